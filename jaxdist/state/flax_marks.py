"""Registers marks and typed keys with `flax.serialization`, where a program has imported it.

And refuses states of nnx that steps cannot keep: without marks, with a shared Variable, or with random streams.
"""

import sys
from typing import Any

import jax

from .._core.compat import key_class
from .._core.trees import VARIABLES, leaf_name
from .._core.types import State
from .marks import MARKS, PerWorker, is_mark, with_value

MODULE = "flax.serialization"
OPTIMIZER = "flax.nnx.training.optimizer"

STREAMS = (
    "Make the layer without rngs=, nnx.Dropout(rate), nnx.MultiHeadAttention(..., keep_rngs=False) or "
    "nnx.RNN(cell, rngs=False), and pass them in the call, "
    "model(x, rngs=nnx.Rngs(dropout=jd.runtime.worker_key(key))) (docs/how-to/use-flax.md)"
)
PATTERN = (
    "call optax directly: `_, params, rest = nnx.split(model, nnx.Param, ...)`, `opt = tx.init(params)`, and in the "
    "step `updates, opt = tx.update(grads, opt, params)` (docs/how-to/use-flax.md)"
)


def register_marks(serialization: Any) -> None:
    """Registers functions that convert marks and typed keys to dictionaries of arrays and back.

    `to_bytes` supports registered classes only, and cannot convert typed keys, which reducers have in their state, to
    NumPy arrays. Classes that are registered already are not changed.
    """

    def mark_to_dict(mark):
        return {"value": serialization.to_state_dict(mark.value)}

    def mark_from_dict(mark, found):
        return with_value(mark, serialization.from_state_dict(mark.value, found["value"], name="value"))

    def key_from_words(key, words):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))

    entries: dict[type, tuple[Any, Any]] = {mark: (mark_to_dict, mark_from_dict) for mark in MARKS}
    # A typed key is saved as its words; the implementation is that of the target.
    entries[key_class()] = (jax.random.key_data, key_from_words)
    for kind, functions in entries.items():
        if not serialization.is_serializable(kind):
            serialization.register_serialization_state(kind, *functions)


def refuse_lost_marks(state: State) -> None:
    """Refuses states of `nnx.Optimizer` whose marks nnx removes: without them workers draw equal noise, or fail."""
    if OPTIMIZER not in sys.modules:
        return
    variable: type = sys.modules[OPTIMIZER].OptState
    flattened: type = sys.modules["flax.nnx"].State
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, flattened)):
        # The step count of an optimizer: states of optax inside an optimizer have only its subclasses.
        if isinstance(node, flattened) and any(type(x) is variable for x in _nodes(node, variable)):
            raise ValueError(
                "nnx.state and nnx.split remove the marks from the state of an nnx.Optimizer: make the optimizer "
                f"itself a part of the train state, (model, optimizer), or {PATTERN}"
            )
    for node in _nodes(state, variable):
        if isinstance(node, variable) and any(map(is_mark, jax.tree.leaves(node, is_leaf=is_mark))):
            raise ValueError(
                "nnx.Optimizer.update removes marks around single arrays, which this optimizer has (zero_redundancy): "
                f"{PATTERN}"
            )
        if isinstance(node, variable) and len(jax.tree.leaves(node)) > 1:
            raise ValueError(
                "nnx.Optimizer.update takes one array for each parameter and kind of state, and this optimizer has "
                f"{len(jax.tree.leaves(node))} of them together: {PATTERN}"
            )


def variables_by_path(tree: State) -> dict[Any, Any]:
    """The arrays of the nnx Variables in a tree, which may be changed in place."""
    if VARIABLES not in sys.modules:
        return {}
    variable: type = sys.modules[VARIABLES].Variable
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, variable))
    pairs = [(path, jax.tree.leaves(node)) for path, node in nodes if isinstance(node, variable)]
    return {(*path, number): leaf for path, leaves in pairs for number, leaf in enumerate(leaves)}


def refuse_shared_variables(state: State) -> None:
    """Refuses nnx modules that have one Variable in two places: a step returns two, which then train apart."""
    if VARIABLES not in sys.modules:
        return
    variable: type = sys.modules[VARIABLES].Variable
    first: dict[int, Any] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, variable)):
        if isinstance(node, variable) and first.setdefault(id(node), path) is not path:
            raise ValueError(
                f"leaf `{leaf_name(first[id(node)])}` and leaf `{leaf_name(path)}` of the state are one shared "
                f"Variable, of which jit makes two, and they would train apart. nnx.split keeps it one: {PATTERN}"
            )


def refuse_modules(state: State) -> None:
    """Refuses nnx modules where the parameters must be a tree by themselves, like that which `tx.init` got."""
    if VARIABLES not in sys.modules:
        return
    module: type = sys.modules["flax.nnx"].Module
    if any(isinstance(node, module) for node in _nodes(state, module)):
        raise ValueError(
            "the state has an nnx module, whose parameters are no tree by themselves, and an nnx.Optimizer has its own "
            f"arrays around those of local_steps: {PATTERN}; the state that meets is then "
            '{"params": params, "rest": rest, "opt": opt}'
        )


def refuse_random_streams(state: State) -> None:
    """Refuses nnx modules that store random streams, unless each worker has a module of its own."""
    if VARIABLES not in sys.modules:
        return
    module, stream = sys.modules["flax.nnx"].Module, sys.modules["flax.nnx"].RngState
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, module | PerWorker))
    for above, node in nodes:
        if not isinstance(node, module):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: isinstance(x, stream)):
            if isinstance(leaf, stream):
                raise ValueError(
                    f"leaf `{leaf_name((*above, *path))}` of the state belongs to a random stream that a module "
                    f"stores: all workers would draw the same numbers, in each step again. {STREAMS}"
                )


def _nodes(tree: State, kind: type) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))


def register_with_flax() -> None:
    """Registers the marks if the program has imported flax, which is slow to import and may not be installed."""
    if MODULE in sys.modules:
        register_marks(sys.modules[MODULE])

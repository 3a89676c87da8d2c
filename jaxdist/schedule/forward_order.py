"""The layers of a model in the order of its forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._core.compat import Literal
from .._core.jaxprs import RESHAPES, inner_jaxprs
from .._core.layers import Entry, groups_of, leaf_entries, listed, opened
from .._core.types import PyTree

# Primitives that only change the form of a parameter, which is used where their result is used.
FORMS = RESHAPES | {"convert_element_type", "transpose", "copy", "pvary", "slice"}


class LayerSplit(NamedTuple):
    """Parameters split into layers.

    Attributes:
      parts: one dict from entry to subtree for each layer.
      join: the inverse, from parts to parameters.
    """

    parts: tuple[dict[Any, PyTree], ...]
    join: Callable[[Sequence[dict[Any, PyTree]]], PyTree]


def forward_order(loss: Callable[..., Any], params: PyTree, batch: PyTree, *rest: Any) -> tuple[Entry, ...]:
    """The top-level entries of the parameters in the order in which a loss first uses them, read from its trace.

    *On the wire*: nothing, and nothing is computed.

    Args:
      loss: `loss(params, batch, *rest)`.
      params: a dict, sequence or NamedTuple of layers, arrays or shapes; a tree with a single entry
        (`{"params": ...}`) is replaced by that entry.
      batch: of the loss, arrays or shapes.
      rest: further arguments of the loss.

    Returns:
      Keys, indices or field names, for `layers=` of `pipelined`, `recipes.ddp`, `bucketed` and `partitioned`. Entries
      that the loss does not use come last.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"head": jnp.ones((4, 2)), "embedding": jnp.ones((3, 4)), "block": jnp.ones((4, 4))}
      >>> def loss(params, x):
      ...     return jnp.mean(x @ params["embedding"] @ params["block"] @ params["head"])
      >>> jd.schedule.forward_order(loss, params, jnp.ones((8, 3)))
      ('embedding', 'block', 'head')

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
    """
    closed = jax.make_jaxpr(loss)(params, batch, *rest)
    names = leaf_entries(params)
    first: dict[Entry, tuple[int, ...]] = {}
    uses = _first_uses(closed.jaxpr, closed.jaxpr.invars[: len(names)])
    for name, use in zip(names, uses, strict=True):
        if use is not None:
            first[name] = min(use, first.get(name, use))
    return tuple(sorted(opened(params)[0], key=lambda name: (name not in first, first.get(name, ()))))


def split_layers(params: PyTree, layers: Sequence[Any] | None) -> LayerSplit:
    """Splits a tree of parameters into layers.

    Args:
      params: as for `forward_order`.
      layers: entries, or tuples of entries that form one layer, in forward order; `None` for sequences and NamedTuples,
        whose order is that of the forward pass.

    Returns:
      The parts and their inverse.
    """
    entries, close = opened(params)
    names = list(entries)
    if layers is None:
        if len(names) > 1 and _is_dict(params):
            raise ValueError(
                f"the parameters are a dict of {listed(names)}, whose order is alphabetical, not that of the "
                "forward pass: pass layers=jd.schedule.forward_order(loss, params, batch), or name them in that order"
            )
        layers = names
    groups = groups_of(params, layers)

    def join(parts):
        return close({name: subtree for part in parts for name, subtree in part.items()})

    return LayerSplit(tuple({name: entries[name] for name in group} for group in groups), join)


def _is_dict(tree: PyTree) -> bool:
    """Checks whether the first level with several entries is a mapping."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and children[0][0]:
        return _is_dict(children[0][1])
    return any(path and isinstance(path[0], jax.tree_util.DictKey) for path, _ in children)


def _first_uses(jaxpr: Any, variables: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """The first use of each variable: the number of the equation, and inside a call the number there.

    Arguments that a call does not use are not used.
    """
    owner = {variable: i for i, variable in enumerate(variables)}
    uses: list[tuple[int, ...] | None] = [None] * len(variables)
    for number, equation in enumerate(jaxpr.eqns):
        arrays = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        if equation.primitive.name in FORMS and len(arrays) == 1:
            if arrays[0] in owner:
                owner[equation.outvars[0]] = owner[arrays[0]]
            continue
        inside = inner_jaxprs(equation)
        deeper: list[tuple[int, ...] | None] = [()] * len(equation.invars)
        if inside and len(inside[0].jaxpr.invars) == len(equation.invars):
            deeper = _first_uses(inside[0].jaxpr, inside[0].jaxpr.invars)
        for atom, within in zip(equation.invars, deeper, strict=True):
            at = None if isinstance(atom, Literal) else owner.get(atom)
            if at is not None and within is not None:
                uses[at] = min((number, *within), uses[at] or (number, *within))
    return uses

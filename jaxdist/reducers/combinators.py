"""Reducers made of others: one for each group of leaves, one after another, and one whose sending is counted."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import widen
from .._core.trees import fold_keys, next_count
from .._core.types import Array, Int, Like, PyTree, State, UInt, Updates
from ..comm.base import Comm, Sent, add_bytes, count_sent, total_bytes
from ..state.marks import PerWorker, with_value
from ..wire.flat import length
from .base import (
    NO_EXTRAS,
    Extras,
    Forms,
    Law,
    Protocol,
    Reduced,
    Reducer,
    as_generator,
    forward_forms,
    from_generator,
    interleave,
    list_named_leaves,
    tree_norm,
    weakest,
)


@with_description
def per_leaf(label_fn: Callable[[str, Like], Hashable], reducers: Mapping[Hashable, Reducer | None]) -> Reducer:
    """Chooses a reducer for each leaf: rank 4 for matrices, exact for vectors, nothing for frozen leaves.

    *On the wire*: what the reducers send, with their collectives merged round by round (one for each direction and
    dtype). Leaves whose reducer is `None` send nothing, and their mean is zero. Put error feedback inside, around the
    reducers of the labels: around `per_leaf` it keeps the updates of such leaves too, and delivers all of them at once
    if the leaves are trained later.

    *State*: a dict from label to the state of its reducer.

    Args:
      label_fn: `label_fn(path, leaf)` with the path as `"layers/0/kernel"`, and shape and dtype of the leaf.
      reducers: the reducer of each label; `None` for leaves that are not trained.

    Raises:
      ValueError: a leaf has a label that `reducers` lacks.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> policy = jd.reducers.per_leaf(
      ...     lambda path, leaf: "matrix" if leaf.ndim > 1 else "vector",
      ...     {"matrix": jd.power_sgd(rank=1, min_compression_rate=0.0), "vector": jd.exact()},
      ... )
      >>> sorted(policy.init({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}))
      ['matrix', 'vector']
    """
    frozen = frozenset(label for label, reducer in reducers.items() if reducer is None)
    known = {label: _ZEROS if reducer is None else reducer for label, reducer in reducers.items()}
    return _per_leaf(_LeafGroups(label_fn, known, frozen))


class _LeafGroups(NamedTuple):
    """`frozen`: the labels without a reducer, which have no entry in the state."""

    label_fn: Callable[[str, Like], Hashable]
    reducers: Mapping[Hashable, Reducer]
    frozen: frozenset[Hashable]


def _per_leaf(cfg: _LeafGroups) -> Reducer:
    def rebuild(*inner):
        return _per_leaf(cfg._replace(reducers=dict(zip(cfg.reducers, inner, strict=True))))

    reducers = cfg.reducers.values()
    forms, law = forward_forms(rebuild, *reducers), weakest(*reducers)
    return from_generator("per_leaf", partial(_init_groups, cfg), partial(_group_messages, cfg), law=law, forms=forms)


def _init_groups(cfg: _LeafGroups, like: PyTree[Like]) -> State:
    labels = _labels_of(cfg, like)
    trained = {label: reducer for label, reducer in cfg.reducers.items() if label not in cfg.frozen}
    # Groups must not share their draws.
    return {
        label: fold_keys(reducer.init(_select_group(like, labels, label)), number)
        for number, (label, reducer) in enumerate(trained.items())
    }


def _group_messages(cfg: _LeafGroups, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    labels = _labels_of(cfg, updates)
    # In lockstep: round `i` of all reducers shares its collectives.
    generators = [
        as_generator(reducer, _select_group(updates, labels, label), state.get(label, ()), comm, extras)
        for label, reducer in cfg.reducers.items()
    ]
    results = dict(zip(cfg.reducers, (yield from interleave(generators)), strict=True))
    mean, own = (
        _merge_groups(updates, labels, {label: done[i] for label, (done, _) in results.items()}) for i in (0, 1)
    )
    return Reduced(mean, own), {label: new for label, (_, new) in results.items() if label not in cfg.frozen}


def _labels_of(cfg: _LeafGroups, tree: PyTree) -> list[Hashable]:
    labels = []
    for path, leaf in list_named_leaves(tree):
        label = cfg.label_fn(path, leaf)
        if label not in cfg.reducers:
            where = f"leaf {path!r}" if path else "the tree, which is one leaf,"
            raise ValueError(f"{where} has label {label!r}, but reducers has only {list(cfg.reducers)}")
        labels.append(label)
    return labels


def _select_group(tree: PyTree, labels: Sequence[Hashable], label: Hashable) -> PyTree:
    """The tree with the leaves of one label, and `None` in place of the others."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([leaf if own == label else None for leaf, own in zip(leaves, labels, strict=True)])


def _merge_groups(like: PyTree, labels: Sequence[Hashable], trees: Mapping[Hashable, PyTree]) -> PyTree:
    structure = jax.tree.structure(like)
    leaves = {label: structure.flatten_up_to(tree) for label, tree in trees.items()}
    return structure.unflatten([leaves[label][i] for i, label in enumerate(labels)])


def _zero_messages(groups: int | None, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    """The mean is zero, without communication; its shards are with `groups`."""
    # A generator without messages.
    yield from ()
    # Not zeros_like, which would be typed varying: these zeros were not communicated, and are equal on all workers.
    own = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), updates)
    if groups is None:
        return Reduced(own, own), state
    sizes = jax.tree.map(lambda leaf: groups * length(leaf.size, groups * comm.size), updates)
    return Reduced(jax.tree.map(lambda leaf, size: jnp.zeros(size, leaf.dtype), updates, sizes), own), state


def _zeros(groups: int | None, forms: Forms) -> Reducer:
    return from_generator("zeros", lambda like: (), partial(_zero_messages, groups), law=Law.EXACT, forms=forms)


_ZEROS = _zeros(None, Forms(shards=lambda groups: _zeros(groups, Forms(weighted=None)), weighted=None))


class SwitchState(NamedTuple):
    """Replicated: the number of reductions so far. The states of both reducers; that of the idle one is unchanged."""

    count: Int[Array, ""]
    first: State
    then: State


@with_description
def reducer_schedule(first: Reducer, then: Reducer, step: int) -> Reducer:
    """Reduces with `first` for `step` steps and then with `then`: `exact()` before a lossy compressor, for example.

    Early gradients are large, short-lived and the hardest to compress. Error feedback around the schedule keeps
    its residual at the switch; feedback inside one of the reducers stays with that one, so the residuals and server
    residuals of `first` at the switch are never delivered.

    *On the wire*: what the reducer of the step sends; the program has both.

    *State*: that of both, and a replicated count. The law is the weaker one of the two.

    Args:
      step: the number of reductions by `first`. PyTorch suggests a tenth of the training for PowerSGD, and no fewer
        than the steps of a warm-up.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.reducer_schedule(jd.exact(), jd.compressed(jd.top_k(0.5)), 1)
      >>> x = jnp.array([1.0, 4.0])
      >>> first, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> second, _ = reducer.reduce(x, state, jd.comm.alone())
      >>> first.mean.tolist(), second.mean.tolist()
      ([1.0, 4.0], [0.0, 4.0])

    References:
      Vogels, Karimireddy, Jaggi, arXiv:1905.13727, 2019 (in PyTorch, `start_powerSGD_iter`).
    """
    check_count("step", step, 0)

    def init(like):
        return SwitchState(jnp.zeros((), jnp.int32), first.init(like), then.init(like))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        with jax.named_scope("reducer_schedule"):
            parts = {"first": first, "then": then}
            reduced, state = one_of_two(state.count < step, parts, updates, state, comm, extras)
        return reduced, state._replace(count=next_count(state.count))

    forms = forward_forms(lambda first, then: reducer_schedule(first, then, step), first, then)
    return Reducer(init, reduce, weakest(first, then), forms)


def one_of_two(
    choice: Array, reducers: Mapping[str, Reducer], updates: Updates, state: Any, comm: Comm, extras: Extras
) -> tuple[Reduced, Any]:
    """Reduces with the first of two reducers if `choice` is true; their names are those of their fields in `state`."""
    on_true, on_false = (partial(_reduce_field, field, reducer, extras) for field, reducer in reducers.items())
    return comms.cond(choice, on_true, on_false, comm, updates, state)


def _reduce_field(
    field: str, reducer: Reducer, extras: Extras, comm: Comm, updates: Updates, state: Any
) -> tuple[Reduced, Any]:
    reduced, inner = reducer.reduce(updates, getattr(state, field), comm, extras)
    # Both branches must have one type. With feedback, `own` is wider than the updates.
    own = jax.tree.map(widen, reduced.own)
    return Reduced(reduced.mean, comm.varying(own)), state._replace(**{field: inner})


class TrackedState(NamedTuple):
    """`bytes` sent by this worker since the start, as (high, low) 32-bit words; `error` of the last reduction."""

    reducer: State
    syncs: Int[Array, ""]
    bytes: UInt[Array, "2"]
    error: PerWorker


@with_description
def with_stats(reducer: Reducer) -> Reducer:
    """The same reducer, which also counts reductions and bytes and measures `|x - own|² / |x|²` on each worker.

    The error takes one more pass over the updates. Inside `error_feedback` it is the compression error of the corrected
    update; around it, of the raw one.

    *On the wire*: what the reducer sends. Around `hierarchical` the error needs every chip's part of `own`, one
    more gather over the fast axis; inside it, nothing more.

    *State*: that of the reducer, and replicated counts; per worker one float32. `stats(opt_state)` reads them.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.all_reduce(jd.error_feedback(jd.reducers.with_stats(jd.compressed(jd.top_k(0.5)))), axis=None)
      >>> _, state = jax.jit(tx.update)(jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
      >>> found = jd.transforms.stats(state)
      >>> int(found["syncs"]), round(float(found["compression_error"]), 2)
      (1, 0.2)
    """
    forms = forward_forms(with_stats, reducer, shards=False)

    def init(like):
        zero = jnp.zeros((), jnp.float32)
        sent = jnp.zeros(2, jnp.uint32)
        return TrackedState(reducer.init(like), jnp.zeros((), jnp.int32), sent, PerWorker(zero))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        # Inside another count the ledger is that one's: a condition corrects the ledger of its own group alone.
        ledger: list[Sent] = [] if comm.ledger is None else comm.ledger
        counted, start = count_sent(comm, ledger) if comm.ledger is None else comm, len(ledger)
        reduced, inner = reducer.reduce(updates, state.reducer, counted, extras)
        # The error uses `own`, and so what was sent for it alone.
        ledger[start:] = [Sent(*sent) for sent in ledger[start:]]
        # |x - own|² / |x|²; an update of zeros has no error.
        size = tree_norm(updates)
        error = tree_norm(jax.tree.map(lambda x, own: x.astype(own.dtype) - own, updates, reduced.own))
        error = jnp.square(error / jnp.where(size == 0, 1, size)).astype(jnp.float32)
        error = comm.varying(jnp.where(size == 0, jnp.zeros_like(error), error))
        sent = add_bytes(state.bytes, total_bytes(ledger[start:]))
        return reduced, TrackedState(inner, next_count(state.syncs), sent, with_value(state.error, error))

    return Reducer(init, reduce, weakest(reducer), forms)

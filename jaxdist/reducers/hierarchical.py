"""Two levels: exact over fast links, any reducer on a shard over slow ones."""

import math

import jax
import jax.numpy as jnp

from .._core.trees import fold_keys
from .._core.types import Array, Like, State, Updates
from ..comm.base import Comm
from ..state.marks import INNER, OUTER, PerWorker, Sharded, is_mark
from ..wire.flat import MULTIPLE, from_vectors, vector_likes, vectors
from ..wire.shards import cleared
from .base import (
    NO_EXTRAS,
    Extras,
    Forms,
    Law,
    Reduced,
    Reducer,
    as_generator,
    is_map_params_placeholder,
    run,
    shards_of,
    weakest,
)

_NO_FEEDBACK = (
    "error feedback around hierarchical() makes the residuals of the workers of one pod diverge: put it inside, "
    "hierarchical(inner=exact(), outer=error_feedback(...))"
)


def hierarchical(*, inner: Reducer, outer: Reducer) -> Reducer:
    """Reduce-scatters over the fast axis, reduces the shard with `outer` over the slow ones, and gathers it again.

    Over two axes `("pod", "chip")`, slow first, each of `L` chips of a pod owns `1/L` of the mean of its pod, and only
    that crosses between pods. Error feedback belongs inside, on the shard: `outer=error_feedback(...)`.

    *On the wire* for `n` elements: on the fast axis a reduce-scatter and an all-gather, `2(L-1)/L · itemsize · n`
    bytes; on the slow axes what `outer` sends for a vector of `n/L`. With `inner=two_shot(code)` the reduce-scatter is
    coded too, and the gather is not. The reduce-scatter form has no gather: with `two_shot` for both levels it is the
    quantized reduce-scatter of ZeRO++ (qgZ), and sends `(L-1)/L · bytes(n)` and `(P-1)/P · bytes(n/L)` between `P`
    pods.

    *State*: that of `outer`, cut over the fast axis where it is shaped like the vector, else one for each place on it.
    What `outer` cuts itself (the server residual of `two_shot`) is cut over both; when the number of workers changes,
    such entries move within the padding, by fewer places than `8 W`, unless `n` is a multiple of that.

    Args:
      inner: over the fast axis: `exact()`, or another one that has a reduce-scatter form, `two_shot(int8())`.
      outer: over the slow axes; sees one flat vector for each dtype. Of the reduce-scatter form it must not keep
        anything per worker: error feedback is for `inner` there.

    Returns:
      The reducer, for `all_reduce(..., axis=(slow, fast))`.

    Raises:
      ValueError: `inner` has no reduce-scatter form, or the group has not two levels.

    Example:
      >>> import jaxdist as jd
      >>> reducer = jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(jd.compressed(jd.top_k(0.01))))
      >>> tx = jd.all_reduce(reducer, axis=("pod", "chip"))

    References:
      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209,
      2023.
    """
    if inner.forms.shards is None:
        raise ValueError(
            "hierarchical(inner=...) must be exact(), or another reducer with a reduce-scatter form, two_shot(code): "
            "compress on the slow links, with outer=..."
        )
    first = shards_of(inner)
    plain = inner.law == Law.MEAN
    multiple = 1 if plain else MULTIPLE

    def init(like):
        if is_map_params_placeholder(like):
            return 0
        likes = vector_likes(jax.tree.leaves(like))
        spread = _spread(outer.init(likes), {flat.shape for flat in likes}, multiple)
        return spread if plain else (first.init(likes), spread)

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        fast, slow = _levels(comm)
        leaves, structure = jax.tree.flatten(updates)
        flats = vectors(leaves)
        if plain:
            inner_state, chunks = None, [fast.reduce_scatter_mean(_rows(flat, fast.size)) for flat in flats]
        else:
            inner_state, state = state
            chunks, inner_state = _in_pods(first, flats, inner_state, fast, slow, extras)
        reduced, new = run(as_generator(outer, chunks, unmarked(state, leaves), slow, extras), slow)
        state = jax.tree.structure(state).unflatten(jax.tree.leaves(new))
        mean, own = (structure.unflatten(whole(parts, leaves, comm)) for parts in reduced)
        return Reduced(mean, comm.varying(own)), state if plain else (inner_state, state)

    def shards(groups):
        del groups  # one level of `over` has no levels itself
        last = shards_of(outer)

        def start(like):
            if is_map_params_placeholder(like):
                return 0
            state = last.init(jax.tree.map(_flat, like))
            if any(map(is_mark, jax.tree.leaves(state, is_leaf=is_mark))):
                raise ValueError(
                    "the reduce-scatter form of hierarchical() has no place for what outer= keeps of each shard: put "
                    "error feedback around inner=, or use an unbiased code for outer=, two_shot(qsgd(4))"
                )
            return first.init(like), state

        def to_shards(updates, state, comm, extras=NO_EXTRAS):
            fast, slow = _levels(comm)
            form = shards_of(inner, slow.size)
            chunks, inner_state = _in_pods(form, updates, state[0], fast, slow, extras, groups=slow.size)
            reduced, outer_state = run(as_generator(last, chunks, state[1], slow, extras), slow)
            return Reduced(reduced.mean, updates), (inner_state, outer_state)

        return Reducer(start, to_shards, Law.NONE)

    def unmarked(state, leaves):
        """The state with the marks of `outer` alone."""
        return jax.tree.structure(jax.eval_shape(outer.init, vector_likes(leaves))).unflatten(jax.tree.leaves(state))

    def whole(parts, leaves, comm):
        return from_vectors([comm.inner.all_gather(part).ravel() for part in parts], leaves)

    forms = Forms(shards=None if outer.forms.shards is None else shards, no_feedback=_NO_FEEDBACK)
    return Reducer(init, reduce, weakest(outer), forms)


def _levels(comm: Comm) -> tuple[Comm, Comm]:
    if comm.inner is None or comm.outer is None:
        raise ValueError(
            "hierarchical() needs two levels of workers: all_reduce(..., axis=(slow, fast)) with both names, "
            f"but this group of {comm.size} has one"
        )
    return comm.inner, comm.outer


def _in_pods(
    form: Reducer, updates: Updates, state: State, fast: Comm, slow: Comm, extras: Extras, *, groups: int = 1
) -> tuple[Updates, State]:
    """The pieces of the mean of each pod. Pods draw different numbers, of keys that all agree on."""

    def is_key(leaf):
        return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    reduced, new = run(as_generator(form, updates, fold_keys(state, slow.index), fast, extras), fast)
    means = jax.tree.map(
        lambda mean, x: cleared(mean, x.size, fast.size, fast.index, groups=groups), reduced.mean, updates
    )
    return means, jax.tree.map(lambda old, leaf: old if is_key(old) else leaf, state, new)


def _flat(like: Like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((math.prod(like.shape),), like.dtype)


def _rows(flat: Array, count: int) -> Array:
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _spread(state: State, lengths: set, multiple: int) -> State:
    """Marks the outer reducer's state: its own marks are over slow axes, and all leaves differ along the fast one."""

    def inside(leaf):
        is_vector = leaf.shape in lengths
        return Sharded(leaf, axis=INNER, multiple=multiple) if is_vector else PerWorker(leaf, axis=INNER, resize="copy")

    def one(node):
        if isinstance(node, PerWorker):
            return PerWorker(jax.tree.map(inside, node.value), axis=OUTER, resize=node.resize)
        if isinstance(node, Sharded):  # what the workers on slow links cut among them is a chip's shard already
            return Sharded(node.value, shape=node.shape, axis=(INNER, OUTER), multiple=node.multiple)
        return inside(node)

    return jax.tree.map(one, state, is_leaf=is_mark)

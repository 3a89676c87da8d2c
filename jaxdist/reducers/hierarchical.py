"""Two levels: exact over fast links, any reducer on a shard over slow ones."""

import jax
import jax.numpy as jnp

from .._marks import INNER, OUTER, PerWorker, Sharded, is_mark
from .._typing import Array, State
from ._flat import from_vectors, vector_likes, vectors
from .base import Reduced, Reducer, drive, held_by, is_stand_in, rounds_of


def hierarchical(*, inner: Reducer, outer: Reducer) -> Reducer:
    """Reduce-scatters over the fast axis, reduces the shard with `outer` over the slow ones, and gathers it again.

    Over two axes `("pod", "chip")`, slow first, each of `L` chips of a pod owns `1/L` of the mean of its pod, and only
    that crosses between pods. Error feedback belongs inside, on the shard: `outer=error_feedback(...)`.

    *On the wire* for `n` elements: on the fast axis a reduce-scatter and an all-gather, `2(L-1)/L · itemsize · n`
    bytes; on the slow axes what `outer` sends for a vector of `n/L`.

    *State*: that of `outer`, cut over the fast axis where it is shaped like the vector, else one for each place on it.
    What `outer` cuts itself (the server residual of `two_shot`) is cut over both; when the number of workers changes,
    such entries move within the padding, by fewer places than `8 W`, unless `n` is a multiple of that.

    Args:
      inner: over the fast axis; `exact()`.
      outer: over the slow axes; sees one flat vector for each dtype.

    Returns:
      The reducer, for `all_reduce(..., axis=(slow, fast))`.

    Raises:
      ValueError: `inner` is not a plain mean, or the group has not two levels.

    Example:
      >>> import jaxdist as jd
      >>> reducer = jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(jd.compressed(jd.top_k(0.01))))
      >>> tx = jd.all_reduce(reducer, axis=("pod", "chip"))

    References:
      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209,
      2023.
    """
    if not inner.plain:
        raise ValueError("hierarchical(inner=...) must be exact(): compress on the slow links, with outer=...")

    def init(like):
        if is_stand_in(like):
            return 0
        likes = vector_likes(jax.tree.leaves(like))
        return _spread(outer.init(likes), {flat.shape for flat in likes})

    def reduce(updates, state, comm, **agreed):
        if comm.inner is None or comm.outer is None:
            raise ValueError(
                "hierarchical() needs two levels of workers: all_reduce(..., axis=(slow, fast)) with both names, "
                f"but this group of {comm.size} has one"
            )
        leaves, structure = jax.tree.flatten(updates)
        chunks = [comm.inner.reduce_scatter_mean(_rows(flat, comm.inner.size)) for flat in vectors(leaves)]
        reduced, plain = drive(rounds_of(outer, chunks, unmarked(state, leaves), comm.outer, **agreed), comm.outer)
        state = jax.tree.structure(state).unflatten(jax.tree.leaves(plain))
        mean, own = (structure.unflatten(whole(parts, leaves, comm)) for parts in reduced)
        return Reduced(mean, comm.varying(own)), state

    def held(state, like, comm):
        leaves, structure = jax.tree.flatten(like)
        chunks = [jax.ShapeDtypeStruct((-(-x.size // comm.inner.size),), x.dtype) for x in vector_likes(leaves)]
        parts = held_by(outer, unmarked(state, leaves), chunks, comm.outer)
        return structure.unflatten(whole(parts, leaves, comm))

    def unmarked(state, leaves):
        """The state with the marks of `outer` alone."""
        return jax.tree.structure(jax.eval_shape(outer.init, vector_likes(leaves))).unflatten(jax.tree.leaves(state))

    def whole(parts, leaves, comm):
        return from_vectors([comm.inner.all_gather(part).ravel() for part in parts], leaves)

    def for_feedback():
        raise ValueError(
            "error feedback around hierarchical() lets the residuals of the workers of one pod drift apart for "
            "ever: put it "
            "inside, hierarchical(inner=exact(), outer=error_feedback(...))"
        )

    return Reducer(init, reduce, law=outer.law, for_feedback=for_feedback, held=held)


def _rows(flat: Array, count: int) -> Array:
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _spread(state: State, lengths: set) -> State:
    """Marks the outer reducer's state: its own marks are over slow axes, and all leaves differ along the fast one."""

    def inside(leaf):
        return Sharded(leaf, axis=INNER) if leaf.shape in lengths else PerWorker(leaf, axis=INNER, resize="copy")

    def one(node):
        if isinstance(node, PerWorker):
            return PerWorker(jax.tree.map(inside, node.value), axis=OUTER, resize=node.resize)
        if isinstance(node, Sharded):  # what the workers on slow links cut among them is a chip's shard already
            return Sharded(node.value, shape=node.shape, axis=(INNER, OUTER), multiple=node.multiple)
        return inside(node)

    return jax.tree.map(one, state, is_leaf=is_mark)

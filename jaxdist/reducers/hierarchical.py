"""Two levels: exact over fast links, any reducer on a shard over slow ones."""

import math

import jax
import jax.numpy as jnp

from .._marks import INNER, OUTER, PerWorker, Sharded
from .._typing import Array, State
from ._flat import concatenate
from .base import Reduced, Reducer, drive, is_stand_in, rounds_of


def hierarchical(*, inner: Reducer, outer: Reducer) -> Reducer:
    """Reduce-scatters over the fast axis, reduces the shard with `outer` over the slow ones, and gathers it again.

    Over two axes `("pod", "chip")`, slow first, each of `L` chips of a pod owns `1/L` of the mean of its pod, and only
    that crosses between pods. Error feedback belongs inside, on the shard: `outer=error_feedback(...)`.

    *On the wire* for `n` elements: on the fast axis a reduce-scatter and an all-gather, `2(L-1)/L · itemsize · n`
    bytes; on the slow axes what `outer` sends for a vector of `n/L`.

    *State*: that of `outer`, cut over the fast axis where it is shaped like the vector, else one for each place on it.

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
        leaves = jax.tree.leaves(like)
        vectors = _flat_likes(leaves)
        lengths = {vector.shape for vector in vectors}
        return _spread(outer.init(vectors), lengths)

    def reduce(updates, state, comm, **agreed):
        if comm.inner is None or comm.outer is None:
            raise ValueError(
                "hierarchical() needs two levels of workers: all_reduce(..., axis=(slow, fast)) with both names, "
                f"but this group of {comm.size} has one"
            )
        leaves, structure = jax.tree.flatten(updates)
        chunks = [
            comm.inner.reduce_scatter_mean(_rows(leaves, members, comm.inner.size)) for members in _by_dtype(leaves)
        ]
        plain = jax.tree.structure(jax.eval_shape(outer.init, _flat_likes(leaves))).unflatten(jax.tree.leaves(state))
        reduced, plain = drive(rounds_of(outer, chunks, plain, comm.outer, **agreed), comm.outer)

        def whole(parts):
            out = list(leaves)
            for members, chunk in zip(_by_dtype(leaves), parts, strict=True):
                flat, start = comm.inner.all_gather(chunk).ravel(), 0
                for i in members:
                    out[i] = flat[start : start + leaves[i].size].reshape(leaves[i].shape)
                    start += leaves[i].size
            return structure.unflatten(out)

        state = jax.tree.structure(state).unflatten(jax.tree.leaves(plain))
        return Reduced(whole(reduced.mean), comm.varying(whole(reduced.own))), state

    def for_feedback():
        raise ValueError(
            "error feedback around hierarchical() lets the residuals of the workers of one pod drift apart for "
            "ever: put it "
            "inside, hierarchical(inner=exact(), outer=error_feedback(...))"
        )

    return Reducer(init, reduce, law=outer.law, for_feedback=for_feedback)


def _by_dtype(leaves: list) -> list[list[int]]:
    kinds: dict = {}
    for i, leaf in enumerate(leaves):
        kinds.setdefault(jnp.dtype(leaf.dtype), []).append(i)
    return list(kinds.values())


def _flat_likes(leaves: list) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((sum(math.prod(leaves[i].shape) for i in members),), leaves[members[0]].dtype)
        for members in _by_dtype(leaves)
    ]


def _rows(leaves: list[Array], members: list[int], count: int) -> Array:
    flat = concatenate([leaves[i] for i in members])
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _spread(state: State, lengths: set) -> State:
    """Marks the outer reducer's state: its own marks are over slow axes, and all leaves differ along the fast one."""

    def inside(leaf):
        return Sharded(leaf, axis=INNER) if leaf.shape in lengths else PerWorker(leaf, axis=INNER, resize="copy")

    def one(node):
        if isinstance(node, PerWorker):
            return PerWorker(jax.tree.map(inside, node.value), axis=OUTER, resize=node.resize)
        return inside(node)

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, PerWorker))

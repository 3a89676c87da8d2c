"""Two levels: exact over fast links, any reducer on a shard over slow links."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import fold_keys, is_key
from .._core.types import Like, PyTree, State, Updates
from ..comm.base import Comm, Sent, SentForOwn
from ..state.marks import INNER, OUTER, PerWorker, Sharded, axis_tuple, flatten_marks, is_mark, record_order
from ..wire.buffers import MULTIPLE, from_vectors, vector_likes, vector_orders, vectors
from ..wire.shards import clear_padding
from .messages import as_generator, for_real_numbers, run
from .reducer import (
    MIXED_WEIGHTS,
    NO_EXTRAS,
    Extras,
    Forms,
    Law,
    Reduced,
    Reducer,
    Result,
    Use,
    check_reducer,
    check_use,
    forward_limits,
    least_contraction,
    reason_against,
    shards_of,
    weakest,
)
from .trees import is_map_params_placeholder


@with_description
def hierarchical(*, inner: Reducer, outer: Reducer) -> Reducer:
    """Reduce-scatters over the fast axis, reduces the shard with `outer` over the slow ones, and gathers it again.

    Over two axes `("pod", "chip")`, slow first, each of the `L` chips of a pod owns `1/L` of the mean of its pod, and
    only that is sent between pods. Error feedback belongs inside, on the shard: `outer=error_feedback(...)`.

    *On the wire* for `n` elements: on the fast axis a reduce-scatter and an all-gather, `2(L-1)/L · itemsize · n`
    bytes; on the slow axes what `outer` sends for a vector of `n/L`. With `inner=two_shot(compressor)` the
    reduce-scatter is compressed too, and the gather is not. The reduce-scatter form has no gather: with `two_shot` for
    both levels it is the quantized reduce-scatter of ZeRO++ (qgZ), and sends `(L-1)/L · bytes(n)` and
    `(P-1)/P · bytes(n/L)` between `P` pods.

    *State*: that of `outer`: sharded over the fast axis where it is shaped like the vector, else one copy for each
    worker on it. What `outer` shards itself (the server residual of `two_shot`) is sharded over both.

    Args:
      inner: over the fast axis: `exact()`, or another one that has a reduce-scatter form, `two_shot(int8())`.
      outer: over the slow axes; sees one flat vector for each dtype. What it decides from its gradients (`accordion`,
        `with_regime`) each chip decides for its shard. In the reduce-scatter form it must not have state per worker:
        put error feedback around `inner` there.

    Raises:
      ValueError: `inner` has no reduce-scatter form, or `outer` needs matrices or whole gradients (`power_sgd`, `dgc`
        with `clip_norm=`); from `init`, the state of `outer` has two levels itself, or is neither shaped like the
        vector nor independent of its length (`loco`, `partitioned`, the server residual of `two_shot` if dtypes are
        mixed); at trace time, the group does not have two levels.

    Examples:
      >>> import jaxdist as jd
      >>> reducer = jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(jd.compressed(jd.top_k(0.01))))
      >>> tx = jd.all_reduce(reducer, axis=("pod", "chip"))

    References:
      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209,
      2023.
    """
    check_reducer(inner)
    check_reducer(outer)
    if inner.forms.shards is None:
        raise ValueError(
            "hierarchical(inner=...) must be exact(), or another reducer with a reduce-scatter form, two_shot(code): "
            "compress on the slow links, with outer=..."
        )
    check_use(Use.PARTS, outer, "hierarchical(outer=...) gives each chip a part of flat vectors")
    reducer = _Hierarchical(inner, outer, inner.law == Law.MEAN)
    shards = reducer.shards if outer.forms.shards else None
    forms = Forms(shards=shards, biased=least_contraction(inner, outer))
    limits = reducer.limits() | {Use.FEEDBACK: _no_feedback(inner, outer)}
    return Reducer(for_real_numbers(reducer.init), reducer.reduce, weakest(outer), forms, limits=limits)


def _no_feedback(inner: Reducer, outer: Reducer) -> str:
    lossy = [level for level in (inner, outer) if level.forms.biased is not None] or [outer]
    # A level that refuses feedback does so inside, too.
    for level in lossy:
        if (reason := reason_against(Use.FEEDBACK, level)) is not None:
            return reason
    calls = [
        f"error_feedback({level.description or '...'})" if level in lossy else level.description or "..."
        for level in (inner, outer)
    ]
    return (
        "error feedback around hierarchical() makes the residuals of the workers of one pod diverge: put it inside, "
        f"hierarchical(inner={calls[0]}, outer={calls[1]})"
    )


class _Hierarchical(NamedTuple):
    """`stateless`: `inner` is the mean, without state, so the state is that of `outer` alone."""

    inner: Reducer
    outer: Reducer
    stateless: bool

    @property
    def multiple(self) -> int:
        return 1 if self.stateless else MULTIPLE

    def limits(self) -> dict[Use, str]:
        # A pod has no number of examples: a reducer that weights by them cannot be between pods.
        if self.outer.forms.weighted:
            return {Use.EXAMPLES: MIXED_WEIGHTS}
        reason = forward_limits(self.outer, self.inner).get(Use.EXAMPLES)
        return {} if reason is None else {Use.EXAMPLES: reason}

    def init(self, like: PyTree[Like]) -> State:
        if is_map_params_placeholder(like):
            return 0
        likes = vector_likes(jax.tree.leaves(like))
        outer_state = self.outer.init(likes)
        _check_single_level(outer_state)
        outer_state = _mark(outer_state, _find_vectors(self.outer, outer_state, likes), self.multiple)
        state = outer_state if self.stateless else (shards_of(self.inner).init(likes), outer_state)
        return record_order(state, tuple(itertools.chain(*vector_orders(like))))

    def reduce(self, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        fast, slow = _levels(comm)
        leaves, structure = jax.tree.flatten(updates)
        flats = vectors(leaves)
        # Reduce-scatter over the fast axis: each worker owns a shard of the mean of its pod.
        if self.stateless:
            inner_state, outer_state = None, state
            padded = [jnp.pad(flat, (0, -flat.size % fast.size)) for flat in flats]
            chunks = [fast.reduce_scatter_mean(flat.reshape(fast.size, -1)) for flat in padded]
        else:
            inner_state, outer_state = state
            chunks, inner_state = _reduce_in_pods(shards_of(self.inner), flats, inner_state, fast, slow, extras)
        # Reduce the shards over the slow axes. The outer reducer gets its state with its own marks alone, not with
        # those of `_mark`, so the tree is built anew from the leaves.
        structure_of_outer = jax.tree.structure(jax.eval_shape(self.outer.init, vector_likes(leaves)))
        unmarked = structure_of_outer.unflatten(jax.tree.leaves(outer_state))
        start = len(slow.ledger or ())
        reduced, new = run(as_generator(self.outer, chunks, unmarked, slow, _of_pod(extras)), slow)
        _average_sent(slow.ledger, start, fast)
        new = jax.tree.structure(outer_state).unflatten(jax.tree.leaves(new))

        # Gather the shards over the fast axis.
        def gather(shards):
            return structure.unflatten(from_vectors([fast.all_gather(shard).ravel() for shard in shards], leaves))

        ledger: list[Sent] = [] if fast.ledger is None else fast.ledger
        mean, counted = gather(reduced.mean), len(ledger)
        own = gather(reduced.own)
        ledger[counted:] = [SentForOwn(*sent) for sent in ledger[counted:]]
        return Reduced(mean, comm.varying(own)), new if self.stateless else (inner_state, new)

    def shards(self, groups: int) -> Reducer:
        # No use for `groups`: as `inner=` of another hierarchical reducer it gets one level, which `_levels` refuses.
        return Reducer(self._init_shards, self._reduce_to_shards, Law.NONE, limits=self.limits())

    def _init_shards(self, like: PyTree[Like]) -> State:
        if is_map_params_placeholder(like):
            return 0
        flat = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((math.prod(leaf.shape),), leaf.dtype), like)
        outer_state = shards_of(self.outer).init(flat)
        if any(map(is_mark, jax.tree.leaves(outer_state, is_leaf=is_mark))):
            raise ValueError(
                "the reduce-scatter form of hierarchical() cannot store what outer= keeps of each shard: put error "
                "feedback around inner=, or use an unbiased compressor for outer=, two_shot(qsgd(4))"
            )
        return shards_of(self.inner).init(like), outer_state

    def _reduce_to_shards(self, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        fast, slow = _levels(comm)
        inner_state, outer_state = state
        form = shards_of(self.inner, slow.size)
        chunks, inner_state = _reduce_in_pods(form, updates, inner_state, fast, slow, extras, groups=slow.size)
        form = shards_of(self.outer)
        reduced, outer_state = run(as_generator(form, chunks, outer_state, slow, _of_pod(extras)), slow)
        return Reduced(reduced.mean, updates), (inner_state, outer_state)


def _of_pod(extras: Extras) -> Extras:
    """What the outer reducer gets: a pod takes part even if one of its workers does not."""
    return extras._replace(examples=None)


def _average_sent(ledger: list[Sent] | None, start: int, fast: Comm) -> None:
    """Averages over a pod what its chips sent under conditions, which each of them may have decided differently."""
    if ledger is None:
        return
    for i, sent in enumerate(ledger[start:], start):
        if isinstance(sent.bytes, jax.Array):
            ledger[i] = sent._replace(bytes=fast.mean(fast.varying(sent.bytes)))


def _levels(comm: Comm) -> tuple[Comm, Comm]:
    if comm.inner is None or comm.outer is None:
        raise ValueError(
            "hierarchical() needs two levels of workers: all_reduce(..., axis=(slow, fast)) with both names, "
            f"but this group of {comm.size} has one"
        )
    return comm.inner, comm.outer


def _reduce_in_pods(
    form: Reducer, updates: Updates, state: State, fast: Comm, slow: Comm, extras: Extras, *, groups: int = 1
) -> tuple[Updates, State]:
    """The shards of the mean of each pod."""
    # Pods draw different numbers: each folds its index into the replicated key, which stays as it is.
    reduced, new = run(as_generator(form, updates, fold_keys(state, slow.index), fast, extras), fast)
    means = jax.tree.map(
        lambda mean, x: clear_padding(mean, x.size, fast.size, fast.index, groups=groups), reduced.mean, updates
    )
    return means, jax.tree.map(lambda old, leaf: old if is_key(old) else leaf, state, new)


def _find_vectors(outer: Reducer, state: State, likes: Sequence[Like]) -> PyTree[bool]:
    """Whether each leaf of the state of `outer` is shaped like its vector, of which each chip has a part."""
    # Other lengths tell such a leaf from one whose shape is the same by chance.
    others = [jax.ShapeDtypeStruct((x.shape[0] // 2 if x.shape[0] > 1 else 2,), x.dtype) for x in likes]
    vectors = {(like.shape, other.shape) for like, other in zip(likes, others, strict=True)}
    probe = jax.eval_shape(outer.init, others)
    leaves, structure = jax.tree.flatten(state)
    pairs = [(leaf.shape, other.shape) for leaf, other in zip(leaves, jax.tree.leaves(probe))]
    # Marks contain the lengths.
    alike = jax.tree.structure(state, is_leaf=is_mark) == jax.tree.structure(probe, is_leaf=is_mark)
    if not alike or any(shape != other and (shape, other) not in vectors for shape, other in pairs):
        raise ValueError(
            f"hierarchical() cannot shard what outer={outer!r} keeps over the chips of a pod: its state must be shaped "
            "like the vector of a dtype, or be independent of its length. Use error_feedback in place of loco, leave "
            "partitioned out, and with a two_shot that has a server residual cast gradients to one dtype"
        )
    return structure.unflatten([pair in vectors for pair in pairs])


def _check_single_level(state: State) -> None:
    marks = [mark for leaf in flatten_marks(state) for mark in leaf.marks]
    if any(set(axis_tuple(mark.axis)) & {INNER, OUTER} for mark in marks):
        raise ValueError(
            "hierarchical(outer=hierarchical(...)) cannot store the state of a third level: give one hierarchical() "
            'three axes, axis=("slowest", "slow", "fast"), and its outer reducer the two slow ones'
        )


def _mark(state: State, is_vector: PyTree[bool], multiple: int) -> State:
    """Marks the state of `outer`: its own marks are over slow axes, and all leaves differ along the fast one."""

    def mark_leaf(leaf, is_vector):
        return Sharded(leaf, axis=INNER, multiple=multiple) if is_vector else PerWorker(leaf, axis=INNER, resize="copy")

    def mark_node(node, flags):
        if isinstance(node, PerWorker):
            return PerWorker(jax.tree.map(mark_leaf, node.value, flags.value), axis=OUTER, resize=node.resize)
        if isinstance(node, Sharded):
            # Sharded over slow links, this is a part of a chip's shard already.
            return Sharded(node.value, shape=node.shape, axis=(INNER, OUTER), multiple=node.multiple)
        return mark_leaf(node, flags)

    return jax.tree.map(mark_node, state, is_vector, is_leaf=is_mark)

"""Statistics of communication, read from an optimizer state."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.types import Array, AxisNames, PyTree, State
from .._core.xla_quirks import largest_entry
from ..comm.over import over
from ..reducers.error_feedback import ErrorFeedbackState
from ..reducers.with_stats import TrackedState
from ..state.marks import OnHost, PerWorker, cutting_marks, map_marked
from .all_reduce import AllReduceState
from .dynamic_loss_scale import named_loss_scales
from .mistakes import communicates
from .skip_nonfinite import SkipNonfiniteState


def stats(opt_state: State) -> dict[str, Array]:
    """Reads the statistics that transformations keep in their state.

    Returns:
      Scalar arrays, those of the following that the state has:
      `residual_norm` (L2, root mean square over workers; inside a step that of this worker) from error feedback;
      `syncs`, `bytes` (sent by one worker since the start) and `compression_error` (`|x - own|² / |x|²` of the last
      reduction, mean over workers) from `with_stats`, `bytes` also from `gossip`, `local_steps`, `noloco`,
      `mirror_descent`, `anytime_minibatch`, `one_bit_adam`, `qadam` and `zero_one_adam`; `rounds` from `local_steps`
      (the sum over fragments) and `noloco`; `skips` from `skip_nonfinite` (the sum over workers that skip
      independently); `empty` (steps without any example) from `all_reduce`; `loss_scale` from `dynamic_loss_scale`, of
      several of them `loss_scale.NODE` for each. Of several reducers `syncs` is the largest number, and
      `compression_error` the mean.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.skip_nonfinite(jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None), axis=None)
      >>> sorted(jd.transforms.stats(tx.init(jnp.zeros(2))))
      ['empty', 'residual_norm', 'skips']
    """
    found: dict[str, Any] = {}
    opt_state = jax.tree.map(_without_host, opt_state, is_leaf=lambda x: isinstance(x, OnHost))
    # The L2 norm over all leaves, root mean square over workers.
    counts = map_marked(_count_workers, opt_state)
    pairs = zip(_nodes(opt_state, ErrorFeedbackState), _nodes(counts, ErrorFeedbackState), strict=True)
    squares = [_mean_square(node.residual, count.residual) for node, count in pairs]
    if squares:
        found["residual_norm"] = jnp.sqrt(sum(squares))
    tracked = _nodes(opt_state, TrackedState)
    if tracked:
        found["syncs"] = largest_entry(jnp.stack([largest_entry(node.syncs) for node in tracked]))
        found["compression_error"] = jnp.stack([node.error.value.mean() for node in tracked]).mean()
    sent = _bytes_sent(opt_state)
    if sent:
        found["bytes"] = sum(map(_number, sent))
    local = _communicating(opt_state, "rounds")
    if local:
        found["rounds"] = sum(node.rounds.sum() for node in local)
    for name, kind, field in (("skips", SkipNonfiniteState, "skipped"), ("empty", AllReduceState, "empty")):
        nodes = _nodes(opt_state, kind)
        if nodes:
            found[name] = sum(getattr(node, field).sum() for node in nodes)
    scales = named_loss_scales(opt_state)
    for name, value in scales:
        found["loss_scale" if len(scales) == 1 else f"loss_scale.{name}"] = value
    return found


def _without_host(node: Any) -> Any:
    """Removes the mark of the memory kind; the marks inside, of placement over workers, are needed."""
    return node.value if isinstance(node, OnHost) else node


def _number(words: Array) -> Array:
    """Converts (high, low) words to a float."""
    # Of a count for each worker the first one: all workers send the same.
    high, low = words.reshape(-1, 2)[0].astype(jnp.float32)
    return high * 2.0**32 + low


def _nodes(tree: PyTree, kind: type) -> list[Any]:
    return _matching(tree, lambda x: isinstance(x, kind))


def _bytes_sent(tree: PyTree) -> list[Array]:
    """Returns the counts of bytes that are not part of one another."""

    def counts(node: Any) -> bool:
        return isinstance(node, TrackedState) or (communicates(node) and "sent" in node._fields)

    found = []
    for node in filter(counts, jax.tree.leaves(tree, is_leaf=counts)):
        # A count includes those of reducers inside; an inner optimizer communicates by itself.
        found.append(node.bytes if isinstance(node, TrackedState) else node.sent)
        found += _bytes_sent(getattr(node, "inner", ()))
    return found


def _communicating(tree: PyTree, field: str) -> list[Any]:
    return _matching(tree, lambda x: communicates(x) and field in x._fields)


def _matching(tree: PyTree, matches: Callable[[Any], bool]) -> list[Any]:
    """Returns all nodes that match, including those inside other matching nodes."""
    found = [node for node in jax.tree.leaves(tree, is_leaf=matches) if matches(node)]
    # As a plain tuple, so that the node itself does not match again.
    return found + [inner for node in found for inner in _matching(tuple(node), matches)]


def _count_workers(marks: Sequence[Any], leaf: Array) -> int:
    """Returns the number of workers that an array has rows for."""
    held = [mark for mark in cutting_marks(marks) if not _is_bound(mark.axis)]
    return math.prod(n for n, mark in zip(leaf.shape, held, strict=False) if isinstance(mark, PerWorker))


def _mean_square(residual: PerWorker, counts: PyTree) -> Array:
    """Returns the squared norm of a residual, averaged over the workers in its leading dimensions."""
    pairs = zip(jax.tree.leaves(residual), jax.tree.leaves(counts), strict=True)
    return sum((jnp.sum(jnp.square(leaf)) / count for leaf, count in pairs), jnp.zeros(()))


def _is_bound(axis: AxisNames) -> bool:
    """Whether this is the step of one worker, which sees its own part of a state."""
    try:
        return over(axis).size > 0
    except ValueError:
        return False

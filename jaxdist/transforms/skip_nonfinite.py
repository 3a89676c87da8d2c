"""A step that would leave NaN or Inf anywhere does not happen, on any worker."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._core.dtypes import working_dtype
from .._core.errors import Portable
from .._core.types import Array, AxisNames, Bool, Int, PyTree, State
from ..comm.over import over


class SkipNonfiniteState(NamedTuple):
    """Counts of steps that did not happen (agreed; of each worker inside `local_steps` and `gossip`).

    `skipped` in all, `consecutive` in a row up to now, of which `allowed` is the largest number.
    """

    inner: State
    skipped: Int[Array, ""]
    consecutive: Int[Array, ""]
    allowed: Int[Array, ""]


class TooManySkips(Portable, RuntimeError):
    """More steps in a row were skipped than `skip_nonfinite(max_consecutive=)` allows.

    The step before has left the state as it was: it can be saved, and training can go on from it with other data or a
    lower learning rate.

    Attributes:
      skips: how many in a row.
    """

    def __init__(self, skips: int):
        super().__init__(skips)
        self.skips = skips

    def __str__(self) -> str:
        return (
            f"skip_nonfinite has skipped {self.skips} steps in a row, since gradients, updates or new states were not "
            "finite: look for NaN in the data and the loss, lower the learning rate, or allow more by max_consecutive="
        )


def skip_nonfinite(
    tx: optax.GradientTransformation, *, axis: AxisNames = "data", max_consecutive: int | None = 1000
) -> optax.GradientTransformationExtraArgs:
    """Skips the whole chain on all workers if one of them would be left with anything that is not finite.

    Wrap the whole chain: Adam and weight decay move parameters even on a zero gradient, and a residual that has taken
    up a NaN never recovers. A step is skipped if on any worker

    - a gradient is not finite, or so large that the sum of its squares overflows, `|g| > 1.8e19` in float32: a
      residual would keep it, and products and sums of the next steps would overflow in its place;
    - an update, a parameter that it makes, or a number in the new state of the chain is not finite and was before.

    The chain runs in any case, so that its collectives happen on all workers, on zeros in place of a bad gradient; a
    skipped step's updates are then replaced by zeros and its new state by the old one, residuals included. Workers with
    `examples=0` do not count for their gradient.

    Around `local_steps` and `gossip` it makes all workers meet in every step, which they are there to avoid. Inside,
    `local_steps(skip_nonfinite(inner, axis=None), ...)`, a worker sits its own step out, as with `active=False`, and
    nobody waits. With `gradient_tracking`, which keeps the gradients themselves, it must stand around.

    *On the wire*: one all-reduce of 4 bytes after those of `tx`; with `axis=None` nothing.

    *State*: that of `tx`, and three counts. While a step runs, the old state is kept until the new one is known to be
    finite: with Adam 1.25 times the memory of the parameters.

    Args:
      tx: the whole chain, `all_reduce` included.
      axis: the mesh axis of the workers; `None` where each decides for itself, inside `local_steps` and `gossip`.
      max_consecutive: how many steps in a row may be skipped. One more, and the next call of the step that `distribute`
        or `simulate` made raises `TooManySkips`; in a loop of another kind call `check_skips`. A few hundred tell a
        model or data that are lost from a bad batch; `None` goes on for ever.

    Returns:
      The guarded chain.

    Raises:
      ValueError: `max_consecutive` is below 1; at trace time, if the axis is not bound.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.adam(0.1)), axis=None)
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> updates.tolist(), int(state.skipped)
      ([0.0, 0.0], 1)

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 2018 (skipping steps that overflow).
    """
    if max_consecutive is not None and max_consecutive < 1:
        raise ValueError(f"max_consecutive must be at least 1, or None for no end, got {max_consecutive}")
    most = np.iinfo(np.int32).max
    allowed = most if max_consecutive is None else min(max_consecutive, most)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(tx.init(params), zero, jnp.zeros_like(zero), jnp.asarray(allowed, jnp.int32))

    def update(updates, state, params=None, **extra_args):
        comm = over(axis)
        bad = _any(jnp.logical_not(_leaves_room(x)) for x in _inexact(updates))
        clean = jax.tree.map(lambda x: jnp.where(bad, jnp.zeros_like(x), x), updates)
        if "examples" in extra_args:  # without examples a mean is 0/0; all_reduce leaves it out
            bad = bad & (jnp.asarray(extra_args["examples"]) > 0)
        new_updates, inner = tx.update(clean, state.inner, params, **extra_args)
        # In one flag with the gradient's: all that the step makes has to be there before any of it is kept.
        bad = bad | _any(~jnp.isfinite(x).all() for x in _inexact(new_updates)) | _overflows(state.inner, inner)
        if params is not None:
            bad = bad | _overflows(params, jax.tree.map(_moved, params, new_updates))
        skip = comm.max(comm.varying(bad.astype(jnp.int32))) > 0
        new_updates = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), new_updates)
        inner = jax.tree.map(lambda new, old: jnp.where(skip, old, new), inner, state.inner)
        consecutive = jnp.where(skip, optax.safe_increment(state.consecutive), 0)
        allowed_now = jnp.full_like(state.allowed, allowed)
        skipped = jnp.where(skip, optax.safe_increment(state.skipped), state.skipped)
        return new_updates, SkipNonfiniteState(inner, skipped, consecutive, allowed_now)

    return optax.GradientTransformationExtraArgs(init, update)


def check_skips(state: State) -> int:
    """Raises if a `skip_nonfinite` in a state has skipped more steps in a row than it may.

    Steps made by `distribute` and `simulate` do this by themselves. It waits for the step that makes the state.

    Args:
      state: a state of training or of an optimizer, placed or not, with whatever around.

    Returns:
      How many more steps may be skipped; the largest 32-bit number if none is guarded.

    Raises:
      TooManySkips: too many were.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.skip_nonfinite(optax.sgd(0.1), axis=None, max_consecutive=1)
      >>> state = tx.init(jnp.zeros(1))
      >>> for _ in range(2):
      ...     print(jd.transforms.check_skips(state))
      ...     _, state = tx.update(jnp.array([jnp.nan]), state)
      1
      0
      >>> jd.transforms.check_skips(state)  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      TooManySkips: skip_nonfinite has skipped 2 steps in a row, ...
    """
    left = int(np.iinfo(np.int32).max)
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SkipNonfiniteState)):
        if isinstance(node, SkipNonfiniteState):
            consecutive = max(int(x.max()) for x in _here(node.consecutive))
            left = min(left, min(int(x.min()) for x in _here(node.allowed)) - consecutive, check_skips(node.inner))
            if left < 0:
                raise TooManySkips(consecutive)
    return left


def with_skip_checks(run: Any) -> Any:
    """Wraps a compiled step to raise `TooManySkips` before a call whose state has skipped too many steps.

    A check waits for the previous step, so it is made only when the limit may have been reached: in every
    `max_consecutive + 1`-th call while no step is skipped. All processes check in the same calls.
    """
    calls_to_wait = 0

    @functools.wraps(run)
    def run_with_checks(state, batch, **static):
        nonlocal calls_to_wait
        if calls_to_wait:
            calls_to_wait -= 1
        elif not any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            calls_to_wait = check_skips(state)
        return run(state, batch, **static)

    # Callers expect the attributes of a compiled function.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(run_with_checks, name, getattr(run, name))
    return run_with_checks


def _here(counts: PyTree) -> list[np.ndarray]:
    """What this process has of a count, which may have marks around it, and be one for each worker."""
    found: list[np.ndarray] = []
    for x in jax.tree.leaves(counts):
        found += [np.asarray(shard.data) for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    return found


def _inexact(tree: PyTree) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _any(flags: Iterable[Array]) -> Bool[Array, ""]:
    found = list(flags)
    return jnp.stack(found).any() if found else jnp.zeros((), bool)


def _leaves_room(x: Array) -> Bool[Array, ""]:
    """Whether all entries are finite, and the sum of their squares is."""
    return jnp.isfinite(jnp.sum(jnp.square(jnp.abs(x.astype(working_dtype(x.dtype))))))


def _overflows(old: PyTree, new: PyTree) -> Bool[Array, ""]:
    """Whether anything is not finite any more. What was not before is the business of the chain: a best loss of Inf."""
    pairs = zip(_inexact(old), _inexact(new), strict=True)
    return _any((jnp.isfinite(a) & ~jnp.isfinite(b)).any() for a, b in pairs)


def _moved(parameter: Any, update: Array) -> Array:
    return parameter + update.astype(parameter.dtype)

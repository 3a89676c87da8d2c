"""Skips steps that would leave NaN or Inf anywhere, on all workers together."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._core.checks import Portable, check_count
from .._core.dtypes import working_dtype
from .._core.trees import to_device, tree_where
from .._core.types import Array, AxisNames, Bool, Int, PyTree, State
from ..comm.base import alone
from ..comm.over import over
from ..state.donation import DonationChecks
from ..state.flax_marks import refuse_shared_variables
from ..state.marks import axis_tuple, check_batch_usable, check_usable
from .extra_args import with_extra_args
from .in_plain_jit import is_outside_map, take_terms, weights_of_workers
from .weights import weight_of_leaves, zero_unless


class SkipNonfiniteState(NamedTuple):
    """Counts of skipped steps: `skipped` in total, `consecutive` up to now, and the `allowed` number of the latter.

    Replicated; per worker inside `local_steps` and `gossip`.
    """

    inner: State
    skipped: Int[Array, ""]
    consecutive: Int[Array, ""]
    allowed: Int[Array, ""]


class TooManySkipsError(Portable, RuntimeError):
    """More steps in a row were skipped than `skip_nonfinite(max_consecutive=)` allows.

    Skipped steps leave the state unchanged: it can be saved, and training can resume from it with other data or a lower
    learning rate.

    Attributes:
      skips: the number of consecutive skipped steps.
    """

    def __init__(self, skips: int):
        super().__init__(skips)
        self.skips = skips

    def __str__(self) -> str:
        return (
            f"skip_nonfinite has skipped {self.skips} steps in a row because gradients, updates or new states were not "
            "finite; look for NaN in the data and the loss, lower the learning rate, or raise max_consecutive="
        )


def skip_nonfinite(
    tx: optax.GradientTransformation, *, axis: AxisNames = "data", max_consecutive: int | None = 1000
) -> optax.GradientTransformationExtraArgs:
    """Skips the whole chain on all workers if any of them would end up with a value that is not finite.

    Wrap the whole chain. A step is skipped if on any worker

    - a gradient is not finite, or the sum of its squares overflows, `|g| > 1.8e19` in float32;
    - an update, an updated parameter, or a number in the new state of the chain is not finite and was before;
    - the loss is NaN, if it is passed, `update(gradients, state, params, value=loss)`. It may be this worker's or the
      mean; `tx` gets it too.

    A skipped step's updates are zeros and its new state is the old one, residuals included. Gradients and losses of
    workers with `examples=0` or `active=False` are not checked. "What happens to a NaN?" in docs/faq.md says why.

    *On the wire*: one all-reduce of 4 bytes after those of `tx`; with `axis=None` nothing.

    *State*: the state of `tx`, and three counts. While a step runs, the old state is kept until the new one is known
    to be finite: with Adam 1.25 times the memory of the parameters.

    Args:
      tx: the whole chain.
      axis: the mesh axis of the workers; `None` where workers decide independently, inside `local_steps` and `gossip`.
      max_consecutive: the number of steps in a row that may be skipped. After one more, the next call of the step that
        `distribute` or `simulate` made raises `TooManySkipsError`; other loops call `check_skips`. A few hundred
        distinguish a diverged model or corrupt data from a bad batch; `None` sets no limit.

    Returns:
      A transformation whose `update` takes `value=` and all that `tx` takes.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.adam(0.1)), axis=None)
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> updates.tolist(), int(state.skipped)
      ([0.0, 0.0], 1)
    """
    most = np.iinfo(np.int32).max
    if max_consecutive is not None:
        check_count("max_consecutive", min(max_consecutive, most), 1)
    allowed = most if max_consecutive is None else min(max_consecutive, most)
    tx = with_extra_args(tx)

    def init_fn(params):
        zero = jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(tx.init(params), zero, jnp.zeros_like(zero), jnp.asarray(allowed, jnp.int32))

    def update_fn(updates, state, params=None, **extra_args):
        names, weights = axis_tuple(axis), (extra_args.get("examples"), extra_args.get("active"))
        updates = take_terms(names, updates)
        # Without examples a mean is 0/0, and is left out wherever workers are averaged.
        if is_outside_map(names):
            # Under plain jit a flag is that of all workers already.
            comm, weight, leave_out = alone(), weights_of_workers(names, updates, *weights), jax.vmap(zero_unless)
        else:
            comm, weight, leave_out = over(axis), weight_of_leaves(*weights, updates), zero_unless
        checked = updates if weight is None else leave_out(weight > 0, updates)
        # Collectives run on zeros in place of a bad gradient.
        bad = _any(jnp.logical_not(_is_moderate(x)) for x in _inexact(checked))
        if extra_args.get("value") is not None:
            lost = jnp.isnan(extra_args["value"]).any()
            bad = bad | (lost if weight is None else lost & (weight > 0).any())
        clean = jax.tree.map(lambda x: jnp.where(bad, jnp.zeros_like(x), x), checked)
        new_updates, inner = tx.update(clean, state.inner, params, **extra_args)
        failed = _any(~jnp.isfinite(x).all() for x in _inexact(new_updates)) | _overflows(state.inner, inner)
        if params is not None:
            failed = failed | _overflows(params, jax.tree.map(_apply_update, params, new_updates))
        # One number for gradient, updates and new state, and one collective for it. One worker's bad value skips the
        # step on all of them, which keeps replicated state equal.
        worst = comm.max(comm.varying(jnp.where(failed, 2, bad.astype(jnp.int32))))
        skip = worst > 0
        new_updates = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), new_updates)
        inner = tree_where(skip, state.inner, inner)
        # What was kept from earlier steps is at fault only if the step failed without the bad gradient.
        inner = _drop_pending(inner, worst > 1)
        # Counts go on through skipped steps; all other state is restored.
        consecutive = jnp.where(skip, optax.safe_increment(state.consecutive), 0)
        # From the factory and not from the state: a resumed run follows its own setting.
        allowed_now = jnp.full_like(state.allowed, allowed)
        skipped = jnp.where(skip, optax.safe_increment(state.skipped), state.skipped)
        return new_updates, SkipNonfiniteState(inner, skipped, consecutive, allowed_now)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_skips(state: State) -> int:
    """Checks that no `skip_nonfinite` in a state has skipped more steps in a row than it allows.

    Steps made by `distribute` and `simulate` call it. It blocks until the state has been computed, and returns the
    number of steps that may still be skipped; the largest 32-bit number without any `skip_nonfinite`.

    Examples:
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
      TooManySkipsError: skip_nonfinite has skipped 2 steps in a row, ...
    """
    left = int(np.iinfo(np.int32).max)
    # Guards may be nested: the state inside each is checked too.
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SkipNonfiniteState)):
        if isinstance(node, SkipNonfiniteState):
            consecutive = max(int(np.max(x)) for x in _local_values(node.consecutive))
            allowed = min(int(np.min(x)) for x in _local_values(node.allowed))
            left = min(left, allowed - consecutive, check_skips(node.inner))
            if left < 0:
                raise TooManySkipsError(consecutive)
    return left


def with_skip_checks(run: Any, *, donates: bool = False) -> Any:
    """Wraps a compiled step to raise before a call with arrays that are gone or that it would donate twice.

    Also before one with a state that has skipped too many steps.
    """
    donation = DonationChecks() if donates else None
    # A check waits for the previous step, so it is made only when the limit may have been reached: in every
    # `max_consecutive + 1`-th call while no step is skipped. All processes check in the same calls.
    calls_to_wait, called = 0, False

    @functools.wraps(run)
    def run_with_checks(state, batch, **static):
        nonlocal calls_to_wait, called
        check_usable(state)
        check_batch_usable(batch)
        # What a step returns has none.
        if not called:
            refuse_shared_variables(state)
        called = True
        if donation is not None:
            donation.check(state, batch)
        if calls_to_wait:
            calls_to_wait -= 1
        elif not any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            calls_to_wait = check_skips(state)
        returned = run(state, batch, **static)
        if donation is not None:
            donation.remember(returned[0])
        return returned

    return keep_attributes(run_with_checks, run)


def keep_attributes(wrapper: Any, run: Any) -> Any:
    """Gives a wrapper of a compiled function the attributes that its callers expect, and returns it."""
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(wrapper, name, getattr(run, name))
    return wrapper


def _local_values(counts: PyTree) -> list[np.ndarray]:
    """Returns this process's shards of a count, which may be marked and have one value for each worker."""
    found: list[np.ndarray] = []
    for x in jax.tree.leaves(counts):
        found += [np.asarray(shard.data) for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    return found


def _inexact(tree: PyTree) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def is_guarded(state: State) -> bool:
    """Returns whether a state has a `skip_nonfinite` inside."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SkipNonfiniteState))
    return any(isinstance(node, SkipNonfiniteState) for node in nodes)


def _any(flags: Iterable[Array]) -> Bool[Array, ""]:
    found = list(flags)
    return jnp.stack(found).any() if found else jnp.zeros((), bool)


def _is_moderate(x: Array) -> Bool[Array, ""]:
    """Returns whether all entries, and the sum of their squares, are finite."""
    return jnp.isfinite(jnp.sum(jnp.square(jnp.abs(x.astype(working_dtype(x.dtype))))))


def _overflows(old: PyTree, new: PyTree) -> Bool[Array, ""]:
    """Returns whether any entry has become non-finite. Those that already were are intended: a best loss of Inf."""
    pairs = zip(_inexact(old), _inexact(new), strict=True)
    # Of state in host memory the flag is there too.
    return _any(to_device((jnp.isfinite(a) & ~jnp.isfinite(b)).any()) for a, b in pairs)


def _drop_pending(state: State, drop: Array) -> State:
    """Asks the states that keep a gradient for the next step to drop it, by their method `drop_pending(drop)`."""

    def may_drop(node: Any) -> bool:
        return hasattr(node, "drop_pending")

    state = state.drop_pending(drop) if may_drop(state) else state
    # Such states may be inside each other.
    return jax.tree.map(
        lambda node: _drop_pending(node, drop) if may_drop(node) else node,
        state,
        is_leaf=lambda node: node is not state and may_drop(node),
    )


def _apply_update(parameter: Any, update: Array) -> Array:
    return parameter + update.astype(parameter.dtype)

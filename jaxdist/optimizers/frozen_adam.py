"""Adam whose variance is frozen after a warm-up, so that its momentum can be compressed."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import check_range
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Reducer, check_reducer
from ..state.marks import bind
from ..transforms.common import LearningRate, descend, moving_average, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients


class FrozenAdamState(NamedTuple):
    """Replicated: the bytes `sent` by one worker, as (high, low) words, and two trees in float32 or better."""

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    momentum: Updates
    variance: Updates
    reducer: State

    communicates = True


class FrozenAdam(NamedTuple):
    """The arguments; `corrected` divides by `1 - βᵗ` as Adam does, for the variance with the `t` at which it froze."""

    learning_rate: LearningRate
    freeze_step: int
    b1: float | int
    b2: float | int
    eps: float | int
    weight_decay: float | int
    corrected: bool
    reducer: Reducer
    axis: AxisNames

    def as_transformation(self) -> optax.GradientTransformationExtraArgs:
        """The transformation of a method whose variance is frozen after a warm-up."""
        check_adam(self.b1, self.b2, self.eps, self.weight_decay)
        check_reducer(self.reducer)
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: PyTree) -> State:
        """Moments of zero, and the state of the reducer."""
        check_leaves(params)
        return FrozenAdamState(
            count=jnp.zeros((), jnp.int32),
            sent=jnp.zeros(2, jnp.uint32),
            momentum=zeros_like(params),
            variance=zeros_like(params),
            reducer=bind(self.reducer.init(zeros_like(params)), self.axis),
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        """A warm-up step, or one whose momentum is compressed."""
        del extra_args
        with jax.named_scope("frozen_adam"):
            gradients, comm, ledger, rate = start_step(
                self.axis, self.learning_rate, updates, examples, active, state.count, name="frozen_adam"
            )
            compress, warm_up = partial(self._compress_step, Extras(state.count, rate)), self._warm_up_step
            # The branches differ in their collectives; the count is replicated, so all workers take the same one.
            frozen = state.count >= self.freeze_step
            momentum, variance, reducer_state = comms.cond(frozen, compress, warm_up, comm, gradients, state)
            count = next_count(state.count)
            # x -= η (m / d + λ x)
            direction = divide(momentum, self._preconditioner(variance, count))
            if self.corrected:
                # m̂ = m / (1 - β₁ᵗ)
                direction = jax.tree.map(lambda m: m / (1 - self.b1 ** count.astype(m.dtype)), direction)
            out = descend(direction, rate, self.weight_decay, params, updates)
            sent = add_bytes(state.sent, comms.total_bytes(ledger))
            return out, FrozenAdamState(count, sent, momentum, variance, reducer_state)

    def _warm_up_step(self, comm: Comm, gradients: Updates, state: FrozenAdamState) -> tuple[Updates, Updates, State]:
        """Returns Adam's moments of the exact mean gradient."""
        mean = exact().reduce(gradients, (), comm)[0].mean
        # m = β₁ m + (1-β₁) ḡ and v = β₂ v + (1-β₂) ḡ²
        momentum = moving_average(state.momentum, mean, self.b1)
        return momentum, moving_average(state.variance, jax.tree.map(jnp.square, mean), self.b2), state.reducer

    def _compress_step(
        self, extras: Extras, comm: Comm, gradients: Updates, state: FrozenAdamState
    ) -> tuple[Updates, Updates, State]:
        """Returns the reduced momentum and the frozen variance."""
        # Unlike the paper, which sends m itself: one scale would then serve entries whose d differ by decades.
        # The variance is frozen, so `by` is replicated and constant, and residuals of the reducer keep their unit.
        by = self._preconditioner(state.variance, self.freeze_step)
        local = mask_unseen(divide(moving_average(state.momentum, gradients, self.b1), by), state.variance)
        # reduce((β₁ m + (1-β₁) g_w) / d)
        reduced, reducer_state = self.reducer.reduce(local, state.reducer, comm, extras)
        return multiply(mask_unseen(reduced.mean, state.variance), by), state.variance, reducer_state

    def _preconditioner(self, variance: Updates, count: Array | int) -> Updates:
        """Returns `d = √v̂ + ε`, where the bias correction of `v̂` stops at `freeze_step`, as the variance does."""
        if self.corrected:
            # v̂ = v / (1 - β₂ˢ)
            s = jnp.minimum(count, self.freeze_step)
            variance = jax.tree.map(lambda v: v / (1 - self.b2 ** s.astype(v.dtype)), variance)
        return preconditioner(variance, self.eps)


def check_adam(b1: float | int, b2: float | int, eps: float | int, weight_decay: float | int) -> None:
    """Checks the range of Adam's arguments."""
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("eps", eps, 0)
    check_range("weight_decay", weight_decay, 0)


def start_step(
    axis: AxisNames,
    learning_rate: LearningRate,
    updates: Updates,
    examples: Any,
    active: Any,
    count: Array,
    *,
    name: str,
) -> tuple[Updates, Comm, list[comms.Sent], Array]:
    """Returns gradients in float32 or better, the group of workers, the ledger of the bytes it sends, and the rate."""
    gradients, comm = local_gradients(updates, axis, examples, active, name=name)
    ledger: list[comms.Sent] = []
    return gradients, comms.count_sent(comm, ledger), ledger, rate_at(learning_rate, count)


def mask_unseen(tree: Updates, variance: Updates) -> Updates:
    """Sets entries without any gradient so far to zero: sign codes have no zero, and `eps` alone would divide them."""
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros_like(x)), tree, variance)


def preconditioner(variance: Updates, eps: float | int) -> Updates:
    """Returns `√v + ε`, at least the smallest normal number, so that an `eps` of 0 never divides by zero.

    It is replicated. Divided by it, all entries have about the same size and can share one scale.
    """
    return jax.tree.map(lambda v: jnp.maximum(jnp.sqrt(v) + eps, jnp.finfo(v.dtype).tiny), variance)


def divide(tree: Updates, by: Updates) -> Updates:
    """Returns `tree / by`, entry by entry."""
    return jax.tree.map(jnp.divide, tree, by)


def multiply(tree: Updates, by: Updates) -> Updates:
    """Returns `tree · by`, entry by entry."""
    return jax.tree.map(jnp.multiply, tree, by)

"""0/1 Adam: the variance is refreshed ever more rarely, then workers step by themselves between syncs of one bit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_range
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Float, Int, State, UInt, Updates
from ..compressors.sign import scaled_sign
from ..reducers.base import Extras, Reducer
from ..reducers.exact import exact
from ..reducers.feedback import error_feedback
from ..reducers.two_shot import two_shot
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import LearningRate, moving_average, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients
from .base import check_adam, cleared, divide, multiply, rescaled, seen, units

LONGEST = 2**30


class Interval(NamedTuple):
    """Agreed: something happens every `length` steps; `done` counts towards the next doubling of it."""

    length: Int[Array, ""]
    done: Int[Array, ""]


class ZeroOneAdamState(NamedTuple):
    """Agreed: `count`, the bytes `sent` by one worker, as (high, low) words, `variance`, and both intervals.

    Agreed too: the sum of learning `rates` since the last sync.
    Per worker: `momentum`, and the `global_params`, the parameters after the last sync, equal on all workers.
    `reducer` as the reducer defines it. All trees are in float32 or better.
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    variance: Updates
    rates: Float[Array, ""]
    refresh: Interval
    sync: Interval
    momentum: PerWorker
    anchor: PerWorker
    reducer: State

    communicates = True


def zero_one_adam(
    learning_rate: LearningRate,
    *,
    freeze_step: int,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    refreshes: int = 16,
    doubling_steps: int = 32_678,
    longest_interval: int = 16,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Adam that sends a bit for each entry on most steps, and nothing at all on most of the later ones.

    Until `freeze_step`: every `k` steps the mean gradient `ḡ` is exact and refreshes the variance,
    `v = β₂ v + (1-β₂) ḡ²`; between them `ḡ = d · reduce(g_w / d)` with `d = √v + ε`. Always `m = β₁ m + (1-β₁) ḡ` and
    `x -= η m / d`. `k` starts at 1 and doubles after every `refreshes` refreshes.

    Afterwards `v` stays, and each worker steps by itself: `m_w = β₁ m_w + (1-β₁) g_w`, `x_w -= η m_w / d`. Every `h`
    steps they meet. With the anchor `a`, where they met last, and `s`, the sum of `η` since then:
    `u = reduce(x_w - a)`, `m_w = -d u / s`, `x_w = a = a + u`. `h` starts at 1 and doubles every `doubling_steps`
    steps, up to `longest_interval`.

    **Not as in the paper**, which sends `g_w` and `d (x_w - a)` and divides by `d` after that: see `one_bit_adam`. Of
    64 entries whose gradients span three decades none is ever further from its optimum than 0.22 (uncompressed 0.18);
    the paper's form threw one as far as 9.1. On a refresh, where `d` changes, residuals of `error_feedback` and
    `two_shot` are carried over, times the old `d` and over the new one: they are owed in gradients. Those that are not
    cut as the parameters are, inside `bucketed`, `per_leaf` or `hierarchical`, are carried over as steps instead.

    No bias correction, as in the original. Entries without any variance stay where they are, as in `one_bit_adam`.
    Weight decay is applied to the anchor, `a -= s λ a`, so that it does not enter the momentum.

    *On the wire* for `n` entries: on a refresh one all-reduce, `2(W-1)/W · 4n` bytes sent; on other steps until
    `freeze_step`, and when workers meet, what the reducer sends: by default one all-to-all and one all-gather, about
    `2(W-1)/W · n/8` bytes together; on all other steps nothing.

    *State*: agreed, counts, intervals and the variance; per worker momentum and anchor; that of the reducer: by default
    a residual per worker and one that is cut over the workers, both zeroed at `freeze_step`, from where on
    they are residuals of displacements, no more of gradients. **Parameters differ between workers between syncs**: mark
    them, `TrainState(jd.PerWorker(params), tx.init(params))`, and evaluate `jd.consensus(state.params)`.

    Args:
      learning_rate: `η`, a number or a schedule.
      freeze_step: steps until the variance is frozen, at least 1; the end of the learning rate's warm-up or later.
      b1: `β₁`, of the momentum.
      b2: `β₂`, of the variance.
      eps: `ε`.
      weight_decay: `λ`, decoupled.
      refreshes: refreshes of the variance before their interval doubles. Fewer sends less and risks an old variance.
      doubling_steps: local steps before the interval between syncs doubles.
      longest_interval: where that stops. Longer sends less and lets workers drift further apart.
      reducer: what carries gradients, then displacements; by default `error_feedback(two_shot(scaled_sign()))`.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients whose updates contain the learning rate; it needs `params` and comes
      last in a chain. Its `update` takes `examples=`, as that of `all_reduce`.

    Raises:
      ValueError: an argument is out of range; at trace time, what `all_reduce` raises, or if `params` are missing.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.zero_one_adam(0.1, freeze_step=2, axis=None)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.array([1.0, -1.0]), state, params)
      ...     params = params + updates
      >>> bool(jnp.allclose(params, state.anchor.value)), int(state.sync.length)
      (True, 1)

    References:
      Lu, Li, Zhang, De Sa, He, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", arXiv
      2202.06009, 2022.
    """
    check_adam(b1, b2, eps, weight_decay)
    for name, value in (
        ("freeze_step", freeze_step),
        ("refreshes", refreshes),
        ("doubling_steps", doubling_steps),
        ("longest_interval", longest_interval),
    ):
        check_range(name, value, 1)
    coder = error_feedback(two_shot(scaled_sign())) if reducer is None else reducer

    def init(params) -> State:
        check_leaves(params)
        # A copy, since parameters and optimizer state may both be donated.
        anchor = jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)
        return ZeroOneAdamState(
            count=jnp.zeros((), jnp.int32),
            sent=jnp.zeros(2, jnp.uint32),
            variance=zeros_like(params),
            rates=jnp.zeros((), jnp.float32),
            refresh=_each_step(),
            sync=_each_step(),
            momentum=bind(PerWorker(zeros_like(params)), axis),
            anchor=bind(PerWorker(anchor), axis),
            reducer=bind(coder.init(zeros_like(params)), axis),
        )

    def talk(comm, refresh, meet, gradients, payload, state, extras):
        """The mean of the payloads, by the means of this step; zeros where workers step by themselves.

        On a refresh that of the gradients, and the variance that they make.
        """

        def whole(comm, gradients, payload, reducer_state):
            del payload
            mean = exact().reduce(gradients, (), comm)[0].mean
            variance = moving_average(state.variance, jax.tree.map(jnp.square, mean), b2)
            # What is owed is owed in gradients; it was counted in the old unit.
            factor = divide(units(state.variance, eps), units(variance, eps))
            return mean, variance, rescaled(reducer_state, factor, comm)

        def coded(comm, gradients, payload, reducer_state):
            del gradients
            reduced, reducer_state = coder.reduce(payload, reducer_state, comm, extras)
            return reduced.mean, state.variance, reducer_state

        def either(comm, *operands):
            return comms.cond(refresh, whole, coded, comm, *operands)

        def silent(comm, gradients, payload, reducer_state):
            del comm, gradients
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), payload)
            return zeros, state.variance, reducer_state

        fresh = coder.init(zeros_like(payload))
        kept = cleared(state.reducer, fresh, state.count == freeze_step)
        return comms.cond(meet, either, silent, comm, gradients, payload, kept)

    def ahead(momentum, variance, rate):
        steps = divide(momentum, units(variance, eps))
        return seen(jax.tree.map(lambda m: -rate.astype(m.dtype) * m, steps), variance)

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        with jax.named_scope("zero_one_adam"):
            gradients, comm = local_gradients(updates, axis, examples)
            # Gradients may be narrower than their parameters, and the branches below must give one dtype.
            gradients = jax.tree.map(lambda g, v: g.astype(v.dtype), gradients, state.variance)
            ledger: list[comms.Sent] = []
            comm = comms.counted(comm, ledger)
            rate = rate_at(learning_rate, state.count)
            rates = state.rates + rate.astype(state.rates.dtype)
            step = next_count(state.count)
            together = state.count < freeze_step
            refresh = together & (step % state.refresh.length == 0)
            meet = together | (step % state.sync.length == 0)

            # What this worker does by itself, how far that takes it from the anchor, and in which unit it says so.
            local = moving_average(state.momentum.value, gradients, b1)
            alone = ahead(local, state.variance, rate)
            moved = jax.tree.map(
                lambda p, a, d: p.astype(a.dtype) - _as_held(a, p) + d, params, state.anchor.value, alone
            )
            unit = units(state.variance, eps)
            payload = seen(_choose(together, divide(gradients, unit), moved), state.variance)
            extras = Extras(state.count, rate)
            sent, variance, reducer_state = talk(comm, refresh, meet, gradients, payload, state, extras)

            mean = _choose(refresh, sent, multiply(seen(sent, variance), unit))
            fresh = moving_average(state.momentum.value, mean, b1)
            met = jax.tree.map(lambda u, m: jnp.where(rates > 0, -u / _nonzero(rates, u), m), mean, local)
            momentum = _choose(together, fresh, _choose(meet, met, local))
            momentum = seen(momentum, variance)
            # Both `fresh` and `met` are the step that all take together, over all rates since the last one.
            displacement = ahead(momentum, variance, rates)
            anchor = jax.tree.map(
                lambda a, d: jnp.where(meet, a - weight_decay * rates.astype(a.dtype) * a + d, a),
                state.anchor.value,
                displacement,
            )
            out = jax.tree.map(
                lambda a, p, d, g: jnp.where(meet, a - p.astype(a.dtype), d).astype(g.dtype),
                anchor,
                params,
                alone,
                updates,
            )
            return out, ZeroOneAdamState(
                count=step,
                sent=add_bytes(state.sent, comms.total_bytes(ledger)),
                variance=variance,
                rates=jnp.where(meet, 0, rates),
                refresh=_advance(state.refresh, refresh, refreshes, LONGEST),
                sync=_advance(state.sync, ~together, doubling_steps, longest_interval),
                momentum=with_value(state.momentum, momentum),
                anchor=with_value(state.anchor, anchor),
                reducer=reducer_state,
            )

    return optax.GradientTransformationExtraArgs(init, update)


def _choose(condition: Array, yes: Updates, no: Updates) -> Updates:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def _nonzero(rates: Array, like: Array) -> Array:
    return jnp.where(rates > 0, rates, 1).astype(like.dtype)


def _as_held(anchor: Array, param: Array) -> Array:
    """The anchor as a parameter of this dtype holds it: what is lost there is no movement."""
    return anchor.astype(param.dtype).astype(anchor.dtype)


def _each_step() -> Interval:
    return Interval(jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32))


def _advance(interval: Interval, happened: Array, every: int, longest: int) -> Interval:
    """Counts, and doubles the length when `every` have happened."""
    done = interval.done + happened.astype(jnp.int32)
    doubled = jnp.minimum(2 * interval.length, longest)
    return Interval(jnp.where(done == every, doubled, interval.length), jnp.where(done == every, 0, done))

"""0/1 Adam: a variance that is refreshed ever more rarely, then local steps between one-bit synchronizations."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_count
from .._core.dtypes import wider_dtype, working_dtype
from .._core.trees import next_count, tree_where
from .._core.types import Array, AxisNames, Bool, Float, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..compressors.scaled_sign import scaled_sign
from ..reducers.error_feedback import ErrorFeedbackState, error_feedback
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Reducer, check_reducer
from ..reducers.two_shot import TwoShotState, two_shot
from ..state.marks import PerWorker, Sharded, bind, map_marked, with_value
from ..transforms.common import LearningRate, moving_average, zeros_like
from ..transforms.local_gradients import check_leaves
from ..transforms.weights import weight_of_worker, zero_unless
from ..wire.buffers import leaf_order, vectors
from .frozen_adam import check_adam, divide, mask_unseen, multiply, preconditioner, start_step

# The interval between refreshes doubles without a practical limit.
LONGEST = 2**30


class Interval(NamedTuple):
    """Replicated: the `length` of an interval in steps; `done` counts towards its next doubling."""

    length: Int[Array, ""]
    done: Int[Array, ""]


class ZeroOneAdamState(NamedTuple):
    """Per worker: `momentum`, `anchor`, the parameters after the last sync, and how far they have `moved` since.

    Trees are in float32 or better; `moved` has the leaves whose parameters are narrower, the others tell themselves.

    Replicated: the rest, among it the bytes `sent` by one worker, as (high, low) words, and `rates`, the sum of the
    learning rates since the last sync. `reducer` as the reducer defines it.
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    variance: Updates
    rates: Float[Array, ""]
    refresh: Interval
    sync: Interval
    momentum: PerWorker
    anchor: PerWorker
    moved: PerWorker
    reducer: State

    communicates = True


class _Decision(NamedTuple):
    """The decision of both policies for a step: `shared` until the variance is frozen; `refresh` implies `sync`."""

    shared: Bool[Array, ""]
    refresh: Bool[Array, ""]
    sync: Bool[Array, ""]


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
    """Adam that sends one bit an entry on most steps, and nothing on most of the later ones.

    Until `freeze_step`: every `k` steps the mean gradient `ḡ` is exact and refreshes the variance,
    `v = β₂ v + (1-β₂) ḡ²`; between them `ḡ = d · reduce(g_w / d)` with `d = √v + ε`. Always `m = β₁ m + (1-β₁) ḡ` and
    `x -= η m / d`. `k` starts at 1 and doubles after `refreshes` of them. **Not as in the paper**: units of `d`, as in
    `one_bit_adam`.

    Afterwards `v` is frozen, and workers take local steps: `m_w = β₁ m_w + (1-β₁) g_w`, `x_w -= η m_w / d`. Every `h`
    steps they synchronize, with the last synchronized parameters `a` and the sum `s` of `η` since then:
    `u = reduce(x_w - a)`, `m_w = -d u / s`, `x_w = a = a + u`. `h` starts at 1 and doubles every `doubling_steps`, up
    to `longest_interval`. Weight decay: `a -= s λ a`.

    It comes last in a chain; `update` needs `params` and takes `examples=` and `active=`. **Parameters differ between
    workers between syncs**: `TrainState(jd.PerWorker(params), tx.init(params))`; evaluate `jd.consensus`.

    *On the wire* for `n` entries: on a refresh one all-reduce, `2(W-1)/W · 4n` bytes sent; on other steps until
    `freeze_step`, and on syncs, those of the reducer, by default `2(W-1)/W · n/8`; else none.

    *State*: replicated, the variance; per worker momentum and `a`, of half-precision parameters their displacement;
    residuals.

    Args:
      learning_rate: `η`; this and the arguments not listed are those of `one_bit_adam`.
      freeze_step: steps until `v` is frozen: the learning rate's warm-up or longer.
      refreshes: fewer send less and risk an old variance.
      doubling_steps: in local steps.
      longest_interval: longer sends less and lets workers drift apart.
      reducer: averages gradients, then displacements; by default that of `one_bit_adam`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.zero_one_adam(0.1, freeze_step=2, axis=None)
      >>> params = jnp.zeros(2)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(3):
      ...     updates, state = update(jnp.array([1.0, -1.0]), state, params)
      ...     params = params + updates
      >>> bool(jnp.allclose(params, state.anchor.value)), int(state.sync.length)
      (True, 1)

    References:
      Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", arXiv:2202.06009, 2022.
    """
    check_adam(b1, b2, eps, weight_decay)
    steps = {"freeze_step": freeze_step, "refreshes": refreshes, "doubling_steps": doubling_steps}
    for name, value in {**steps, "longest_interval": longest_interval}.items():
        check_count(name, value, 1)
    reducer = error_feedback(two_shot(scaled_sign())) if reducer is None else reducer
    check_reducer(reducer)
    intervals = refreshes, doubling_steps, longest_interval
    tx = _ZeroOneAdam(learning_rate, freeze_step, b1, b2, eps, weight_decay, *intervals, reducer, axis)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _ZeroOneAdam(NamedTuple):
    learning_rate: LearningRate
    freeze_step: int
    b1: float | int
    b2: float | int
    eps: float | int
    weight_decay: float | int
    refreshes: int
    doubling_steps: int
    longest_interval: int
    reducer: Reducer
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        check_leaves(params)
        # A copy, since parameters and optimizer state may both be donated.
        anchor = jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)
        narrow = [i for i, p in enumerate(jax.tree.leaves(params)) if _is_narrow(p)]
        order = tuple(leaf_order(params)[i] for i in narrow)
        return ZeroOneAdamState(
            count=jnp.zeros((), jnp.int32),
            sent=jnp.zeros(2, jnp.uint32),
            variance=zeros_like(params),
            rates=jnp.zeros((), jnp.float32),
            refresh=Interval(jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)),
            sync=Interval(jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)),
            momentum=bind(PerWorker(zeros_like(params)), self.axis),
            anchor=bind(PerWorker(anchor), self.axis),
            moved=bind(PerWorker([jnp.zeros_like(a) for a, _ in _narrow(anchor, params)], order=order), self.axis),
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
        **extra_args: object,
    ) -> tuple[Updates, State]:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        with jax.named_scope("zero_one_adam"):
            gradients, comm, ledger, rate = start_step(
                self.axis, self.learning_rate, updates, examples, active, state.count, name="zero_one_adam"
            )
            # Gradients may be narrower than their parameters, and the branches below must return the same dtypes.
            gradients = jax.tree.map(lambda g, v: g.astype(v.dtype), gradients, state.variance)
            # s, the sum of η since the last sync
            rates = state.rates + rate.astype(state.rates.dtype)
            decision = self._decide(state)

            # The local step, taken unless workers synchronize: m_w = β₁ m_w + (1-β₁) g_w, x_w -= η m_w / d.
            local_momentum = moving_average(state.momentum.value, gradients, self.b1)
            local_update = self._adam_update(local_momentum, state.variance, rate)
            # Without examples a worker takes no step of its own; one that all take together it takes with them.
            weight = weight_of_worker(examples, active, name="zero_one_adam")
            if weight is not None:
                takes_step = decision.shared | (weight > 0)
                local_momentum = tree_where(takes_step, local_momentum, state.momentum.value)
                local_update = zero_unless(takes_step, local_update)

            # Until the variance is frozen gradients are sent, g_w / d, afterwards displacements, x_w - a.
            d = preconditioner(state.variance, self.eps)
            displacement = _displacement(params, state.anchor.value, local_update, state.moved.value)
            payload = tree_where(decision.shared, divide(gradients, d), displacement)
            payload = mask_unseen(payload, state.variance)
            # At `freeze_step` the payload changes from gradients to displacements, a learning rate apart.
            fresh = self.reducer.init(zeros_like(payload))
            reducer_state = _reset_reducer(state.reducer, fresh, state.count == self.freeze_step)
            # 0: neither, 1: sync, 2: refresh, which implies sync. One branch for compressed gradients and compressed
            # displacements: the reducer is compiled once.
            compress = partial(_compress_step, self.reducer, Extras(state.count, rate))
            branches = [_local_step, compress, self._full_step]
            which = decision.sync.astype(jnp.int32) + decision.refresh.astype(jnp.int32)
            operands = state.variance, gradients, payload, reducer_state
            mean, variance, reducer_state = comms.switch(which, branches, comm, *operands)
            # Only a refresh averages the gradients themselves; all other means are in units of d.
            mean = tree_where(decision.refresh, mean, multiply(mask_unseen(mean, variance), d))

            momentum = mask_unseen(self._next_momentum(decision, mean, local_momentum, state, rates), variance)
            anchor = self._next_anchor(decision, momentum, variance, state.anchor.value, rates)

            # After a sync parameters equal the anchor, which updates narrower than the parameters would miss; otherwise
            # the local step is taken.
            def choose_step(a, p, old, moved, step, g):
                # Narrow parameters follow a + (x_w - a), which they cannot add up themselves.
                local = step if p.dtype == a.dtype else old + moved - p.astype(a.dtype)
                return jnp.where(decision.sync, a - p.astype(a.dtype), local).astype(wider_dtype(g.dtype, p.dtype))

            out = jax.tree.map(choose_step, anchor, params, state.anchor.value, displacement, local_update, updates)
            moved = [jnp.where(decision.sync, 0, x) for x, _ in _narrow(displacement, params)]
            return out, ZeroOneAdamState(
                count=next_count(state.count),
                sent=add_bytes(state.sent, comms.total_bytes(ledger)),
                variance=variance,
                rates=jnp.where(decision.sync, 0, rates),
                refresh=_advance(state.refresh, decision.refresh, self.refreshes, LONGEST),
                sync=_advance(state.sync, ~decision.shared, self.doubling_steps, self.longest_interval),
                momentum=with_value(state.momentum, momentum),
                anchor=with_value(state.anchor, anchor),
                moved=with_value(state.moved, moved),
                reducer=reducer_state,
            )

    def _decide(self, state: ZeroOneAdamState) -> _Decision:
        """Applies the paper's two policies: when to refresh the variance, and when to synchronize."""
        step = next_count(state.count)
        # Until `freeze_step` all workers take the same step, and every step communicates.
        shared = state.count < self.freeze_step
        refresh = shared & (step % state.refresh.length == 0)
        sync = shared | (step % state.sync.length == 0)
        return _Decision(shared, refresh, sync)

    def _full_step(
        self, comm: Comm, variance: Updates, gradients: Updates, payload: Updates, reducer_state: State
    ) -> tuple[Updates, Updates, State]:
        """Returns the exact mean of the gradients and the refreshed variance `v = β₂ v + (1-β₂) ḡ²`."""
        del payload
        mean = exact().reduce(gradients, (), comm)[0].mean
        refreshed = moving_average(variance, jax.tree.map(jnp.square, mean), self.b2)
        # Residuals are in units of d: r · d_old / d_new is the same amount of gradient.
        factor = divide(preconditioner(variance, self.eps), preconditioner(refreshed, self.eps))
        return mean, refreshed, _rescale_residuals(reducer_state, factor, comm)

    def _next_momentum(
        self, decision: _Decision, mean: Updates, local_momentum: Updates, state: ZeroOneAdamState, rates: Array
    ) -> Updates:
        shared = moving_average(state.momentum.value, mean, self.b1)
        # m_w = -d u / s; `mean` is d u here. With a sum of rates of zero nothing moved: the local momentum stays.
        divisor = jnp.where(rates > 0, rates, 1)
        synced = jax.tree.map(lambda u, m: jnp.where(rates > 0, -u / divisor.astype(u.dtype), m), mean, local_momentum)
        return tree_where(decision.shared, shared, tree_where(decision.sync, synced, local_momentum))

    def _next_anchor(
        self, decision: _Decision, momentum: Updates, variance: Updates, anchor: Updates, rates: Array
    ) -> Updates:
        """Returns `a - s λ a + u` after a sync."""
        # Shared and synced momenta alike give the replicated step over all rates since the last sync.
        step = self._adam_update(momentum, variance, rates)

        def move(a, u):
            return jnp.where(decision.sync, a - self.weight_decay * rates.astype(a.dtype) * a + u, a)

        return jax.tree.map(move, anchor, step)

    def _adam_update(self, momentum: Updates, variance: Updates, rate: Array) -> Updates:
        """Returns `-η m / d`, zero for entries without any variance."""
        steps = divide(momentum, preconditioner(variance, self.eps))
        return mask_unseen(jax.tree.map(lambda m: -rate.astype(m.dtype) * m, steps), variance)


def _local_step(
    comm: Comm, variance: Updates, gradients: Updates, payload: Updates, reducer_state: State
) -> tuple[Updates, Updates, State]:
    """Sends nothing; returns zeros in place of a mean."""
    del comm, gradients
    # New zeros are replicated, like the means of the other branches.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), payload), variance, reducer_state


def _compress_step(
    reducer: Reducer,
    extras: Extras,
    comm: Comm,
    variance: Updates,
    gradients: Updates,
    payload: Updates,
    reducer_state: State,
) -> tuple[Updates, Updates, State]:
    """Returns the reducer's mean of the payloads."""
    del gradients
    reduced, reducer_state = reducer.reduce(payload, reducer_state, comm, extras)
    return reduced.mean, variance, reducer_state


def _narrow(tree: Updates, params: PyTree) -> list[tuple[Array, Array]]:
    """The leaves of a tree, in float32 or wider, whose parameters are narrower, each with its parameter."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True)
    return [(x, p) for x, p in pairs if _is_narrow(p)]


def _is_narrow(param: Array) -> bool:
    return param.dtype != working_dtype(param.dtype)


def _displacement(params: PyTree, anchor: Updates, update: Updates, moved: list[Array]) -> Updates:
    """Returns `x_w - a` after the local update; of parameters that are too narrow to add it up, from `moved`."""
    stored = iter(moved)

    def add(p, a, u):
        return (p - a if p.dtype == a.dtype else next(stored)) + u

    return jax.tree.map(add, params, anchor, update)


def _advance(interval: Interval, happened: Array, every: int, longest: int) -> Interval:
    """Counts an event, and doubles the interval after `every` of them."""
    done = interval.done + happened.astype(jnp.int32)
    # The count starts again with each doubling.
    doubled = jnp.minimum(2 * interval.length, longest)
    return Interval(jnp.where(done == every, doubled, interval.length), jnp.where(done == every, 0, done))


def _reset_reducer(state: State, fresh: State, when: Array) -> State:
    """Sets residuals to zero, and replicated floating leaves to those of a `fresh` state, where `when` is true."""

    def reset_leaf(marks, leaf, new):
        # Keys and counts go on; only what is in the unit of the gradients starts again.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(when, jnp.zeros_like(leaf) if marks else new, leaf)

    return map_marked(reset_leaf, state, fresh)


def _rescale_residuals(state: State, factor: PyTree, comm: Comm) -> State:
    """Multiplies the residuals of `error_feedback` and `two_shot` by the replicated `factor`, a tree like the updates.

    Residuals of another structure, inside `bucketed`, `per_leaf` or `hierarchical`, stay as they are.
    """

    def rescale_node(node):
        if isinstance(node, ErrorFeedbackState):
            residual = node.residual.value
            if _shapes(residual) == _shapes(factor):
                residual = jax.tree.map(jnp.multiply, residual, factor)
            inner = _rescale_residuals(node.reducer, factor, comm)
            return ErrorFeedbackState(inner, with_value(node.residual, residual))
        # The server residual is sharded over the workers as flat chunks.
        if isinstance(node, TwoShotState):
            flats = vectors(jax.tree.leaves(factor))
            if [residual.shape for residual in node.residuals] == [flat.shape for flat in flats]:
                return node._replace(residuals=[_rescale_chunk(e, f, comm) for e, f in zip(node.residuals, flats)])
        return node

    kinds = (ErrorFeedbackState, TwoShotState)
    return jax.tree.map(rescale_node, state, is_leaf=lambda node: isinstance(node, kinds))


def _shapes(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf.shape for leaf in leaves]


def _rescale_chunk(residual: Sharded, factor: Array, comm: Comm) -> Sharded:
    # Chunks are of equal size, the last one padded with zeros, and so is the factor.
    size = residual.value.size
    padded = jnp.pad(factor, (0, size * comm.size - factor.size)).reshape(comm.size, size)
    return with_value(residual, residual.value * lax.dynamic_index_in_dim(padded, comm.index, keepdims=False))

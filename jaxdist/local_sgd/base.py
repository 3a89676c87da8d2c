"""Workers step by themselves and meet every `H` steps: the transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_range
from .._core.dtypes import working_dtype
from .._core.trees import choose, next_count
from .._core.types import Array, AxisNames, State, Updates
from ..comm.over import over
from ..reducers.base import Law, Reducer
from ..reducers.exact import exact
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import check_per_worker, inner_step
from ..transforms.local_gradients import check_leaves, check_local, refuse_model_axes
from ..transforms.optax_wrappers import check_outer
from .fragments import Fragments, SyncPeriod, as_fragments, check_period, first_round, is_due, merge, part, period_at
from .state import Buffers, LocalStepsState, average, reset
from .synchronize import Group, one_round, set_anchor, take_over, told_to_talk, warm_mean


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    offset: int = 0,
    fragments: Fragments | int | None = None,
    delay: int = 0,
    merge_alpha: float | int = 0.0,
    overlap_correction: bool = False,
    buffers: Buffers = "maintain",
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Each worker takes `H` steps on its own data; then the mean of how far they got is one step of an outer optimizer.

    With the anchor `a`, the model that a round starts from: `p_w = a`, then `H` inner steps `p_w += inner(g_w)`; the
    drift `Δ_w = a - p_w` is averaged, `Δ = reduce(Δ_w)`, and `a += outer(Δ)`, `p_w = a`. What is averaged is the
    difference, in float32, never the parameters: in bfloat16 these would lose it.

    **Parameters differ between workers**: the state is `TrainState(jd.PerWorker(params), tx.init(params))`, and the
    model to evaluate is `jd.local_sgd.global_params(opt_state)`. After a round parameters agree with it up to rounding.

    *On the wire*: in a round what the reducer sends for the leaves of the fragment, for `exact()` one all-reduce,
    `2(W-1)/W · 4` bytes an entry; on all other steps nothing: the collective stands in a condition on agreed counts.
    With `examples`, four bytes more; with `buffers="average"`, the buffers too. Warm-up steps send the gradients, the
    last one the parameters as well.

    *State*: agreed, the anchor and that of `outer`, in float32; per worker that of `inner`, and with
    `overlap_correction` the parameters that were sent; that of the reducer.

    Args:
      inner: the optimizer of each worker. It is also passed `anchor=` and `step=`. It may communicate over other,
        faster axes: `optax.chain(jd.all_reduce(jd.exact(), axis="chip"), optax.adamw(1e-3))`, or
        `jd.zero_redundancy(optax.adamw(1e-3), axis="chip")`.
      outer: gets the drift as its gradient: `optax.sgd(1.0)` averages (Local SGD), `optax.sgd(0.7, momentum=0.9,
        nesterov=True)` is DiLoCo, `slow_momentum()` SlowMo. Do not clip or decay here.
      sync_period: `H`, or a schedule from the step to `H`. More sends less, and workers drift further apart: 8 to 64
        for plain averaging, up to 500 with DiLoCo. Schedules count inner steps.
      offset: the first round ends after so many steps instead of `H`.
      fragments: groups of leaves that meet at steps of their own, `H/P` apart: `balanced(P)` (or just `P`) or
        `strided(P)`. The busiest step sends the largest fragment, not the model.
      delay: with `d > 0` the drift after a step is sent during the next one, whose gradient does not wait for it, and
        what comes back is merged at the end of the `d`-th step.
      merge_alpha: `α`: workers keep a part of their own, `p_w = α p_w + (1-α) a`. 0.5 goes with a delay.
      overlap_correction: workers keep what they have moved since `p̂_w` was sent: `p_w += (1-α) (a - p̂_w)`. For a delay.
      buffers: what a round does to the momentum of `inner`: `"maintain"`, `"reset"` to zero (schedules go on counting),
        or `"average"` over workers.
      warmup_steps: so many first steps average gradients instead, exactly, and workers stay equal.
      reducer: what carries the drift; by default `exact()`.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params` and comes last in a chain. Its `update` takes:
      `learning_rate=`, the agreed rate of this step, of which outer optimizer and reducer get the mean over the round;
      `examples=`, how many examples of this worker are behind the gradient: drifts are weighted by their number in the
      round; `active=`, a boolean of this worker: false for a step that it does not take; `sync_period=`, an agreed `H`
      instead of that of the schedule; and `sync=`, a static boolean, or the numbers of the fragments that talk in this
      step, where the host chooses the program (`due_fragments` says when): it then holds the collective without any
      condition, or none at all, warm-up included.

    Raises:
      ValueError: arguments are out of range or do not go together; in `init`, `outer` wants more than a drift (a loss),
        or `inner` keeps what is cut or differs over the same axis; at trace time, if `params` are missing or not marked
        `PerWorker`, and what `all_reduce` raises.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 2)
      >>> run = jd.simulate(step, workers=2)
      >>> for _ in range(2):
      ...     state, _ = run(state, jnp.array([1.0, 3.0]))
      >>> round(float(state["x"].value[0]), 4), round(float(jd.local_sgd.global_params(state["opt"])), 4)
      (0.38, 0.38)

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767, 2019. Wang, Tantia, Ballas, Rabbat,
      "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", arXiv 1910.00643, 2020. Douillard
      et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, 2023. Douillard et
      al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", arXiv 2501.18512, 2025.
      Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
      arXiv 2006.00441, 2020 (overlap_correction).
    """
    dealt = as_fragments(fragments)
    number = dealt.number
    check_period(sync_period, offset, delay, number)
    check_range("merge_alpha", merge_alpha, 0, 1)
    check_range("warmup_steps", warmup_steps, 0)
    _check_buffers(buffers, number, delay)
    if overlap_correction and not delay:
        raise ValueError(
            "overlap_correction is for what workers do while the drift travels: it needs a delay of at least 1"
        )
    firsts = [first_round(sync_period, offset, i, number) for i in range(number)]
    carrier = exact() if reducer is None else reducer
    inner, outer = optax.with_extra_args_support(inner), optax.with_extra_args_support(outer)

    def init(params) -> State:
        check_leaves(params)
        # A copy, since parameters and optimizer state may both be donated.
        held = jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)
        check_outer(outer, held)
        groups = dealt.assign(held)
        parts = [part(held, groups, i) for i in range(number)]
        return LocalStepsState(
            count=jnp.zeros((), jnp.int32),
            since=jnp.zeros(number, jnp.int32),
            rounds=jnp.zeros(number, jnp.int32),
            rates=jnp.zeros(number, jnp.float32),
            sent=jnp.zeros(2, jnp.uint32),
            anchor=held,
            outer=tuple(outer.init(one) for one in parts),
            inner=bind(PerWorker(inner.init(params)), axis),
            examples=bind(PerWorker(jnp.zeros(number, jnp.float32), resize="mean"), axis),
            reducer=tuple(bind(carrier.init(one), axis) for one in parts),
            sent_from=bind(PerWorker(jax.tree.map(jnp.array, params) if overlap_correction else ()), axis),
        )

    def update(
        updates,
        state,
        params=None,
        *,
        learning_rate=None,
        examples=None,
        active=None,
        sync=None,
        sync_period: Any = sync_period,
        **extra_args,
    ) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        check_leaves(updates)
        check_local(updates, axis)
        check_per_worker(params, axis)
        if carrier.law != Law.MEAN:
            refuse_model_axes("this reducer", "shard the model over an axis that is mapped by hand, or use exact()")
        ledger: list[comms.Sent] = []
        comm = comms.counted(over(axis), ledger)
        groups = dealt.assign(state.anchor)
        told = told_to_talk(sync, number)
        warm = False if told is not None or not warmup_steps else state.count < warmup_steps
        period = jnp.maximum(period_at(sync_period, state.count), delay + 1)  # what was sent must arrive

        def due(state):
            if told is not None:
                return [i in told for i in range(number)]
            late = [is_due(state.since[i], state.rounds[i], period, firsts[i]) for i in range(number)]
            return [flag & ~jnp.asarray(warm) for flag in late]

        def meet(state, local):
            """The state after the rounds that are due, and which these are."""
            happened = due(state)
            met = [
                one_round(
                    comm,
                    happened[i],
                    carrier,
                    outer,
                    Group(part(state.anchor, groups, i), state.outer[i], state.reducer[i]),
                    part(local, groups, i),
                    examples=None if examples is None else state.examples.value[i],
                    learning_rate=None if learning_rate is None else state.rates[i] / jnp.maximum(state.since[i], 1),
                )
                for i in range(number)
            ]
            flags = jnp.stack([jnp.asarray(flag) for flag in happened])
            sent_from = state.sent_from
            if overlap_correction:
                now, before = ([part(tree, groups, i) for i in range(number)] for tree in (local, sent_from.value))
                sent_from = with_value(sent_from, merge(list(map(choose, happened, now, before)), groups))
            return state._replace(
                since=jnp.where(flags, 0, state.since),
                rounds=jnp.where(flags, next_count(state.rounds), state.rounds),
                rates=jnp.where(flags, 0, state.rates),
                anchor=merge([group.anchor for group in met], groups),
                outer=tuple(group.outer for group in met),
                reducer=tuple(group.reducer for group in met),
                examples=with_value(state.examples, jnp.where(flags, 0, state.examples.value)),
                sent_from=sent_from,
            ), happened

        with jax.named_scope("local_steps"):
            anchor = comm.varying(state.anchor)  # with a delay, inner steps do not wait for the new one
            if delay:
                state, _ = meet(state, params)
            passed = _given(learning_rate=learning_rate, examples=examples)
            passed = {"step": state.count, **extra_args, **passed, "anchor": anchor}
            gradients = warm_mean(comm, warm, updates, examples)
            steps, inner_state, local = inner_step(inner, gradients, state.inner.value, params, active=active, **passed)

            counts = (~jnp.asarray(warm)).astype(jnp.int32)
            state = state._replace(
                count=next_count(state.count),
                since=state.since + counts,
                rates=state.rates + counts * _number(learning_rate),
                examples=with_value(state.examples, state.examples.value + counts * _number(examples)),
            )
            if delay:
                arrived = [(state.rounds[i] > 0) & (state.since[i] == delay) for i in range(number)]
            else:
                state, arrived = meet(state, local)
            if buffers == "average":
                inner_state = average(comm, arrived[0], inner, inner_state, params)
            if buffers == "reset":
                inner_state = choose(arrived[0], reset(inner, inner_state, params), inner_state)
            if warm is not False:
                state = state._replace(anchor=set_anchor(comm, state.count == warmup_steps, state.anchor, local))
            trees = [state.anchor, local, params, steps, *([state.sent_from.value] if overlap_correction else [])]
            steps = [
                take_over(arrived[i], merge_alpha, *(part(tree, groups, i) for tree in trees)) for i in range(number)
            ]
        return merge(steps, groups), state._replace(
            inner=with_value(state.inner, comm.varying(inner_state)),
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _given(**extras: Any) -> dict[str, Any]:
    return {name: value for name, value in extras.items() if value is not None}


def _number(extra: Any) -> Array:
    return jnp.asarray(0 if extra is None else extra, jnp.float32)


def _check_buffers(buffers: str, fragments: int, delay: int) -> None:
    if buffers not in ("maintain", "reset", "average"):
        raise ValueError(f'buffers must be "maintain", "reset" or "average", got {buffers!r}')
    if buffers != "maintain" and fragments > 1:
        raise ValueError(f'buffers={buffers!r} needs a single fragment: with several, use buffers="maintain"')
    if buffers == "average" and delay:
        raise ValueError(
            'buffers="average" cannot go with a delay, since an old average would undo newer steps: use "maintain" or '
            '"reset"'
        )

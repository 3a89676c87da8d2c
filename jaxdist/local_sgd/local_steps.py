"""Local steps: each worker optimizes by itself, and workers synchronize every `H` steps."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import check_count, check_range
from .._core.trees import fold_keys, next_count, tree_where
from .._core.types import Array, AxisNames, Flag, PyTree, State, Updates
from ..comm.base import add_bytes
from ..comm.over import over
from ..reducers.exact import exact
from ..reducers.reducer import Law, Reducer, check_reducer
from ..state.marks import PerWorker, axis_tuple, bind, expand_specs, is_mark, with_value
from ..state.parameter_specs import axes_of_specs, check_specs
from ..transforms.common import LearningRate, inner_step, rate_at
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_outer, check_shards, refuse_model_axes
from ..transforms.on_shards import on_shards
from ..transforms.weights import check_shared, number_per_leaf, weight_of_leaves
from .buffers import Buffers
from .fragments import (
    Fragments,
    SyncPeriod,
    as_fragments,
    check_period,
    first_round,
    is_due,
    labels_of,
    merge,
    period_at,
    split,
)
from .merging import Merge, check_linear, check_merge
from .nested import (
    check_nested,
    find_weigh_drift,
    has_models,
    inner_anchor,
    mark_inner,
    restart_models,
    unmark_inner,
    update_inner_buffers,
)
from .rounds import Fragment, WeighDrift, merge_anchor, parse_sync_override, synchronize_fragment
from .shards import check_entrywise, has_shards, init_reducer
from .state import LocalStepsState, check_step, copy_wide, merge_state, split_state
from .warm_up import set_anchor, warm_mean


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
    eager: bool = False,
    merge: Merge = "mean",
    buffers: Buffers = "maintain",
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Takes `H` steps on each worker's own data, then one step of an outer optimizer along the mean change.

    From the anchor `p_w = a`, `H` times `p_w += inner(g_w)`, then `a += outer(Δ)` with `Δ = reduce(a - p_w)`.
    Mark parameters `PerWorker`, and evaluate `jd.local_sgd.global_params(opt_state)`. What `update` takes:
    docs/explanation/local-updates.md.

    *On the wire*: in a round the fragment by the reducer, for `exact()` `2(W-1)/W · 4` bytes an entry, with "rda" also
    a leaf, with `examples` four more. Warm-up steps send gradients, the last one parameters too.

    *State*: replicated, the anchor and `outer`'s, in float32; per worker `inner`'s, `p̂_w` if kept; the reducer's.

    Args:
      inner: each worker's optimizer, which may communicate over faster axes, or be `gossip` or `local_steps`.
      outer: receives `Δ` as its gradient: `optax.sgd(1.0)` averages. Neither clip nor decay.
      sync_period: `H`, or a schedule of it: 8 to 64 for averaging, up to 500 with DiLoCo.
      offset: the first round's length, if not `H`.
      fragments: groups of leaves, `H/P` steps apart: `P`, `strided(P)`.
      delay: a drift is sent during the next step, merged `d` steps later.
      merge_alpha: `α` of `p_w = α p_w + (1-α) a`, with a delay 0.5.
      overlap_correction: keeps progress since `p̂_w` was sent: `p_w += (1-α) (a - p̂_w)` (with `delay`).
      eager: the same, but `p_w` becomes `p̂_w = a + outer((a - p_w)/W)` when it is sent (`delay` ≥ 2).
      merge: "mean", or "rda": the mean length along the mean direction, leaf by leaf; of `exact()`, in islands of any.
      buffers: `inner`'s momentum in a round: `"maintain"`, `"reset"` to zero, or `"average"`.
      warmup_steps: first steps, of averaged gradients.
      reducer: of the drift; by default `exact()`.
      specs: as in `all_reduce`.

    Returns:
      The end of a chain; its `update` needs `params`.

    Raises:
      ValueError: options or sharding do not fit; at trace time, `params` are not `PerWorker`.

    Examples:
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
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105, 2023.
      Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
      arXiv:2501.18512, 2025. Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training
      Using Delayed Averaging", arXiv:2006.00441, 2020 (overlap_correction). Kale, Douillard, Donchev, "Eager Updates
      For Overlapped Communication and Computation in DiLoCo", arXiv:2502.12996, 2025 (eager). Douillard et al.,
      "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428, 2026 (rda).
    """
    partition = as_fragments(fragments)
    check_period(sync_period, offset, delay, partition.number)
    check_range("merge_alpha", merge_alpha, 0, 1)
    check_count("warmup_steps", warmup_steps, 0)
    _check_buffers(buffers, partition.number, delay)
    check_merge(merge)
    if overlap_correction and not delay:
        raise ValueError("overlap_correction keeps the progress made while the drift is sent; it needs delay >= 1")
    if eager and delay < 2:
        raise ValueError(
            f"eager workers train on with their own share until those of the others arrive, got delay={delay}, with "
            "which they arrive in the same step: use delay >= 2"
        )
    if eager and overlap_correction:
        raise ValueError("eager keeps the progress made while the drift is sent: leave overlap_correction out")
    inner, outer = with_extra_args(inner), with_extra_args(outer)
    reducer = exact() if reducer is None else reducer
    check_reducer(reducer)
    _check_specs(specs, axis)
    first_rounds = [first_round(sync_period, offset, i, partition.number) for i in range(partition.number)]
    merging = merge_alpha, overlap_correction, eager, merge, buffers, warmup_steps
    return LocalStepsMethod(
        inner, outer, reducer, partition, first_rounds, sync_period, delay, *merging, axis, specs
    ).as_transformation()


def _check_specs(specs: PyTree | None, axis: AxisNames) -> None:
    """Checks that specs, if any, are over other axes than that of the workers, whose models differ."""
    check_specs(specs, caller="local_steps(specs=)")
    if specs is not None and axis is None:
        raise ValueError(
            "specs= are of workers on a mesh, and with axis=None there is one alone: leave them out, and shard the "
            "state by init_state(specs=)"
        )
    named = axes_of_specs(specs) & set(axis_tuple(axis))
    if named:
        raise ValueError(
            f"local_steps(specs=) name the axis of the workers, {min(named)!r}, whose models differ between rounds: "
            "name the axes that shard each worker's parameters"
        )


class LocalSteps(optax.GradientTransformationExtraArgs):
    """What `local_steps` and its recipes return. Other ways to synchronize read the arguments in `method`."""

    method: "LocalStepsMethod"


class _Step(NamedTuple):
    """One call of `update`: its workers, and what decides which of them count and which rounds are due.

    `override` is the fragments that the host selects; without it those whose last round is `period` steps ago are due,
    none of them while the warm-up lasts (`warm`). `weight` is this worker's, or one a leaf, and `examples` is the same
    where it is counted.
    """

    comm: comms.Comm
    override: Collection[int] | None
    period: Array
    warm: Flag
    weight: Array | None
    examples: Array | None
    learning_rate: Any


class LocalStepsMethod(NamedTuple):
    """The checked arguments of `local_steps`; `first_rounds` are the lengths of the fragments' first rounds."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    reducer: Reducer
    fragments: Fragments
    first_rounds: list[int]
    sync_period: SyncPeriod
    delay: int
    merge_alpha: float | int
    overlap_correction: bool
    eager: bool
    merge: Merge
    buffers: Buffers
    warmup_steps: int
    axis: AxisNames
    specs: PyTree | None

    def as_transformation(self) -> LocalSteps:
        """The transformation of these arguments."""
        return _with_method(LocalSteps(self.init, self.update), self)

    @property
    def keeps_sent(self) -> bool:
        """Whether the state has the models that the progress since is measured from."""
        return self.overlap_correction or self.eager

    def init(self, params: PyTree) -> State:
        """See `local_steps`."""
        check_leaves(params, sharded=True)
        check_shards(params, self.axis)
        anchor = copy_wide(params)
        check_outer(self.outer, anchor)
        check_entrywise(self.outer, anchor)
        number = self.fragments.number
        labels = labels_of(self.fragments, anchor)
        parts = split(anchor, labels, number)
        inner = self.inner.init(params)
        self._check_merge(params, inner)
        if has_models(inner):
            several = number if number > 1 else None
            check_nested(
                inner,
                params,
                self.axis,
                fragments=several,
                delay=self.delay,
                merge_alpha=self.merge_alpha,
                warmup_steps=self.warmup_steps,
            )
        by_fragment = self._reducers(anchor, labels)
        reducers = [self.init_reducer(i, *each) for i, each in enumerate(zip(parts, by_fragment, strict=True))]
        return LocalStepsState(
            count=jnp.zeros((), jnp.int32),
            since=jnp.zeros(number, jnp.int32),
            rounds=jnp.zeros(number, jnp.int32),
            rates=jnp.zeros(number, jnp.float32),
            sent=jnp.zeros(2, jnp.uint32),
            anchor=anchor,
            outer=tuple(self.outer.init(part) for part in parts),
            inner=mark_inner(inner, self.axis),
            examples=bind(number_per_leaf(params), self.axis),
            reducer=tuple(bind(x, self.axis) for x in reducers),
            sent_from=bind(PerWorker(jax.tree.map(jnp.array, params) if self.keeps_sent else ()), self.axis),
        )

    def _reducers(self, anchor: Updates, labels: PyTree) -> list[Reducer]:
        """The reducer of each fragment: with `specs`, that of its shards."""
        if self.specs is None:
            return [self.reducer] * self.fragments.number
        parts = split(expand_specs(self.specs, anchor), labels, self.fragments.number)
        return [on_shards(self.reducer, part, self.axis) for part in parts]

    def init_reducer(self, fragment: int, part: Updates, reducer: Reducer) -> State:
        """The first state of the reducer of a fragment, whose part of the anchor this is."""
        state = init_reducer(reducer, part)
        # Fragments draw different numbers.
        return fold_keys(state, fragment) if fragment else state

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        learning_rate: Any = None,
        examples: Any = None,
        active: Any = None,
        sync: Any = None,
        sync_period: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        """Takes one inner step and the rounds that are due.

        A round synchronizes the models after the inner step; with a delay, those that the previous step has left.
        """
        check_step(updates, params, self.axis)
        ledger: list[comms.Sent] = []
        weight = self._weight(updates, params, examples, active)
        comm = comms.count_sent(over(self.axis), ledger)
        step = self._read(comm, state, weight, learning_rate, examples, sync, sync_period)
        given = {"learning_rate": learning_rate, "examples": examples}
        extras = {"step": state.count, **extra_args, **{k: v for k, v in given.items() if v is not None}}
        with jax.named_scope("local_steps"):
            # The inner step uses the previous anchor: with a delay, the previous step's round runs at the same time.
            anchor, sent = comm.varying(state.anchor), []
            if self.delay:
                state, _, sent = self._synchronize(step, state, params)
            steps, inner = self._inner_step(step, updates, state, params, extras | {"anchor": anchor})
            if self.eager:
                steps = self._take_share(sent, state, params, steps)
            state = _advance_counts(step, state)
            nested = has_models(inner)
            if self.delay:
                arrived = self._arrived(state)
                steps = self._merge_arrived(arrived, state, params, steps)
            else:
                # The model of a group of workers is sent for all of it.
                group = inner_anchor(inner) if nested else None
                weigh = find_weigh_drift(inner) if nested else None
                state, steps, arrived = self._synchronize(step, state, params, steps, group, weigh)
            if self.buffers != "maintain":
                # "reset" starts from the models after the round: some optimizers keep a copy of the parameters.
                after: Any = optax.apply_updates(params, steps)  # pyright: ignore[reportArgumentType]
                inner = update_inner_buffers(self.buffers, comm, arrived[0], self.inner, inner, after)
            # The warm-up moves the models only; at its end the anchor follows, and the first round starts from it.
            if step.warm is not False:
                warmed_up = state.count == self.warmup_steps
                state = state._replace(anchor=set_anchor(comm, warmed_up, state.anchor, params, steps))
            if nested:
                # All workers have one model now: push-sum weights return to 1, and anchors inside follow.
                fresh = self.inner.init(state.anchor)
                inner = restart_models(arrived[0], comm, inner, fresh, buffers=self.buffers)
        return steps, state._replace(
            inner=_vary_marked(comm, mark_inner(inner, self.axis)),
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        )

    def _check_merge(self, params: PyTree, inner: State) -> None:
        """Checks that lengths of drifts can be taken: of whole arrays, and of workers that count alike."""
        if self.merge == "mean":
            return
        # An island has no axis, and decodes one drift after the other.
        if self.axis is not None:
            check_linear(self.merge, self.reducer)
        if has_shards(params):
            raise ValueError(
                'merge="rda" takes lengths of whole drifts, and of Sharded parameters each worker has a shard: use '
                'merge="mean", or do not shard the parameters (stages 1 and 2)'
            )
        if has_models(inner) and find_weigh_drift(inner) is not None:
            raise ValueError(
                'merge="rda" averages directions of drifts, and the gossip inside sends parts of models whose sum '
                'alone has a meaning: use merge="mean", or d_psgd(), whose models count alike'
            )

    def _weight(self, updates: Updates, params: PyTree, examples: Any, active: Any) -> Array | None:
        weight = weight_of_leaves(examples, active, updates)
        if weight is not None:
            check_shared("active" if examples is None else "examples", weight, params)
        return weight

    def _read(
        self,
        comm: comms.Comm,
        state: LocalStepsState,
        weight: Array | None,
        learning_rate: Any,
        examples: Any,
        sync: Any,
        sync_period: Any,
    ) -> _Step:
        override = parse_sync_override(sync, self.fragments.number)
        # Steps that end no round, as those of an island, reduce nothing.
        if self.specs is None and self.reducer.law != Law.MEAN and (override is None or len(override)):
            advice = "pass local_steps(..., specs=) with the PartitionSpec of each parameter, or use exact()"
            refuse_model_axes("this reducer", advice)
        warm = False if override is not None or not self.warmup_steps else state.count < self.warmup_steps
        # A round starts only after the previous one has arrived.
        chosen = self.sync_period if sync_period is None else sync_period
        period = jnp.maximum(period_at(chosen, state.count), self.delay + 1)
        return _Step(comm, override, period, warm, weight, None if examples is None else weight, learning_rate)

    def _inner_step(
        self, step: _Step, updates: Updates, state: LocalStepsState, params: PyTree, extras: dict[str, Any]
    ) -> tuple[Updates, State]:
        # During the warm-up all workers take the same step, with the mean gradient; afterwards each its own, unless it
        # has no examples.
        gradients, taken, value = warm_mean(step.comm, step.warm, updates, step.weight, extras.get("value"))
        extras = _extras_of_all(step.warm, extras, value)
        inner = unmark_inner(state.inner, self.axis)
        if has_models(inner):
            if "examples" in extras and inner_anchor(inner) is not None:
                raise ValueError(
                    "local_steps around local_steps does not support example weighting (examples=): groups have equal "
                    "weights; leave it out, and pass active=examples > 0 for workers without any"
                )
            # Where the inner optimizer mixes models, an inactive worker still takes part in that.
            if taken is not None:
                extras, taken = {**extras, "active": taken}, None
        # The gradients of a shard are means already, and the workers that have the others have as many examples.
        if has_shards(params):
            extras.pop("examples", None)
        return inner_step(self.inner, gradients, inner, params, axis=self.axis, taken=taken, **extras)

    def _due_fragments(self, step: _Step, fragments: list[Fragment]) -> list[Flag]:
        """A flag for each fragment: the host's override, or from the replicated counts, never in the warm-up."""
        if step.override is not None:
            return [i in step.override for i in range(len(fragments))]
        pairs = zip(fragments, self.first_rounds, strict=True)
        return [is_due(part.since, part.rounds, step.period, first) & ~jnp.asarray(step.warm) for part, first in pairs]

    def _synchronize(
        self,
        step: _Step,
        state: LocalStepsState,
        params: PyTree,
        steps: Updates | None = None,
        group: Updates | None = None,
        weigh_drift: WeighDrift | None = None,
    ) -> tuple[LocalStepsState, Updates | None, list[Flag]]:
        """Synchronizes the fragments that are due; returns the state, the updates, and a flag for each fragment."""
        labels, number = labels_of(self.fragments, state.anchor), self.fragments.number
        fragments, reducers = split_state(state, labels), self._reducers(state.anchor, labels)
        due = self._due_fragments(step, fragments)
        trees = [[None] * number if tree is None else split(tree, labels, number) for tree in (params, steps, group)]
        after = [
            synchronize_fragment(
                step.comm,
                flag,
                reducer,
                self.outer,
                fragment,
                *part,
                merge_alpha=self.merge_alpha,
                has_rate=step.learning_rate is not None,
                has_examples=step.examples is not None,
                by_leaf=step.weight is not None and bool(step.weight.ndim),
                merge=self.merge,
                eager=self.eager,
                weigh_drift=weigh_drift,
            )
            for flag, reducer, fragment, *part in zip(due, reducers, fragments, *trees, strict=True)
        ]
        state = merge_state(state, [fragment for fragment, _ in after], labels)
        return state, None if steps is None else merge([part for _, part in after], labels), due

    def _arrived(self, state: LocalStepsState) -> list[Flag]:
        """Whether the result of each fragment's round is merged now: `delay` steps of the fragment after its start."""
        return [(state.rounds[i] > 0) & (state.since[i] == self.delay) for i in range(self.fragments.number)]

    def _take_share(self, sent: list[Flag], state: LocalStepsState, params: PyTree, steps: Updates) -> Updates:
        """Moves the fragments that are sent by the outer step along this worker's own share."""
        labels, number = labels_of(self.fragments, state.anchor), self.fragments.number
        parts = zip(
            sent, *(split(tree, labels, number) for tree in (state.sent_from.value, params, steps)), strict=True
        )
        moved = [
            tree_where(flag, jax.tree.map(lambda e, p, u: (u + (e - p)).astype(u.dtype), eager, params, steps), steps)
            for flag, eager, params, steps in parts
        ]
        return merge(moved, labels)

    def _merge_arrived(self, arrived: list[Flag], state: LocalStepsState, params: PyTree, steps: Updates) -> Updates:
        """Merges the anchor of each fragment that has arrived into this worker's parameters."""
        labels = labels_of(self.fragments, state.anchor)
        trees = [state.anchor, params, steps, *([state.sent_from.value] if self.keeps_sent else [])]
        parts = zip(arrived, *(split(tree, labels, self.fragments.number) for tree in trees), strict=True)
        merged = [
            tree_where(flag, merge_anchor(self.merge_alpha, anchor, params, steps, *sent), steps)
            for flag, anchor, params, steps, *sent in parts
        ]
        return merge(merged, labels)


def _extras_of_all(warm: Flag, extras: dict[str, Any], value: Any) -> dict[str, Any]:
    """The extra arguments with the loss of all workers in a warm-up, whose steps must be those of all.

    Raises:
      ValueError: there is a warm-up, and one of them is a function, which is of one worker's batch.
    """
    if warm is not False and (names := [name for name, x in extras.items() if callable(x)]):
        raise ValueError(
            f"{names[0]}= is a function of this worker's batch, by which the inner optimizer takes another step on "
            "each worker, but the warm-up keeps models equal: use warmup_steps=0; for an exact start, let a schedule "
            "sync_period= begin at 1"
        )
    return extras if value is None else {**extras, "value": value}


def _with_method(tx: LocalSteps, method: LocalStepsMethod) -> LocalSteps:
    tx.method = method
    return tx


def with_rate(tx: optax.GradientTransformationExtraArgs, learning_rate: LearningRate) -> LocalSteps:
    """Passes `learning_rate=` to the update of `local_steps`, from a number or a schedule that counts its steps."""

    def update_fn(updates, state, params=None, **extra_args):
        extras = {"learning_rate": rate_at(learning_rate, state.count), **extra_args}
        return tx.update(updates, state, params, **extras)

    return _with_method(LocalSteps(tx.init, update_fn), method_of(tx))


def method_of(tx: optax.GradientTransformation) -> LocalStepsMethod:
    """The arguments of the `local_steps` that made this transformation, for other ways to synchronize.

    Raises:
      ValueError: it was not made by `local_steps` or a recipe of it.
    """
    if not isinstance(tx, LocalSteps):
        raise ValueError(
            "this transformation was not made by local_steps(...); pass what local_steps returned, unwrapped"
        )
    return tx.method


def _advance_counts(step: _Step, state: LocalStepsState) -> LocalStepsState:
    """Counts one step; warm-up steps belong to no round."""
    local_step = (~jnp.asarray(step.warm)).astype(jnp.int32)
    seen = state.examples.value
    if step.examples is not None:
        # In an island the first step that counts examples replaces a mark.
        seen = jnp.maximum(seen, 0) + local_step * step.examples
    rate = 0 if step.learning_rate is None else step.learning_rate
    return state._replace(
        count=next_count(state.count),
        since=state.since + local_step,
        rates=state.rates + local_step * jnp.asarray(rate, jnp.float32),
        examples=with_value(state.examples, seen),
    )


def _vary_marked(comm: comms.Comm, state: State) -> State:
    """Types the values of all marks as different between workers."""
    return jax.tree.map(
        lambda node: with_value(node, comm.varying(node.value)) if is_mark(node) else node, state, is_leaf=is_mark
    )


def _check_buffers(buffers: str, fragments: int, delay: int) -> None:
    if buffers not in ("maintain", "reset", "average"):
        raise ValueError(f'buffers must be "maintain", "reset" or "average", got {buffers!r}')
    if buffers != "maintain" and fragments > 1:
        raise ValueError(f'buffers={buffers!r} needs a single fragment; with several, use buffers="maintain"')
    if buffers == "average" and delay:
        raise ValueError(
            'buffers="average" cannot go with a delay, since an old average would undo newer steps; use "maintain" or '
            '"reset"'
        )

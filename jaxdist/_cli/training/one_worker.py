"""A run as one worker sees it: its state, its optimizer, wherever that is kept, and its step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from ... import offload as offloading
from ..._core.types import AxisNames, Metrics, PyTree, State, Updates
from ...analysis.base import Collectives
from ...analysis.collectives import logical_collectives
from ...runtime.distribute import distribute
from ...state.marks import PerWorker
from ...transforms.all_reduce import all_reduce
from ...transforms.local_value_and_grad import local_value_and_grad
from ...zero.gathered import gathered, gathered_scan, shard
from ...zero.zero_redundancy import zero_redundancy
from ..models.base import PLAIN, LayerRunner, TrainingMethod, Workload


class Offload(NamedTuple):
    """The place of the optimizer state: a folder on disk, or host memory if there is none."""

    folder: Path | None = None


class MeanGradients(NamedTuple):
    """Replaces the optimizer state inside the step: the mean gradients, and the state of the reducer."""

    means: Updates
    state: State


class SplitOptimizer(NamedTuple):
    """An optimizer as the part inside the compiled step and, with a disk, the part between two steps."""

    transformation: optax.GradientTransformationExtraArgs
    streamed: offloading.Streamed | None


def parse_offload(text: str | None) -> Offload | None:
    """Parses the value of `--offload`.

    Examples:
      >>> parse_offload("host"), parse_offload("nvme:/scratch/run").folder.name
      (Offload(folder=None), 'run')
    """
    if text is None or text == "host":
        return None if text is None else Offload()
    kind, _, folder = text.partition(":")
    if kind != "nvme" or not folder:
        raise ValueError(f"--offload must be host or nvme:FOLDER, got {text!r}")
    return Offload(Path(folder))


def check_zero(spelling: str, method: TrainingMethod) -> None:
    """Raises ValueError if the reducer of a ZeRO stage cannot reduce gradients to shards."""
    if method.stage and method.reducer is not None and method.reducer.forms.shards is None:
        raise ValueError(
            f"--zero {method.stage} needs a reducer with a reduce-scatter form, got {spelling!r}: use exact, "
            "two_shot:qsgd:4, two_shot:int8, or with --zero 1 or 2 also ef:two_shot:qsgd:4"
        )


def check_combination(method: TrainingMethod, offload: Offload | None) -> None:
    """Raises ValueError where a method cannot be trained so; nothing is compiled or written."""
    if offload is None or offload.folder is None:
        _make_transformation(method, axis="data")
    elif method.reducer is None or method.stage in (1, 2):
        raise ValueError(
            "--offload nvme needs a reducer, or --zero 3: it cannot shard the state of replicated parameters"
        )


def split_optimizer(method: TrainingMethod, offload: Offload | None, *, axis: AxisNames) -> SplitOptimizer:
    """Makes the optimizer of a run, including the reducer before it; without `offload` its state is on the device."""
    if offload is not None and offload.folder is not None:
        check_combination(method, offload)
        # The gradients of sharded parameters are means already.
        reducer = method.reducer if method.stage == 0 else None
        means = optax.identity() if reducer is None else all_reduce(reducer, axis=axis)
        # float32 on the disk, where small updates of half-precision parameters are not lost.
        streamed = offloading.nvme(method.optimizer, offloading.Store(offload.folder), master_dtype=jnp.float32)
        return SplitOptimizer(_keep_means(means), streamed)
    transformation = _make_transformation(method, axis=axis)
    # Around everything, so that residuals of the reducer are in host memory too.
    return SplitOptimizer(transformation if offload is None else offloading.host(transformation), None)


def _make_transformation(method: TrainingMethod, *, axis: AxisNames) -> optax.GradientTransformationExtraArgs:
    """The optimizer with the reducer before it, or inside ZeRO."""
    transformation = optax.with_extra_args_support(method.optimizer)
    if method.stage:
        # With ZeRO-3 the gradients of sharded parameters arrive reduced: `gathered` has done it.
        reducers: dict[str, Any] = {} if method.stage == 3 else {"reducer": method.reducer}
        return zero_redundancy(transformation, stage=2 if method.stage == 2 else 1, axis=axis, **reducers)
    if method.reducer is not None:
        return optax.chain(all_reduce(method.reducer, axis=axis), transformation)
    return transformation


def _keep_means(means: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the mean gradients in the state, to be applied after the step."""

    def init_fn(params: PyTree) -> State:
        return MeanGradients(jax.tree.map(jnp.zeros_like, params), means.init(params))

    def update_fn(
        updates: Updates, state: State, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Updates, State]:
        del extra_args
        updates, inner = means.update(updates, state.state, params)
        # The step itself leaves the parameters alone: the optimizer on disk changes them after it.
        return jax.tree.map(jnp.zeros_like, updates), MeanGradients(updates, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class TrainState(NamedTuple):
    """All that is needed to resume a run."""

    params: PyTree  # the model; `PerWorker` if workers take local steps
    opt_state: PyTree  # the optimizer state, with residuals and keys of the reducer


class OneWorker(NamedTuple):
    """The functions of one worker, for `distribute`, `simulate` and `analysis.pods`."""

    make_state: Callable[[int], TrainState]  # `make_state(seed)`, for `init_state`
    step: Callable[..., tuple[TrainState, Metrics]]  # `step(state, batch, **extra_args) -> (state, {"loss": ...})`
    metrics: Callable[..., Metrics]  # `metrics(params, batch)`
    streamed: offloading.Streamed | None  # the optimizer on disk between steps; None if there is none


def one_worker(
    workload: Workload, method: TrainingMethod, offload: Offload | None = None, *, axis: AxisNames = "data"
) -> OneWorker:
    """Combines a workload and a method."""
    transformation, streamed = split_optimizer(method, offload, axis=axis)
    layers, sharded = PLAIN, method.stage == 3
    if sharded:
        # The reducer averages gradients in the backward pass of the gathers.
        layers = LayerRunner(*(partial(f, axis=axis, reducer=method.reducer) for f in (gathered, gathered_scan)))

    def make_state(seed: int) -> TrainState:
        params = workload.init(jax.random.key(seed))
        # Even the smallest leaf is cut, so that a device holds its share of all bytes.
        params = shard(params, smallest=0) if sharded else params
        # Local steps make parameters differ; another number of workers resumes from their mean.
        marked = PerWorker(params, resize="mean") if method.sync_period else params
        return TrainState(marked, transformation.init(params))

    def step(state: TrainState, batch: Any, **extra_args: Any) -> tuple[TrainState, Metrics]:
        loss_fn = partial(workload.loss, layers=layers)
        loss, gradients = local_value_and_grad(loss_fn, axis=axis)(state.params, batch)
        # Gradients are those of this worker: the transformation decides what to communicate.
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params, **extra_args)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), {"loss": jax.lax.pmean(loss, axis)}

    return OneWorker(make_state, step, partial(workload.metrics, layers=layers), streamed)


def trace_round(
    worker: OneWorker, mesh: Mesh | AbstractMesh, state: PyTree, batch: Any, *, axis: AxisNames = "data"
) -> tuple[Collectives, Collectives]:
    """The collectives of a step that synchronizes all that a round does, and of a step between two rounds.

    Both are traced with the static `sync=`, and so after the warm-up. Its mean gradients, its last model and the round
    are three conditions of the compiled step, which no single step meets together.
    """

    def trace(sync: bool, branch: Literal["max", "min"]) -> Collectives:
        step = distribute(partial(worker.step, sync=sync), mesh, axis=axis)
        return logical_collectives(step, state, batch, branch=branch, platform=jax.default_backend())

    return trace(True, "max"), trace(False, "min")

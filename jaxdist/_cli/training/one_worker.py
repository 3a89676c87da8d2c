"""A run as one worker sees it: the state and the step, independent of meshes and devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from ... import offload as offloading
from ..._core.types import AxisNames, Metrics, PyTree
from ...state.marks import PerWorker
from ...transforms.local_value_and_grad import local_value_and_grad
from ...zero.gathered import gathered, gathered_scan, shard
from ..models.base import PLAIN, LayerRunner, TrainingMethod, Workload
from .offloaded import Offload, split_optimizer


class TrainState(NamedTuple):
    """All that is needed to resume a run.

    Attributes:
      params: the model; `PerWorker` if workers take local steps.
      opt_state: the optimizer state, with residuals and keys of the reducer.
    """

    params: PyTree
    opt_state: PyTree


class OneWorker(NamedTuple):
    """The functions of one worker, for `distribute`, `simulate` and `analysis.pods`.

    Attributes:
      make_state: `make_state(seed)`, for `init_state`.
      step: `step(state, batch, **extra_args) -> (state, {"loss": ...})`.
      metrics: `metrics(params, batch)`.
      streamed: the optimizer on disk between steps; None if there is none.
    """

    make_state: Callable[[int], TrainState]
    step: Callable[..., tuple[TrainState, Metrics]]
    metrics: Callable[..., Metrics]
    streamed: offloading.Streamed | None


def one_worker(
    workload: Workload, method: TrainingMethod, offload: Offload | None = None, *, axis: AxisNames = "data"
) -> OneWorker:
    """Combines a workload and a method.

    Args:
      workload: the model and the data.
      method: how workers learn from each other.
      offload: the place of the optimizer state; None: on the device.
      axis: the mesh axis of the workers.

    Example:
      >>> import jaxdist as jd, optax
      >>> from jaxdist._cli.models import base, digits
      >>> from jaxdist._cli.training.one_worker import one_worker
      >>> worker = one_worker(digits.digits_workload(4), base.TrainingMethod(jd.exact(), optax.adam(1e-3)))
      >>> step = jd.simulate(worker.step, workers=2)
    """
    transformation, streamed = split_optimizer(method, offload, axis=axis)
    layers, sharded = PLAIN, method.stage == 3
    if sharded:
        layers = LayerRunner(*(partial(f, axis=axis, reducer=method.reducer) for f in (gathered, gathered_scan)))

    def make_state(seed: int) -> TrainState:
        params = workload.init(jax.random.key(seed))
        params = shard(params, smallest=0) if sharded else params
        marked = PerWorker(params, resize="mean") if method.sync_period else params
        return TrainState(marked, transformation.init(params))

    def step(state: TrainState, batch: Any, **extra_args: Any) -> tuple[TrainState, Metrics]:
        loss_fn = partial(workload.loss, layers=layers)
        loss, gradients = local_value_and_grad(loss_fn, axis=axis)(state.params, batch)
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params, **extra_args)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), {"loss": jax.lax.pmean(loss, axis)}

    return OneWorker(make_state, step, partial(workload.metrics, layers=layers), streamed)

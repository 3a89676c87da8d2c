"""One worker's part of a run: the state and the step, before any mesh or device."""

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
from ..models.base import PLAIN, Layers, Method, Workload
from .offloaded import Offload, arrange


class TrainState(NamedTuple):
    """All that a run needs to go on.

    Attributes:
      params: the model; `PerWorker` where each worker steps by itself.
      opt_state: the optimizer's state, residuals and keys of the reducer included.
    """

    params: PyTree
    opt_state: PyTree


class OneWorker(NamedTuple):
    """A run as one worker sees it: what `distribute`, `simulate` and `analysis.pods` take.

    Attributes:
      make_state: `make_state(seed)`, the state as one worker means it, for `init_state`.
      step: `step(state, batch, **asked) -> (state, {"loss": ...})`.
      metrics: `metrics(params, batch)`, the workload's.
      streamed: what is kept on disk between steps; None if nothing is.
    """

    make_state: Callable[[int], TrainState]
    step: Callable[..., tuple[TrainState, Metrics]]
    metrics: Callable[..., Metrics]
    streamed: offloading.Streamed | None


def one_worker(
    workload: Workload, method: Method, offload: Offload | None = None, *, axis: AxisNames = "data"
) -> OneWorker:
    """Puts a workload and a method together.

    Args:
      workload: what to train.
      method: how workers learn from each other.
      offload: where the optimizer's state lies, if not on the device.
      axis: the axis of the workers.

    Returns:
      A `OneWorker`.

    Example:
      >>> import jaxdist as jd, optax
      >>> from jaxdist._cli import base, digits
      >>> one = one_worker(digits.digits_workload(4), base.Method(jd.exact(), optax.adam(1e-3)))
      >>> step = jd.simulate(one.step, workers=2)
    """
    transformation, streamed = arrange(method, offload, axis=axis)
    layers, cut = PLAIN, method.stage == 3
    if cut:
        layers = Layers(*(partial(f, axis=axis, reducer=method.reducer) for f in (gathered, gathered_scan)))

    def make_state(seed: int) -> TrainState:
        params = workload.init(jax.random.key(seed))
        params = shard(params, smallest=0) if cut else params
        held = PerWorker(params, resize="mean") if method.sync_period else params
        return TrainState(held, transformation.init(params))

    def step(state: TrainState, batch: Any, **asked: Any) -> tuple[TrainState, Metrics]:
        loss_fn = partial(workload.loss, layers=layers)
        loss, gradients = local_value_and_grad(loss_fn, axis=axis)(state.params, batch)
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params, **asked)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), {"loss": jax.lax.pmean(loss, axis)}

    return OneWorker(make_state, step, partial(workload.metrics, layers=layers), streamed)

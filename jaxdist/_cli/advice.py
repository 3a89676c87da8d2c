"""Predicts a step over a given link with each of several methods, and recommends one of them."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from .. import analysis
from ..analysis import cost
from ..analysis.base import make_collective
from ..analysis.measured import seconds_of
from ..reducers.base import Law, Reducer
from ..runtime.distribute import distribute
from ..runtime.mesh import global_batch, make_mesh
from ..state.placement import init_state
from .models.base import TrainingMethod, Workload, check_batch
from .spellings import parse
from .training.one_worker import one_worker

AXIS = "data"
METHODS = (
    "exact",
    "f16",
    "two_shot:int8",
    "two_shot:qsgd:4",
    "ef:power_sgd:4",
    "ef:top_k:0.01",
    "diloco:H=50",
    "diloco:H=50/two_shot:qsgd:4",
)
# A method may be this much slower than the fastest and still be preferred if it changes training less.
CLOSE = 1.1
# The chip of a cluster of which only the link matters.
_ANY_CHIP = cost.Chip("any", {"other": math.inf}, math.inf, math.inf, math.inf)


class Prediction(NamedTuple):
    """One method over one link.

    Attributes:
      name: the spelling.
      wire_bytes: bytes that one worker sends in a step; the mean for methods that synchronize every `H` steps.
      coding: seconds of encoding and decoding in a step with all workers' payloads, measured here.
      network: seconds in a step that the link is busy.
      step: seconds of a step without overlap: compute, coding and network.
      hidden: the same with communication hidden behind compute as far as possible.
      break_even: the bandwidth of the link, in bytes per second, below which the method beats the first one; 0 if it
        never does, infinity if it always does.
    """

    name: str
    wire_bytes: float
    coding: float
    network: float
    step: float
    hidden: float
    break_even: float


class _Costs(NamedTuple):
    """Costs of a step: bytes sent, seconds of latency, and seconds of coding."""

    wire_bytes: float
    latency: float
    coding: float


def compute_seconds(workload: Workload, optimizer: str, examples: int, *, repetitions: int = 3) -> float:
    """Measures the median time of one worker's step on the default device, without communication."""
    alone = one_worker(workload, parse.parse_method("exact", optimizer), axis=AXIS)
    mesh = make_mesh({AXIS: 1}, devices=jax.local_devices()[:1])
    state = init_state(lambda: alone.make_state(0), mesh, axis=AXIS)
    batch = global_batch(workload.batch(0, 0, examples), mesh, axis=AXIS)
    step = distribute(alone.step, mesh, axis=AXIS)

    def run_step():
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return statistics.median(seconds_of(run_step, repetitions))


def predict(
    workload: Workload,
    names: Sequence[str],
    *,
    optimizer: str,
    workers: int,
    batch_size: int,
    link: cost.Link,
    compute: float,
) -> list[Prediction]:
    """Predicts a step with each method: bytes from its trace for this many workers, coding measured on this device.

    Args:
      workload: the model and the data.
      names: spellings of methods; the first is the baseline of the others.
      optimizer: the spelling of the optimizer.
      workers: how many there are.
      batch_size: examples in a step, all workers together.
      link: between the workers.
      compute: seconds of one worker's own step, for example from `compute_seconds`.

    Returns:
      One `Prediction` for each name, in their order.

    Raises:
      ValueError: a name does not parse or is an optimizer that communicates, or the batch does not divide.
    """
    if workers < 2:
        raise ValueError(f"--workers must be at least 2, got {workers}: one worker sends nothing")
    check_batch(batch_size, workers)
    parsed = [(name, parse.parse_method(name, optimizer)) for name in names]
    methods = [(name, method, _find_reducer(name, method)) for name, method in parsed]
    like = jax.eval_shape(workload.init, jax.random.key(0))
    found: list[tuple[str, _Costs]] = []
    for name, method, reducer in methods:
        coding = 0.0 if reducer.law == Law.MEAN else analysis.codec_seconds(reducer, like, workers=workers)
        traffic = _trace_traffic(workload, method, workers, batch_size, link)
        found.append((name, _Costs(*traffic, coding / (method.sync_period or 1))))
    return [_predict_step(name, costs, found[0][1], compute, link) for name, costs in found]


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """Chooses, of the methods nearly as fast as the fastest, the one that sends most and so changes training least.

    Example:
      >>> from jaxdist._cli.advice import Prediction, recommend
      >>> steps = {"exact": 2.0, "qsgd": 1.05, "top_k": 1.0}
      >>> sizes = {"exact": 100, "qsgd": 12, "top_k": 2}
      >>> recommend([Prediction(name, sizes[name], 0, 0, step, 0, 0) for name, step in steps.items()]).name
      'qsgd'
    """
    fastest = min(prediction.step for prediction in predictions)
    close = [prediction for prediction in predictions if prediction.step <= CLOSE * fastest]
    return max(close, key=lambda prediction: prediction.wire_bytes)


def _find_reducer(name: str, method: TrainingMethod) -> Reducer:
    """The reducer that encodes and decodes: that of every step, or that of a round."""
    if parse.is_sync(name):
        return parse.parse_reducer(name.partition("/")[2] or "exact")
    if method.reducer is None:
        raise ValueError(f"{name!r} is an optimizer that communicates: try it with jaxdist compare")
    return method.reducer


def _trace_traffic(
    workload: Workload, method: TrainingMethod, workers: int, batch_size: int, link: cost.Link
) -> tuple[float, float]:
    """Bytes and seconds of latency of a step, on average, from a trace."""
    alone = one_worker(workload, method, axis=AXIS)
    state = jax.eval_shape(lambda: init_state(lambda: alone.make_state(0), workers, axis=AXIS))
    batch = jax.eval_shape(lambda: workload.batch(0, 0, batch_size))
    step = distribute(alone.step, AbstractMesh((workers,), (AXIS,)), axis=AXIS)
    # With infinite bandwidth only the latency of each hop remains.
    hop = cost.cluster(_ANY_CHIP, [(link._replace(bandwidth=math.inf), workers)])
    # The mean loss is only for display and need not be sent in every step.
    loss = make_collective("all-reduce", [("float32", 4)], devices=workers, where="")
    sums = []
    for branch in ("max", "min"):
        seen = analysis.logical_collectives(step, state, batch, branch=branch, platform=jax.default_backend())
        # On gloo, each operand of a merged operation is a separate message.
        latency = sum(op.messages * cost.seconds(cost.crossings(op, hop)) for op in seen.ops)
        latency -= cost.seconds(cost.crossings(loss, hop))
        sums.append((seen.wire_bytes - loss.wire_bytes, latency))
    # One step of a round takes the branch that sends most, the others the one that sends least.
    most, least = sums
    period = method.sync_period or 1
    wire_bytes, latency = (low + (high - low) / period for high, low in zip(most, least, strict=True))
    return wire_bytes, latency


def _predict_step(name: str, costs: _Costs, baseline: _Costs, compute: float, link: cost.Link) -> Prediction:
    network = costs.latency + costs.wire_bytes / link.bandwidth
    # The method wins where saved bytes / bandwidth > lost seconds.
    saved = baseline.wire_bytes - costs.wire_bytes
    lost = (costs.coding + costs.latency) - (baseline.coding + baseline.latency)
    break_even = 0.0 if saved <= 0 else math.inf if lost <= 0 else saved / lost
    step, hidden = compute + costs.coding + network, max(compute, network) + costs.coding
    return Prediction(name, costs.wire_bytes, costs.coding, network, step, hidden, break_even)

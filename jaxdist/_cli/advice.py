"""What a step will take over a given link with each of several methods, and which of them to choose."""

import math
import re
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
from .models.base import Method, Workload, check_batch
from .spellings import methods, parse, sync
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
# How much slower than the fastest a method may be and still be preferred, because it changes training less.
CLOSE = 1.1
_RATE = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Prediction(NamedTuple):
    """One method over one link.

    Attributes:
      name: as it was spelled.
      wire_bytes: what one worker sends in a step; the mean, where workers meet every so many steps.
      coding: seconds a step for what the method computes to save bytes, with so many workers, measured here.
      network: seconds a step that the link is busy.
      step: seconds of a step when nothing overlaps: the model's own work, coding, network.
      hidden: the same when communication hides behind the model's own work as far as it can.
      break_even: bytes a second of the link below which the method beats the first one; 0 where it never does, infinity
        where it always does.
    """

    name: str
    wire_bytes: float
    coding: float
    network: float
    step: float
    hidden: float
    break_even: float


class _Traffic(NamedTuple):
    """Bytes and seconds of waiting for hops, per step."""

    wire_bytes: float
    latency: float


def parse_link(text: str) -> cost.Link:
    """Makes the link that `BANDWIDTH[,LATENCY]` spells.

    Example:
      >>> from jaxdist._cli.advice import parse_link
      >>> parse_link("100mbit,20ms")
      Link(name='100mbit,20ms', latency=0.02, bandwidth=12500000.0)
    """
    rate, _, latency = parse.checked(text).partition(",")
    found = [_quantity(rate, _RATE), _quantity(latency or "0s", _SECONDS)]
    if None in found or not found[0]:
        raise ValueError(f"a link is a bandwidth and a latency, such as 100mbit,20ms or 10gbit,50us, got {text!r}")
    return cost.Link(text, found[1], found[0])


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units and match[1] != "." else None


def compute_seconds(workload: Workload, optimizer: str, examples: int, *, turns: int = 3) -> float:
    """The median time of one worker's step on the default device, without any other worker."""
    one = one_worker(workload, methods.parse_method("exact", optimizer), axis=AXIS)
    mesh = make_mesh({AXIS: 1}, devices=jax.local_devices()[:1])
    state = init_state(lambda: one.make_state(0), mesh, axis=AXIS)
    batch = global_batch(workload.batch(0, 0, examples), mesh, axis=AXIS)
    step = distribute(one.step, mesh, axis=AXIS)

    def run():
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return statistics.median(seconds_of(run, turns))


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
    """Predicts a step with each method: bytes from its trace for so many workers, coding measured on this device.

    Args:
      workload: what to train.
      names: methods as `methods.parse_method` takes them; the first is what the others are measured against.
      optimizer: as on the command line.
      workers: how many.
      batch_size: examples in a step, all workers together.
      link: between the workers.
      compute: seconds of one worker's own step, from `compute_seconds` or told.

    Returns:
      One `Prediction` for each name, in their order.

    Raises:
      ValueError: a name that does not parse; an optimizer that communicates by itself; an odd batch.
    """
    if workers < 2:
        raise ValueError(f"--workers must be at least 2, got {workers}: one worker sends nothing")
    check_batch(batch_size, workers)
    parsed = [(name, methods.parse_method(name, optimizer)) for name in names]
    spelled = [(name, method, _carrier(name, method)) for name, method in parsed]
    like = jax.eval_shape(workload.init, jax.random.key(0))
    found: list[tuple[str, _Traffic, float]] = []
    for name, method, reducer in spelled:
        traffic = _traffic(workload, method, workers, batch_size, link)
        coding = 0.0 if reducer.law == Law.MEAN else analysis.codec_seconds(reducer, like, workers=workers)
        found.append((name, traffic, coding / (method.sync_period or 1)))
    return [_prediction(*one, compute, link, found[0]) for one in found]


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """The method to choose: of those nearly as fast as the fastest, the one that sends most and so changes least.

    Example:
      >>> from jaxdist._cli.advice import Prediction, recommend
      >>> steps = {"exact": 2.0, "qsgd": 1.05, "top_k": 1.0}
      >>> sizes = {"exact": 100, "qsgd": 12, "top_k": 2}
      >>> recommend([Prediction(name, sizes[name], 0, 0, step, 0, 0) for name, step in steps.items()]).name
      'qsgd'
    """
    fastest = min(one.step for one in predictions)
    return max((one for one in predictions if one.step <= CLOSE * fastest), key=lambda one: one.wire_bytes)


def _carrier(name: str, method: Method) -> Reducer:
    """What codes and decodes: the method's reducer, or the one that carries what a round sends."""
    if sync.is_sync(name):
        return parse.parse_reducer(name.partition("/")[2] or "exact")
    if method.reducer is None:
        raise ValueError(f"{name!r} is an optimizer that communicates by itself: try it with jaxdist compare")
    return method.reducer


def _traffic(workload: Workload, method: Method, workers: int, batch_size: int, link: cost.Link) -> _Traffic:
    one = one_worker(workload, method, axis=AXIS)
    state = jax.eval_shape(lambda: init_state(lambda: one.make_state(0), workers, axis=AXIS))
    batch = jax.eval_shape(lambda: workload.batch(0, 0, batch_size))
    step = distribute(one.step, AbstractMesh((workers,), (AXIS,)), axis=AXIS)
    hop = cost.cluster(_NOWHERE, [(link._replace(bandwidth=math.inf), workers)])
    # The mean of the loss is for whoever watches; it need not be sent in every step.
    loss = make_collective("all-reduce", [("float32", 4)], devices=workers, where="")
    sums = []
    for branch in ("max", "min"):
        seen = analysis.logical_collectives(step, state, batch, branch=branch, platform=jax.default_backend())
        # Each operand of a merged operation is a message of its own on gloo.
        waits = sum(op.messages * cost.seconds(cost.crossings(op, hop)) for op in seen.ops)
        waits -= cost.seconds(cost.crossings(loss, hop))
        sums.append((seen.wire_bytes - loss.wire_bytes, waits))
    most, least = sums
    period = method.sync_period or 1
    return _Traffic(*(low + (high - low) / period for high, low in zip(most, least, strict=True)))


_NOWHERE = cost.Chip("any", {"other": math.inf}, math.inf, math.inf, math.inf)


def _prediction(
    name: str, traffic: _Traffic, coding: float, compute: float, link: cost.Link, plain: tuple[str, _Traffic, float]
) -> Prediction:
    network = traffic.latency + traffic.wire_bytes / link.bandwidth
    _, other, other_coding = plain
    saved = other.wire_bytes - traffic.wire_bytes
    lost = (coding + traffic.latency) - (other_coding + other.latency)
    even = 0.0 if saved <= 0 else math.inf if lost <= 0 else saved / lost
    step, hidden = compute + coding + network, max(compute, network) + coding
    return Prediction(name, traffic.wire_bytes, coding, network, step, hidden, even)

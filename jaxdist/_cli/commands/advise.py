"""`jaxdist advise`: predicts a step over given links with each of several methods, and recommends one of them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh
from rich.table import Table

from ... import analysis
from ...analysis import cost
from ...analysis.base import make_collective
from ...analysis.measured import measure_link, seconds_of
from ...processes.initialize import initialize
from ...reducers.base import Law, Reducer
from ...runtime.distribute import distribute
from ...runtime.mesh import global_batch, make_mesh
from ...state.placement import init_state
from .. import tables
from ..figures import in_bytes, new_table
from ..models.base import TrainingMethod, Workload, check_batch
from ..running import File, Integer, Number, Text, new_console, print_paths
from ..spellings import parse
from ..training.one_worker import one_worker

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
NOTE = (
    "Bytes: sent by one worker, from the traced step. Coding: timed on this device.\n"
    "Step: the model's own work, coding and network, one after the other.\n"
    "Hidden: with communication hidden behind the model's own work as far as possible.\n"
    "Break-even: on slower links than this the method beats the first one."
)


@dataclass(frozen=True)
class AdviseOptions:
    """Recommends a method for given links: bytes, predicted step times, break-even."""

    link: Text = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. The default is to measure those between the processes of
    this job (Slurm, Open MPI, Kubernetes, TPU pods, or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID), or between the accelerators here."""
    workers: Integer = None
    """Number of workers; by default all devices of all processes, or 8 with --link."""
    reducers: tuple[str, ...] = METHODS
    """The methods to compare, spelled as for jaxdist compare, also MODULE:NAME; the first is the baseline."""
    workload: Literal["text", "digits"] = "text"
    """As for jaxdist train."""
    model: Text = None
    """As for jaxdist train."""
    optimizer: str = "adamw:1e-3"
    """As for jaxdist train."""
    batch: int = 32
    """Examples in a step, all workers together."""
    compute: Number = None
    """Milliseconds of one worker's step without communication, if it will run on another device than this one."""
    table: File = None
    """Write the table to this file too: .csv with all numbers, .md or .tex."""


class Prediction(NamedTuple):
    """One method over one link."""

    name: str  # the spelling
    wire_bytes: float  # bytes that one worker sends in a step; the mean for methods that synchronize every `H` steps
    coding: float  # seconds of encoding and decoding in a step with all workers' payloads, measured here
    network: float  # seconds in a step that the link is busy
    step: float  # seconds of a step without overlap: compute, coding and network
    hidden: float  # the same with communication hidden behind compute as far as possible
    # the bandwidth of the link, in bytes per second, below which the method beats the first one; 0 if it never
    # does, infinity if it always does
    break_even: float


class _Costs(NamedTuple):
    """Costs of a step: bytes sent, seconds of latency, and seconds of coding."""

    wire_bytes: float
    latency: float
    coding: float


def run_advise(chosen: AdviseOptions) -> None:
    """Measures the link and the step, or takes them from the options; prints predictions and a recommendation."""
    tables.check_table(chosen.table)
    console = new_console()
    # With a link that is given nothing is measured, and no other process is needed.
    several = chosen.link is None and initialize()
    workload = parse.parse_workload(chosen.workload, chosen.model)
    if chosen.link is not None:
        link, workers = parse.parse_link(chosen.link), chosen.workers or 8
    # The devices that one CPU is split into share its memory: there is no link to measure.
    elif several or (jax.device_count() > 1 and jax.default_backend() != "cpu"):
        workers = chosen.workers or jax.device_count()
        link = measure_link(make_mesh({AXIS: jax.device_count()}), axis=AXIS)
    else:
        raise ValueError("there is no other worker to measure a link to: give one, as in --link 100mbit,20ms")
    if chosen.compute is not None and chosen.compute <= 0:
        raise ValueError(f"--compute must be positive, got {chosen.compute}")
    compute = chosen.compute and chosen.compute / 1e3
    if compute is None:
        compute = compute_seconds(workload, chosen.optimizer, max(1, chosen.batch // workers))
    settings = {"optimizer": chosen.optimizer, "workers": workers, "batch_size": chosen.batch}
    found = predict(workload, chosen.reducers, **settings, link=link, compute=compute)
    # All processes have measured; process 0 prints.
    if jax.process_index():
        return
    console.print(
        f"\n{workers} workers, {_spell_link(link)}, {1e3 * compute:,.0f} ms of the model's own work", style="dim"
    )
    table = _predictions_table(found)
    console.print(table)
    if chosen.table is not None:
        print_paths(console, table=tables.write_table(table, [each._asdict() for each in found], chosen.table))
    console.print("\n".join(_conclude(found, link)), highlight=False, soft_wrap=True)


def _conclude(found: Sequence[Prediction], link: cost.Link) -> list[str]:
    baseline, best = found[0], recommend(found)
    waiting = 100 * (baseline.network + baseline.coding) / baseline.step
    lines = [f"{baseline.name}: {waiting:.0f} % of a step goes to communication."]
    if best is baseline:
        # The fastest link on which another method would still win.
        rates = [other.break_even for other in found[1:] if 0 < other.break_even < math.inf]
        when = f"it starts to pay below {_spell_rate(max(rates))}" if rates else "no link makes these pay"
        return [*lines, f"Stay with {baseline.name}: compression will lose here, {when}."]
    fewer = f"{baseline.wire_bytes / best.wire_bytes:,.0f} times" if best.wire_bytes else "infinitely many times"
    lines.append(f"Take {best.name}: {baseline.step / best.step:.1f} times as fast, {fewer} fewer bytes.")
    losing = [other.name for other in found[1:] if other.step > baseline.step]
    if losing:
        lines.append(f"Slower than {baseline.name} over {_spell_link(link)}: {', '.join(losing)}.")
    if best.hidden < best.step / CLOSE:
        lines.append("Hiding it behind the model's own work gains more: see 'Hide the communication'.")
    return [*lines, "Speed is half of it: jaxdist compare shows what each costs in loss."]


def _predictions_table(found: Sequence[Prediction]) -> Table:
    headings = ("bytes a step", "coding ms", "network ms", "step ms", "hidden ms", "speed", "break-even")
    table = new_table("method", headings, caption=NOTE)
    best = recommend(found)
    for method in found:
        times = (f"{1e3 * x:,.1f}" for x in (method.coding, method.network, method.step, method.hidden))
        break_even = "" if method is found[0] else _spell_rate(method.break_even)
        speed = f"{found[0].step / method.step:.2f}x"
        style = "bold green" if method is best else None
        table.add_row(method.name, in_bytes(method.wire_bytes), *times, speed, break_even, style=style)
    return table


def _spell_link(link: cost.Link) -> str:
    return f"links of {_spell_rate(link.bandwidth)} and {1e3 * link.latency:,.2f} ms"


def _spell_rate(bandwidth: float) -> str:
    """A bandwidth in bits per second."""
    if bandwidth in (0, math.inf):
        return "never" if bandwidth == 0 else "always"
    # Links are sold in bits per second, with decimal prefixes.
    bits = 8 * bandwidth
    return f"{bits / 1e9:,.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.1f} Mbit/s"


def compute_seconds(workload: Workload, optimizer: str, examples: int, *, repetitions: int = 3) -> float:
    """Measures the median time of one worker's step on the default device, without communication."""
    # On one device an all-reduce is the identity: what remains is the own work of a worker.
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

    The first method is the baseline of the others; `compute` is seconds of one worker's own step.
    """
    if workers < 2:
        raise ValueError(f"--workers must be at least 2, got {workers}: one worker sends nothing")
    check_batch(batch_size, workers)
    parsed = [(name, parse.parse_method(name, optimizer)) for name in names]
    methods = [(name, method, _find_reducer(name, method)) for name, method in parsed]
    # Every spelling was parsed above, so that a wrong one fails before the measurements.
    like = jax.eval_shape(workload.init, jax.random.key(0))
    found: list[tuple[str, _Costs]] = []
    for name, method, reducer in methods:
        # A plain mean sends the gradient as it is: there is no code to time.
        coding = 0.0 if reducer.law == Law.MEAN else analysis.codec_seconds(reducer, like, workers=workers)
        traffic = _trace_traffic(workload, method, workers, batch_size, link)
        # Methods with local steps encode once in a round of H steps.
        found.append((name, _Costs(*traffic, coding / (method.sync_period or 1))))
    return [_predict_step(name, costs, found[0][1], compute, link) for name, costs in found]


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """Chooses, of the methods nearly as fast as the fastest, the one that sends most and so changes training least.

    Examples:
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
    # At best the network is busy while the model computes; coding occupies the same device.
    step, hidden = compute + costs.coding + network, max(compute, network) + costs.coding
    return Prediction(name, costs.wire_bytes, costs.coding, network, step, hidden, break_even)

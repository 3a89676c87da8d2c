"""`jaxdist advise`: predicts the time of several methods over given links, and recommends one of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
from rich.table import Table

from ..._core.checks import check_range
from ...analysis.cost import Link
from ...analysis.measured import measure_link
from ...analysis.step_time import (
    StepCost,
    break_even,
    network_seconds,
    step_seconds,
    step_seconds_if_hidden,
    uses_gloo,
)
from ...processes.initialize import initialize
from ...reducers.reducer import Reducer
from ...runtime.mesh import make_mesh
from .. import race, tables
from ..figures import in_bytes, in_rate, new_table, print_table
from ..models.base import TrainingMethod, Workload, check_batch
from ..running import File, Integer, Number, Text, check_positive, new_console, print_paths
from ..spellings import parse
from ..spellings.tables import ANY_STEPS
from ..training import costs
from ..training.costs import AXIS
from ..training.own_step_costs import OwnTrace, measure_own_compute, trace_own_step

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
# What --step brings itself.
OF_MODEL = ("workload", "model", "optimizer", "batch")
# A method may be this much slower than the fastest and still be preferred if it changes training less.
CLOSE = 1.1
NOTE = (
    "Bytes: sent by one worker, and as many received, from the traced step. Coding: timed on this device.\n"
    "Step: the model's own work, coding and network, one after the other unless the method's schedule hides some.\n"
    "Hidden: with communication hidden behind the model's own work as far as possible.\n"
    "Break-even: on slower links than this a step of the method is shorter than one of the first."
)


@dataclass(frozen=True)
class AdviseOptions:
    """Recommends a method for given links: bytes, predicted step times, and the time to a loss if losses are known.

    Examples:
      jaxdist advise --link 100mbit,20ms --workers 8
      jaxdist compare --link 1gbit && jaxdist advise --link 100mbit,20ms --losses runs/compare/log.jsonl
      srun jaxdist advise --losses runs/compare/log.jsonl
      jaxdist advise --step my_step:make --link 10gbit,50us --workers 4
    """

    link: Text = None
    """Bandwidth and latency, as in 100mbit,20ms. Default: measured between processes, or accelerators here."""
    workers: Integer = None
    """Number of workers. Default: all devices of all processes; with --link those of --losses, or 8."""
    losses: File = None
    """The log of a jaxdist compare --link: methods are ranked by the time to a loss, not of a step. Its workload,
    model, optimizer and batch are taken too."""
    target: Number = None
    """With --losses: the held-out loss to reach. By default the lowest that every method reaches."""
    reducers: tuple[str, ...] = ()
    """The methods, spelled as for jaxdist compare, also MODULE:NAME; the first is the baseline. Default: eight common
    ones, or those of --losses."""
    workload: Literal["text", "digits"] = "text"
    """As for jaxdist train."""
    model: Text = None
    """As for jaxdist train, also MODULE:FUNCTION of your own."""
    step: Text = None
    """MODULE:FUNCTION of your own, in place of --model and its options: FUNCTION(mesh, reducer=...) returns a compiled
    step and its arguments as shapes, as for jaxdist plan."""
    axes: Text = None
    """With --step, the axes of the mesh, as in dcn=4,fsdp=8: workers are along the first, over the link."""
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
    # the bandwidth of the link, in bytes per second, below which a step of the method is shorter than one of the first;
    # 0 if it never is, infinity if it always is
    break_even: float
    # to the target loss, as the mean over the seeds, infinite if one does not reach it; NaN if no losses are known
    seconds: float = math.nan


def run_advise(chosen: AdviseOptions) -> None:
    """Measures the link and the step, or takes them from the options; prints predictions and a recommendation."""
    tables.check_table(chosen.table)
    if chosen.compute is not None:
        check_positive("--compute", chosen.compute)
    _check_step(chosen)
    chosen, curves, target = _take_losses(chosen)
    console = new_console()
    # With a link that is given nothing is measured, and no other process is needed.
    several = chosen.link is None and initialize()
    if chosen.link is not None:
        link, workers = parse.parse_link(chosen.link), 8
    # The devices that one CPU is split into share its memory: there is no link to measure.
    elif several or (jax.device_count() > 1 and jax.default_backend() != "cpu"):
        link, workers = None, jax.device_count()
    else:
        raise ValueError("there is no other worker to measure a link to: give one, as in --link 100mbit,20ms")
    axes = {AXIS: workers if chosen.workers is None else chosen.workers}
    if chosen.axes is not None:
        axes = parse.parse_axes(chosen.axes)
    axis, workers = next(iter(axes.items()))
    # What cannot work fails before the measurements.
    subject = _of_model(chosen, workers) if chosen.step is None else _of_step(chosen, chosen.step, axes)
    tables.make_folder(chosen.table)
    if link is None:
        link = measure_link(make_mesh({AXIS: jax.device_count()} if chosen.axes is None else axes), axis=axis)
    compute = subject.measure_compute() if chosen.compute is None else chosen.compute / 1e3
    # What runs on another device will not use the transport of this one.
    gloo = chosen.compute is None and uses_gloo()
    found = subject.predict(link=link, compute=compute, gloo=gloo)
    if curves:
        found = [each._replace(seconds=each.step * float(curves[each.name].steps_to(target).mean())) for each in found]
    # All processes have measured; process 0 prints.
    if jax.process_index():
        return
    whose = "model" if chosen.step is None else "step"
    console.print(
        f"\n{workers} workers, {_spell_link(link)}, {1e3 * compute:,.0f} ms of the {whose}'s own work", style="dim"
    )
    table = _predictions_table(found, target, subject.units)
    print_table(console, table)
    if chosen.table is not None:
        print_paths(console, table=tables.write_table(table, [each._asdict() for each in found], chosen.table))
    lines = [*subject.notes, *(_conclude_with_losses(found, target) if curves else _conclude(found, link))]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


class _Subject(NamedTuple):
    """What is advised on: a model that `jaxdist train` would train, or a step of the user's own."""

    measure_compute: Callable[[], float]  # seconds of one worker's step without communication
    predict: Callable[..., list[Prediction]]  # predict(link=, compute=, gloo=), a prediction for each method
    units: tables.Units | None  # what a worker trains on in a step, if that is known
    notes: tuple[str, ...] = ()  # lines below the table


def _of_model(chosen: AdviseOptions, workers: int) -> _Subject:
    workload = parse.parse_workload(chosen.workload, chosen.model)
    settings = {"optimizer": chosen.optimizer, "workers": workers, "batch_size": chosen.batch}
    methods = parse_methods(chosen.reducers, **settings)
    return _Subject(
        partial(costs.measure_compute, workload, chosen.optimizer, max(1, chosen.batch // workers)),
        partial(predict, workload, methods, **settings),
        tables.count_units(workload, chosen.batch, workers),
    )


def _of_step(chosen: AdviseOptions, step: str, axes: Mapping[str, int]) -> _Subject:
    make = parse.parse_step(step)
    _check_workers(next(iter(axes.values())))
    traced: dict[str, OwnTrace] = {}
    notes: list[str] = []
    for name, reducer in {name: _parse_reducer(name) for name in chosen.reducers}.items():
        try:
            traced[name] = trace_own_step(step, make, reducer, axes)
        except ValueError as problem:
            # Without the first there is nothing to compare with.
            if not traced:
                raise
            notes.append(f"Left out {name}: {problem.__cause__ or problem}")
    return _Subject(
        partial(measure_own_compute, step, make, axes), partial(predict_own_step, traced), None, tuple(notes)
    )


def _parse_reducer(name: str) -> Reducer:
    """A reducer by its spelling; raises ValueError for methods that are more than a reducer."""
    method = parse.parse_method(name, "sgd:0.1", ANY_STEPS)
    if method.reducer is None or method.sync_period or method.stage:
        raise ValueError(
            f"--step takes reducers, and {name} is a method around them, with an optimizer or local steps of its own: "
            "leave it out of --reducers, or give the model alone, as --model MODULE:FUNCTION"
        )
    return method.reducer


def _check_step(chosen: AdviseOptions) -> None:
    """Raises ValueError for options that only a model, or only a step, looks at."""
    if chosen.step is None:
        if chosen.axes is not None:
            raise ValueError("--axes is for --step: the step of --model has one axis, data")
        return
    given = [field.name for field in fields(chosen) if getattr(chosen, field.name) != field.default]
    if others := [name for name in given if name in OF_MODEL]:
        raise ValueError(f"--{others[0]} is for the step of --model, and {chosen.step} has its own: leave it out")
    if chosen.axes is not None and chosen.workers is not None:
        raise ValueError(f"--workers is the first of --axes {chosen.axes}: leave it out")


def _take_losses(chosen: AdviseOptions) -> tuple[AdviseOptions, dict[str, race.Curve], float]:
    """Fills in the methods and the settings of their log, and returns its losses and the target, if there is one."""
    if chosen.losses is None:
        if chosen.target is not None:
            raise ValueError("--target needs losses: give a log, as in --losses runs/compare/log.jsonl")
        common = METHODS if chosen.step is None else tuple(name for name in METHODS if not parse.is_sync(name))
        return replace(chosen, reducers=chosen.reducers or common), {}, math.nan
    settings, curves = race.read_curves(chosen.losses)
    names = chosen.reducers or tuple(curves)
    unknown = [name for name in names if name not in curves]
    if unknown:
        raise ValueError(f"{chosen.losses} has no losses of {', '.join(unknown)}, only of {', '.join(curves)}")
    target = race.common_target(curves[name] for name in names) if chosen.target is None else float(chosen.target)
    if chosen.target is not None:
        check_positive("--target", target)
    elif math.isnan(target):
        raise ValueError(f"{chosen.losses} has no loss that a method reaches with every seed: all of them diverge")
    taken = {key: settings[key] for key in ("model", "optimizer", "batch")}
    # A model of the user's own is no workload of the command.
    taken |= {"workload": settings["workload"]} if settings["workload"] in parse.MODELS else {}
    if chosen.link is not None:
        taken["workers"] = settings["workers"] if chosen.workers is None else chosen.workers
    return replace(chosen, reducers=names, **taken), curves, target


def _conclude(found: Sequence[Prediction], link: Link) -> list[str]:
    baseline, best = found[0], recommend(found)
    waiting = 100 * (baseline.network + baseline.coding) / baseline.step
    lines = [f"{baseline.name}: {waiting:.0f} % of a step goes to communication."]
    if not found[1:]:
        return lines
    if best is baseline:
        if any(other.step < baseline.step for other in found[1:]):
            return [*lines, f"Stay with {baseline.name}: no other method gains more than a tenth here."]
        # The fastest link on which another method would still win.
        rates = [other.break_even for other in found[1:] if 0 < other.break_even < math.inf]
        when = f"it starts to pay below {_spell_rate(max(rates))}" if rates else "no link makes these pay"
        return [*lines, f"Stay with {baseline.name}: compression will lose here, {when}."]
    lines.append(f"Take {best.name}: {baseline.step / best.step:.1f} times as fast, {_spell_bytes(best, baseline)}.")
    losing = [other.name for other in found[1:] if other.step > baseline.step]
    if losing:
        lines.append(f"Slower than {baseline.name} over {_spell_link(link)}: {', '.join(losing)}.")
    if best.hidden < best.step / CLOSE:
        lines.append("Hiding it behind the model's own work gains more: see 'Hide the communication'.")
    return [
        *lines,
        "This ranks steps alone, and methods differ in how many they need. To rank the time to a loss, train on any",
        "machine (jaxdist compare --link 1gbit --reducers ...), and add --losses runs/compare/log.jsonl here.",
    ]


def _conclude_with_losses(found: Sequence[Prediction], target: float) -> list[str]:
    baseline, best = found[0], recommend(found)
    late = [each.name for each in found if each.seconds == math.inf]
    lines = [f"Not at {target:.4g} in the steps of the log: {', '.join(late)}."] if late else []
    if best.seconds == math.inf:
        return [*lines, "Train for longer, or choose a higher --target."]
    if best is baseline:
        return [f"Stay with {baseline.name}: it reaches {target:.4g} first, after {_spell_seconds(best)}.", *lines]
    plain = "not at all" if baseline.seconds == math.inf else f"after {_spell_seconds(baseline)}"
    first = f"Take {best.name}: it reaches {target:.4g} after {_spell_seconds(best)} ({baseline.name}: {plain}), with "
    return [f"{first}{_spell_bytes(best, baseline)} a step.", *lines]


def _spell_bytes(best: Prediction, baseline: Prediction) -> str:
    if best.wire_bytes > baseline.wire_bytes:
        return f"{best.wire_bytes / max(baseline.wire_bytes, 1):,.1f} times more bytes"
    times = f"{baseline.wire_bytes / best.wire_bytes:,.0f}" if best.wire_bytes else "infinitely many"
    return f"{times} times fewer bytes"


def _spell_seconds(prediction: Prediction) -> str:
    return "-" if prediction.seconds == math.inf else f"{prediction.seconds:,.1f} s"


def _predictions_table(found: Sequence[Prediction], target: float, units: tables.Units | None) -> Table:
    headings = [
        "bytes a step",
        *([units.heading()] if units else []),
        "coding ms",
        "network ms",
        "step ms",
        "hidden ms",
        "speed",
        "break-even",
    ]
    with_losses = not math.isnan(found[0].seconds)
    headings += [f"to {target:.4g}"] if with_losses else []
    table = new_table("method", headings, caption=NOTE)
    best = recommend(found)
    for method in found:
        times = (f"{1e3 * x:,.1f}" for x in (method.coding, method.network, method.step, method.hidden))
        break_even = "" if method is found[0] else _spell_rate(method.break_even)
        speed = f"{found[0].step / method.step:.2f}x"
        style = "bold green" if method is best else None
        last = [_spell_seconds(method)] if with_losses else []
        sent = [in_bytes(method.wire_bytes), *([units.share(method.wire_bytes)] if units else [])]
        table.add_row(method.name, *sent, *times, speed, break_even, *last, style=style)
    return table


def _spell_link(link: Link) -> str:
    return f"links of {_spell_rate(link.bandwidth)} and {1e3 * link.latency:,.2f} ms"


def _spell_rate(bandwidth: float) -> str:
    """A bandwidth in bits per second, or when there is none."""
    if bandwidth in (0, math.inf):
        return "never" if bandwidth == 0 else "always"
    return in_rate(bandwidth)


def parse_methods(names: Sequence[str], *, optimizer: str, workers: int, batch_size: int) -> dict[str, TrainingMethod]:
    """Makes the methods by their spellings; raises ValueError if these workers cannot take a step with them."""
    _check_workers(workers)
    check_batch(batch_size, workers)
    return {name: parse.parse_method(name, optimizer, ANY_STEPS) for name in names}


def _check_workers(workers: int) -> None:
    check_range("--workers", workers, 2, ends="[]", hint="one worker sends nothing")


def predict(
    workload: Workload,
    methods: Mapping[str, TrainingMethod],
    *,
    optimizer: str,
    workers: int,
    batch_size: int,
    link: Link,
    compute: float,
    gloo: bool = False,
) -> list[Prediction]:
    """Predicts a step with each method: bytes from its trace for this many workers, coding measured on this device.

    The first method is the baseline of the others; `compute` is seconds of one worker's own step, and `gloo` says that
    the workers communicate over it.
    """
    examples = max(1, batch_size // workers)
    found: list[tuple[str, StepCost]] = []
    for name, method in methods.items():
        settings = {"optimizer": optimizer, "workers": workers, "examples": examples, "compute": compute}
        cost = costs.measure_cost(name, method, workload, **settings)
        traffic = costs.traffic_of_trace(workload, method, workers=workers, batch_size=batch_size, gloo=gloo)
        found.append((name, cost._replace(traffic=traffic)))
    return [_predict_step(name, cost, found[0][1], link) for name, cost in found]


def predict_own_step(
    traced: Mapping[str, OwnTrace], *, link: Link, compute: float, gloo: bool = False
) -> list[Prediction]:
    """Predicts as `predict`, for a step of the user's own that was traced with each reducer."""
    found = {name: each.measure(compute=compute, gloo=gloo) for name, each in traced.items()}
    first = next(iter(found.values()))
    return [_predict_step(name, cost, first, link) for name, cost in found.items()]


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """Chooses the method that reaches the target first.

    Where no losses are known it chooses, of the methods nearly as fast as the fastest, the one that sends most and so
    changes training least.

    Examples:
      >>> steps = {"exact": 2.0, "qsgd": 1.05, "top_k": 1.0}
      >>> sizes = {"exact": 100, "qsgd": 12, "top_k": 2}
      >>> found = [Prediction(name, sizes[name], 0, 0, step, 0, 0) for name, step in steps.items()]
      >>> recommend(found).name
      'qsgd'
      >>> recommend([each._replace(seconds=100.0 * each.step) for each in found]).name
      'top_k'
    """
    if not math.isnan(predictions[0].seconds):
        return min(predictions, key=lambda prediction: prediction.seconds)
    fastest = min(prediction.step for prediction in predictions)
    close = [prediction for prediction in predictions if prediction.step <= CLOSE * fastest]
    return max(close, key=lambda prediction: prediction.wire_bytes)


def _predict_step(name: str, cost: StepCost, baseline: StepCost, link: Link) -> Prediction:
    return Prediction(
        name=name,
        wire_bytes=cost.traffic.wire_bytes,
        coding=cost.coding,
        network=network_seconds(cost, link),
        step=step_seconds(cost, link),
        hidden=step_seconds_if_hidden(cost, link),
        break_even=break_even(cost, baseline, latency=link.latency),
    )

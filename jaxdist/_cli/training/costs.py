"""Measures and counts what a step of a method costs on this device, apart from any link."""

import inspect
import statistics
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ... import analysis
from ...analysis.base import make_collective, summarize
from ...analysis.measured import seconds_of
from ...analysis.step_time import Schedule, StepCost, Traffic, mean_traffic, traffic
from ...reducers.base import Reducer
from ...runtime.distribute import distribute
from ...runtime.mesh import global_batch, make_mesh
from ...state.placement import init_state
from ..models.base import TrainingMethod, Workload
from ..spellings import parse
from ..spellings.tables import ANY_STEPS, SYNCS
from .one_worker import one_worker, trace_round
from .train import Run

AXIS = "data"


def measure_compute(workload: Workload, optimizer: str, examples: int, *, repetitions: int = 3) -> float:
    """Measures the median time of one worker's step on the default device, without communication."""
    # On one device an all-reduce is the identity, and is not compiled: what remains is the own work of a worker.
    return _measure_alone(workload, parse.parse_method("exact", optimizer, ANY_STEPS), examples, repetitions)


def _measure_alone(workload: Workload, method: TrainingMethod, examples: int, repetitions: int) -> float:
    """Measures a step of a method on one device, whose collectives are identities."""
    alone = one_worker(workload, method, axis=AXIS)
    mesh = make_mesh({AXIS: 1}, devices=jax.local_devices()[:1])
    state = init_state(lambda: alone.make_state(0), mesh, axis=AXIS)
    batch = global_batch(workload.batch(0, 0, examples), mesh, axis=AXIS)
    step = distribute(alone.step, mesh, axis=AXIS)

    def run_step():
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return statistics.median(seconds_of(run_step, repetitions))


def find_reducer(name: str, method: TrainingMethod) -> Reducer | None:
    """The reducer that encodes and decodes, of every step or of a round; None if the optimizer communicates itself."""
    if parse.is_sync(name):
        return parse.parse_reducer(name.partition("/")[2] or "exact")
    return method.reducer


def measure_coding(
    name: str, method: TrainingMethod, workload: Workload, *, workers: int, examples: int, compute: float
) -> float:
    """Measures the seconds of a step, on average, in which a worker packs, encodes and decodes the payloads of all.

    For an optimizer that communicates it is what its own step takes longer than `compute`, the step of `--optimizer`.
    """
    reducer = find_reducer(name, method)
    if reducer is None:
        return max(0.0, _measure_alone(workload, method, examples, 3) - compute)
    like = jax.eval_shape(workload.init, jax.random.key(0))
    # Methods with local steps encode once in a round of H steps.
    return analysis.codec_seconds(reducer, like, workers=workers) / (method.sync_period or 1)


def measure_cost(
    name: str, method: TrainingMethod, workload: Workload, *, workers: int, examples: int, compute: float
) -> StepCost:
    """The cost of a step before its traffic is known, which a trace or the compiled step tells."""
    coding = measure_coding(name, method, workload, workers=workers, examples=examples, compute=compute)
    return StepCost(compute, coding, Traffic(0.0, 0.0), schedule_of(name, method))


def schedule_of(name: str, method: TrainingMethod) -> Schedule:
    """When the method that `name` spells communicates, and how late its results are used.

    Examples:
      >>> from jaxdist._cli.spellings import parse
      >>> name = "streaming_diloco:H=50,fragments=4"
      >>> schedule_of(name, parse.parse_method(name, "adamw:1e-3"))
      Schedule(period=50, fragments=4, delay=1)
    """
    if not method.sync_period:
        return Schedule()
    spelled, _, given = parse.parse_call(name.partition("/")[0])
    defaults = inspect.signature(SYNCS[spelled].factory).parameters

    def argument(key: str, otherwise: int) -> int:
        default = defaults[key].default if key in defaults else otherwise
        value = given.get(key, default)
        return value if isinstance(value, int) else otherwise

    # A collective begins and ends in the program of one step: it hides behind the work of that step, and of no other,
    # however late its result is used.
    return Schedule(method.sync_period, argument("fragments", 1), min(1, argument("delay", 0)))


def traffic_of_trace(
    workload: Workload, method: TrainingMethod, *, workers: int, batch_size: int, gloo: bool = False
) -> Traffic:
    """Bytes and hops of a step, on average, from a trace for this many workers, which need not exist.

    For a method with rounds these are the steps after its warm-up. `gloo` says that they will communicate over it.
    """
    alone = one_worker(workload, method, axis=AXIS)
    state = jax.eval_shape(lambda: init_state(lambda: alone.make_state(0), workers, axis=AXIS))
    batch = jax.eval_shape(lambda: workload.batch(0, 0, batch_size))
    mesh = AbstractMesh((workers,), (AXIS,))
    if method.sync_period:
        found = trace_round(alone, mesh, state, batch, axis=AXIS)
        most, least = (traffic(each, workers=workers, gloo=gloo) for each in found)
        # A round is one of H steps.
        return _without_loss(mean_traffic(most, least, 1 / method.sync_period), workers)
    step = distribute(alone.step, mesh, axis=AXIS)
    every_step = analysis.logical_collectives(step, state, batch, platform=jax.default_backend())
    return _without_loss(traffic(every_step, workers=workers, gloo=gloo), workers)


def traffic_of_run(run: Run, *, sent: float | None = None, gloo: bool = False) -> Traffic:
    """Bytes and hops of a step, on average, from the compiled step of a run.

    With `sent`, the bytes of a step as they were recorded, the average is over the steps that the run has taken;
    without, over those of a round, after the warm-up. `gloo` says that the workers will communicate over it.
    """
    program: Any = run.program.compiled
    most, least = (
        traffic(analysis.collectives(program, branch=branch), workers=run.workers, gloo=gloo)
        for branch in ("max", "min")
    )
    if sent is None:
        sent = run.wire_bytes
    elif run.program.counted:
        # A count in the state leaves the mean loss out.
        sent += _loss_traffic(run.workers).wire_bytes
    # The bytes tell how many steps took the branch that sends most.
    span = most.wire_bytes - least.wire_bytes
    share = (sent - least.wire_bytes) / span if span else 1.0
    return _without_loss(mean_traffic(most, least, share), run.workers)


def _loss_traffic(workers: int) -> Traffic:
    mean = make_collective("all-reduce", [("float32", 4)], devices=workers, where="")
    return traffic(summarize([mean], []), workers=workers)


def _without_loss(found: Traffic, workers: int) -> Traffic:
    """Subtracts the mean loss, which is only for display and need not be sent in every step."""
    loss = _loss_traffic(workers)
    return found._replace(wire_bytes=found.wire_bytes - loss.wire_bytes, hops=found.hops - loss.hops)

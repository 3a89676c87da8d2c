"""Measures and counts what a step of a method costs on this device, apart from any link."""

import inspect
import statistics
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh

from ... import analysis
from ...analysis.base import Collectives, make_collective, summarize
from ...analysis.measured import seconds_of
from ...analysis.step_time import Schedule, StepCost, Traffic, mean_traffic, traffic
from ...reducers.exact import exact
from ...reducers.reducer import Reducer
from ...runtime.distribute import distribute
from ...runtime.mesh import global_batch, make_mesh
from ...state.placement import init_state
from ..models.base import TrainingMethod, Workload
from ..spellings import parse
from ..spellings.tables import ANY_STEPS, ENCODINGS, OPTIMIZERS, SYNCS
from .one_worker import OneWorker, one_worker, trace_round
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
    """The reducer that encodes and decodes, in every step or once in a round; None if its code is in the optimizer.

    Examples:
      >>> from jaxdist._cli.spellings import parse
      >>> name = "compressed_adam:2e-3/ef:power_sgd:2"
      >>> find_reducer(name, parse.parse_method(name, "adamw:1e-3")).law.name
      'EXACT'
    """
    if method.reducer is not None:
        return method.reducer
    spelled, _, reducer = name.partition("/")
    if reducer:
        return parse.parse_reducer(reducer)
    called, _, given = parse.parse_call(spelled)
    if called in ENCODINGS:
        parameters = inspect.signature((OPTIMIZERS | SYNCS)[called].factory).parameters
        values = {key: given.get(key, each.default) for key, each in parameters.items()}
        return parse.parse_reducer(ENCODINGS[called].format(**values))
    return exact() if parse.is_sync(name) else None


def _spell_without_reducer(name: str, method: TrainingMethod) -> str | None:
    """Spells a method with an optimizer of its own such that it sends what it sends uncompressed, where it can.

    None if the method goes around `--optimizer`.
    """
    spelled = name.partition("/")[0]
    called = parse.parse_call(spelled)[0]
    if called in SYNCS:
        return None if "inner" in inspect.signature(SYNCS[called].factory).parameters else spelled
    if method.reducer is not None:
        return None
    can = called in OPTIMIZERS and "reducer" in inspect.signature(OPTIMIZERS[called].factory).parameters
    return f"{spelled}/exact" if can else name


def measure_cost(
    name: str,
    method: TrainingMethod,
    workload: Workload,
    *,
    optimizer: str,
    workers: int,
    examples: int,
    compute: float,
) -> StepCost:
    """The cost of a step before its traffic is known, which a trace or the compiled step tells.

    `compute` is seconds of a step with `optimizer`; what a method's own optimizer takes longer comes on top. Coding is
    seconds of a step, on average, in which a worker packs, encodes and decodes the payloads of all; of one worker where
    the code is in the optimizer.
    """
    reducer, coding, longer = find_reducer(name, method), 0.0, 0.0
    if own := _spell_without_reducer(name, method):
        alone = _measure_alone(workload, parse.parse_method(own, optimizer, ANY_STEPS), examples, 3)
        # Both here, as `compute` may be of another device.
        longer = max(0.0, alone - measure_compute(workload, optimizer, examples))
    if reducer is None:
        coding = longer
    else:
        compute += longer
        like = jax.eval_shape(workload.init, jax.random.key(0))
        # Methods with local steps encode once in a round of H steps.
        coding = analysis.codec_seconds(reducer, like, workers=workers) / (method.sync_period or 1)
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
    mesh, *shapes = _shapes(workload, alone, workers=workers, batch_size=batch_size)
    if method.sync_period:
        # A round is one of H steps.
        return mean_traffic(*_traffic_of_round(alone, mesh, *shapes, gloo=gloo), 1 / method.sync_period)
    step = distribute(alone.step, mesh, axis=AXIS)
    every_step = analysis.logical_collectives(step, *shapes, platform=jax.default_backend())
    return _traffic(every_step, workers, gloo=gloo)


def _shapes(workload: Workload, alone: OneWorker, *, workers: int, batch_size: int) -> tuple[AbstractMesh, Any, Any]:
    """The arguments of a trace: a mesh without devices, and the shapes of the state and of a batch."""
    state = jax.eval_shape(lambda: init_state(lambda: alone.make_state(0), workers, axis=AXIS))
    return AbstractMesh((workers,), (AXIS,)), state, jax.eval_shape(lambda: workload.batch(0, 0, batch_size))


def _traffic_of_round(
    alone: OneWorker, mesh: AbstractMesh, state: Any, batch: Any, *, gloo: bool
) -> tuple[Traffic, Traffic]:
    """The traffic of a step that synchronizes all that a round does, and of a step between two rounds."""
    most, least = trace_round(alone, mesh, state, batch, axis=AXIS)
    return _traffic(most, mesh.size, gloo=gloo), _traffic(least, mesh.size, gloo=gloo)


def traffic_of_run(run: Run, *, sent: float | None = None, gloo: bool = False) -> Traffic:
    """Bytes and hops of a step, on average, from the compiled step of a run or, with rounds, from its trace.

    With `sent`, the bytes of a step as they were recorded, the average is over the steps that the run has taken;
    without, over those of a round, after the warm-up. `gloo` says that the workers will communicate over it.
    """
    if sent is None or not run.program.counted:
        # A count in the state leaves the mean loss out.
        sent = (run.wire_bytes if sent is None else sent) - _loss_traffic(run.workers).wire_bytes
    most, least = _extremes(run, sent, gloo=gloo)
    # The bytes tell how many steps sent most.
    span = most.wire_bytes - least.wire_bytes
    return mean_traffic(most, least, (sent - least.wire_bytes) / span if span else 1.0)


def _extremes(run: Run, sent: float, *, gloo: bool) -> tuple[Traffic, Traffic]:
    """The traffic of the two kinds of steps that a run consists of, which has sent so many bytes in a step."""
    if not run.sync_period:
        program: Any = run.program.compiled
        most, least = (analysis.collectives(program, branch=branch) for branch in ("max", "min"))
        return _traffic(most, run.workers, gloo=gloo), _traffic(least, run.workers, gloo=gloo)
    workload, sizes = run.program.workload, {"workers": run.workers, "batch_size": run.program.batch_size}
    worker = run.program.worker
    most, least = _traffic_of_round(worker, *_shapes(workload, worker, **sizes), gloo=gloo)
    rounds = mean_traffic(most, least, 1 / run.sync_period)
    if sent <= rounds.wire_bytes:
        return most, least
    # More than the rounds send: other steps were of the warm-up, which averages the gradients uncompressed.
    return traffic_of_trace(workload, TrainingMethod(exact(), optax.sgd(1.0)), **sizes, gloo=gloo), rounds


def _traffic(found: Collectives, workers: int, *, gloo: bool) -> Traffic:
    """Leaves out the mean loss, which is only for display and need not be sent in every step."""
    all_of_it, loss = traffic(found, workers=workers, gloo=gloo), _loss_traffic(workers)
    return all_of_it._replace(wire_bytes=all_of_it.wire_bytes - loss.wire_bytes, hops=all_of_it.hops - loss.hops)


def _loss_traffic(workers: int) -> Traffic:
    mean = make_collective("all-reduce", [("float32", 4)], devices=workers, where="")
    return traffic(summarize([mean], []), workers=workers)

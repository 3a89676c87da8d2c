"""The training loop of the command line and the benchmarks."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from ... import analysis
from ..._core.types import Metrics, PyTree
from ...local_sgd.state import global_params
from ...reducers.reducer import Reducer
from ...reducers.with_stats import with_stats
from ...runtime.distribute import distribute, evaluate
from ...runtime.mesh import global_batch
from ...state.placement import init_state
from ...transforms.stats import stats
from ..models.base import TrainingMethod, Workload, check_batch, parameters_of
from .one_worker import Offload, OneWorker, one_worker, trace_round
from .one_worker import TrainState as TrainState

AXIS = "data"


class _Program(NamedTuple):
    """What all runs of one compiled step share."""

    workload: Workload
    worker: OneWorker  # the functions of one worker
    mesh: jax.sharding.Mesh
    batch_size: int
    compiled: Callable[..., tuple[TrainState, dict[str, Any]]]  # the step; with `any_period` its batch is `(batch, H)`
    any_period: bool
    most: float  # bytes that a worker sends in a step: with the branches that send most, or in that of a round
    least: float  # with the branches that send least, or between rounds
    counted: bool  # true if the state counts the bytes
    evaluate: Callable[[TrainState], dict[str, float]]
    compile_seconds: float

    def start(self, seed: int, sync_period: int | None, state: TrainState | None = None) -> "Run":
        """Makes the run of this seed and period, from its first state unless another is given."""
        state = _first_state(self.worker, self.mesh, seed) if state is None else state
        streamed = self.worker.streamed
        return Run(self, state, seed, sync_period, 0 if streamed is None else streamed.stats().step)


class Run(NamedTuple):
    """A workload, a reducer and an optimizer, compiled for a mesh."""

    program: _Program  # the compiled step, shared by runs of other seeds and periods
    state: TrainState  # the initial state
    seed: int  # draws the parameters and the batches
    sync_period: int | None  # `H`; None if the workers take no local steps
    first: int  # number of steps already done, by an earlier run whose state was on disk

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.program.mesh.shape[AXIS]

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return parameters_of(self.program.workload)

    @property
    def units_per_step(self) -> int:
        """Tokens or images in a step, all workers together."""
        return self.program.batch_size * self.program.workload.units_per_example

    @property
    def compile_seconds(self) -> float:
        """Seconds that XLA took to compile the step."""
        return self.program.compile_seconds

    @property
    def wire_bytes(self) -> float:
        """Bytes that one worker sends in a step: the mean over a round after the warm-up, or else the most."""
        most, least = self.program.most, self.program.least
        # Each fragment is synchronized once in a round; the other steps send the least.
        return most if self.sync_period is None else least + (most - least) / self.sync_period

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes a compiled step, which donates the state, and applies an optimizer on disk."""
        if self.program.any_period:
            # A program for any period has one. A traced int32, so that another H needs no other program.
            assert self.sync_period is not None
            return self.program.compiled(state, (batch, np.int32(self.sync_period)))
        state, metrics = self.program.compiled(state, batch)
        streamed = self.program.worker.streamed
        if streamed is not None:
            # The compiled step has left the mean gradients in the state, for the optimizer on disk.
            state = state._replace(params=streamed.apply(state.params, state.opt_state.means))
        return state, metrics

    def batch(self, step: int) -> Any:
        """The batch of a step, on the mesh."""
        return _place(self.program.workload.batch(self.seed, step, self.program.batch_size), self.program.mesh)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """The metrics, as means over the held-out split."""
        return self.program.evaluate(state)

    def bytes_sent(self, state: TrainState, count: int) -> float:
        """Bytes that one worker has sent in the first `count` steps; counted in the state if they differ."""
        return float(stats(state.opt_state)["bytes"]) if self.program.counted else count * self.wire_bytes

    def with_seed(self, seed: int) -> "Run":
        """The same compiled step with other parameters and batches."""
        return self.program.start(seed, self.sync_period)

    def with_period(self, sync_period: int) -> "Run":
        """The same compiled step with another `H`, if it was prepared for any."""
        return self.program.start(self.seed, sync_period)

    def close(self) -> None:
        """Closes the files of an optimizer on disk."""
        if self.program.worker.streamed is not None:
            self.program.worker.streamed.close()


class Record(NamedTuple):
    """The measurements of one step."""

    step: int  # its number, from 1
    loss: float  # mean over all workers, before the step's update
    seconds: float  # wall-clock time of the step, with placing the batch and waiting for the result
    units_per_second: float  # tokens or images per second
    wire_bytes: float  # bytes sent by one worker in this step
    total_wire_bytes: float  # bytes sent by one worker until now


def prepare(
    workload: Workload,
    reducer: Reducer | None,
    optimizer: optax.GradientTransformation,
    *,
    mesh: jax.sharding.Mesh,
    batch_size: int,
    seed: int = 0,
    sync_period: int | None = None,
    stage: Literal[0, 1, 2, 3] = 0,
    any_period: bool = False,
    offload: Offload | None = None,
    island: bool = False,
) -> Run:
    """Builds and compiles a run. Runs that are compared differ only in how workers exchange gradients or models.

    Args:
      reducer: averages the gradients; None if the optimizer communicates.
      mesh: a mesh with an axis `"data"`.
      batch_size: examples in a step, all workers together.
      sync_period: as in `TrainingMethod`; the last global parameters are evaluated.
      stage: as in `TrainingMethod`; 3 gathers the parameters layer by layer. The reducer needs a reduce-scatter form.
      any_period: makes `H` an argument of the compiled step, for `with_period`. The optimizer must take `sync_period=`
        in its update, as `local_steps` with a single fragment does.
      offload: keep the optimizer state in host memory or on disk. A folder with the state of an earlier run of the same
        model is resumed.
      island: leaves the rounds of the optimizer out of the step, for `jaxdist.islands`; as with `sync_period`, the last
        global parameters are evaluated.

    Examples:
      >>> import jaxdist as jd, optax
      >>> from jaxdist._cli.models import digits
      >>> from jaxdist._cli.training import train
      >>> mesh = jd.make_mesh({"data": 1})
      >>> run = train.prepare(digits.digits_workload(4), jd.exact(), optax.adam(1e-3), mesh=mesh, batch_size=8)
      >>> [record.step for record, state in train.steps(run, 2)]
      [1, 2]
    """
    check_batch(batch_size, mesh.shape[AXIS])
    # The same function serves `plan`, so that it compiles the very step that is trained.
    worker = one_worker(workload, TrainingMethod(reducer, optimizer, sync_period, stage), offload, axis=AXIS)
    start = time.perf_counter()
    # The first batch has the shapes of all: each run compiles once, ahead of its steps.
    state, rows = _first_state(worker, mesh, seed), _place(workload.batch(seed, 0, batch_size), mesh)
    if any_period:
        specs = jax.sharding.PartitionSpec(AXIS), jax.sharding.PartitionSpec()
        distributed = distribute(partial(_step_with_period, worker), mesh, axis=AXIS, batch_specs=specs)
        compiled = distributed.lower(state, (rows, np.int32(1))).compile()
    else:
        step = partial(worker.step, sync=()) if island else worker.step
        compiled = distribute(step, mesh, axis=AXIS).lower(state, rows).compile()
    compile_seconds = time.perf_counter() - start
    # A program with branches sends a different number of bytes from step to step.
    most, least = (float(analysis.collectives(compiled, branch=branch).wire_bytes) for branch in ("max", "min"))
    # Only a count in the state tells which branch each step took.
    counted = most > least and "bytes" in stats(state.opt_state)
    if most > least and not counted and not sync_period:
        if reducer is None:
            raise ValueError("the bytes of this optimizer differ from step to step, and it does not count them")
        # Compiles again, with a reducer that counts.
        sizes = {"mesh": mesh, "batch_size": batch_size, "seed": seed}
        return prepare(workload, with_stats(reducer), optimizer, **sizes, stage=stage, offload=offload)
    if sync_period:
        most, least = (float(found.wire_bytes) for found in trace_round(worker, mesh, state, rows, axis=AXIS))
    # With ZeRO-3 an evaluation gathers the parameters layer by layer, as the step does.
    evaluated = workload._replace(metrics=worker.metrics)
    evaluation = _make_evaluation(evaluated, mesh, batch_size, local=island or sync_period is not None)
    sizes = (workload, worker, mesh, batch_size)
    program = _Program(*sizes, compiled, any_period, most, least, counted, evaluation, compile_seconds)
    return program.start(seed, sync_period, state)


def _first_state(worker: OneWorker, mesh: jax.sharding.Mesh, seed: int) -> TrainState:
    state = init_state(lambda: worker.make_state(seed), mesh, axis=AXIS)
    return state if worker.streamed is None else state._replace(params=worker.streamed.init(state.params))


def _step_with_period(worker: OneWorker, state: TrainState, batch: tuple[Any, Any]) -> tuple[TrainState, Metrics]:
    return worker.step(state, batch[0], sync_period=batch[1])


def steps(
    run: Run, count: int, *, first: int = 0, after: Callable[[TrainState, int], TrainState] | None = None
) -> Iterator[tuple[Record, TrainState]]:
    """Trains, and yields each step's record and state.

    The step donates its state: `run.state`, and each state that was yielded, is invalid after the next step. A resumed
    run has done `first` steps already, and gets the batches that follow. `after(state, step)`, with steps counted from
    0, returns the state that the next step takes; its time does not count.
    """
    state, before = run.state, run.bytes_sent(run.state, first)
    for step in range(first, first + count):
        start = time.perf_counter()
        state, metrics = run.step(state, run.batch(step))
        # Reading the loss waits for the step, so that the clock does not stop before it.
        loss = float(metrics["loss"])
        seconds = time.perf_counter() - start
        # After the clock: reading a count from the device is not a part of the step.
        total = run.bytes_sent(state, step + 1)
        if after is not None:
            state = after(state, step)
        yield Record(step + 1, loss, seconds, run.units_per_step / seconds, total - before, total), state
        before = total


def _make_evaluation(
    workload: Workload, mesh: jax.sharding.Mesh, batch_size: int, *, local: bool = False
) -> Callable[[TrainState], dict[str, float]]:
    """Makes `evaluate(state)`, the mean over the held-out batches."""
    workers = mesh.shape[AXIS]

    def evaluate_worker(state: TrainState, batch: Any) -> dict[str, Any]:
        return jax.lax.pmean(workload.metrics(_global_params(state) if local else state.params, batch), AXIS)

    # Compiled at the first evaluation, and once for each shape of a batch.
    metrics = evaluate(evaluate_worker, mesh, axis=AXIS)

    def place_batches() -> Iterator[Any]:
        for batch in workload.held_out(batch_size):
            # Drop the rows that do not divide among the workers.
            rows = len(jax.tree.leaves(batch)[0]) // workers * workers
            if rows:
                yield _place(jax.tree.map(lambda x, rows=rows: x[:rows], batch), mesh)

    def mean_over_batches(state: TrainState) -> dict[str, float]:
        # All batches have one size, so the mean of their means is that of the examples.
        results = [metrics(state, batch) for batch in place_batches()]
        if not results:
            raise ValueError(f"fewer held-out examples than the {workers} workers")
        return {name: float(np.mean([result[name] for result in results])) for name in results[0]}

    return mean_over_batches


def _global_params(state: TrainState) -> PyTree:
    """The last global parameters of workers that take local steps, or the mean if they are only ever paired."""
    try:
        return global_params(state.opt_state)
    # NoLoCo has no global parameters.
    except ValueError:
        return jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), state.params)


def _place(batch: Any, mesh: jax.sharding.Mesh) -> Any:
    """Places this process's rows of the batch, which is computed in full by every process."""
    count, index = jax.process_count(), jax.process_index()
    return global_batch(jax.tree.map(lambda rows: np.array_split(rows, count)[index], batch), mesh, axis=AXIS)

"""The training loop of the command line and the benchmarks."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from ... import analysis
from ..._core.types import PyTree
from ...local_sgd.state import global_params
from ...reducers.base import Reducer
from ...reducers.with_stats import with_stats
from ...runtime.distribute import distribute, evaluate
from ...runtime.mesh import global_batch
from ...state.placement import init_state
from ...transforms.stats import stats
from ..models.base import TrainingMethod, Workload, check_batch, parameters_of
from .offloaded import Offload
from .one_worker import OneWorker, one_worker
from .one_worker import TrainState as TrainState

AXIS = "data"


class _Program(NamedTuple):
    """What all runs of one compiled step share.

    Attributes:
      compiled: the step; with `any_period` its batch is `(batch, H)`.
      worker: the functions of one worker.
      most, least: bytes that a worker sends in the step, with the branches that send most and least.
      counted: true if the state counts the bytes.
    """

    workload: Workload
    worker: OneWorker
    mesh: jax.sharding.Mesh
    batch_size: int
    compiled: Callable[..., tuple[TrainState, dict[str, Any]]]
    any_period: bool
    most: float
    least: float
    counted: bool
    evaluate: Callable[[TrainState], dict[str, float]]
    compile_seconds: float

    def start(self, seed: int, sync_period: int | None, state: TrainState | None = None) -> "Run":
        """Makes the run of this seed and period, from its first state unless another is given."""
        state = _first_state(self.worker, self.mesh, seed) if state is None else state
        streamed = self.worker.streamed
        return Run(self, state, seed, sync_period, 0 if streamed is None else streamed.stats().step)


class Run(NamedTuple):
    """A workload, a reducer and an optimizer, compiled for a mesh.

    Attributes:
      program: the compiled step, shared by runs of other seeds and periods.
      state: the initial state.
      seed: draws the parameters and the batches.
      sync_period: `H`; None if the workers take no local steps.
      first: number of steps already done, by an earlier run whose state was on disk.
    """

    program: _Program
    state: TrainState
    seed: int
    sync_period: int | None
    first: int

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.program.mesh.shape[AXIS]

    @property
    def parameters(self) -> int:
        """Size of the model."""
        return parameters_of(self.program.workload)

    @property
    def units_per_step(self) -> int:
        """Tokens or images in a step, all workers together."""
        return self.program.batch_size * self.program.workload.units_per_example

    @property
    def compile_seconds(self) -> float:
        """Time to trace and compile."""
        return self.program.compile_seconds

    @property
    def wire_bytes(self) -> float:
        """Bytes that one worker sends in a step, read from the compiled program.

        The mean over a round for methods that synchronize every `H` steps; the maximum if the program decides from step
        to step.
        """
        most, least = self.program.most, self.program.least
        # Each fragment is synchronized once in a round; the other steps send the least.
        return most if self.sync_period is None else least + (most - least) / self.sync_period

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes a compiled step, which donates the state, and applies an optimizer on disk."""
        if self.program.any_period:
            return self.program.compiled(state, (batch, np.int32(self.sync_period)))
        state, metrics = self.program.compiled(state, batch)
        streamed = self.program.worker.streamed
        if streamed is not None:
            state = state._replace(params=streamed.apply(state.params, state.opt_state.means))
        return state, metrics

    def batch(self, step: int) -> Any:
        """The batch of a step, on the mesh."""
        return _place(self.program.workload.batch(self.seed, step, self.program.batch_size), self.program.mesh)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """The metrics, as means over the held-out split."""
        return self.program.evaluate(state)

    def sent(self, state: TrainState, count: int) -> float:
        """Bytes that one worker has sent in the first `count` steps; counted in the state if they differ."""
        return float(stats(state.opt_state)["bytes"]) if self.program.counted else count * self.wire_bytes

    def with_seed(self, seed: int) -> "Run":
        """The same compiled step with other parameters and batches."""
        return self.program.start(seed, self.sync_period)

    def with_period(self, sync_period: int) -> "Run":
        """The same compiled step with another `H`, if it was prepared for any."""
        return self.program.start(self.seed, sync_period)

    def close(self) -> None:
        """Releases the files of the run."""
        if self.program.worker.streamed is not None:
            self.program.worker.streamed.close()


class Record(NamedTuple):
    """The measurements of one step.

    Attributes:
      step: its number, from 1.
      loss: mean over all workers, before the step's update.
      seconds: wall-clock time of the step, with placing the batch and waiting for the result.
      units_per_second: tokens or images per second.
      wire_bytes: bytes sent by one worker in this step.
      total_wire_bytes: bytes sent by one worker until now.
    """

    step: int
    loss: float
    seconds: float
    units_per_second: float
    wire_bytes: float
    total_wire_bytes: float


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
) -> Run:
    """Builds and compiles a run. Runs that are compared differ only in how workers exchange gradients or models.

    Args:
      workload: the model and the data.
      reducer: averages the gradients; None if the optimizer communicates.
      optimizer: any optax transformation of the mean gradients.
      mesh: a mesh with an axis `"data"`.
      batch_size: examples in a step, all workers together; a multiple of the number of workers.
      seed: draws the parameters and the batches.
      sync_period: `H`, if workers take local steps and synchronize every `H` steps: parameters are then per-worker, and
        the last global parameters are evaluated.
      stage: of ZeRO: 1 and 2 shard the optimizer state over the workers, 3 the parameters too, gathered layer by layer.
        The reducer then needs a reduce-scatter form.
      any_period: makes `H` an argument of the compiled step, for `with_period`. The optimizer must take `sync_period=`
        in its update, as `local_steps` with a single fragment does.
      offload: keep the optimizer state in host memory or on disk. A folder with the state of an earlier run of the same
        model is resumed.

    Example:
      >>> import jaxdist as jd, optax
      >>> from jaxdist._cli.models import digits
      >>> from jaxdist._cli.training import train
      >>> mesh = jd.make_mesh({"data": 1})
      >>> run = train.prepare(digits.digits_workload(4), jd.exact(), optax.adam(1e-3), mesh=mesh, batch_size=8)
      >>> [record.step for record, state in train.steps(run, 2)]
      [1, 2]
    """
    check_batch(batch_size, mesh.shape[AXIS])
    worker = one_worker(workload, TrainingMethod(reducer, optimizer, sync_period, stage), offload, axis=AXIS)
    start = time.perf_counter()
    state, rows = _first_state(worker, mesh, seed), _place(workload.batch(seed, 0, batch_size), mesh)
    if any_period:
        specs = jax.sharding.PartitionSpec(AXIS), jax.sharding.PartitionSpec()
        distributed = distribute(partial(_step_with_period, worker), mesh, axis=AXIS, batch_specs=specs)
        compiled = distributed.lower(state, (rows, np.int32(1))).compile()
    else:
        compiled = distribute(worker.step, mesh, axis=AXIS).lower(state, rows).compile()
    compile_seconds = time.perf_counter() - start
    most, least = (float(analysis.collectives(compiled, branch=branch).wire_bytes) for branch in ("max", "min"))
    counted = most > least and "bytes" in stats(state.opt_state)
    if most > least and not counted and not sync_period:
        if reducer is None:
            raise ValueError("the bytes of this optimizer differ from step to step, and it does not count them")
        # Compiles again, with a reducer that counts.
        sizes = {"mesh": mesh, "batch_size": batch_size, "seed": seed}
        return prepare(workload, with_stats(reducer), optimizer, **sizes, stage=stage, offload=offload)
    evaluated = workload._replace(metrics=worker.metrics)
    evaluation = _make_evaluation(evaluated, mesh, batch_size, local=sync_period is not None)
    sizes = (workload, worker, mesh, batch_size)
    program = _Program(*sizes, compiled, any_period, most, least, counted, evaluation, compile_seconds)
    return program.start(seed, sync_period, state)


def _first_state(worker: OneWorker, mesh: jax.sharding.Mesh, seed: int) -> TrainState:
    state = init_state(lambda: worker.make_state(seed), mesh, axis=AXIS)
    return state if worker.streamed is None else state._replace(params=worker.streamed.init(state.params))


def _step_with_period(
    worker: OneWorker, state: TrainState, batch: tuple[Any, Any]
) -> tuple[TrainState, dict[str, Any]]:
    return worker.step(state, batch[0], sync_period=batch[1])


def steps(run: Run, count: int, *, first: int = 0) -> Iterator[tuple[Record, TrainState]]:
    """Trains, and yields each step's record and state.

    The step donates its state: a state that was yielded is invalid after the next step.

    Args:
      run: from `prepare`; `run.state` is the initial state, and is invalid afterwards.
      count: number of steps.
      first: number of steps already done, so that a resumed run gets the batches that follow.

    Yields:
      `(Record, TrainState)`.
    """
    state, before = run.state, run.sent(run.state, first)
    for step in range(first, first + count):
        start = time.perf_counter()
        state, metrics = run.step(state, run.batch(step))
        loss = float(metrics["loss"])
        seconds = time.perf_counter() - start
        total = run.sent(state, step + 1)
        yield Record(step + 1, loss, seconds, run.units_per_step / seconds, total - before, total), state
        before = total


def _make_evaluation(
    workload: Workload, mesh: jax.sharding.Mesh, batch_size: int, *, local: bool = False
) -> Callable[[TrainState], dict[str, float]]:
    """Makes `evaluate(state)`, the mean over the held-out batches."""
    workers = mesh.shape[AXIS]

    def evaluate_worker(state: TrainState, batch: Any) -> dict[str, Any]:
        return jax.lax.pmean(workload.metrics(_global_params(state) if local else state.params, batch), AXIS)

    metrics = evaluate(evaluate_worker, mesh, axis=AXIS)

    def place_batches() -> Iterator[Any]:
        for batch in workload.held_out(batch_size):
            # Drop the rows that do not divide among the workers.
            rows = len(jax.tree.leaves(batch)[0]) // workers * workers
            if rows:
                yield _place(jax.tree.map(lambda x, rows=rows: x[:rows], batch), mesh)

    def mean_over_batches(state: TrainState) -> dict[str, float]:
        results = [metrics(state, batch) for batch in place_batches()]
        if not results:
            raise ValueError(f"fewer held-out examples than the {workers} workers")
        return {name: float(np.mean([result[name] for result in results])) for name in results[0]}

    return mean_over_batches


def _global_params(state: TrainState) -> PyTree:
    """The last global parameters of workers that take local steps, or the mean if they are only ever paired."""
    try:
        return global_params(state.opt_state)
    except ValueError:  # NoLoCo has no global parameters
        return jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), state.params)


def _place(batch: Any, mesh: jax.sharding.Mesh) -> Any:
    """Places this process's rows of the batch, which is computed in full by every process."""
    count, index = jax.process_count(), jax.process_index()
    return global_batch(jax.tree.map(lambda rows: np.array_split(rows, count)[index], batch), mesh, axis=AXIS)

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
from ..models.base import Method, Workload, check_batch, parameters_of
from .offloaded import Offload, apply_after
from .one_worker import TrainState as TrainState
from .one_worker import one_worker

AXIS = "data"


class Run(NamedTuple):
    """A workload, a reducer and an optimizer, compiled for a mesh.

    Attributes:
      step: `step(state, batch) -> (state, metrics)`, compiled; it donates the state.
      state: the initial state.
      batch: `batch(n) -> Batch`, the batch of step `n`, on the mesh.
      evaluate: `evaluate(state) -> {"loss": float, ...}`, the mean over the held-out split.
      workers: number of workers.
      parameters: size of the model.
      wire_bytes: bytes that one worker sends in a step, read from the compiled program: the mean over a round for
        methods that synchronize every `H` steps, and the maximum if the program decides from step to step.
      sent: `sent(state, n)`, bytes that one worker has sent in `n` steps; counted step by step if they differ.
      units_per_step: tokens or images in a step, all workers together.
      first: number of steps already done, by an earlier run whose state was on disk.
      compile_seconds: time to trace and compile.
      close: releases the files of the run.
      with_seed: `with_seed(n) -> Run`, the same compiled step with other parameters and batches.
      with_period: `with_period(H) -> Run`, the same compiled step with another `H`; None if `H` is fixed.
    """

    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
    state: TrainState
    batch: Callable[[int], Any]
    evaluate: Callable[[TrainState], dict[str, float]]
    workers: int
    parameters: int
    wire_bytes: float
    sent: Callable[[TrainState, int], float]
    units_per_step: int
    first: int
    compile_seconds: float
    close: Callable[[], None]
    with_seed: Callable[[int], "Run"]
    with_period: Callable[[int], "Run"] | None


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
    workers = mesh.shape[AXIS]
    check_batch(batch_size, workers)
    method = Method(reducer, optimizer, sync_period, stage)
    make_state, train_step, metrics_fn, streamed = one_worker(workload, method, offload, axis=AXIS)

    def first_state(seed: int) -> TrainState:
        state = init_state(lambda: make_state(seed), mesh, axis=AXIS)
        return state if streamed is None else state._replace(params=streamed.init(state.params))

    def step_with_period(state: TrainState, batch: tuple[Any, Any]) -> tuple[TrainState, dict[str, Any]]:
        return train_step(state, batch[0], sync_period=batch[1])

    def batch(seed: int, step: int) -> Any:
        return _place(workload.batch(seed, step, batch_size), mesh)

    start = time.perf_counter()
    state, rows = first_state(seed), batch(seed, 0)
    if any_period:
        specs = jax.sharding.PartitionSpec(AXIS), jax.sharding.PartitionSpec()
        distributed = distribute(step_with_period, mesh, axis=AXIS, batch_specs=specs)
        compiled = distributed.lower(state, (rows, np.int32(1))).compile()
    else:
        compiled = distribute(train_step, mesh, axis=AXIS).lower(state, rows).compile()
    compile_seconds = time.perf_counter() - start
    most, least = (float(analysis.collectives(compiled, branch=branch).wire_bytes) for branch in ("max", "min"))
    counted = most > least and "bytes" in stats(state.opt_state)
    if most > least and not counted and not sync_period:
        if reducer is None:
            raise ValueError(
                "this optimizer sends different numbers of bytes in different steps and does not count them"
            )
        # Compiles again, with a reducer that counts.
        sizes = {"mesh": mesh, "batch_size": batch_size, "seed": seed}
        return prepare(workload, with_stats(reducer), optimizer, **sizes, stage=stage, offload=offload)
    evaluation = _make_evaluation(
        workload._replace(metrics=metrics_fn), mesh, batch_size, local=sync_period is not None
    )

    def make_run(state: TrainState, seed: int, sync_period: int | None) -> Run:
        # Each fragment is synchronized once in a round; the other steps send the least.
        wire_bytes = most if sync_period is None else least + (most - least) / sync_period
        period = None if sync_period is None else np.int32(sync_period)

        def sent(state: TrainState, count: int) -> float:
            return float(stats(state.opt_state)["bytes"]) if counted else count * wire_bytes

        return Run(
            step=(lambda state, rows: compiled(state, (rows, period)))
            if any_period
            else apply_after(compiled, streamed),
            state=state,
            batch=partial(batch, seed),
            evaluate=evaluation,
            workers=workers,
            parameters=parameters_of(workload),
            wire_bytes=wire_bytes,
            sent=sent,
            units_per_step=batch_size * workload.units_per_example,
            first=0 if streamed is None else streamed.stats().step,
            compile_seconds=compile_seconds,
            close=(lambda: None) if streamed is None else streamed.close,
            with_seed=lambda seed: make_run(first_state(seed), seed, sync_period),
            with_period=(lambda period: make_run(first_state(seed), seed, period)) if any_period else None,
        )

    return make_run(state, seed, sync_period)


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

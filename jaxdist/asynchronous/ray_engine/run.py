"""Runs a rule on real processes: the arguments, and the connection to Ray."""

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from ..._core.checks import check_range
from ..._core.types import Number
from ..protocol import Rule
from ..replay.base import Result, Task
from .driver import Driver, RunOptions, Status


def run(
    rule: Rule,
    task: Task,
    *,
    workers: int,
    seconds: Number | None = None,
    steps: int | None = None,
    gradients: int | None = None,
    target: Number | None = None,
    seed: int = 0,
    evaluate_every: Number | None = None,
    slow: Mapping[int, Number] | None = None,
    on_death: Literal["restart", "continue"] = "restart",
    restarts: int = 3,
    timeout: Number = 60.0,
    address: str | None = None,
    resources: Mapping[str, Any] | None = None,
    progress: Callable[[Status], None] | None = None,
) -> Result:
    """Runs a rule on Ray actors: one process per worker and one for the server, on wall time.

    Rules, tasks and results are those of `replay.run`; a tick of the trace is a nanosecond. A process that dies is
    replaced by one that continues from its stored state.

    *On the wire*: the rule's messages; to the state store, the arrays of each state that changed.

    Args:
      rule: from `asynchronous.rules`, or your own.
      task: model and data. Ray pickles its functions.
      workers: their number.
      seconds: stop after this wall time, from when all processes are ready.
      steps: stop after this number of updates of the model.
      gradients: stop after this number of arrived gradients.
      target: stop at an evaluation at or below this loss.
      seed: of data and random choices.
      evaluate_every: seconds between evaluations in this process, starting at 0; None for none.
      slow: `{worker: factor}`: sleeps until a gradient took `factor` times as long. For demonstrations.
      on_death: of a worker: `"restart"` it, or `"continue"` without it, for rules with a server. A server is always
        restarted.
      restarts: restarts of each process before the run fails.
      timeout: seconds until a silent process counts as dead, and a run without progress as stalled.
      address: of a Ray cluster, such as `"auto"` or `"10.0.0.1:6379"`; None: the connected one, or a new one for this
        run.
      resources: of each worker, as for Ray's `Actor.options`; by default one CPU and no accelerator.
      progress: called about ten times a second.

    Returns:
      The `Result`, as from a replay; `params` and `losses` are of stored states.

    Raises:
      ValueError: Ray is not installed or does not answer.
      ActorLostError: a process could not be started, or died too often.
      StalledError: no process makes progress.
      NonFiniteGradientError: a worker's gradient contains a NaN or an infinity.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import ray_engine, replay, rules
      >>> task = replay.Task({"w": np.zeros(3)}, lambda x, batch: ((x["w"] - batch) ** 2).sum(), lambda *job: 1.0)
      >>> run = ray_engine.run(rules.asgd(optax.sgd(0.1)), task, workers=2, steps=100)  # doctest: +SKIP
      >>> run.params["w"].round(2).tolist()  # doctest: +SKIP
      [1.0, 1.0, 1.0]

    References:
      Moritz et al., "Ray: a distributed framework for emerging AI applications", arXiv:1712.05889, 2017; Elnozahy,
      Alvisi, Wang, Johnson, "A survey of rollback-recovery protocols in message-passing systems", 2002 (states
      are stored before messages are sent).
    """
    options = RunOptions(
        rule=rule,
        task=task._replace(params=jax.tree.map(np.asarray, task.params)),
        workers=workers,
        seconds=seconds,
        steps=steps,
        gradients=gradients,
        target=target,
        seed=seed,
        evaluate_every=evaluate_every,
        slow={worker: float(factor) for worker, factor in (slow or {}).items()},
        on_death=on_death,
        restarts=restarts,
        timeout=float(timeout),
        resources=resources or {},
        progress=progress,
    )
    _check(options)
    with _connect(address, workers + 1) as ray:
        driver = Driver(ray, options)
        try:
            return driver.run()
        finally:
            driver.close()


def _check(options: RunOptions) -> None:
    check_range("workers", options.workers, 1, ends="[]")
    _check_stopping(options)
    for name in ("evaluate_every", "timeout", "seconds"):
        value = getattr(options, name)
        if value is not None:
            check_range(name, value, 0, ends="(]")
    for name in ("seed", "restarts"):
        check_range(name, getattr(options, name), 0, ends="[]")
    for worker, factor in options.slow.items():
        if not (0 <= worker < options.workers and factor >= 1):
            raise ValueError(
                f"slow must map workers below {options.workers} to factors of at least 1, got {worker}: {factor}"
            )
    if options.on_death not in ("restart", "continue"):
        raise ValueError(f"on_death must be 'restart' or 'continue', got {options.on_death!r}")
    if options.on_death == "continue" and options.rule.server is None:
        raise ValueError(
            f"on_death='continue' needs a rule with a server, and {options.rule.name} has none: use 'restart'"
        )


def _check_stopping(options: RunOptions) -> None:
    if options.seconds is None and options.steps is None and options.gradients is None and options.target is None:
        raise ValueError("no stopping criterion: pass seconds=, steps=, gradients= or target=")
    if options.target is not None and options.evaluate_every is None:
        raise ValueError(f"target={options.target} needs evaluate_every=")
    if options.target is not None:
        check_range("target", options.target, -math.inf)
    if options.evaluate_every is not None and options.task.evaluate is None:
        raise ValueError(f"evaluate_every={options.evaluate_every} needs a task with evaluate=")


@contextlib.contextmanager
def _connect(address: str | None, places: int) -> Iterator[Any]:
    """Uses Ray as it is, connects to an address, or starts Ray on this machine until the end of the block."""
    # Otherwise Ray warns about its next version.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("ray_engine needs Ray: pip install '.[ray]' in a clone of jaxdist") from None
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray is initialized already: omit address={address!r}, or call ray.shutdown() first")
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # At Ray's default niceness of 15 other programs on this machine would starve the workers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        quiet |= {"address": "local", "num_cpus": max(places, os.cpu_count() or 1), "include_dashboard": False}
    else:
        quiet |= {"address": address}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**quiet)
    except ConnectionError as problem:
        raise ValueError(f"no Ray cluster answers at address={address!r}: {problem}") from None
    try:
        yield ray
    finally:
        ray.shutdown()

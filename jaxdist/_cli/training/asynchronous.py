"""Asynchronous training of a workload: the task of each worker, and the staleness and events of a finished run."""

import json
from functools import partial
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from ...asynchronous import replay
from ..models.base import Workload
from ..models.digits import Digits, equal_parts, splits
from ..spellings.grammar import parse_call


def make_task(workload: Workload, *, batch: int, seed: int, workers: int, skew: float | None = None) -> replay.Task:
    """Makes the task of the workers, with batches drawn from (seed, worker, job), evaluated on the held-out data.

    With `skew`, for digits, each worker has its own mixture of labels, with this concentration.
    """

    def draw_alike(seed: int, worker: int, job: int) -> Any:
        # One step number for each pair of job and worker.
        return workload.batch(seed, (job << 24) | worker, batch)

    def draw_own(train: Digits, parts: list[np.ndarray], seed: int, worker: int, job: int) -> Digits:
        # Each worker draws from its own part alone, which makes the data of the workers differ.
        rows = np.random.default_rng((seed, worker, job)).choice(parts[worker], batch)
        return Digits(train.images[rows], train.labels[rows])

    draw_batch = draw_alike
    if skew is not None:
        if workload.name != "digits":
            raise ValueError(f"--skew is for the workload 'digits', got {workload.name!r}")
        train, _ = splits()
        draw_batch = partial(draw_own, train, equal_parts(train.labels, workers, concentration=skew))

    # Held-out batches and the compiled metrics are made once, for all evaluations of all rules.
    held_out = workload.held_out(256)
    metrics = jax.jit(workload.metrics)

    def evaluate(params: Any) -> Any:
        return jnp.mean(jnp.stack([metrics(params, rows)["loss"] for rows in held_out]))

    return replay.Task(workload.init(jax.random.key(seed)), workload.loss, draw_batch, evaluate)


def staleness(name: str, trace: replay.Trace) -> np.ndarray:
    """The staleness of each gradient used: in versions of the model, or for `ad_psgd`, which has none, in gradients."""
    return replay.peer_delays(trace) if parse_call(name)[0] == "ad_psgd" else replay.delays(trace)


def write_events(name: str, run: replay.Result, log: TextIO) -> None:
    """Writes each event as a line of JSON, with the rule's name first."""
    for line in replay.event_lines(run.trace):
        # Spliced as text: the lines are JSON already, and there are many.
        log.write(json.dumps({"rule": name})[:-1] + ", " + line[1:] + "\n")

"""Islands that are killed, late or new: the held-out loss beside synchronous training at equal tokens.

    python benchmarks/islands quality --out benchmarks/reports/NAME

A small GPT trains synchronously for a fifth of its steps, and from there on synchronously, as islands that nothing
disturbs, and as islands with churn, for each number of islands, each `H` and each number of fragments. All of them
divide the same windows of text. Islands are threads over a store in memory, on the clock of the tests, which only
sleeps move: a step takes a second of it, so that nothing depends on the speed of the machine. Without churn islands do
what `local_steps` does on a mesh, which is faster; the condition `islands` shows that.

Rows are written when they are measured, and those that the file has are not measured again. The tables of the report
are printed at the end.
"""

import argparse
import functools
import json
import logging
import statistics
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import ROOT, append_rows

sys.path.insert(0, str(ROOT / "tests" / "support"))

from island_stores import KilledError, wrap
from virtual_clock import VirtualClock

import jaxdist as jd
from jaxdist._cli.models.base import parameters_of
from jaxdist._cli.spellings import parse

# What happens in each condition. The others are for one cell, and tell which kind of churn costs what.
CONDITIONS = {
    "undisturbed": None,
    "churn": ("kill", "late", "join"),
    "islands": (),
    "kills": ("kill",),
    "late": ("late",),
    "joins": ("join",),
}
# How long an island is away after a kill, or late: seconds of the clock, and so steps.
AWAY = (64, 128)
# Longer than an island that returns amid a round is apart from the others; in times between two meetings.
TIMEOUT = 1.5
QUORUM = 1
CELL = ("islands", "period", "fragments")
KEY = ("condition", "seed", *CELL, "timeout", "quorum")


class Task(NamedTuple):
    """What all runs of a seed share."""

    workload: Any
    # uint8 `[steps, 2 batch, context + 1]`, after the start; the second half is for islands that join.
    windows: np.ndarray
    # After the synchronous start; `inner` goes on with its schedule.
    params: Any
    moments: Any
    inner: optax.GradientTransformation

    @property
    def batch(self) -> int:
        """The examples of a step, all islands together."""
        return self.windows.shape[1] // 2

    def examples(self, steps: slice, first: int, size: int) -> np.ndarray:
        """Of each of these steps so many windows, from the `first` on."""
        return self.windows[steps, first : first + size]

    def evaluate(self, params: Any) -> float:
        """The held-out loss."""
        batches = self.workload.held_out(256)
        return statistics.mean(float(self.workload.metrics(params, batch)["loss"]) for batch in batches)


class Event(NamedTuple):
    """A kill or a delay of an island, in its first meeting from a step of the run on.

    A kill strikes before the meeting's call number `call` of the store, so before or after the drift is sent.
    """

    step: int
    kind: str
    seconds: float
    call: int


class Life(NamedTuple):
    """From which step of the run, and until which, an island is there, and what happens to it."""

    first: int
    last: int
    events: list[Event]


def draw_lives(rng: np.random.Generator, islands: int, steps: int, kinds: tuple[str, ...]) -> list[Life]:
    """The lives of all islands: each is killed once and late once, and one more for each four joins for a third."""
    lives = []
    for _ in range(islands):
        # In the last tenth nothing happens, as each has to return.
        drawn = [
            (int(rng.integers(steps // 20, steps * 9 // 10)), kind, float(rng.integers(*AWAY)), int(rng.integers(20)))
            for kind in ("kill", "late")
        ]
        lives.append(Life(0, steps, sorted(Event(*event) for event in drawn if event[1] in kinds)))
    for _ in range(max(1, islands // 4)):
        first = int(rng.integers(steps // 20, steps // 2))
        if "join" in kinds:
            lives.append(Life(first, first + steps // 3, []))
    return lives


# The same transformations and programs for all seeds, so that each is traced and compiled once.


@functools.cache
def make_inner(rate: float, steps: int, first: int) -> optax.GradientTransformation:
    """AdamW with the cosine of the run, from a step on."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 100, steps, 0.05 * rate)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda count: schedule(count + first), b2=0.99))


@functools.cache
def make_method(inner: optax.GradientTransformation, period: int, fragments: int, **where: Any):
    """DiLoCo as the recipe has it after a synchronous start, in 4 bits with error feedback."""
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    options = {"learning_rate": 0.7, "momentum": 0.9, "reducer": reducer, "fragments": fragments}
    return jd.local_sgd.diloco(inner, sync_period=period, **options, **where)


@functools.cache
def make_train(loss: Any, tx: optax.GradientTransformation, **arguments: Any):
    """Compiles `train(state, windows)`, a step for each of the first dimension of the windows."""

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params, **arguments)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.jit(lambda state, windows: jax.lax.scan(step, state, windows)[0])


@functools.cache
def make_mesh_train(loss: Any, tx: optax.GradientTransformation, islands: int):
    """As `make_train`, for simulated workers."""

    def step(state, batch):
        params, opt_state = state
        _, gradients = jd.local_value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.jit(lambda state, windows: jax.lax.scan(jd.simulate(step, islands), state, windows)[0])


def prepare(workload: Any, options: argparse.Namespace, seed: int) -> Task:
    """A task after its synchronous start."""
    windows = np.stack([workload.batch(seed, step, 2 * options.batch) for step in range(options.steps)])
    rate, steps, start = options.rate, options.steps, options.steps // 5
    inner, params = make_inner(rate, steps, 0), workload.init(jax.random.key(seed))
    train = make_train(workload.loss, inner)
    params, moments = train((params, inner.init(params)), windows[:start, : options.batch])
    return Task(workload, windows[start:], params, _restart_schedules(moments), make_inner(rate, steps, start))


def _restart_schedules(moments: Any) -> Any:
    """Islands count the steps of their run, which begins after the start."""

    def is_schedule(state):
        return isinstance(state, optax.ScaleByScheduleState)

    def restart(state):
        return state._replace(count=jnp.zeros_like(state.count)) if is_schedule(state) else state

    return jax.tree.map(restart, moments, is_leaf=is_schedule)


def begin(task: Task, tx: optax.GradientTransformation, *, moments: bool) -> Any:
    """The first state, with or without the moments of the synchronous start."""
    opt_state = tx.init(task.params)
    if moments:
        inner = jax.tree.unflatten(jax.tree.structure(opt_state.inner), jax.tree.leaves(task.moments))
        opt_state = opt_state._replace(inner=inner)
    return task.params, opt_state


def train_mesh(task: Task, islands: int, period: int, fragments: int) -> Any:
    """What undisturbed islands do, by `local_steps` on simulated workers; returns the last global parameters."""
    tx = make_method(task.inner, period, fragments)
    params, opt_state = begin(task, tx, moments=True)
    state = jd.place((jd.PerWorker(params), opt_state), islands)
    train = make_mesh_train(task.workload.loss, tx, islands)
    return jd.local_sgd.global_params(train(state, task.windows[:, : task.batch])[1])


class Fleet:
    """The islands of a run, in threads of which one at a time is awake."""

    def __init__(
        self, task: Task, lives: list[Life], *, islands: int, period: int, fragments: int, timeout: float, quorum: int
    ):
        self._task, self._lives, self._islands = task, lives, islands
        # Steps between two meetings.
        self._interval, self._size = period // fragments, task.batch // islands
        self._tx = make_method(task.inner, period, fragments, axis=None)
        self._train = make_train(task.workload.loss, self._tx, sync=())
        self._options: dict[str, Any] = {
            "round_timeout": timeout * self._interval,
            "quorum": quorum,
            "keep_every": 10 * fragments,
        }
        self._store, self._clock = jd.islands.memory(), VirtualClock(len(lives))
        self._problems: list[BaseException] = []
        # At the end of the run, as the first island to reach it has them.
        self.global_params: Any = None
        self.reports: list[jd.islands.Report] = []
        self.examples, self.happened = 0, dict.fromkeys(("kill", "late", "join"), 0)

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self._clock.rule(patch)
            threads = [
                threading.Thread(target=self._live, args=(number,), daemon=True) for number in range(len(self._lives))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._problems:
            raise self._problems[0]

    def _live(self, number: int) -> None:
        life = self._lives[number]
        events, is_first = list(life.events), life.first == 0
        try:
            # One after another, so that the order of events is always the same.
            self._clock.sleep(life.first + 1e-3 * (1 + number))
            self.happened["join"] += not is_first
            while (away := self._stay(number, life.last, events, is_first=is_first)) is not None:
                self._clock.sleep(away)
                is_first = False
        except BaseException as problem:
            self._problems.append(problem)
        finally:
            self._clock.leave()

    def _stay(self, number: int, last: int, events: list[Event], *, is_first: bool) -> float | None:
        """Trains until a kill, then returns the seconds for which the island is away, or to the end.

        It has no checkpoint: an island that returns begins its inner optimizer anew, which is the worst case.
        """
        calls_left = away = None

        def call(index, name, function, arguments):
            nonlocal calls_left
            if calls_left is not None:
                calls_left -= 1
                if calls_left < 0:
                    raise KilledError
            return function(*arguments)

        begin_with = self._islands if is_first else 1
        store, options = wrap(self._store, call), {"name": f"island{number}", "begin_with": begin_with, **self._options}
        with suppress(KilledError), jd.islands.join(store, self._tx, **options) as island:
            state = island.enter(begin(self._task, self._tx, moments=is_first))
            while self.global_params is None and (step := island.round * self._interval) < last:
                self._clock.sleep(self._interval)
                steps = slice(step, step + self._interval)
                state = self._train(state, self._task.examples(steps, number * self._size, self._size))
                self.examples += self._size * self._interval
                if events and events[0].step <= step:
                    event = events.pop(0)
                    self.happened[event.kind] += 1
                    if event.kind == "late":
                        self._clock.sleep(event.seconds)
                    else:
                        away, calls_left = event.seconds, event.call
                if self.global_params is None:
                    state, report = island.meet(state)
                    self.reports.append(report)
                    self._note_end(island.round, state)
                if away is not None:
                    calls_left = 0
                    raise KilledError
        return away

    def _note_end(self, rounds: int, state: Any) -> None:
        if self.global_params is None and rounds * self._interval >= len(self._task.windows):
            assert rounds * self._interval == len(self._task.windows)
            self.global_params = jd.local_sgd.global_params(state[1])


def measure_synchronous(task: Task) -> dict[str, Any]:
    """The row of synchronous training to the end, without what names it."""
    state = make_train(task.workload.loss, task.inner)((task.params, task.moments), task.windows[:, : task.batch])
    sizes = {"steps": len(task.windows), "batch": task.batch, "parameters": parameters_of(task.workload)}
    return {"loss": task.evaluate(state[0]), "tokens_per_example": task.workload.units_per_example, **sizes}


def measure_cell(
    task: Task, condition: str, seed: int, islands: int, period: int, fragments: int, timeout: float, quorum: int
) -> dict[str, Any]:
    """The row of a condition in a cell, without what names it."""
    kinds = CONDITIONS[condition]
    if kinds is None:
        return {"loss": task.evaluate(train_mesh(task, islands, period, fragments))}
    lives = draw_lives(np.random.default_rng([seed, islands]), islands, len(task.windows), kinds)
    settings = {"islands": islands, "period": period, "fragments": fragments, "timeout": timeout, "quorum": quorum}
    fleet = Fleet(task, lives, **settings)
    fleet.run()
    tokens = fleet.examples * task.workload.units_per_example
    return {
        "loss": task.evaluate(fleet.global_params),
        # Of those of synchronous training.
        "tokens": fleet.examples / (task.batch * len(task.windows)),
        "sent_bytes_per_token": sum(report.sent_bytes for report in fleet.reports) / tokens,
        "received_bytes_per_token": sum(report.received_bytes for report in fleet.reports) / tokens,
        "mean_members": statistics.mean(len(report.members) for report in fleet.reports if report.counted),
        **fleet.happened,
    }


def read_rows(folder: Path | None) -> list[dict[str, Any]]:
    """The rows of the file; none if there is none."""
    path = folder and folder / "quality.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def keys_of(options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """What names the rows to measure: those with the fewest meetings first, and all seeds of a cell together."""
    cells = product(options.islands, options.periods, options.fragments)
    cells = sorted(cells, key=lambda cell: cell[0] * cell[2] / cell[1])
    keys = product(cells, options.seeds, options.conditions)
    synchronous = [("synchronous", seed) for seed in options.seeds]
    return [
        *synchronous,
        *((condition, seed, *cell, options.timeout, options.quorum) for cell, seed, condition in keys),
    ]


def measure(options: argparse.Namespace) -> None:
    """Measures what the file does not have."""
    done = {tuple(row[name] for name in KEY if name in row) for row in read_rows(options.out)}
    workload, tasks = parse.parse_workload("text", options.model), dict[int, Task]()
    for key in keys_of(options):
        if key in done:
            continue
        seed = key[1]
        task = tasks[seed] = tasks.get(seed) or prepare(workload, options, seed)
        began = time.process_time()
        found = measure_cell(task, *key) if key[2:] else measure_synchronous(task)
        seconds = round(time.process_time() - began, 1)
        row = {**dict(zip(KEY, key, strict=False)), **found, "processor_seconds": seconds}
        print(json.dumps(row), flush=True)
        append_rows(options.out, "quality", [row])


def make_table(rows: list[dict[str, Any]]) -> str:
    """A row for each cell: losses above synchronous training, and bytes of an island for each token that it trained on.

    Losses are means over seeds. Synchronous training sends as a ring of as many workers as there are islands.
    """
    synchronous = {row["seed"]: row for row in rows if row["condition"] == "synchronous"}
    whole = next(iter(synchronous.values()))
    lines = [
        "| islands | `H` | fragments | seeds | undisturbed | with churn | churn / undisturbed, mean (most) | tokens "
        "| synchronous: bytes a token | islands: sent | received |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell, churned in sorted(_by_cell(rows, "churn").items()):
        calm = {row["seed"]: row["loss"] for row in _by_cell(rows, "undisturbed")[cell]}
        above = [100 * (calm[row["seed"]] / synchronous[row["seed"]]["loss"] - 1) for row in churned]
        churn_above = [100 * (row["loss"] / synchronous[row["seed"]]["loss"] - 1) for row in churned]
        ratios = [row["loss"] / calm[row["seed"]] for row in churned]
        tokens, sent, received = (
            statistics.mean(row[name] for row in churned)
            for name in ("tokens", "sent_bytes_per_token", "received_bytes_per_token")
        )
        # 8 n (W - 1) / W bytes a step, for a share of its tokens.
        ring = 8 * whole["parameters"] * (cell[0] - 1) / (whole["batch"] * whole["tokens_per_example"])
        lines.append(
            f"| {' | '.join(map(str, cell))} | {len(churned)} | {statistics.mean(above):+.1f} % "
            f"| {statistics.mean(churn_above):+.1f} % | {statistics.mean(ratios):.3f} ({max(ratios):.3f}) "
            f"| {tokens:.0%} | {ring:,.0f} | {sent:.1f} | {received:.1f} |"
        )
    return "\n".join(lines)


def make_settings_table(rows: list[dict[str, Any]]) -> str:
    """What other conditions and settings do, in the cells in which any was measured: losses beside undisturbed ones."""
    lines = [
        "| islands | `H` | fragments | what happens | `round_timeout`, in rounds | `quorum` | seeds "
        "| loss / undisturbed, mean (most) | tokens |",
        "|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    undisturbed = {
        (cell, row["seed"]): row["loss"] for cell, found in _by_cell(rows, "undisturbed").items() for row in found
    }
    groups = defaultdict(list)
    for row in rows:
        if row["condition"] not in ("synchronous", "undisturbed"):
            groups[_cell_of(row), row["condition"], row["timeout"], row["quorum"]].append(row)
    others = {cell for cell, *setting in groups if setting != ["churn", TIMEOUT, QUORUM]}
    for (cell, condition, timeout, quorum), found in sorted(groups.items()):
        if cell not in others:
            continue
        ratios = [row["loss"] / undisturbed[cell, row["seed"]] for row in found]
        lines.append(
            f"| {' | '.join(map(str, cell))} | {condition} | {timeout:g} | {quorum} | {len(found)} "
            f"| {statistics.mean(ratios):.3f} ({max(ratios):.3f}) "
            f"| {statistics.mean(row['tokens'] for row in found):.0%} |"
        )
    return "\n".join(lines)


def _cell_of(row: dict[str, Any]) -> tuple[int, ...] | None:
    return tuple(row[name] for name in CELL) if CELL[0] in row else None


def _by_cell(rows: list[dict[str, Any]], condition: str) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """The rows of a condition with the default settings, by cell."""
    found = defaultdict(list)
    for row in rows:
        if row["condition"] == condition and (row["timeout"], row["quorum"]) == (TIMEOUT, QUORUM):
            found[_cell_of(row)].append(row)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt:tiny,layers=1,width=32,context=32,heads=2")
    parser.add_argument("--steps", type=int, default=2560, help="with the synchronous start, a fifth of them")
    parser.add_argument("--batch", type=int, default=16, help="examples of a step, all islands together")
    parser.add_argument("--rate", type=float, default=8e-3, help="of AdamW at its highest")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--periods", type=int, nargs="+", default=[16, 64], help="H")
    parser.add_argument("--fragments", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--conditions", nargs="+", default=["undisturbed", "churn"], choices=CONDITIONS)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="round_timeout, in times between two meetings")
    parser.add_argument("--quorum", type=int, default=QUORUM, help="the fewest drifts that make a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    jax.config.update("jax_platforms", "cpu")
    # Islands that are late are what this is about.
    logging.getLogger("jaxdist.islands").setLevel(logging.ERROR)
    measure(given)
    rows = read_rows(given.out)
    print(make_table(rows), make_settings_table(rows), sep="\n\n")

"""What the commands share: devices, the loop over a run with its log, titles and folders."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..processes.preemption import preemption_requested
from ..runtime.mesh import make_mesh, use_cpu_devices
from . import results
from .models.base import Workload
from .options import Options
from .plotting.figures import in_bytes
from .spellings import parse
from .training import train

SIMULATED_DEVICES = 4


def set_up(options: Options, devices: int | None = None) -> tuple[Workload, jax.sharding.Mesh]:
    """Makes the workload and a mesh over the devices; on a CPU, first makes that many devices of it."""
    devices = devices or options.devices
    for name in ("steps", "batch", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        with contextlib.suppress(ValueError):  # JAX runs already: use its devices
            use_cpu_devices(devices or SIMULATED_DEVICES)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise ValueError(f"--devices={count} requested, but only {jax.device_count()} devices are available")
    workload = parse.parse_workload(options.workload, options.model, path=options.text)
    return workload, make_mesh({train.AXIS: count}, devices=jax.devices()[:count])


def new_console() -> Console:
    """A console as wide as the terminal; in a file, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def print_paths(console: Console, **paths: Path) -> None:
    """Prints each path behind its name, without wrapping."""
    for name, path in paths.items():
        console.print(f"{name} {path}", highlight=False, soft_wrap=True)


def prepare_runs(
    names: Sequence[str], options: Options, workload: Workload, mesh: jax.sharding.Mesh, **settings: Any
) -> Iterator[tuple[str, train.Run]]:
    """Checks all spellings now; compiles one run after the other later, so that only one state is in memory."""
    methods = [(name, parse.parse_method(name, options.optimizer)) for name in names]
    settings |= {"mesh": mesh, "batch_size": options.batch, "seed": options.seed}
    return ((name, train.prepare(workload, **method._asdict(), **settings)) for name, method in methods)


def train_to_end(
    name: str,
    run: train.Run,
    options: Options,
    workload: Workload,
    log: TextIO,
    console: Console,
    *,
    evaluate_every: int | None = None,
    save: Callable[[train.TrainState, int], None] | None = None,
    save_every: int | None = None,
) -> tuple[results.RunResult, train.TrainState]:
    """Trains with a progress bar and logs every step.

    With `save`, it saves every `save_every` steps, and at a signal such as SIGTERM, after which it exits.
    """
    settings = {"reducer": name, "optimizer": options.optimizer, "workload": workload.name, "model": options.model}
    settings |= {"batch": options.batch, "seed": options.seed, "steps": options.steps}
    results.write_line(log, results.header(run, **settings))
    if run.first >= options.steps:
        raise ValueError(f"the resumed run has already done {run.first} steps: --steps must be larger")
    records, evaluations, state = [], [], run.state
    columns = [TextColumn(f"{name:<15}"), BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=options.steps, completed=run.first, now="")
        for record, state in train.steps(run, options.steps - run.first, first=run.first):
            records.append(record)
            results.write_line(log, {"kind": "step", "reducer": name, **record._asdict()})
            speed, size = record.units_per_second, in_bytes(record.wire_bytes)
            now = f"loss {record.loss:.3f} {speed:7,.0f} {workload.unit}/s {size}/step"
            progress.update(bar, advance=1, now=now)
            if save is not None:
                stop = preemption_requested(record.step)
                if stop or (save_every and record.step % save_every == 0):
                    save(state, record.step)
                if stop:
                    console.print(f"received a signal: saved and left after step {record.step} of {options.steps}")
                    raise SystemExit(0)
            if evaluate_every and record.step % evaluate_every == 0:
                found = results.Evaluation(record.step, record.total_wire_bytes, run.evaluate(state))
                evaluations.append(found)
                results.write_line(log, {"kind": "evaluation", "reducer": name, **found._asdict()})
        sent = records[-1].total_wire_bytes / options.steps
        held_out = run.evaluate(state)
        result = results.RunResult(name, tuple(records), held_out, sent, run.compile_seconds, tuple(evaluations))
    results.write_line(log, {"kind": "summary", "reducer": name, **results.summarize(result)._asdict()})
    return result, state


def title_of(options: Options, run: train.Run) -> str:
    """The line above plots and tables: model, data, size and settings."""
    size = f"{run.parameters / 1e6:.2f} M parameters"
    last = options.seed + getattr(options, "seeds", 1) - 1
    seeds = f"seed {options.seed}" if last == options.seed else f"seeds {options.seed} to {last}"
    what = {"text": "byte-level GPT", "digits": "convolutional net on digits"}[options.workload]
    if options.workload == "text":
        what += f" on {options.text or 'the standard library of Python'}"
    return f"{what}, {size}, {run.workers} workers, batch {options.batch}, {options.optimizer}, {seeds}"


def unit_of(workload: Workload) -> str:
    """The unit of the loss."""
    return "nats per byte" if workload.name == "text" else "nats"


def path_in(folder: Path, name: str) -> Path:
    """The path of a file in a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name

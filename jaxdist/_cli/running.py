"""What the commands share: devices, the runs and their log, and how they are called."""

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
from .plotting import plots
from .spellings import methods, parse
from .training import train

SIMULATED_DEVICES = 4


def set_up(options: Options, devices: int | None = None) -> tuple[Workload, jax.sharding.Mesh]:
    """The workload and a mesh over the devices; on a machine with a CPU alone its devices are made here, so many."""
    devices = devices or options.devices
    for name in ("steps", "batch", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    told = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told:
        with contextlib.suppress(ValueError):  # JAX runs already: take the devices that it has
            use_cpu_devices(devices or SIMULATED_DEVICES)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise ValueError(f"--devices {count}: there are {jax.device_count()}")
    workload = parse.parse_workload(options.workload, options.model, path=options.text)
    return workload, make_mesh({train.AXIS: count}, devices=jax.devices()[:count])


def new_console() -> Console:
    """As wide as the terminal; in a file, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def prepared_runs(
    names: Sequence[str], options: Options, workload: Workload, mesh: jax.sharding.Mesh, **settings: Any
) -> Iterator[tuple[str, train.Run]]:
    """Checks all spellings now; compiles one run after the other later, so that only one state is alive."""
    spelled = [(name, methods.parse_method(name, options.optimizer)) for name in names]
    settings |= {"mesh": mesh, "batch_size": options.batch, "seed": options.seed}
    return ((name, train.prepare(workload, **method._asdict(), **settings)) for name, method in spelled)


def finish(
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
) -> tuple[results.Result, train.TrainState]:
    """Trains to the end behind a progress bar and writes every step to the log. What saves does so at SIGTERM, too."""
    settings = {"reducer": name, "optimizer": options.optimizer, "workload": workload.name, "model": options.model}
    settings |= {"batch": options.batch, "seed": options.seed, "steps": options.steps}
    results.write_line(log, results.header(run, **settings))
    if run.first >= options.steps:
        raise ValueError(f"the run that goes on has {run.first} steps behind it: --steps must be more")
    records, evaluations, state = [], [], run.state
    columns = [TextColumn(f"{name:<15}"), BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=options.steps, completed=run.first, now="")
        for record, state in train.steps(run, options.steps - run.first, first=run.first):
            records.append(record)
            results.write_line(log, {"kind": "step", "reducer": name, **record._asdict()})
            speed, size = record.units_per_second, plots.in_bytes(record.wire_bytes)
            now = f"loss {record.loss:.3f} {speed:7,.0f} {workload.unit}/s {size}/step"
            progress.update(bar, advance=1, now=now)
            if save is not None:
                asked = preemption_requested(record.step)
                if asked or (save_every and record.step % save_every == 0):
                    save(state, record.step)
                if asked:
                    console.print(f"a signal: saved and left after step {record.step} of {options.steps}")
                    raise SystemExit(0)
            if evaluate_every and record.step % evaluate_every == 0:
                found = results.Evaluation(record.step, record.total_wire_bytes, run.evaluate(state))
                evaluations.append(found)
                results.write_line(log, {"kind": "evaluation", "reducer": name, **found._asdict()})
        sent = records[-1].total_wire_bytes / options.steps
        held_out = run.evaluate(state)
        result = results.Result(name, tuple(records), held_out, sent, run.compile_seconds, tuple(evaluations))
    results.write_line(log, {"kind": "summary", "reducer": name, **results.summarize(result)._asdict()})
    return result, state


def title_of(options: Options, run: train.Run) -> str:
    """One line above plots and tables: what was trained, on what, and how."""
    size = f"{run.parameters / 1e6:.2f} M parameters"
    last = options.seed + getattr(options, "seeds", 1) - 1
    seeds = f"seed {options.seed}" if last == options.seed else f"seeds {options.seed} to {last}"
    what = {"text": "byte-level GPT", "digits": "convolutional net on digits"}[options.workload]
    if options.workload == "text":
        what += f" on {options.text or 'the standard library of Python'}"
    return f"{what}, {size}, {run.workers} workers, batch {options.batch}, {options.optimizer}, {seeds}"


def unit_of(workload: Workload) -> str:
    """What the loss is measured in."""
    return "nats per byte" if workload.name == "text" else "nats"


def fresh(folder: Path, name: str) -> Path:
    """A file in a folder that is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name

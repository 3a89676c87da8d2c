"""What the commands share: devices, the loop over a run with its log, titles and folders."""

import contextlib
import math
import os
import signal
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from .._core.checks import check_range
from ..processes.preemption import preemption_requested
from ..runtime.mesh import make_mesh, use_cpu_devices
from . import results
from .figures import SUFFIXES, in_bytes
from .models.base import Workload, check_batch, parameters_of
from .spellings import parse
from .training import train
from .training.one_worker import check_combination, check_zero

# Options without a default value; their help shows no {None}|STR and no (default: None).
Text = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
Integer = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
SIMULATED_DEVICES = 4


class StoppedError(Exception):
    """Training was asked to stop, and saved."""

    def __init__(self, step: int, state: train.TrainState) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.state = step, state


@dataclass(frozen=True)
class Options:
    """The options that both commands have."""

    optimizer: str = "adamw:1e-3"
    """From optax: adamw:4e-3,schedule=cosine."""
    workload: Literal["text", "digits"] = "text"
    """text: Python's own source; digits: handwritten ones."""
    model: Text = None
    """gpt:tiny to large, gpt:demo,layers=4; convnet:32; MODULE:FUNCTION."""
    steps: int = 200
    """Number of training steps."""
    batch: int = 32
    """Examples in a step, all workers together."""
    seed: int = 0
    """Draws the parameters and the batches."""
    devices: Integer = None
    """Number of workers. Default: all devices, or 4 simulated on a CPU."""
    text: File = None
    """A file or a folder of your own to train on."""
    show: bool = False
    """Open the figure at the end."""


def check_positive(option: str, value: float) -> None:
    """Raises ValueError if the value of an option is not positive and finite."""
    check_range(option, value, 0, ends="(]")
    check_range(option, value, -math.inf)


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that has no key of its own: those of JAX take 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {seed}")


def set_up(options: Options, devices: int | None = None) -> tuple[Workload, jax.sharding.Mesh]:
    """Makes the workload and a mesh over the devices; on a CPU, first makes that many devices of it."""
    devices = devices or options.devices
    for name in ("steps", "batch", "devices"):
        value = getattr(options, name)
        if value is not None:
            check_range(f"--{name}", value, 1, ends="[]")
    # `compare` counts its seeds from the first.
    for seed in (options.seed, options.seed + max(1, getattr(options, "seeds", 1)) - 1):
        check_seed(seed)
    # Either variable is the user's own choice of devices.
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        # If JAX runs already, its devices are used.
        with contextlib.suppress(ValueError):
            # A CPU counts as one device until it is divided, which must happen before JAX starts.
            use_cpu_devices(devices or SIMULATED_DEVICES)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise ValueError(f"--devices={count} requested, but only {jax.device_count()} devices are available")
    workload = parse.parse_workload(options.workload, options.model, path=options.text)
    return workload, make_mesh({train.AXIS: count}, devices=jax.devices()[:count])


def new_console() -> Console:
    """A console as wide as the terminal, and of 132 columns in a file; tables take what they need there.

    Brackets are text, since names may have some: `markup=True` gives them a meaning.
    """
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=132, markup=False)


def new_progress(console: Console, count: type[ProgressColumn], width: int) -> Progress:
    """A line with a name, which wraps on a narrow terminal, a bar, a count, and the numbers of `now`, which do not."""
    name = TextColumn("{task.description:<15}", markup=False, table_column=Column(overflow="fold"))
    now = TextColumn("{task.fields[now]}", table_column=Column(no_wrap=True))
    return Progress(name, BarColumn(width), count(table_column=Column(no_wrap=True)), now, console=console)


def print_paths(console: Console, **paths: Path | str) -> None:
    """Prints each path behind its name, without wrapping."""
    for name, path in paths.items():
        console.print(f"{name}: {shorten(path)}", highlight=False, soft_wrap=True)


def print_figure(console: Console, options: Options, figure: Path) -> None:
    """Prints the path of a figure, and opens it with `--show`."""
    print_paths(console, figure=figure)
    if options.show:
        webbrowser.open(figure.absolute().as_uri())


def shorten(path: Path | str) -> Path | str:
    """The path from the working directory, if it is inside; a URL as it is."""
    if isinstance(path, str):
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def prepare_runs(
    names: Sequence[str], options: Options, workload: Workload, mesh: jax.sharding.Mesh, **settings: Any
) -> Iterator[tuple[str, train.Run]]:
    """Checks all spellings now; compiles one run after the other later, so that only one state is in memory."""
    # A wrong spelling fails here, before minutes of training with the others.
    methods = [(name, parse.parse_method(name, options.optimizer, options.steps)) for name in names]
    for name, method in methods:
        check_zero(name, method)
        check_combination(method, settings.get("offload"))
    check_batch(options.batch, mesh.size)
    settings |= {"mesh": mesh, "batch_size": options.batch, "seed": options.seed}
    return ((name, _compile(name, workload, **method._asdict(), **settings)) for name, method in methods)


def _compile(name: str, workload: Workload, *, mesh: jax.sharding.Mesh, **settings: Any) -> train.Run:
    """Prepares a run, and shows for how long it has compiled."""
    with show_compiling(new_console(), f"{name} for {mesh.size} workers"):
        return train.prepare(workload, mesh=mesh, **settings)


@contextlib.contextmanager
def show_compiling(console: Console, what: str) -> Iterator[None]:
    """Shows what is compiled with a clock; without a terminal a single line."""
    line = f"compiling {what} ..."
    if not console.is_terminal:
        console.print(line, highlight=False)
        yield
        return
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(line, total=None)
        yield


def check_steps_left(done: int, steps: int) -> None:
    """Raises ValueError if a resumed run has already done the steps that `--steps` gives, the total of all starts."""
    if done >= steps:
        raise ValueError(f"the resumed run has already done {done} steps: --steps must be larger, got {steps}")


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
    after: Callable[[train.TrainState, int], train.TrainState] | None = None,
) -> tuple[results.RunResult, train.TrainState]:
    """Trains with a progress bar and logs every step.

    With `save`, it saves every `save_every` steps, and at SIGTERM or the first Ctrl-C, after which it raises
    StoppedError. `after` is that of `train.steps`.
    """
    settings = {"reducer": name, "optimizer": options.optimizer, "workload": workload.name, "model": options.model}
    settings |= {"batch": options.batch, "seed": options.seed, "steps": options.steps}
    check_steps_left(run.first, options.steps)
    results.write_line(log, results.header(run, **settings))
    records, evaluations, state = [], [], run.state
    interrupts = contextlib.nullcontext() if save is None else _interrupt_as_preemption(run.first)
    with interrupts, new_progress(console, MofNCompleteColumn, 10) as progress:
        bar = progress.add_task(name, total=options.steps, completed=run.first, now="")
        for record, state in train.steps(run, options.steps - run.first, first=run.first, after=after):
            records.append(record)
            results.write_line(log, {"kind": "step", "reducer": name, **record._asdict()})
            # The mean until now, as in the table: a method with rounds sends nothing in most steps.
            speed, size = record.units_per_second, in_bytes(record.total_wire_bytes / record.step)
            now = f"loss {record.loss:.3f} {speed:7,.0f} {workload.unit}/s {size}/step"
            progress.update(bar, advance=1, now=now)
            if save is not None:
                # All processes agree on the step at which they stop.
                stop = preemption_requested(record.step)
                if stop or (save_every and record.step % save_every == 0):
                    save(state, record.step)
                if stop:
                    raise StoppedError(record.step, state)
            if evaluate_every and record.step % evaluate_every == 0:
                found = results.Evaluation(record.step, record.total_wire_bytes, run.evaluate(state))
                evaluations.append(found)
                results.write_line(log, {"kind": "evaluation", "reducer": name, **found._asdict()})
        # The mean over the run: steps of one method may send different amounts.
        sent = records[-1].total_wire_bytes / options.steps
        held_out = run.evaluate(state)
        result = results.RunResult(name, tuple(records), held_out, sent, run.compile_seconds, tuple(evaluations))
    results.write_line(log, {"kind": "summary", "reducer": name, **results.summarize(result)._asdict()})
    return result, state


@contextlib.contextmanager
def _interrupt_as_preemption(step: int) -> Iterator[None]:
    """Turns the first Ctrl-C into SIGTERM; the second one ends the process at once."""
    # From this call on SIGTERM is a request to stop.
    preemption_requested(step)

    def request_stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, request_stop)
    try:
        yield
    finally:
        # A second Ctrl-C also ends the save that is still being written.
        if signal.getsignal(signal.SIGINT) is request_stop:
            signal.signal(signal.SIGINT, before)


def title_of(options: Options, workload: Workload, workers: int) -> str:
    """The line above plots and tables: model, data, size and settings."""
    size = f"{parameters_of(workload) / 1e6:.2f} M parameters"
    # Only `compare` has several seeds.
    last = options.seed + getattr(options, "seeds", 1) - 1
    seeds = f"seed {options.seed}" if last == options.seed else f"seeds {options.seed} to {last}"
    known = {"text": "byte-level GPT", "digits": "convolutional net on digits"}
    what = known.get(workload.name, str(options.model))
    if workload.name == "text":
        what += f" on {options.text or 'the standard library of Python'}"
    return f"{what}, {size}, {workers} workers, batch {options.batch}, {options.optimizer}, {seeds}"


def unit_of(workload: Workload) -> str:
    """The unit of the loss of a workload."""
    return {"text": "nats per byte", "digits": "nats"}.get(workload.name, "as the model returns it")


def check_folder(option: str, folder: Path) -> None:
    """Raises ValueError, before any work, if a file is where a folder is needed."""
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{option} needs a folder {str(part)!r}, which is a file: give another path")


def check_figure(path: Path | None) -> None:
    """Raises ValueError, before any work, if no figure can be written there or in the form of the suffix."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--figure must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    check_folder(f"--figure {path}", path.parent)


def figure_path(chosen: Path | None, folder: Path, name: str, part: str = "") -> Path:
    """The path of a figure: `name` in a folder, or the one of `--figure`, with `part` before its suffix.

    Folders are made, so that a path that cannot be written fails before the work.
    """
    if chosen is None:
        return path_in(folder, name)
    return path_in(chosen.parent, f"{chosen.stem}{part}{chosen.suffix}")


def path_in(folder: Path, name: str) -> Path:
    """The path of a file in a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name

"""The `jaxdist` command: `jaxdist train` and `jaxdist compare`."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

try:
    import jax
    import numpy as np
    import tyro
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from .parallel import make_mesh, use_cpu_devices
    from .workloads import parse, plots, results, saved, suite, train
    from .workloads.base import Workload
except ModuleNotFoundError as missing:
    raise SystemExit(f"jaxdist: error: {missing.name} is missing: pip install 'jaxdist[cli,train]'") from missing

DEMO = ("exact", "f16", "qsgd:4", "ef:top_k:0.01", "ef:power_sgd:4", "ef:sign")
SIMULATED_DEVICES = 4
CAPTION = "Bytes: sent by one worker, read from the compiled step. Milliseconds: median on this machine's devices."
SEEDS_CAPTION = (
    """Mean over the seeds and half of their range. *: nothing else has both fewer bytes and a lower loss."""
)
COMPARED = "The first is what the others are measured against.\n"


@dataclass(frozen=True)
class Options:
    """What both commands take."""

    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9."""
    workload: Literal["text", "digits"] = "text"
    """text: the source of Python's standard library, byte by byte; digits: scikit-learn's handwritten digits."""
    model: str | None = None
    """Default gpt:demo for text (or tiny, small, medium, large; also gpt:demo,layers=4), convnet:32 for digits."""
    steps: int = 200
    """How many steps to train."""
    batch: int = 32
    """Examples in a step, all workers together."""
    seed: int = 0
    """Draws the parameters and the batches: equal seeds see equal data in equal order."""
    devices: int | None = None
    """How many workers. The default is all devices, or four simulated ones where there is only a CPU."""
    text: Path | None = None
    """A file or a folder of your own to train on."""


@dataclass(frozen=True)
class Train(Options):
    """The options of `jaxdist train`."""

    reducer: Annotated[str, tyro.conf.arg(help=parse.describe())] = "ef:power_sgd:4"
    baseline: bool = True
    """Train with plain all-reduce too, to compare with."""
    out: Path = Path("runs/train")
    """Where log.jsonl, loss.png and checkpoint/ go."""


@dataclass(frozen=True)
class Compare(Options):
    """The options of `jaxdist compare`."""

    reducers: Annotated[tuple[str, ...], tyro.conf.arg(help=COMPARED + parse.describe())] = DEMO
    suite: Literal["compression"] | None = None
    """Instead of --reducers: the whole compression family. Try it with --workload digits --seeds 3."""
    seeds: int = 1
    """How many seeds to repeat everything with, counted from --seed. From 2 on, or with a suite, the drawing has the
    mean and the range of the held-out loss against the bytes of a step."""
    out: Path = Path("runs/compare")
    """Where log.jsonl and the drawing (compare.png, or pareto.png of several seeds) go."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: what follows `jaxdist`; None for those of this process.

    Returns:
      The exit code: 0, or 2 for arguments that cannot work, with one line on stderr that says why. With
      `JAXDIST_TRACEBACK=1` in the environment they raise instead.
    """
    chosen = tyro.cli(
        _subcommands(), prog="jaxdist", description="Distributed training, cheap in bytes.", args=arguments
    )
    try:
        work = _set_up(chosen)
        if isinstance(chosen, Train):
            _train(chosen, *work)
        else:
            _compare(chosen, *work)
    except (ValueError, OSError) as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        print(f"jaxdist: error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    return 0


def _subcommands() -> Any:
    def command(options: type, name: str, purpose: str) -> Any:
        return Annotated[options, tyro.conf.subcommand(name, description=purpose)]

    return command(Train, "train", "Trains one model on all devices and compares it with plain all-reduce.") | command(
        Compare, "compare", "Trains with several reducers on the same data and draws loss against bytes."
    )


def _set_up(options: Options) -> tuple[Workload, jax.sharding.Mesh]:
    """The workload and a mesh over the devices; on a machine with a CPU alone its devices are made here."""
    for name in ("steps", "batch", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    told = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told:
        with contextlib.suppress(ValueError):  # JAX runs already: take the devices that it has
            use_cpu_devices(options.devices or SIMULATED_DEVICES)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise ValueError(f"--devices {count}: there are {jax.device_count()}")
    workload = parse.parse_workload(options.workload, options.model, path=options.text)
    return workload, make_mesh({train.AXIS: count}, devices=jax.devices()[:count])


def _train(chosen: Train, workload: Workload, mesh: jax.sharding.Mesh) -> None:
    console = _console()
    names = ["exact"] if chosen.baseline and chosen.reducer != "exact" else []
    runs = _runs([*names, chosen.reducer], chosen, workload, mesh)
    finished, log_path = [], _fresh(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        for name, run in runs:
            result, state = _run(name, run, chosen, workload, log, console)
            finished.append(result)
    where = saved.save(chosen.out / "checkpoint", state)
    baseline = finished[0] if names else None
    plot = plots.draw_train(
        finished[-1], baseline, chosen.out / "loss.png", title=_title(chosen, run), unit=_unit(workload)
    )
    console.print(_table(finished, baseline))
    _close(console, finished[-1], baseline)
    console.print(f"plot {plot}\nlog {log_path}\ncheckpoint {where}", highlight=False, soft_wrap=True)


def _compare(chosen: Compare, workload: Workload, mesh: jax.sharding.Mesh) -> None:
    console = _console()
    names = suite.reducers() if chosen.suite else chosen.reducers
    if not names:
        raise ValueError("--reducers needs at least one name")
    if chosen.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {chosen.seeds}")
    runs = _runs(names, chosen, workload, mesh)
    finished: list[list[results.Result]] = []
    log_path = _fresh(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        for name, run in runs:
            finished.append([])
            for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                seeded = run if seed == chosen.seed else run.with_seed(seed)
                options = replace(chosen, seed=seed)
                finished[-1].append(_run(name, seeded, options, workload, log, console)[0])
    title = _title(chosen, run)
    if chosen.suite or chosen.seeds > 1:
        spreads = [suite.spread(one, finished[0]) for one in finished]
        plot = suite.draw(spreads, chosen.out / "pareto.png", title=title, unit=_unit(workload))
        table = _seeds_table(spreads)
    else:
        single = [one[0] for one in finished]
        plot = plots.draw_compare(single, chosen.out / "compare.png", title=title, unit=_unit(workload))
        table = _table(single, single[0])
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table)
    console.print(f"plot {plot}\nlog {log_path}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """As wide as the terminal; in a file, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def _runs(
    names: Sequence[str], options: Options, workload: Workload, mesh: jax.sharding.Mesh
) -> Iterator[tuple[str, train.Run]]:
    """Checks all spellings now; compiles one run after the other later, so that only one state is alive."""
    optimizer = parse.parse_optimizer(options.optimizer)
    spelled = [(name, parse.parse_method(name, optimizer)) for name in names]
    settings = {"mesh": mesh, "batch_size": options.batch, "seed": options.seed}
    return ((name, train.prepare(workload, *method, **settings)) for name, method in spelled)


def _run(
    name: str, run: train.Run, options: Options, workload: Workload, log: TextIO, console: Console
) -> tuple[results.Result, train.TrainState]:
    """Trains to the end behind a progress bar and writes every step to the log."""
    settings = {"reducer": name, "optimizer": options.optimizer, "workload": workload.name, "model": options.model}
    settings |= {"batch": options.batch, "seed": options.seed, "steps": options.steps}
    results.write_line(log, results.header(run, **settings))
    records, state = [], run.state
    columns = [TextColumn(f"{name:<15}"), BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=options.steps, now="")
        for record, state in train.steps(run, options.steps):  # noqa: B007
            records.append(record)
            results.write_line(log, {"kind": "step", "reducer": name, **record._asdict()})
            speed, size = record.units_per_second, plots.in_bytes(record.wire_bytes)
            now = f"loss {record.loss:.3f} {speed:7,.0f} {workload.unit}/s {size}/step"
            progress.update(bar, advance=1, now=now)
        sent = records[-1].total_wire_bytes / len(records)
        result = results.Result(name, tuple(records), run.evaluate(state), sent, run.compile_seconds)
    results.write_line(log, {"kind": "summary", "reducer": name, **results.summarise(result)._asdict()})
    return result, state


def _table(finished: Sequence[results.Result], baseline: results.Result | None) -> Table:
    table = Table(box=None, caption=CAPTION, caption_justify="left", header_style="bold", padding=(0, 1))
    table.add_column("reducer", no_wrap=True)
    extra = [name for name in finished[0].held_out if name != "loss"]
    versus = [f"against {baseline.name}"] if baseline else []
    fewer = ["fewer bytes"] if baseline else []
    headings = ["bytes a step", *fewer, "train loss", "held-out loss", *versus, *extra, "ms/step"]
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom")
    for result in finished:
        summary = results.summarise(result, baseline)
        cells = [plots.in_bytes(summary.wire_bytes_per_step)]
        cells += [f"{summary.times_fewer_bytes:,.1f}x"] if baseline else []
        cells += [f"{summary.train_loss:.4f}", f"{summary.held_out_loss:.4f}"]
        cells += [f"{summary.difference:+.4f}"] if baseline else []
        cells += [f"{summary.held_out[name]:.4f}" for name in extra]
        table.add_row(result.name, *cells, f"{summary.step_milliseconds:,.0f}")
    return table


def _seeds_table(spreads: Sequence[suite.Spread]) -> Table:
    table = Table(box=None, caption=SEEDS_CAPTION, caption_justify="left", header_style="bold", padding=(0, 1))
    table.add_column("reducer", no_wrap=True)
    extra = [name for name in spreads[0].held_out if name != "loss"]
    headings = ["bytes a step", "fewer bytes", "held-out loss", f"against {spreads[0].name}", *extra, "ms/step"]
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom")
    best = suite.front(spreads)
    for one in spreads:
        ratio = spreads[0].wire_bytes / one.wire_bytes if one.wire_bytes else 1.0
        cells = [plots.in_bytes(one.wire_bytes), f"{ratio:,.1f}x", _with_range(one.held_out["loss"])]
        cells += [f"{one.difference.mean():+.4f}", *(_with_range(one.held_out[name]) for name in extra)]
        table.add_row(f"{'*' if one in best else ' '} {one.name}", *cells, f"{one.milliseconds:,.0f}")
    return table


def _with_range(values: np.ndarray) -> str:
    return f"{values.mean():.4f} ±{(values.max() - values.min()) / 2:.4f}"


def _close(console: Console, result: results.Result, baseline: results.Result | None) -> None:
    """The closing line of `jaxdist train`."""
    if baseline is None:
        return
    summary = results.summarise(result, baseline)
    less = plots.in_bytes(summary.steps * (baseline.wire_bytes - result.wire_bytes))
    console.print(
        f"{result.name} sent {summary.times_fewer_bytes:,.1f} times fewer bytes than plain all-reduce ({less} less from"
        f" each worker) on the same data; its held-out loss differs by {summary.difference:+.4f}.",
        highlight=False,
    )


def _title(options: Options, run: train.Run) -> str:
    size = f"{run.parameters / 1e6:.2f} M parameters"
    last = options.seed + getattr(options, "seeds", 1) - 1
    seeds = f"seed {options.seed}" if last == options.seed else f"seeds {options.seed} to {last}"
    what = {"text": "byte-level GPT", "digits": "convolutional net on digits"}[options.workload]
    if options.workload == "text":
        what += f" on {options.text or 'the standard library of Python'}"
    return f"{what}, {size}, {run.workers} workers, batch {options.batch}, {options.optimizer}, {seeds}"


def _unit(workload: Workload) -> str:
    return "nats per byte" if workload.name == "text" else "nats"


def _fresh(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name

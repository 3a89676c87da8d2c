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
    import tyro
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from .parallel import make_mesh, use_cpu_devices
    from .workloads import parse, plots, results, saved, suite, sweep, sync, tables, train
    from .workloads.base import Workload
except ModuleNotFoundError as missing:
    raise SystemExit(f"jaxdist: error: {missing.name} is missing: pip install 'jaxdist[cli,train]'") from missing

DEMO = ("exact", "f16", "qsgd:4", "ef:top_k:0.01", "ef:power_sgd:4", "ef:sign")
SIMULATED_DEVICES = 4
REDUCER = "Default: ef:power_sgd:4, or exact with --sync, where it carries what a round sends.\n"
SYNC = "Workers step by themselves and meet every H steps, each with the --optimizer:\n" + sync.describe()
COMPARED = "The first is what the others are measured against. Also SYNC/REDUCER, as in diloco:H=50/ef:qsgd:4.\n"


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

    reducer: Annotated[str | None, tyro.conf.arg(help=REDUCER + parse.describe())] = None
    sync: Annotated[str | None, tyro.conf.arg(help=SYNC)] = None
    baseline: bool = True
    """Train with plain all-reduce too, to compare with."""
    out: Path = Path("runs/train")
    """Where log.jsonl, loss.png and checkpoint/ go."""


@dataclass(frozen=True)
class Compare(Options):
    """The options of `jaxdist compare`."""

    reducers: Annotated[tuple[str, ...], tyro.conf.arg(help=COMPARED + parse.describe())] = DEMO
    suite: Literal["compression", "local"] | None = None
    """Instead of --reducers: the whole compression family (try it with --workload digits --seeds 3), or all methods
    that talk every H steps, against bytes and against tokens."""
    workers: tuple[int, ...] = (4, 8)
    """For --suite local, instead of --devices: a comparison with each of these numbers of workers."""
    periods: tuple[int, ...] = sweep.PERIODS
    """For --suite local: the values of H."""
    seeds: int = 1
    """How many seeds to repeat everything with, counted from --seed. From 2 on, or with a suite, the drawing has the
    mean and the range of the held-out loss against the bytes of a step."""
    out: Path = Path("runs/compare")
    """Where log.jsonl and the drawing (compare.png, pareto.png of several seeds, local-WORKERS.png) go."""


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
        if isinstance(chosen, Train):
            _train(chosen, *_set_up(chosen))
        elif chosen.suite == "local":
            _compare_periods(chosen)
        else:
            _compare(chosen, *_set_up(chosen))
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


def _set_up(options: Options, devices: int | None = None) -> tuple[Workload, jax.sharding.Mesh]:
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


def _train(chosen: Train, workload: Workload, mesh: jax.sharding.Mesh) -> None:
    console = _console()
    if chosen.sync is not None and not sync.is_sync(chosen.sync):
        sync.parse_sync(chosen.sync, chosen.optimizer)  # says what there is
    spelled = sync.spell(chosen.sync, chosen.reducer, default="ef:power_sgd:4")
    names = ["exact"] if chosen.baseline and spelled != "exact" else []
    runs = _runs([*names, spelled], chosen, workload, mesh)
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
    console.print(tables.runs_table(finished, baseline))
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
        table = tables.seeds_table(spreads)
    else:
        single = [one[0] for one in finished]
        plot = plots.draw_compare(single, chosen.out / "compare.png", title=title, unit=_unit(workload))
        table = tables.runs_table(single, single[0])
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table)
    console.print(f"plot {plot}\nlog {log_path}", highlight=False, soft_wrap=True)


def _compare_periods(chosen: Compare) -> None:
    """`--suite local`: each method at each `H`, for each number of workers."""
    console = _console()
    sweep.check(chosen.periods, chosen.workers, chosen.seeds)
    workload, _ = _set_up(chosen, devices=max(chosen.workers))
    if max(chosen.workers) > jax.device_count():
        raise ValueError(f"--workers {max(chosen.workers)}: there are {jax.device_count()} devices")
    log_path = _fresh(chosen.out, "log.jsonl")
    every = sweep.evaluate_every(chosen.steps, chosen.periods)
    with log_path.open("w") as log:
        for workers in chosen.workers:
            mesh = make_mesh({train.AXIS: workers}, devices=jax.devices()[:workers])
            settings = {"mesh": mesh, "batch_size": chosen.batch, "seed": chosen.seed}
            cells: list[sweep.Cell] = []
            for method, period, name, run in sweep.runs(workload, chosen.optimizer, chosen.periods, **settings):
                finished = []
                for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                    options, seeded = replace(chosen, seed=seed), run.with_seed(seed)
                    finished.append(_run(name, seeded, options, workload, log, console, evaluate_every=every)[0])
                cells.append(sweep.cell(method, period, finished, cells[0] if cells else None, run))
            title = _title(chosen, run)
            names = {"title": title, "unit": _unit(workload), "counted": workload.unit}
            plot = sweep.draw(cells, chosen.out / f"local-{workers}.png", **names)
            console.print(f"\n{title}", style="dim", highlight=False)
            console.print(tables.periods_table(cells))
            console.print(f"plot {plot}", highlight=False, soft_wrap=True)
    console.print(f"log {log_path}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """As wide as the terminal; in a file, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def _runs(
    names: Sequence[str], options: Options, workload: Workload, mesh: jax.sharding.Mesh
) -> Iterator[tuple[str, train.Run]]:
    """Checks all spellings now; compiles one run after the other later, so that only one state is alive."""
    spelled = [(name, sync.parse_method(name, options.optimizer)) for name in names]
    settings = {"mesh": mesh, "batch_size": options.batch, "seed": options.seed}
    return ((name, train.prepare(workload, **method._asdict(), **settings)) for name, method in spelled)


def _run(
    name: str,
    run: train.Run,
    options: Options,
    workload: Workload,
    log: TextIO,
    console: Console,
    *,
    evaluate_every: int | None = None,
) -> tuple[results.Result, train.TrainState]:
    """Trains to the end behind a progress bar and writes every step to the log."""
    settings = {"reducer": name, "optimizer": options.optimizer, "workload": workload.name, "model": options.model}
    settings |= {"batch": options.batch, "seed": options.seed, "steps": options.steps}
    results.write_line(log, results.header(run, **settings))
    records, evaluations, state = [], [], run.state
    columns = [TextColumn(f"{name:<15}"), BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=options.steps, now="")
        for record, state in train.steps(run, options.steps):
            records.append(record)
            results.write_line(log, {"kind": "step", "reducer": name, **record._asdict()})
            speed, size = record.units_per_second, plots.in_bytes(record.wire_bytes)
            now = f"loss {record.loss:.3f} {speed:7,.0f} {workload.unit}/s {size}/step"
            progress.update(bar, advance=1, now=now)
            if evaluate_every and record.step % evaluate_every == 0:
                found = results.Evaluation(record.step, record.total_wire_bytes, run.evaluate(state))
                evaluations.append(found)
                results.write_line(log, {"kind": "evaluation", "reducer": name, **found._asdict()})
        sent = records[-1].total_wire_bytes / len(records)
        held_out = run.evaluate(state)
        result = results.Result(name, tuple(records), held_out, sent, run.compile_seconds, tuple(evaluations))
    results.write_line(log, {"kind": "summary", "reducer": name, **results.summarise(result)._asdict()})
    return result, state


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

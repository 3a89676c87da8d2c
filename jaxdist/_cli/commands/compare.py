"""`jaxdist compare`: several methods on the same data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TextIO

import jax
import tyro
from rich.console import Console

from ..._core.checks import check_range
from ...analysis.cost import Link
from ...analysis.step_time import StepCost, uses_gloo
from ...runtime.mesh import make_mesh
from .. import losses, race, results, tables
from ..figures import print_table
from ..labels import Labels, parse_labels, relabel
from ..models.base import Workload, check_batch
from ..running import (
    File,
    Integer,
    Number,
    Options,
    check_figure,
    check_positive,
    figure_path,
    new_console,
    path_in,
    prepare_runs,
    print_figure,
    print_paths,
    set_up,
    title_of,
    train_to_end,
    unit_of,
)
from ..spellings import parse
from ..spellings.tables import peak_rate, replace_rate
from ..training import costs, starts, suites, train

# Each at a fair setting of its own: behind a sparse or one-bit code Adam runs on each worker, before the mean.
DEMO = (
    "exact",
    "f16",
    "qsgd:4",
    "compressed_adam:2e-3/ef:top_k:0.01",
    "ef:power_sgd:4",
    "compressed_adam:2e-3/ef:sign",
)
DEMO_OPTIMIZER = "adamw:2e-3"
DEMO_STEPS = 200
# The options of --suite local, and what takes their place elsewhere.
FOR_LOCAL = {
    "workers": "the number of workers is --devices",
    "periods": "a method takes H=, as in diloco:H=50",
    "start": "a method takes warmup_steps=",
    "rates": "--optimizer takes its rate",
}


@dataclass(frozen=True)
class CompareOptions(Options):
    """Trains with several reducers on the same data and plots loss against bytes.

    Examples:
      jaxdist compare
      jaxdist compare --reducers exact f16 diloco:H=50/ef:qsgd:4 --workload digits
      jaxdist compare --reducers exact my_reducers:diana:qsgd:2 --seeds 3 --table diana.tex
      jaxdist compare --reducers exact qsgd:4 --figure qsgd.pdf --label exact=Mean "qsgd:4=4 bits"
      jaxdist compare --suite compression --workload digits --seeds 3
      jaxdist compare --suite local --workers 4 --seeds 2
      jaxdist compare --link 100mbit,20ms 1gbit,1ms --target 2.4
      jaxdist compare --model my_model:make --batch 64
    """

    optimizer: Annotated[str, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = ""
    """From optax: adamw:4e-3,schedule=cosine. Default: adamw:2e-3."""
    steps: Annotated[int, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = 0
    """Number of training steps. 0: 200, and 2560 with --suite local."""
    reducers: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="STR...", help_behavior_hint="")] = None
    """Names of jaxdist reducers, SYNC/REDUCER, or MODULE:NAME of your own. The first is the baseline. Default: six."""
    suite: Annotated[Literal["compression", "local"] | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Instead of --reducers: compression (all), or local (those of --sync)."""
    workers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT...", help_behavior_hint="")] = ()
    """For --suite local, instead of --devices. Default: 4 8."""
    periods: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT...", help_behavior_hint="")] = ()
    """For --suite local: the values of H. Default: 8 32 128."""
    start: Integer = None
    """For --suite local: synchronous steps before rounds; a fifth by default."""
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOAT...", help_behavior_hint="")] = ()
    """For --suite local: learning rates to try. Default: 4e-3 8e-3."""
    seeds: int = 1
    """Repeats everything with this many seeds, counted from --seed."""
    link: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.arg(metavar="STR...", help_behavior_hint="(repeatable)"),
        tyro.conf.UseAppendAction,
    ] = ()
    """Also predict the time over links, as in 100mbit,20ms; measured stands for those between the devices here."""
    target: Number = None
    """With --link: the held-out loss to reach. By default the lowest that every method reaches."""
    compute: Number = None
    """With --link: milliseconds of one worker's step without communication, if it will run on another device."""
    table: File = None
    """Write the table to this file too: .csv with all numbers, .md or .tex without times of this machine."""
    figure: File = None
    """Write the figure to this file: .png, .pdf or .svg. Default: a PNG in --out."""
    label: Labels = ()
    """Names in figures and tables, as in exact=All-reduce."""
    out: Path = Path("runs/compare")
    """Folder of log.jsonl and the figure."""


def run_compare(chosen: CompareOptions) -> None:
    """Compares reducers, or synchronization periods of local steps, as the suite of `chosen` says."""
    tables.check_table(chosen.table)
    check_figure(chosen.figure)
    _check_race(chosen)
    _check_suite(chosen)
    if chosen.suite == "local":
        _compare_periods(fill_local_defaults(chosen))
        return
    steps, optimizer = chosen.steps or DEMO_STEPS, chosen.optimizer or DEMO_OPTIMIZER
    _compare_reducers(replace(chosen, steps=steps, optimizer=optimizer))


def _compare_reducers(chosen: CompareOptions) -> None:
    """Trains with each method in turn, on every seed, and leaves a log, a table and a plot."""
    workload, mesh = set_up(chosen)
    console = new_console()
    names = _list_names(chosen)
    check_range("--seeds", chosen.seeds, 1, ends="[]")
    labels = parse_labels(chosen.label, names)
    runs = prepare_runs(names, chosen, workload, mesh)
    links = race.parse_links(chosen.link, mesh, axis=train.AXIS)
    tables.make_folder(chosen.table)
    log_path = path_in(chosen.out, "log.jsonl")
    figure = figure_path(chosen.figure, chosen.out, "pareto.png" if chosen.suite else "compare.png")
    measured = _measure_costs(names, chosen, workload, mesh.size, console) if links else {}
    evaluate_every = max(1, chosen.steps // race.EVALUATIONS) if links else None
    finished: list[list[results.RunResult]] = []
    entrants: list[race.Entrant] = []
    with results.open_log(log_path) as log:
        for name, run in runs:
            finished.append([])
            for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                # Other seeds reuse the compiled step.
                seeded = run if seed == chosen.seed else run.with_seed(seed)
                run_of_seed = (name, seeded, replace(chosen, seed=seed), workload, log, console)
                finished[-1].append(train_to_end(*run_of_seed, evaluate_every=evaluate_every)[0])
            if name in measured:
                sent = sum(result.wire_bytes for result in finished[-1]) / len(finished[-1])
                # What runs on another device will not use the transport of this one.
                gloo = chosen.compute is None and uses_gloo()
                cost = measured[name]._replace(traffic=costs.traffic_of_run(run, sent=sent, gloo=gloo))
                entrants.append(race.enter(name, cost, finished[-1]))
    title, units = title_of(chosen, workload, mesh.size), tables.count_units(workload, chosen.batch, mesh.size)
    if chosen.suite or chosen.seeds > 1:
        spreads = _collect(finished)
        shown = relabel(spreads, labels)
        table, records = tables.seeds_table(shown, units), tables.seed_records(spreads, spreads[0], units)
    else:
        single = [seeds[0] for seeds in finished]
        shown = relabel(single, labels)
        table, records = tables.runs_table(shown, shown[0], units), tables.run_records(single, single[0], units)
    console.print(f"\n{title}", style="dim", highlight=False)
    print_table(console, table)
    print_paths(console, log=log_path)
    if chosen.table is not None:
        print_paths(console, table=tables.write_table(table, records, chosen.table))
    # After the tables: a figure that cannot be drawn must not lose hours of training.
    texts = {"title": title, "unit": unit_of(workload)}
    if chosen.suite:
        plot = losses.draw_seeds(relabel(_collect(finished), labels), figure, **texts)
    else:
        plot = losses.draw_compare([relabel(seeds, labels) for seeds in finished], figure, **texts)
    print_figure(console, chosen, plot)
    if links:
        _report_race(chosen, relabel(entrants, labels), links, texts, console)


def _list_names(chosen: CompareOptions) -> tuple[str, ...]:
    """The spellings of the methods to train; raises ValueError for none, and for one that is given twice."""
    if chosen.suite:
        return suites.list_reducers()
    names = DEMO if chosen.reducers is None else chosen.reducers
    if not names:
        raise ValueError("--reducers needs at least one name")
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"--reducers has {', '.join(twice)} more than once: name each method once")
    return names


def _check_suite(chosen: CompareOptions) -> None:
    """Raises ValueError for options that only another suite, or none, looks at."""
    if chosen.suite and chosen.reducers is not None:
        raise ValueError(f"--reducers cannot be used with --suite {chosen.suite}, which has its own methods: give one")
    if chosen.suite == "local":
        if chosen.devices is not None:
            raise ValueError("--devices cannot be used with --suite local: give --workers, as in --workers 4 8")
        return
    given = [option for option in FOR_LOCAL if getattr(chosen, option) not in (None, ())]
    if given:
        raise ValueError(f"--{given[0]} is for --suite local; {FOR_LOCAL[given[0]]}")


def _check_race(chosen: CompareOptions) -> None:
    """Raises ValueError, before anything is compiled, if the options of the race cannot work."""
    if chosen.link and chosen.suite == "local":
        raise ValueError(
            "--link cannot be used with --suite local: name the methods with --reducers, as in diloco:H=50"
        )
    for option in ("target", "compute"):
        value = getattr(chosen, option)
        if value is not None and not chosen.link:
            raise ValueError(f"--{option} is for times over a link: give one, as in --link 100mbit,20ms")
        if value is not None:
            check_positive(f"--{option}", value)


def _measure_costs(
    names: Sequence[str], chosen: CompareOptions, workload: Workload, workers: int, console: Console
) -> dict[str, StepCost]:
    """Measures the computation and the coding of each method, before anything is trained, without its traffic."""
    console.print("measuring one worker's step and each method's coding ...", highlight=False)
    examples = max(1, chosen.batch // workers)
    if chosen.compute is None:
        compute = costs.measure_compute(workload, chosen.optimizer, examples, repetitions=7)
    else:
        compute = chosen.compute / 1e3
    settings = {"optimizer": chosen.optimizer, "workers": workers, "examples": examples, "compute": compute}
    methods = {name: parse.parse_method(name, chosen.optimizer, chosen.steps) for name in names}
    return {name: costs.measure_cost(name, method, workload, **settings) for name, method in methods.items()}


def _report_race(
    chosen: CompareOptions,
    entrants: Sequence[race.Entrant],
    links: Sequence[Link],
    texts: dict[str, str],
    console: Console,
) -> None:
    """Prints the first method to reach the target on each link, and leaves a table and a plot."""
    target = (
        race.common_target(entrant.curve for entrant in entrants) if chosen.target is None else float(chosen.target)
    )
    ends = race.run_race(entrants, links, target)
    table, records = race.finish_table(ends, target), race.finish_records(ends, target)
    console.print()
    print_table(console, table)
    console.print("\n".join(race.conclude(ends, target, entrants[0].name)), highlight=False, soft_wrap=True)
    if chosen.table is not None:
        path = chosen.table.with_stem(f"{chosen.table.stem}-links")
        print_paths(console, table=tables.write_table(table, records, path))
    figure = figure_path(chosen.figure, chosen.out, "links.png", "-links")
    print_figure(console, chosen, race.draw_race(entrants, links, target, figure, **texts))


def _collect(finished: Sequence[Sequence[results.RunResult]]) -> list[suites.SeedSpread]:
    # Differences are taken seed by seed, which cancels what the data and the initial parameters cause.
    return [suites.collect_seeds(seeds, finished[0]) for seeds in finished]


def fill_local_defaults(chosen: CompareOptions) -> CompareOptions:
    """Fills in what `--suite local` trains by default, and checks it."""
    steps = chosen.steps or suites.LOCAL_STEPS
    start = steps // suites.START_SHARE if chosen.start is None else chosen.start
    periods, workers = chosen.periods or suites.PERIODS, chosen.workers or suites.WORKERS
    suites.check_sweep(periods, workers, chosen.seeds)
    suites.check_start(start, steps, periods)
    # An optimizer of the user's own has a rate; those of the suite are for the suite's.
    rates = chosen.rates or (() if chosen.optimizer else suites.LOCAL_RATES)
    optimizer = chosen.optimizer or suites.LOCAL_OPTIMIZER
    model = suites.LOCAL_MODEL if chosen.model is None and chosen.workload == "text" else chosen.model
    filled = {"steps": steps, "start": start, "periods": periods, "workers": workers}
    return replace(chosen, **filled, rates=rates, optimizer=optimizer, model=model)


def _compare_periods(chosen: CompareOptions) -> None:
    """Compares each method at each `H`, for each number of workers: `--suite local`."""
    console = new_console()
    # A CPU can be split only once, before JAX starts: into the devices of the largest comparison.
    workload, _ = set_up(chosen, devices=max(chosen.workers))
    if max(chosen.workers) > jax.device_count():
        raise ValueError(
            f"--workers {max(chosen.workers)} requested, but only {jax.device_count()} devices are available"
        )
    spelled = [replace_rate(chosen.optimizer, rate) for rate in chosen.rates] or [chosen.optimizer]
    for workers in chosen.workers:
        check_batch(chosen.batch, workers)
    for optimizer in spelled:
        # A schedule may leave none of the steps.
        parse.parse_optimizer(optimizer, chosen.steps)
    names = parse_labels(chosen.label, list(suites.METHODS))
    tables.make_folder(chosen.table)
    log_path = path_in(chosen.out, "log.jsonl")
    with results.open_log(log_path) as log:
        for workers in chosen.workers:
            figure = figure_path(chosen.figure, chosen.out, f"local-{workers}.png", f"-{workers}")
            mesh = make_mesh({train.AXIS: workers}, devices=jax.devices()[:workers])
            console.print(f"compiling each method for {workers} workers ...", highlight=False)
            tried: list[suites.Cell] = []
            for optimizer in spelled:
                tried += _sweep(replace(chosen, optimizer=optimizer), workload, mesh, log, console)
            cells = suites.choose_rates(tried)
            shown = relabel(cells, names, "method")
            title = f"{title_of(chosen, workload, workers)}, {chosen.start} synchronous steps of {chosen.steps} first"
            title += f", best of rates {', '.join(f'{rate:g}' for rate in chosen.rates)}" if chosen.rates else ""
            console.print(f"\n{title}", style="dim", highlight=False)
            units = tables.count_units(workload, chosen.batch, workers)
            table = tables.periods_table(shown, units)
            print_table(console, table)
            if chosen.table is not None:
                path = chosen.table.with_stem(f"{chosen.table.stem}-{workers}")
                print_paths(console, table=tables.write_table(table, tables.period_records(cells, units), path))
            texts = {"title": title, "unit": unit_of(workload), "counted": workload.unit}
            plot = losses.draw_periods(shown, figure, **texts)
            print_figure(console, chosen, plot)
    print_paths(console, log=log_path)


def _sweep(
    chosen: CompareOptions, workload: Workload, mesh: jax.sharding.Mesh, log: TextIO, console: Console
) -> list[suites.Cell]:
    """Trains each method at each `H` with one optimizer, on every seed, from a start that the baseline leaves."""
    start = chosen.start or 0
    settings = {"mesh": mesh, "batch_size": chosen.batch, "seed": chosen.seed, "steps": chosen.steps, "start": start}
    # Evaluations at the ends of rounds: the global parameters change only there.
    interval = suites.evaluation_interval(chosen.steps - start, chosen.periods)
    rate = peak_rate(chosen.optimizer)
    cells: list[suites.Cell] = []
    kept: dict[int, starts.Start] = {}
    for method, period, name, run in suites.prepare_sweep(workload, chosen.optimizer, chosen.periods, **settings):
        finished = []
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            begun = suites.begin(run, period, seed, kept.get(seed))
            run_of_seed = (name, begun, replace(chosen, seed=seed), workload, log, console)
            # Only the baseline leaves a start: it is the first of the sweep.
            after = None if period else partial(_keep_start, begun, start, seed, kept)
            finished.append(train_to_end(*run_of_seed, evaluate_every=interval, after=after)[0])
        cells.append(suites.collect_cell(method, period, finished, cells[0] if cells else None, run, rate=rate))
    return cells


def _keep_start(
    run: train.Run, start: int, seed: int, kept: dict[int, starts.Start], state: train.TrainState, step: int
) -> train.TrainState:
    """Keeps a copy of the state after `start` steps in `kept`; the next step donates it."""
    if step + 1 == start:
        kept[seed] = starts.take_start(run, state, start)
    return state

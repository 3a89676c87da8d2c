"""`jaxdist compare`: several methods on the same data."""

from dataclasses import replace

import jax

from ...runtime.mesh import make_mesh
from .. import results, tables
from ..options import CompareOptions
from ..plotting import losses
from ..running import new_console, path_in, prepare_runs, print_paths, set_up, title_of, train_to_end, unit_of
from ..training import suites, train


def run_compare(chosen: CompareOptions) -> None:
    """Runs the comparison that was chosen."""
    if chosen.suite == "local":
        _compare_periods(chosen)
    else:
        _compare_reducers(chosen)


def _compare_reducers(chosen: CompareOptions) -> None:
    """Trains with each method in turn, on every seed, and leaves a log, a table and a plot."""
    workload, mesh = set_up(chosen)
    console = new_console()
    names = suites.list_reducers() if chosen.suite else chosen.reducers
    if not names:
        raise ValueError("--reducers needs at least one name")
    if chosen.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {chosen.seeds}")
    runs = prepare_runs(names, chosen, workload, mesh)
    finished: list[list[results.RunResult]] = []
    log_path = path_in(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        for name, run in runs:
            finished.append([])
            for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                seeded = run if seed == chosen.seed else run.with_seed(seed)
                options = replace(chosen, seed=seed)
                finished[-1].append(train_to_end(name, seeded, options, workload, log, console)[0])
    title = title_of(chosen, run)
    labels = {"title": title, "unit": unit_of(workload)}
    if chosen.suite or chosen.seeds > 1:
        spreads = [suites.collect_seeds(seeds, finished[0]) for seeds in finished]
        plot = losses.draw_seeds(spreads, chosen.out / "pareto.png", **labels)
        table = tables.seeds_table(spreads)
    else:
        single = [seeds[0] for seeds in finished]
        plot = losses.draw_compare(single, chosen.out / "compare.png", **labels)
        table = tables.runs_table(single, single[0])
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table)
    print_paths(console, plot=plot, log=log_path)


def _compare_periods(chosen: CompareOptions) -> None:
    """Compares each method at each `H`, for each number of workers: `--suite local`."""
    console = new_console()
    suites.check_sweep(chosen.periods, chosen.workers, chosen.seeds)
    workload, _ = set_up(chosen, devices=max(chosen.workers))
    if max(chosen.workers) > jax.device_count():
        raise ValueError(
            f"--workers {max(chosen.workers)} requested, but only {jax.device_count()} devices are available"
        )
    log_path = path_in(chosen.out, "log.jsonl")
    interval = suites.evaluation_interval(chosen.steps, chosen.periods)
    with log_path.open("w") as log:
        for workers in chosen.workers:
            mesh = make_mesh({train.AXIS: workers}, devices=jax.devices()[:workers])
            settings = {"mesh": mesh, "batch_size": chosen.batch, "seed": chosen.seed}
            cells: list[suites.Cell] = []
            sweep = suites.prepare_sweep(workload, chosen.optimizer, chosen.periods, **settings)
            for method, period, name, run in sweep:
                finished = []
                for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                    run_of_seed = (name, run.with_seed(seed), replace(chosen, seed=seed), workload, log, console)
                    finished.append(train_to_end(*run_of_seed, evaluate_every=interval)[0])
                cells.append(suites.collect_cell(method, period, finished, cells[0] if cells else None, run))
            title = title_of(chosen, run)
            labels = {"title": title, "unit": unit_of(workload), "counted": workload.unit}
            plot = losses.draw_periods(cells, chosen.out / f"local-{workers}.png", **labels)
            console.print(f"\n{title}", style="dim", highlight=False)
            console.print(tables.periods_table(cells))
            print_paths(console, plot=plot)
    print_paths(console, log=log_path)

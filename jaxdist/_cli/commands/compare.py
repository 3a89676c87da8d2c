"""`jaxdist compare`."""

from dataclasses import replace

import jax

from ...runtime.mesh import make_mesh
from .. import results, tables
from ..models.base import Workload
from ..options import Compare
from ..plotting import plots
from ..running import finish, fresh, new_console, prepared_runs, set_up, title_of, unit_of
from ..training import suite, sweep, train


def compare(chosen: Compare, workload: Workload, mesh: jax.sharding.Mesh) -> None:
    """Trains with each method in turn, on every seed, and leaves a log, a table and a plot."""
    console = new_console()
    names = suite.reducers() if chosen.suite else chosen.reducers
    if not names:
        raise ValueError("--reducers needs at least one name")
    if chosen.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {chosen.seeds}")
    runs = prepared_runs(names, chosen, workload, mesh)
    finished: list[list[results.Result]] = []
    log_path = fresh(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        for name, run in runs:
            finished.append([])
            for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                seeded = run if seed == chosen.seed else run.with_seed(seed)
                options = replace(chosen, seed=seed)
                finished[-1].append(finish(name, seeded, options, workload, log, console)[0])
    title = title_of(chosen, run)
    if chosen.suite or chosen.seeds > 1:
        spreads = [suite.spread(one, finished[0]) for one in finished]
        plot = suite.draw(spreads, chosen.out / "pareto.png", title=title, unit=unit_of(workload))
        table = tables.seeds_table(spreads)
    else:
        single = [one[0] for one in finished]
        plot = plots.draw_compare(single, chosen.out / "compare.png", title=title, unit=unit_of(workload))
        table = tables.runs_table(single, single[0])
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table)
    console.print(f"plot {plot}\nlog {log_path}", highlight=False, soft_wrap=True)


def compare_periods(chosen: Compare) -> None:
    """`--suite local`: each method at each `H`, for each number of workers."""
    console = new_console()
    sweep.check(chosen.periods, chosen.workers, chosen.seeds)
    workload, _ = set_up(chosen, devices=max(chosen.workers))
    if max(chosen.workers) > jax.device_count():
        raise ValueError(f"--workers {max(chosen.workers)}: there are {jax.device_count()} devices")
    log_path = fresh(chosen.out, "log.jsonl")
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
                    finished.append(finish(name, seeded, options, workload, log, console, evaluate_every=every)[0])
                cells.append(sweep.cell(method, period, finished, cells[0] if cells else None, run))
            title = title_of(chosen, run)
            names = {"title": title, "unit": unit_of(workload), "counted": workload.unit}
            plot = sweep.draw(cells, chosen.out / f"local-{workers}.png", **names)
            console.print(f"\n{title}", style="dim", highlight=False)
            console.print(tables.periods_table(cells))
            console.print(f"plot {plot}", highlight=False, soft_wrap=True)
    console.print(f"log {log_path}", highlight=False, soft_wrap=True)

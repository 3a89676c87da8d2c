"""`jaxdist train`."""

import jax
from rich.console import Console

from .. import results, tables
from ..models.base import Workload
from ..options import Train
from ..plotting import plots
from ..running import finish, fresh, new_console, prepared_runs, title_of, unit_of
from ..spellings import methods, sync
from ..training import offloaded


def train(chosen: Train, workload: Workload, mesh: jax.sharding.Mesh) -> None:
    """Trains the baseline and the run that was asked for, and leaves a log, a plot and a checkpoint."""
    console = new_console()
    if chosen.sync is not None and not sync.is_sync(chosen.sync):
        sync.parse_sync(chosen.sync, chosen.optimizer)  # says what there is
    spelled = methods.spell(chosen.sync, chosen.zero, chosen.reducer, default="ef:power_sgd:4")
    where = offloaded.parse_offload(chosen.offload)
    _check(chosen)
    names = ["exact"] if chosen.baseline and (spelled != "exact" or where) else []
    runs = prepared_runs(names, chosen, workload, mesh)
    last = prepared_runs([spelled], chosen, workload, mesh, offload=where)
    finished, log_path, folder = [], fresh(chosen.out, "log.jsonl"), (chosen.out / "checkpoint").absolute()
    with log_path.open("a" if chosen.resume else "w") as log, results.saving(folder) as save:
        for name, run in runs:
            try:
                finished.append(finish(name, run, chosen, workload, log, console)[0])
            finally:
                run.close()
        for name, run in last:
            try:
                run = results.gone_on(folder, run) if chosen.resume else run
                settings = {"save": save, "save_every": chosen.save_every}
                result, state = finish(name, run, chosen, workload, log, console, **settings)
                save(state, chosen.steps)
                finished.append(result)
            finally:
                run.close()
    baseline = finished[0] if names else None
    plot = plots.draw_train(
        finished[-1], baseline, chosen.out / "loss.png", title=title_of(chosen, run), unit=unit_of(workload)
    )
    console.print(tables.runs_table(finished, baseline))
    _close(console, finished[-1], baseline)
    console.print(f"plot {plot}\nlog {log_path}\ncheckpoint {folder}", highlight=False, soft_wrap=True)


def _check(chosen: Train) -> None:
    if chosen.save_every is not None and chosen.save_every < 1:
        raise ValueError(f"--save-every must be at least 1, got {chosen.save_every}")
    if chosen.resume and (chosen.offload or "").startswith("nvme"):
        raise ValueError("--resume: a run with --offload nvme:FOLDER goes on from that folder by itself")


def _close(console: Console, result: results.Result, baseline: results.Result | None) -> None:
    """The closing line of `jaxdist train`."""
    if baseline is None:
        return
    summary = results.summarize(result, baseline)
    less = plots.in_bytes(summary.steps * (baseline.wire_bytes - result.wire_bytes))
    console.print(
        f"{result.name} sent {summary.times_fewer_bytes:,.1f} times fewer bytes than plain all-reduce ({less} less from"
        f" each worker) on the same data; its held-out loss differs by {summary.difference:+.4f}.",
        highlight=False,
    )

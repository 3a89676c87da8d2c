"""`jaxdist train`: one run beside plain all-reduce, on devices or on processes."""

from rich.console import Console

from .. import results, tables
from ..options import TrainOptions
from ..plotting import losses
from ..plotting.figures import in_bytes
from ..running import new_console, path_in, prepare_runs, print_paths, set_up, title_of, train_to_end, unit_of
from ..spellings import parse
from ..training import offloaded
from .processes import refuse_process_options, train_processes


def run_train(chosen: TrainOptions) -> None:
    """Trains by the engine that was chosen."""
    if chosen.engine == "ray":
        train_processes(chosen)
    else:
        refuse_process_options(chosen)
        _train_on_mesh(chosen)


def _train_on_mesh(chosen: TrainOptions) -> None:
    """Trains the baseline and the chosen method, and leaves a log, a plot and a checkpoint."""
    workload, mesh = set_up(chosen)
    console = new_console()
    options = (chosen.sync, chosen.zero, chosen.reducer, chosen.optimizer)
    spelling = parse.join_options(*options, default="ef:power_sgd:4")
    offload = offloaded.parse_offload(chosen.offload)
    if chosen.save_every is not None and chosen.save_every < 1:
        raise ValueError(f"--save-every must be at least 1, got {chosen.save_every}")
    if chosen.resume and (chosen.offload or "").startswith("nvme"):
        raise ValueError("--resume is for checkpoints: a run with --offload nvme:FOLDER resumes from that folder")
    names = ["exact"] if chosen.baseline and (spelling != "exact" or offload) else []
    baselines = prepare_runs(names, chosen, workload, mesh)
    runs = prepare_runs([spelling], chosen, workload, mesh, offload=offload)
    finished, log_path, folder = [], path_in(chosen.out, "log.jsonl"), (chosen.out / "checkpoint").absolute()
    with log_path.open("a" if chosen.resume else "w") as log, results.background_saver(folder) as save:
        for name, run in baselines:
            try:
                finished.append(train_to_end(name, run, chosen, workload, log, console)[0])
            finally:
                run.close()
        for name, run in runs:
            try:
                run = results.resume_run(folder, run) if chosen.resume else run
                settings = {"save": save, "save_every": chosen.save_every}
                result, state = train_to_end(name, run, chosen, workload, log, console, **settings)
                save(state, chosen.steps)
                finished.append(result)
            finally:
                run.close()
    baseline = finished[0] if names else None
    labels = {"title": title_of(chosen, run), "unit": unit_of(workload)}
    plot = losses.draw_train(finished[-1], baseline, chosen.out / "loss.png", **labels)
    console.print(tables.runs_table(finished, baseline))
    _print_savings(console, finished[-1], baseline)
    print_paths(console, plot=plot, log=log_path, checkpoint=folder)


def _print_savings(console: Console, result: results.RunResult, baseline: results.RunResult | None) -> None:
    """Prints the closing line."""
    if baseline is None:
        return
    summary = results.summarize(result, baseline)
    less = in_bytes(summary.steps * (baseline.wire_bytes - result.wire_bytes))
    console.print(
        f"{result.name} sent {summary.times_fewer_bytes:,.1f} times fewer bytes than plain all-reduce ({less} less from"
        f" each worker) on the same data; its held-out loss differs by {summary.difference:+.4f}.",
        highlight=False,
    )

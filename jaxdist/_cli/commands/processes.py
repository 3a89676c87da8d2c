"""`jaxdist train --engine ray`: a rule on real processes."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ...asynchronous import ray_engine, replay
from ...asynchronous.protocol import Rule
from .. import results
from ..options import TrainOptions
from ..plotting.replays import draw_replays
from ..running import new_console, path_in, print_paths
from ..spellings import parse, rules
from ..training import asynchronous
from .replay import rules_table

MESH_OPTIONS = ("reducer", "sync", "zero", "offload", "devices", "save_every", "resume")
PROCESS_OPTIONS = ("rule", "workers", "seconds", "slow", "gradient", "on_death", "address")
EVALUATION_SECONDS = 1.0


def refuse_process_options(chosen: TrainOptions) -> None:
    """Raises ValueError if an option is given that only `--engine ray` has."""
    given = [name for name in PROCESS_OPTIONS if getattr(chosen, name) is not None]
    if given:
        raise ValueError(f"{_join_flags(given)}: only with --engine ray")


def train_processes(chosen: TrainOptions) -> None:
    """Trains by a rule, and leaves a log, a plot and a checkpoint."""
    given = [name for name in MESH_OPTIONS if getattr(chosen, name)]
    if given:
        raise ValueError(f"{_join_flags(given)}: not with --engine ray, which has --rule")
    if chosen.rule is None or chosen.workers is None:
        raise ValueError("--engine ray needs --rule and --workers, as in --rule ad_psgd --workers 3")
    for name in ("steps", "batch", "workers", "seconds"):
        if getattr(chosen, name) is not None and not getattr(chosen, name) > 0:
            raise ValueError(f"--{name} must be positive, got {getattr(chosen, name)}")
    rule = rules.parse_rule(chosen.rule, parse.parse_optimizer(chosen.optimizer), chosen.gradient)
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    task = asynchronous.make_task(workload, batch=chosen.batch, seed=chosen.seed, workers=chosen.workers)
    console = new_console()
    run = _run_processes(chosen, chosen.workers, rule, task, console)
    settings = {"rule": chosen.rule, "optimizer": chosen.optimizer, "workload": workload.name, "model": chosen.model}
    settings |= {"workers": chosen.workers, "batch": chosen.batch, "seed": chosen.seed, "slow": chosen.slow}
    log_path = path_in(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        results.write_line(log, {"kind": "run", "engine": "ray", **settings})
        for seconds, loss in zip(run.times.tolist(), run.losses.tolist()):
            results.write_line(log, {"kind": "evaluation", "rule": chosen.rule, "seconds": seconds, "loss": loss})
        asynchronous.write_events(chosen.rule, run, log)
        counts = {"steps": len(run.trace.steps), "gradients": len(run.trace.gradients), "seconds": run.seconds}
        sent = {"held_out_loss": run.losses[-1].item(), "sent": run.sent.tolist(), "computing": run.computing.tolist()}
        results.write_line(log, {"kind": "summary", "rule": chosen.rule, **counts, **sent, "down": run.down.tolist()})
    folder = results.save(chosen.out / "checkpoint", {"params": run.params})
    slow = f", worker 0 slowed {chosen.slow}" if chosen.slow else ""
    title = f"{workload.name}, {chosen.workers} processes{slow}, {chosen.optimizer}, seed {chosen.seed}"
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(rules_table([(chosen.rule, run)], None))
    plot = draw_replays([(chosen.rule, run)], chosen.out / "loss.png", title=title, clock="wall")
    print_paths(console, plot=plot, log=log_path, checkpoint=folder)


def _join_flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _run_processes(
    chosen: TrainOptions, workers: int, rule: Rule, task: replay.Task, console: Console
) -> replay.Result:
    """Trains with a progress bar."""
    slow = {0: rules.parse_factor("--slow", chosen.slow)[0]} if chosen.slow else {}
    settings: dict[str, Any] = {"on_death": chosen.on_death or "restart", "address": chosen.address, "slow": slow}
    settings |= {"steps": chosen.steps} if chosen.seconds is None else {"seconds": chosen.seconds}
    settings |= {"workers": workers, "seed": chosen.seed, "evaluate_every": EVALUATION_SECONDS}
    columns = [TextColumn(f"{chosen.rule:<15}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(rule.name, total=chosen.seconds or chosen.steps, now="starting processes")

        def show_status(status: ray_engine.Status) -> None:
            died = sum(status.starts.values()) - len(status.starts)
            now = f"{status.seconds:.0f} s, {status.steps:,} steps"
            now += f", loss {status.loss:.3f}" if status.loss is not None else ""
            now += f", {died} replaced" if died else ""
            progress.update(bar, completed=status.seconds if chosen.seconds else status.steps, now=now)

        return ray_engine.run(rule, task, progress=show_status, **settings)

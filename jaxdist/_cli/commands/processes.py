"""`jaxdist train --engine ray`: a rule on real processes."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ...asynchronous import ray_engine, replay
from ...asynchronous.protocol import Rule
from .. import results
from ..options import Train
from ..plotting import replay_plots
from ..running import fresh, new_console
from ..spellings import parse, replayed
from .replay import table

OF_MESH = ("reducer", "sync", "zero", "offload", "devices", "save_every", "resume")
OF_PROCESSES = ("rule", "workers", "seconds", "slow", "gradient", "on_death", "address")
EVERY = 1.0  # seconds between evaluations


def refuse_of_processes(chosen: Train) -> None:
    """Says which options are for the other engine."""
    given = [name for name in OF_PROCESSES if getattr(chosen, name) is not None]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{names}: only with --engine ray")


def train_processes(chosen: Train) -> None:
    """Trains by a rule, and leaves a log, a plot and a checkpoint."""
    given = [name for name in OF_MESH if getattr(chosen, name)]
    if given:
        raise ValueError(
            f"{', '.join('--' + name.replace('_', '-') for name in given)}: not with --engine ray, which has --rule"
        )
    if chosen.rule is None or chosen.workers is None:
        raise ValueError("--engine ray needs --rule and --workers, as in --rule ad_psgd --workers 3")
    for name in ("steps", "batch", "workers", "seconds"):
        if getattr(chosen, name) is not None and not getattr(chosen, name) > 0:
            raise ValueError(f"--{name} must be positive, got {getattr(chosen, name)}")
    rule = replayed.parse_rule(chosen.rule, parse.parse_optimizer(chosen.optimizer), chosen.gradient)
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    task = replayed.task(workload, batch=chosen.batch, seed=chosen.seed, workers=chosen.workers)
    console = new_console()
    run = _run(chosen, chosen.workers, rule, task, console)
    settings = {"rule": chosen.rule, "optimizer": chosen.optimizer, "workload": workload.name, "model": chosen.model}
    settings |= {"workers": chosen.workers, "batch": chosen.batch, "seed": chosen.seed, "slow": chosen.slow}
    log_path = fresh(chosen.out, "log.jsonl")
    with log_path.open("w") as log:
        results.write_line(log, {"kind": "run", "engine": "ray", **settings})
        for seconds, loss in zip(run.times.tolist(), run.losses.tolist()):
            results.write_line(log, {"kind": "evaluation", "rule": chosen.rule, "seconds": seconds, "loss": loss})
        replayed.write_events(chosen.rule, run, log)
        counts = {"steps": len(run.trace.steps), "gradients": len(run.trace.gradients), "seconds": run.seconds}
        sent = {"held_out_loss": run.losses[-1].item(), "sent": run.sent.tolist(), "computing": run.computing.tolist()}
        results.write_line(log, {"kind": "summary", "rule": chosen.rule, **counts, **sent, "down": run.down.tolist()})
    saved_in = results.save(chosen.out / "checkpoint", {"params": run.params})
    slow = f", worker 0 slowed {chosen.slow}" if chosen.slow else ""
    title = f"{workload.name}, {chosen.workers} processes{slow}, {chosen.optimizer}, seed {chosen.seed}"
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table([(chosen.rule, run)], None))
    plot = replay_plots.draw([(chosen.rule, run)], chosen.out / "loss.png", title=title, clock="wall")
    console.print(f"plot {plot}\nlog {log_path}\ncheckpoint {saved_in}", highlight=False, soft_wrap=True)


def _run(chosen: Train, workers: int, rule: Rule, task: replay.Task, console: Console) -> replay.Result:
    """Trains behind a progress bar."""
    slow = {0: replayed.parse_factor("--slow", chosen.slow)[0]} if chosen.slow else {}
    settings: dict[str, Any] = {"on_death": chosen.on_death or "restart", "address": chosen.address, "slow": slow}
    if chosen.seconds is None:
        settings["steps"] = chosen.steps
    else:
        settings["seconds"] = chosen.seconds
    columns = [TextColumn(f"{chosen.rule:<15}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(rule.name, total=chosen.seconds or chosen.steps, now="processes start")

        def tell(status: ray_engine.Status) -> None:
            died = sum(status.starts.values()) - len(status.starts)
            now = f"{status.seconds:.0f} s, {status.steps:,} steps"
            now += f", loss {status.loss:.3f}" if status.loss is not None else ""
            now += f", {died} replaced" if died else ""
            progress.update(bar, completed=status.seconds if chosen.seconds else status.steps, now=now)

        return ray_engine.run(
            rule, task, workers=workers, seed=chosen.seed, evaluate_every=EVERY, progress=tell, **settings
        )

"""`jaxdist train`: one run beside plain all-reduce, on devices or, with `--engine ray`, a rule on real processes."""

import math
import platform
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import TaskProgressColumn

from ... import checkpoint, islands
from ..._core.checks import check_range
from ...asynchronous import ray_engine, replay
from ...asynchronous.protocol import Rule
from ...offload.nvme.base import committed_step
from .. import losses, results, tables
from ..figures import in_bytes, print_table
from ..models.base import check_batch
from ..running import (
    Integer,
    Number,
    Options,
    StoppedError,
    Text,
    check_seed,
    check_steps_left,
    new_console,
    new_progress,
    path_in,
    prepare_runs,
    print_figure,
    print_paths,
    set_up,
    shorten,
    show_compiling,
    title_of,
    train_to_end,
    unit_of,
)
from ..spellings import parse
from ..stores import open_store
from ..training import train
from ..training.one_worker import Offload, parse_offload
from .replay import draw_replays, make_task, rules_table, write_events

MESH_OPTIONS = ("reducer", "sync", "zero", "offload", "devices", "save_every", "resume", "islands")
JOIN_OPTIONS = (
    "round_timeout",
    "begin_with",
    "quorum",
    "grace",
    "patience",
    "overlap",
    "eager",
    "keep_every",
    "owners",
)
ISLAND_OPTIONS = ("name", "store", *JOIN_OPTIONS)
PROCESS_OPTIONS = ("rule", "workers", "seconds", "slow", "gradient", "on_death", "address")
EVALUATION_SECONDS = 1.0


@dataclass(frozen=True)
class TrainOptions(Options):
    """Trains one model on all devices and compares it with plain all-reduce.

    Examples:
      jaxdist train --reducer ef:top_k:0.01 --text my-notes/ --steps 500
      jaxdist train --sync diloco:H=50 --islands s3://bucket/run-7 --save-every 50 --resume
      jaxdist train --engine ray --rule ad_psgd --workers 3
    """

    reducer: Text = None
    """Encodes messages. Default: ef:power_sgd:4, exact with --sync, --zero."""
    sync: Text = None
    """Local steps, synchronized every H: diloco:H=50; see jaxdist reducers."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1, 2 shard the optimizer state, 3 parameters too."""
    offload: Text = None
    """Keep the optimizer state in host memory (host), or in nvme:FOLDER."""
    baseline: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """Leave out the run with plain all-reduce."""
    save_every: Integer = None
    """Also save after every so many steps, in the background."""
    resume: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Continue from the last checkpoint, until --steps in total."""
    checkpoint: Text = None
    """Folder or bucket of the checkpoints. Default: checkpoint/ in --out."""
    islands: Text = None
    """With --sync: meet other jobs in this folder or bucket, as one worker."""
    name: Text = None
    """With --islands: the name of this job. Default: the host's."""
    round_timeout: Number = None
    """With --islands: seconds to wait for others in a round (default: 120)."""
    begin_with: Integer = None
    """With --islands: how many to wait for at the start (default: 1)."""
    quorum: Integer = None
    """With --islands: the fewest that make a round (default: 1)."""
    grace: Number = None
    """With --islands: seconds for others once there is a quorum."""
    patience: Number = None
    """With --islands: seconds until too few are an error (default: 3600)."""
    overlap: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """With --islands: exchange while training, and merge a round later."""
    eager: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """With --overlap: take this island's share of the step at once."""
    keep_every: Integer = None
    """With --islands: rounds between kept parameters (default: 20)."""
    owners: Integer = None
    """With --islands: pieces of a mean, each averaged by one (default: 0)."""
    begin: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """With --islands: join a run that is there, and begin none."""
    store: Text = None
    """With --islands: of a bucket, endpoint=URL,region=NAME,profile=NAME."""
    engine: Literal["mesh", "ray"] = "mesh"
    """mesh: one program; ray: one process per worker."""
    rule: Text = None
    """With ray: how workers exchange, as in ssp:3; see jaxdist reducers."""
    workers: Integer = None
    """With ray: number of processes."""
    seconds: Number = None
    """With ray: duration, instead of --steps, which are updates."""
    slow: Text = None
    """With ray: gradients of worker 0 take that much longer, as in 5x."""
    gradient: Text = None
    """With ray: the code of gradients, as in qsgd:4 or ef:top_k:0.01."""
    on_death: Annotated[
        Literal["restart", "continue"] | None, tyro.conf.arg(metavar="STR", help_behavior_hint="(default: restart)")
    ] = None
    """With ray: restart a dead worker, or continue."""
    address: Text = None
    """With ray: a cluster, as in auto or 10.0.0.1:6379; default: a new one."""
    out: Path = Path("runs/train")
    """Folder of log.jsonl, loss.png and checkpoint/."""


def run_train(chosen: TrainOptions) -> None:
    """Trains on a mesh of this process, or with Ray in a process per worker."""
    if chosen.save_every is not None:
        check_range("--save-every", chosen.save_every, 1, ends="[]")
    if chosen.engine == "ray":
        train_processes(chosen)
    else:
        refuse_process_options(chosen)
        try:
            if chosen.islands:
                _train_on_island(chosen)
            else:
                _train_on_mesh(chosen)
        # Raised through the block of the saver, which waits for the checkpoint.
        except StoppedError as stopped:
            where = f"the checkpoint is in {shorten(_checkpoints_of(chosen))}, --resume continues from it"
            print(f"jaxdist: stopped after step {stopped.step} of {chosen.steps}: {where}", file=sys.stderr)


def _train_on_mesh(chosen: TrainOptions) -> None:
    """Trains the baseline and the chosen method, and leaves a log, a plot and a checkpoint."""
    workload, mesh = set_up(chosen)
    console = new_console()
    options = (chosen.sync, chosen.zero, chosen.reducer, chosen.optimizer)
    spelling = parse.join_options(*options, default="ef:power_sgd:4")
    offload = parse_offload(chosen.offload)
    if chosen.resume and (chosen.offload or "").startswith("nvme"):
        raise ValueError("--resume is for checkpoints: a run with --offload nvme:FOLDER resumes from that folder")
    # Plain all-reduce needs no comparison with itself, unless its state is elsewhere.
    names = ["exact"] if chosen.baseline and (spelling != "exact" or offload) else []
    # Plain all-reduce with its state on the device is the baseline of an offloaded run too.
    baselines = prepare_runs(names, chosen, workload, mesh)
    runs = prepare_runs([spelling], chosen, workload, mesh, offload=offload)
    place = _checkpoints_of(chosen)
    _check_resume(chosen, place, offload)
    if offload is not None and offload.folder is not None:
        # Where it cannot be made, the baseline need not be trained.
        offload.folder.mkdir(parents=True, exist_ok=True)
    finished, log_path = [], path_in(chosen.out, "log.jsonl")
    # The saver first: it refuses a folder in which another run is writing, whose log is there too.
    with results.background_saver(place) as save, results.open_log(log_path, append=chosen.resume) as log:
        for name, run in baselines:
            try:
                # The state is dropped at once: the next run needs the memory.
                finished.append(train_to_end(name, run, chosen, workload, log, console)[0])
            finally:
                run.close()
        for name, run in runs:
            try:
                if chosen.resume:
                    if checkpoint.latest(place) is None:
                        console.print(f"no checkpoint in {shorten(place)}: starting from step 0", highlight=False)
                    run = results.resume_run(place, run)
                settings = {"save": save, "save_every": chosen.save_every}
                result, state = train_to_end(name, run, chosen, workload, log, console, **settings)
                # In the background too: leaving the outer block waits for it.
                save(state, chosen.steps)
                finished.append(result)
            finally:
                run.close()
    baseline = finished[0] if names else None
    labels = {"title": title_of(chosen, workload, mesh.size), "unit": unit_of(workload)}
    plot = losses.draw_train(finished[-1], baseline, chosen.out / "loss.png", **labels)
    units = tables.count_units(workload, chosen.batch, mesh.size)
    print_table(console, tables.runs_table(finished, baseline, units))
    _print_savings(console, finished[-1], baseline)
    print_paths(console, log=log_path, checkpoint=place)
    print_figure(console, chosen, plot)


def _checkpoints_of(chosen: TrainOptions) -> Path | str:
    """The folder or the URL of the checkpoints."""
    if chosen.checkpoint is not None and "://" in chosen.checkpoint:
        return chosen.checkpoint
    return (chosen.out / "checkpoint" if chosen.checkpoint is None else Path(chosen.checkpoint)).absolute()


def _check_resume(chosen: TrainOptions, place: Path | str, offload: Offload | None = None) -> None:
    """Raises ValueError, before anything is trained, if the run to continue is complete."""
    # A folder with the state of an optimizer is continued without --resume.
    done = committed_step(offload.folder) if offload is not None and offload.folder is not None else 0
    if chosen.resume:
        done = checkpoint.latest(place) or 0
    check_steps_left(done, chosen.steps)


def _train_on_island(chosen: TrainOptions) -> None:
    """Trains as one of several jobs that meet in a store, and leaves a log, a plot and a checkpoint."""
    _check_island(chosen)
    workload, mesh = set_up(chosen)
    console = new_console()
    # Checked as without islands, so that mistakes have the same messages.
    spelling = parse.join_options(chosen.sync, 0, chosen.reducer, chosen.optimizer, default="exact")
    method = parse.parse_sync(spelling, chosen.optimizer, steps=chosen.steps, island=train.AXIS)
    check_batch(chosen.batch, mesh.size)
    name = chosen.name or platform.node()
    # Each island draws batches of its own; all of them take the parameters of the run.
    settings = {"mesh": mesh, "batch_size": chosen.batch, "seed": zlib.crc32(name.encode(), chosen.seed)}
    place = _checkpoints_of(chosen)
    _check_resume(chosen, place)
    log_path = path_in(chosen.out, "log.jsonl")
    joined = islands.join(
        open_store(chosen.islands or "", chosen.store),
        method.optimizer,
        name=name,
        begin=chosen.begin,
        **{option: getattr(chosen, option) for option in JOIN_OPTIONS if _is_given(chosen, option)},
    )
    with (
        # First, as it refuses a folder in which another run is writing, whose log is there too.
        results.background_saver(place) as save,
        results.open_log(log_path, append=chosen.resume) as log,
        joined as island,
    ):
        with show_compiling(console, f"{spelling} for {mesh.size} workers"):
            run = train.prepare(workload, None, method.optimizer, **settings, island=True)
        if chosen.resume:
            run = results.resume_run(place, run)
        run = run._replace(state=island.enter(run.state))
        reports: list[islands.Report] = []

        def meet(state: train.TrainState, step: int) -> train.TrainState:
            if not island.due(step):
                return state
            try:
                state, report = island.meet(state)
            except islands.IslandError:
                # What it has learned is not lost with the run: --resume goes on from here.
                save(state, step + 1)
                raise
            reports.append(report)
            results.write_line(log, {"kind": "round", **report._asdict()})
            return state

        saving = {"save": save, "save_every": chosen.save_every}
        try:
            result, state = train_to_end(spelling, run, chosen, workload, log, console, **saving, after=meet)
        except StoppedError as stopped:
            # The others need not wait for this island, and what it has learned is not lost.
            island.leave(stopped.state)
            raise
        save(state, chosen.steps)
    labels = {"title": f"island {name}, {title_of(chosen, workload, mesh.size)}", "unit": unit_of(workload)}
    plot = losses.draw_train(result, None, chosen.out / "loss.png", **labels)
    print_table(console, tables.runs_table([result], None))
    _print_rounds(console, reports)
    print_paths(console, log=log_path, checkpoint=place)
    print_figure(console, chosen, plot)


def _check_island(chosen: TrainOptions) -> None:
    given = [name for name in ("zero", "offload") if getattr(chosen, name)]
    if given:
        raise ValueError(f"{_join_flags(given)}: not with --islands")
    if chosen.sync is None:
        raise ValueError("--islands needs --sync, as in --sync diloco:H=50: islands meet every H steps")


def _print_rounds(console: Console, reports: list[islands.Report]) -> None:
    if not reports:
        return
    sent, waited = (sum(values) / len(reports) for values in zip(*((r.sent_bytes, r.wait_seconds) for r in reports)))
    members = ", ".join(reports[-1].members) or "no island"
    meetings = "1 meeting" if len(reports) == 1 else f"{len(reports)} meetings"
    console.print(
        f"{meetings}, {sum(report.counted for report in reports)} of them counted; the last round took "
        f"{members}. Mean of a meeting: {in_bytes(sent)} sent, {waited:.2f} s.",
        highlight=False,
    )


def _print_savings(console: Console, result: results.RunResult, baseline: results.RunResult | None) -> None:
    if baseline is None:
        return
    summary = results.summarize(result, baseline)
    # All steps of the run, those before a resumption too: the bytes of a step are the mean over them.
    less = in_bytes(result.records[-1].step * (baseline.wire_bytes - result.wire_bytes))
    times = "infinitely many" if summary.times_fewer_bytes == math.inf else f"{summary.times_fewer_bytes:,.1f}"
    console.print(
        f"{result.name} sent {times} times fewer bytes than plain all-reduce ({less} less from each worker) on the same"
        f" data; its held-out loss differs by {summary.difference:+.4f}.",
        highlight=False,
    )


def refuse_process_options(chosen: TrainOptions) -> None:
    """Raises ValueError if an option is given that only `--engine ray`, or only `--islands`, has."""
    # Their defaults are None, so that a value that equals the engine's own default is noticed too.
    given = [name for name in PROCESS_OPTIONS if getattr(chosen, name) is not None]
    if given:
        raise ValueError(f"{_join_flags(given)}: only with --engine ray")
    given = [name for name in ISLAND_OPTIONS if _is_given(chosen, name)] + ["no-begin"] * (not chosen.begin)
    if given and chosen.islands is None:
        raise ValueError(f"{_join_flags(given)}: only with --islands")


def train_processes(chosen: TrainOptions) -> None:
    """Trains by a rule, and leaves a log, a plot and a checkpoint."""
    given = [name for name in (*MESH_OPTIONS, *ISLAND_OPTIONS) if getattr(chosen, name)]
    if given:
        raise ValueError(f"{_join_flags(given)}: not with --engine ray, which has --rule")
    if chosen.rule is None or chosen.workers is None:
        raise ValueError("--engine ray needs --rule and --workers, as in --rule ad_psgd --workers 3")
    for name in ("steps", "batch", "workers", "seconds"):
        if getattr(chosen, name) is not None:
            check_range(f"--{name}", getattr(chosen, name), 0, ends="(]")
    check_seed(chosen.seed)
    rule = parse.parse_rule(chosen.rule, parse.parse_optimizer(chosen.optimizer), chosen.gradient)
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    task = make_task(workload, batch=chosen.batch, seed=chosen.seed, workers=chosen.workers)
    console = new_console()
    log_path = path_in(chosen.out, "log.jsonl")
    run = _run_processes(chosen, chosen.workers, rule, task, console)
    settings = {"rule": chosen.rule, "optimizer": chosen.optimizer, "workload": workload.name, "model": chosen.model}
    settings |= {"workers": chosen.workers, "batch": chosen.batch, "seed": chosen.seed, "slow": chosen.slow}
    with results.open_log(log_path) as log:
        results.write_line(log, {"kind": "run", "engine": "ray", **settings})
        for seconds, loss in zip(run.times.tolist(), run.losses.tolist()):
            results.write_line(log, {"kind": "evaluation", "rule": chosen.rule, "seconds": seconds, "loss": loss})
        write_events(chosen.rule, run, log)
        counts = {"steps": len(run.trace.steps), "gradients": len(run.trace.gradients), "seconds": run.seconds}
        sent = {"held_out_loss": run.losses[-1].item(), "sent": run.sent.tolist(), "computing": run.computing.tolist()}
        results.write_line(log, {"kind": "summary", "rule": chosen.rule, **counts, **sent, "down": run.down.tolist()})
    place = results.save(_checkpoints_of(chosen), {"params": run.params}, len(run.trace.steps))
    slow = f", worker 0 slowed {chosen.slow}" if chosen.slow else ""
    title = f"{workload.name}, {chosen.workers} processes{slow}, {chosen.optimizer}, seed {chosen.seed}"
    console.print(f"\n{title}", style="dim", highlight=False)
    print_table(console, rules_table([(chosen.rule, run)], None))
    plot = draw_replays([(chosen.rule, run)], chosen.out / "loss.png", title=title, clock="wall")
    print_paths(console, log=log_path, checkpoint=place)
    print_figure(console, chosen, plot)


def _is_given(chosen: TrainOptions, name: str) -> bool:
    # Not `in`: 0 equals False, and is a value that `join` refuses.
    return not any(getattr(chosen, name) is default for default in (None, False))


def _join_flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _run_processes(
    chosen: TrainOptions, workers: int, rule: Rule, task: replay.Task, console: Console
) -> replay.Result:
    slow = {0: parse.parse_factor("--slow", chosen.slow)[0]} if chosen.slow else {}
    settings: dict[str, Any] = {"on_death": chosen.on_death or "restart", "address": chosen.address, "slow": slow}
    settings |= {"steps": chosen.steps} if chosen.seconds is None else {"seconds": chosen.seconds}
    settings |= {"workers": workers, "seed": chosen.seed, "evaluate_every": EVALUATION_SECONDS}
    with new_progress(console, TaskProgressColumn, 20) as progress:
        bar = progress.add_task(str(chosen.rule), total=chosen.seconds or chosen.steps, now="starting processes")

        def show_status(status: ray_engine.Status) -> None:
            # Every worker starts once; the other starts replaced one that died.
            died = sum(status.starts.values()) - len(status.starts)
            now = f"{status.seconds:.0f} s, {status.steps:,} steps"
            now += f", loss {status.loss:.3f}" if status.loss is not None else ""
            now += f", {died} replaced" if died else ""
            progress.update(bar, completed=status.seconds if chosen.seconds else status.steps, now=now)

        return ray_engine.run(rule, task, progress=show_status, **settings)

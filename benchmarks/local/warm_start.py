"""How long must a synchronous start be before local methods hold? DiLoCo and others at H = 32 to the end of a cosine.

    python benchmarks/local warm_start --out benchmarks/reports/NAME

Every run has the same tokens in the same order and the same AdamW with clipping, at the same rate in every step. Its
first `warmup_steps` average gradients, the rest of its steps are rounds, and Adam's moments are carried over. The
reference averages gradients in all steps. The start is computed once for each seed and shared: the recipes with
`warmup_steps=` compute the same, which `--check` shows. Workers are simulated on one device; bytes are read from the
compiled programs by `jaxdist compare`, not here. Runs that the file has already are not repeated, and several `--rate`
give a table of each method at its best one too.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxdist as jd
from jaxdist._cli.spellings import parse

CHUNK = 32  # steps of one call of a compiled program; starts and runs are whole numbers of chunks
SETTINGS = ("rate", "schedule", "workers", "steps", "batch", "model")
METHODS = ("synchronous", "local_sgd:32", "diloco:32,0.7,0.9", "diloco:32,0.7,0.5")


class Program(NamedTuple):
    """A compiled step, and the transformation inside it."""

    tx: optax.GradientTransformation
    run: Any  # `run(state, batches) -> (state, losses)`, over the first dimension of the batches


def make_schedule(name: str, rate: float, steps: int) -> optax.Schedule:
    """`cosine`: 100 steps up, then a cosine to 5 % of the rate; `late`: constant for 1,024 steps, then that cosine."""
    if name == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, rate, 100, steps, 0.05 * rate)
    late = optax.cosine_decay_schedule(rate, steps - 1024, 0.05)
    return optax.join_schedules([optax.constant_schedule(rate), late], [1024])


def make_method(spelling: str, inner: optax.GradientTransformation, warmup_steps: int = 0):
    """Makes `synchronous`, `local_sgd:H`, `NAME:H,OUTER_RATE,MOMENTUM` for the DiLoCo variants.

    Those of `diloco_late` and `diloco_eager` have the whole next round to send a drift.
    """
    name, _, rest = spelling.partition(":")
    numbers = [float(number) for number in rest.split(",") if rest]
    if name == "synchronous":
        return optax.chain(jd.all_reduce(jd.exact()), inner)
    period, outer = int(numbers[0]), {"warmup_steps": warmup_steps}
    if name == "local_sgd":
        return jd.local_steps(inner, optax.sgd(1.0), sync_period=period, **outer)
    outer |= {"sync_period": period, "learning_rate": numbers[1], "momentum": numbers[2]}
    if name == "streaming":
        return jd.local_sgd.streaming_diloco(inner, fragments=4, delay=1, **outer)
    variants: dict[str, dict[str, Any]] = {
        "diloco": {},
        "diloco_4_bits": {"reducer": jd.two_shot(jd.qsgd(4))},
        "diloco_rda": {"merge": "rda"},
        "diloco_late": {"delay": period - 1, "overlap_correction": True},
        "diloco_eager": {"delay": period - 1, "eager": True},
    }
    return jd.local_sgd.diloco(inner, **variants[name], **outer)


def make_inner(options: argparse.Namespace) -> optax.GradientTransformation:
    schedule = make_schedule(options.schedule, options.rate, options.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))


def make_program(workload: Any, tx: optax.GradientTransformation, workers: int) -> Program:
    def step(state, batch):
        params, opt_state = state
        loss, gradients = jd.local_value_and_grad(workload.loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    run = jax.jit(partial(jax.lax.scan, jd.simulate(step, workers)), donate_argnums=0)
    return Program(tx, run)


def train(
    program: Program, workload: Any, state: Any, first: int, last: int, options: Any, seed: int, keep: Any = ()
) -> tuple[Any, list[float], dict[int, Any]]:
    """Trains from step `first` to step `last`; returns the state, the mean loss of each chunk, and states to keep."""
    losses, kept = [], {}
    for start in range(first, last, CHUNK):
        steps = range(start, min(start + CHUNK, last))
        batches = np.stack([workload.batch(seed, step, options.batch) for step in steps])
        state, chunk = program.run(state, batches)
        losses.append(round(float(chunk.mean()), 4))
        if steps[-1] + 1 in keep:
            # The next call donates the state.
            kept[steps[-1] + 1] = jax.device_get(state)
    return state, losses, kept


def start_local(program: Program, params: Any, inner_state: Any, workers: int) -> Any:
    """The state of a local method that goes on from a synchronous run, with its Adam state."""
    opt_state = program.tx.init(params)
    moments = jax.tree.unflatten(jax.tree.structure(opt_state.inner), jax.tree.leaves(inner_state))
    return jd.place((jd.PerWorker(params), opt_state._replace(inner=moments)), workers)


def run_seed(workload: Any, seed: int, options: argparse.Namespace, done: set) -> Iterator[dict]:
    """Trains all methods of one seed from one synchronous run; yields a row for each."""
    wanted = {(method, warm) for method in options.methods for warm in options.warm if method != "synchronous"}
    if "synchronous" in options.methods:
        wanted.add(("synchronous", 0))
    if all((seed, *run) in done for run in wanted):
        return
    inner = make_inner(options)
    synchronous = make_program(workload, make_method("synchronous", inner), options.workers)
    params = workload.init(jax.random.key(seed))
    state = jd.place((params, synchronous.tx.init(params)), options.workers)
    # With the reference still to do, the synchronous run goes on to the end.
    whole = "synchronous" in options.methods and (seed, "synchronous", 0) not in done
    starts, began = {0: jax.device_get(state)}, time.perf_counter()
    last = options.steps if whole else max(options.warm)
    state, losses, kept = train(synchronous, workload, state, 0, last, options, seed, keep=options.warm)
    starts |= kept
    if whole:
        yield describe("synchronous", 0, seed, evaluate(workload, state[0]), losses, began, options)
    for method in options.methods:
        missing = [warm for warm in options.warm if (seed, method, warm) not in done]
        if method == "synchronous" or not missing:
            continue
        program = make_program(workload, make_method(method, inner), options.workers)
        for warm in missing:
            began, (model, (_, inner_state)) = time.perf_counter(), starts[warm]
            state = start_local(program, model, inner_state, options.workers)
            state, losses, _ = train(program, workload, state, warm, options.steps, options, seed)
            held_out = evaluate(workload, jd.local_sgd.global_params(state[1]))
            yield describe(method, warm, seed, held_out, losses, began, options)


def evaluate(workload: Any, params: Any) -> float:
    return float(np.mean([jax.jit(workload.loss)(params, batch) for batch in workload.held_out(256)]))


def describe(method: str, warm: int, seed: int, held_out: float, losses: list, began: float, options: Any) -> dict:
    """The row of one run; `train_losses` has a mean for every chunk of steps."""
    row = {"method": method, "warmup_steps": warm, "seed": seed, "held_out_loss": held_out}
    row |= {name: getattr(options, name) for name in SETTINGS}
    return row | {"seconds": round(time.perf_counter() - began, 1), "jax": jax.__version__, "train_losses": losses}


def check(workload: Any, options: argparse.Namespace) -> None:
    """Prints the losses of a run with a shared start and of one with `warmup_steps=`, which agree up to rounding."""
    warm, method = options.warm[0], options.methods[-1]
    (row,) = run_seed(workload, 0, argparse.Namespace(**vars(options) | {"methods": [method], "warm": [warm]}), set())
    program = make_program(workload, make_method(method, make_inner(options), warm), options.workers)
    params = workload.init(jax.random.key(0))
    state = jd.place((jd.PerWorker(params), program.tx.init(params)), options.workers)
    state, _, _ = train(program, workload, state, 0, options.steps, options, 0)
    print("shared start", row["held_out_loss"])
    print("warmup_steps", evaluate(workload, jd.local_sgd.global_params(state[1])))


def make_table(rows: list[dict], method: str) -> str:
    """A row for each start: bytes, and the held-out loss against the synchronous run of the same seed."""
    base = {row["seed"]: row["held_out_loss"] for row in rows if row["method"] == "synchronous"}
    lines = [
        "| `warmup_steps` | fewer bytes in all | held-out loss | against synchronous, each seed |",
        "|--:|--:|--:|---|",
    ]
    own = [row for row in rows if row["method"] == method and row["seed"] in base]
    for warm in sorted({row["warmup_steps"] for row in own}):
        found = sorted((row["seed"], row["held_out_loss"]) for row in own if row["warmup_steps"] == warm)
        period, steps = int(method.split(":")[1].split(",")[0]), own[0]["steps"]
        # A warm-up step and a round send the same: all entries once.
        fewer = steps / (warm + (steps - warm) // period)
        each = ", ".join(f"{100 * (loss / base[seed] - 1):+.1f} %" for seed, loss in found)
        lines.append(f"| {warm} | {fewer:.1f}x | {np.mean([loss for _, loss in found]):.3f} | {each} |")
    return "\n".join(lines)


def make_rates_table(rows: list[dict]) -> str:
    """A row for each method and start at its best rate, against the synchronous run at its own best rate.

    The best rate is that of the lowest mean loss over the seeds that have all rates, and differences are taken by seed.
    """
    rates = sorted({row["rate"] for row in rows})
    losses = {(row["method"], row["warmup_steps"], row["rate"], row["seed"]): row["held_out_loss"] for row in rows}
    runs = dict.fromkeys((row["method"], row["warmup_steps"]) for row in rows)
    lines = [
        f"| method | `warmup_steps` | {' | '.join(f'{rate:g}' for rate in rates)} | at the best, each seed |",
        f"|---|--:|{'--:|' * len(rates)}---|",
    ]
    base: dict[int, float] = {}
    for method, warm in sorted(runs, key=lambda run: (run[0] != "synchronous", run)):
        own = {
            rate: {seed: loss for (*run, at, seed), loss in losses.items() if (*run, at) == (method, warm, rate)}
            for rate in rates
        }
        found = {rate: by_seed for rate, by_seed in own.items() if by_seed}
        # Only seeds that every rate has decide.
        shared = set.intersection(*map(set, found.values()))
        best = min(found, key=lambda rate: np.mean([found[rate][seed] for seed in shared or found[rate]]))
        base = found[best] if method == "synchronous" else base
        each = [f"{100 * (loss / base[seed] - 1):+.1f} %" for seed, loss in sorted(found[best].items()) if seed in base]
        cells = [", ".join(f"{own[rate][seed]:.3f}" for seed in sorted(own[rate])) for rate in rates]
        lines.append(f"| `{method}` | {warm} | {' | '.join(cells)} | {', '.join(each)} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Draws the loss against synchronous training over the length of the start, a line for each method."""
    base = {row["seed"]: row["held_out_loss"] for row in rows if row["method"] == "synchronous"}
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows if row["method"] != "synchronous")):
        own = [row for row in rows if row["method"] == method and row["seed"] in base]
        points = [(row["warmup_steps"], 100 * (row["held_out_loss"] / base[row["seed"]] - 1)) for row in own]
        starts = sorted({warm for warm, _ in points})
        means = [np.mean([loss for warm, loss in points if warm == start]) for start in starts]
        axes.plot(starts, means, color=f"C{number}", label=method)
        axes.plot(*zip(*points, strict=True), "o", color=f"C{number}", markersize=4)
    axes.axhline(0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("symlog", base=2, linthresh=64)
    every = sorted({row["warmup_steps"] for row in rows})
    axes.set_xticks(every, [str(start) for start in every])
    axes.set_xlabel(f"synchronous steps at the start, of {rows[0]['steps']:,}")
    axes.set_ylabel("held-out loss above synchronous training, %")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step, all workers together")
    parser.add_argument("--model", default="gpt:tiny,layers=1,width=32,context=32,heads=2")
    parser.add_argument("--rate", type=float, nargs="+", default=[4e-3], help="the highest inner learning rates")
    parser.add_argument("--schedule", choices=("cosine", "late"), default="cosine")
    parser.add_argument("--warm", type=int, nargs="+", default=[0, 64, 128, 256, 512, 1024])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--check", action="store_true", help="compare a shared start with warmup_steps=")
    parser.add_argument("--out", type=Path, default=Path("runs/local"))


def main(options: argparse.Namespace) -> None:
    workload = parse.parse_workload("text", options.model)
    settings = vars(options)
    options.out.mkdir(parents=True, exist_ok=True)
    path, all_rows = options.out / "warm_start.jsonl", []
    for rate in options.rate:
        at_rate = argparse.Namespace(**settings | {"rate": rate})
        if options.check:
            check(workload, at_rate)
            continue
        all_rows += run_missing(workload, at_rate, path)
    if len(options.rate) > 1 and all_rows:
        # The file may have other starts and methods, at one of the rates only.
        asked = {("synchronous", 0)} | {(method, warm) for method in options.methods for warm in options.warm}
        chosen = [row for row in all_rows if (row["method"], row["warmup_steps"]) in asked]
        text = make_rates_table([row for row in chosen if row["seed"] in options.seeds])
        print(text)
        (options.out / f"best_rates_{options.workers}.md").write_text(text + "\n")
    # Several rates would be several tables of the same starts: the table and the figure are those of one.
    elif all_rows:
        methods = dict.fromkeys(row["method"] for row in all_rows if row["method"] != "synchronous")
        text = "\n\n".join(f"`{method}`\n\n{make_table(all_rows, method)}" for method in methods)
        print(text)
        (options.out / "warm_start.md").write_text(text + "\n")
        if methods:
            draw(all_rows, options.out / "warm_start.png")


def run_missing(workload: Any, options: argparse.Namespace, path: Path) -> list[dict]:
    """Trains what the file does not have at this rate, appends a row for each run, and returns all rows of the rate."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if all(row[name] == getattr(options, name) for name in SETTINGS)]
    done = {(row["seed"], row["method"], row["warmup_steps"]) for row in rows}
    with path.open("a") as file:
        for seed in options.seeds:
            for row in run_seed(workload, seed, options, done):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                shown = ("rate", "seed", "method", "warmup_steps", "held_out_loss", "seconds")
                print(*(row[name] for name in shown), flush=True)
    return rows

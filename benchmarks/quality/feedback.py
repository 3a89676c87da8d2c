"""Does memory of compression errors pay, and how strongly must a code be shrunk inside it?

    python benchmarks/quality feedback --out benchmarks/reports/NAME

Simulated workers train a byte-level language model of 19 thousand parameters (eight bytes, an embedding, one hidden
layer) on the source of Python's standard library. Every method compresses with the same code by itself, with error
feedback, LoCo, EF21, in a two-shot with and without a server residual; in every step, in the rounds of Local SGD and
DiLoCo, and in gossip. Runs of a seed have the same initial values, batches and learning rates, of which each method
has its best. All seeds and rates of a method are one program.

Rows are appended to `feedback.jsonl`; a run that the file has already is not repeated. `feedback.md` has the table.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import append_rows

import jaxdist as jd
from jaxdist._cli.models.text import corpus

CONTEXT, VOCABULARY, EMBEDDING, HIDDEN = 8, 64, 16, 96
BATCH, HELD_OUT, TEXT = 16, 4096, 1 << 20
STEPS, PERIOD, START = 320, 8, 64  # a fifth of the run is synchronous before rounds
BUCKET = 512
# A factor of two apart, around the best of `exact`, which is never the first or the last.
RATES = {
    "diloco": {"adamw": (2e-3, 4e-3, 8e-3), "momentum": (0.025, 0.05, 0.1)},
    "local_sgd": {"adamw": (1e-2, 2e-2, 4e-2), "momentum": (0.2, 0.4, 0.8)},
    "steps": {"adamw": (1e-2, 2e-2, 4e-2), "momentum": (0.1, 0.2, 0.4)},
    "gossip": {"adamw": (2e-2, 4e-2, 8e-2), "momentum": (0.2, 0.4, 0.8)},
}


class Run(NamedTuple):
    """Where a tree is compressed, by which code in which form, and with how many workers; for both optimizers."""

    place: str
    code: str
    form: str
    workers: int


@cache
def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text as codes below 64: the 63 most frequent bytes, and one for all others."""
    text = corpus()
    ranks = np.argsort(-np.bincount(text.train, minlength=256), kind="stable")
    table = np.full(256, VOCABULARY - 1, np.uint8)
    table[ranks[: VOCABULARY - 1]] = np.arange(VOCABULARY - 1)
    return table[text.train[:TEXT]], table[text.held_out[:TEXT]]


SHAPES = {
    "embedding": (VOCABULARY, EMBEDDING),
    "hidden": (CONTEXT * EMBEDDING, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "output": (HIDDEN, VOCABULARY),
    "output_bias": (VOCABULARY,),
}


def init(key: Any) -> Any:
    """All parameters in one vector: one code to compile instead of five, and buckets over layers, as in a two-shot."""
    keys = jax.random.split(key, len(SHAPES))
    parts = []
    for (name, shape), key in zip(SHAPES.items(), keys, strict=True):
        scale = 0.0 if len(shape) == 1 else 1.0 if name == "embedding" else shape[0] ** -0.5
        parts.append(scale * jax.random.normal(key, shape).ravel())
    return jnp.concatenate(parts)


def loss_of(params: Any, windows: Any) -> Any:
    sizes = np.cumsum([np.prod(shape) for shape in SHAPES.values()])
    parts = [x.reshape(shape) for x, shape in zip(jnp.split(params, sizes[:-1]), SHAPES.values(), strict=True)]
    embedding, hidden, hidden_bias, output, output_bias = parts
    x = jnp.tanh(embedding[windows[:, :-1]].reshape(len(windows), -1) @ hidden + hidden_bias)
    return optax.softmax_cross_entropy_with_integer_labels(x @ output + output_bias, windows[:, -1]).mean()


def windows_at(text: Any, starts: Any) -> Any:
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)].astype(jnp.int32)


def inner_optimizer(rate: Any, is_adam: Any) -> optax.GradientTransformation:
    """AdamW or SGD with momentum, as a value says; 20 steps up to the rate, then a cosine to 5 % of it."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, 20, STEPS, 0.05)

    def schedule(count):
        return rate * shape(count)

    adam, momentum = optax.adamw(schedule, b2=0.99), optax.sgd(schedule, momentum=0.9)

    def init_fn(params):
        return adam.init(params), momentum.init(params)

    def update_fn(updates, state, params=None):
        one, adam_state = adam.update(updates, state[0], params)
        other, momentum_state = momentum.update(updates, state[1], params)
        return jax.tree.map(partial(jnp.where, is_adam), one, other), (adam_state, momentum_state)

    return optax.chain(optax.clip_by_global_norm(1.0), optax.GradientTransformation(init_fn, update_fn))


# --- codes and the forms that they are compared in ---------------------------------------------------------------


def codes() -> dict[str, jd.compressors.Compressor]:
    """One code for each name; ALQ is a reducer, which makes its codes from levels."""
    return {
        "qsgd, 2 bits": jd.qsgd(2, bucket=BUCKET),
        "qsgd, 4 bits": jd.qsgd(4, bucket=BUCKET),
        "nuqsgd, 2 bits": jd.compressors.nuqsgd(2, bucket=BUCKET),
        "nuqsgd, 4 bits": jd.compressors.nuqsgd(4, bucket=BUCKET),
        "int4": jd.compressors.int4(),
        "fp8": jd.compressors.fp8(),
    }


def alq(bits: int) -> jd.reducers.Reducer:
    return jd.reducers.alq(bits, bucket=BUCKET, update_steps=(3, 20, 60), every=100)


def factor_of(code: jd.compressors.Compressor, how: str) -> float:
    """What an unbiased code is multiplied by to make it a contraction.

    "worst": 1 / (1 + ω) for the worst input; "typical": that of the error of Gaussian entries; "whole": 1.
    """
    if how == "worst":
        return 1 / (1 + code.variance((8 * BUCKET,)))
    return 1 / (1 + typical_error(code, (8 * BUCKET,))) if how == "typical" else 1.0


def shrunk(code: jd.compressors.Compressor, how: str, factor: Any) -> jd.compressors.Compressor:
    """An unbiased code as a contraction of another kind than the library's, which is `scaled`.

    "fitted": each bucket times what brings it closest to its input; otherwise all of it times the factor.
    """
    if not how:
        return code
    known = code._replace(variance=None, contraction=lambda shape: 0.0)
    if how == "fitted":
        return known._replace(compress=partial(_compress_fitted, code))
    return known._replace(decompress=lambda payload, like: factor * code.decompress(payload, like))


def typical_error(code: jd.compressors.Compressor, shape: tuple[int, ...]) -> float:
    """`E|C(x) - x|² / |x|²` of Gaussian entries."""
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0), 16)

        def error(key):
            x = jax.random.normal(key, shape)
            return jnp.sum((code.decompress(code.compress(x, key), x) - x) ** 2) / jnp.sum(x**2)

        return float(jnp.mean(jax.vmap(error)(keys)))


def _compress_fitted(code: jd.compressors.Compressor, x: Any, key: Any) -> Any:
    payload = code.compress(x, key)
    decoded = code.decompress(payload, x)
    width = min(BUCKET, x.size)
    rows = [jnp.pad(y.ravel(), (0, -y.size % width)).reshape(-1, width) for y in (x, decoded)]
    # The least |s C(x) - x|² of a bucket is at s = <C(x), x> / |C(x)|².
    squares = jnp.sum(rows[1] ** 2, axis=1)
    factor = jnp.sum(rows[0] * rows[1], axis=1) / jnp.where(squares == 0, 1, squares)
    return payload._replace(norms=payload.norms * factor)


# Other contractions than the library's, for comparison.
SHRUNK = {
    "worst": "all times 1 / (1 + ω)",
    "typical": "all times 1 / (1 + that of Gaussian entries)",
    "fitted": "buckets fitted",
    "whole": "not shrunk",
}
MEMORIES = {"ef": jd.error_feedback, "loco": jd.reducers.loco, "ef21": jd.reducers.ef21}


def make_reducer(name: str, form: str, factor: Any = 1.0) -> jd.reducers.Reducer:
    """The reducer of a row."""
    if name == "exact":
        return jd.exact()
    form, _, how = form.partition(", ")
    if name.startswith("alq"):
        return MEMORIES.get(form, lambda reducer: reducer)(alq(int(name[5])))
    code = codes()[name]
    small = shrunk(code, how, factor)
    shots = {
        "two_shot": jd.two_shot(code, server_feedback=False),
        "two_shot+server": jd.two_shot(code, second=small, server_feedback=True),
        "ef two_shot+server": jd.error_feedback(jd.two_shot(small, server_feedback=True)),
    }
    if form == "ef two_shot":
        return jd.error_feedback(jd.two_shot(small, second=code))
    return shots[form] if form in shots else MEMORIES.get(form, lambda reducer: reducer)(jd.compressed(small))


def make_method(name: str, form: str, factor: Any = 1.0) -> Any:
    """A gossip method: CHOCO, which keeps what it has not sent; "plain": DCD-PSGD, which does not."""
    if name == "exact":
        return jd.decentralized.d_psgd()
    form, _, how = form.partition(", ")
    code = codes()[name]
    if form == "plain":
        return jd.decentralized.dcd_psgd(code)
    return jd.decentralized.choco(shrunk(code, how, factor), step_size=0.5)


# --- training ------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Numbers of a run that its program does not depend on."""

    rate: Any
    is_adam: Any
    factor: Any


def make_transformation(run: Run, setting: Setting) -> Any:
    inner = inner_optimizer(setting.rate, setting.is_adam)
    if run.place == "gossip":
        method = make_method(run.code, run.form, setting.factor)
        return jd.gossip(inner, jd.topology.ring(run.workers), method=method)
    reducer = make_reducer(run.code, run.form, setting.factor)
    if run.place == "steps":
        return optax.chain(jd.all_reduce(reducer), inner)
    rounds = {"sync_period": PERIOD, "warmup_steps": START, "reducer": reducer}
    if run.place == "local_sgd":
        return jd.local_steps(inner, optax.sgd(1.0), **rounds)
    return jd.local_sgd.diloco(inner, **rounds)


def model_of(place: str, state: dict[str, Any]) -> Any:
    if place == "steps":
        return state["params"]
    return jd.consensus(state["params"]) if place == "gossip" else jd.local_sgd.global_params(state["opt"])


MakeTransformation = Callable[[Setting], Any]


def make_state(place: str, workers: int, make_tx: MakeTransformation, seed: Any, setting: Setting) -> dict[str, Any]:
    key = jax.random.key(seed)
    params = init(jax.random.fold_in(key, 0))
    opt_state = make_tx(setting).init(params)

    # Draws of the reducers differ from seed to seed as well.
    def reseed(leaf):
        return jax.random.fold_in(leaf, seed) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    opt_state = jax.tree.map(reseed, opt_state)
    params = params if place == "steps" else jd.PerWorker(params)
    return jd.init_state(lambda: {"params": params, "opt": opt_state, "data": key, "setting": setting}, workers)


def is_count(leaf: Any) -> bool:
    """Counts are equal in all seeds and rates: not mapped, so that what depends on them stays a branch."""
    return leaf.dtype == jnp.int32


def program_of(run: Run) -> Run:
    """Runs that differ in a factor alone share a program."""
    form, _, how = run.form.partition(", ")
    return run._replace(form=f"{form}, factor" if how and how != "fitted" else run.form)


Program = Callable[[Setting, Any], Any]


@lru_cache(maxsize=1)
def make_program(run: Run) -> Program:
    return program_of_training(run.place, run.workers, partial(make_transformation, run))


def program_of_training(place: str, workers: int, make_tx: MakeTransformation) -> Program:
    """`program(settings, seeds) -> losses`, held-out, `[settings, seeds]`."""
    text, held_out = (jnp.asarray(x) for x in tokens())
    test = windows_at(held_out, jnp.arange(HELD_OUT) * (len(held_out) // HELD_OUT - 1))

    def step(state, number):
        key = jax.random.fold_in(jax.random.fold_in(state["data"], number[0]), jax.lax.axis_index("data"))
        batch = windows_at(text, jax.random.randint(key, (BATCH,), 0, len(text) - CONTEXT - 1))
        _, gradients = jd.local_value_and_grad(loss_of)(state["params"], batch)
        tx = make_tx(state["setting"])
        updates, opt_state = tx.update(gradients, state["opt"], state["params"])
        return state | {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, ()

    simulated = jd.simulate(step, workers)

    def program(settings, seeds):
        def start(setting):
            return jax.vmap(lambda seed: make_state(place, workers, make_tx, seed, setting), out_axes=axes)(seeds)

        first = jax.tree.map(lambda x: x[0], settings)
        shapes = jax.eval_shape(lambda: make_state(place, workers, make_tx, seeds[0], first))
        axes = jax.tree.map(lambda leaf: None if is_count(leaf) else 0, shapes)
        state = jax.vmap(start, out_axes=axes)(settings)
        mapped = jax.vmap(jax.vmap(simulated, (axes, None), (axes, None)), (axes, None), (axes, None))
        numbers = jnp.broadcast_to(jnp.arange(STEPS)[:, None], (STEPS, workers))
        state, _ = jax.lax.scan(lambda state, number: (mapped(state, number)[0], None), state, numbers)
        return jax.vmap(jax.vmap(lambda state: loss_of(model_of(place, state), test), (axes,)), (axes,))(state)

    return jax.jit(program)


def runs(given: argparse.Namespace) -> Iterator[Run]:
    """All rows, the more telling ones first."""
    two_and_four = ["qsgd, 2 bits", "qsgd, 4 bits"]
    nonuniform, adapted = (["nuqsgd, 2 bits", "nuqsgd, 4 bits"], ["alq, 2 bits", "alq, 4 bits"])

    def cross(places, codes, forms, workers=(4,)):
        return [Run(*row) for row in itertools.product(places, codes, forms, workers)]

    mesh = ("diloco", "steps")
    chosen = cross(RATES, ["exact"], ["plain"], (4, 2, 8))
    shots = ["two_shot", "two_shot+server", "ef two_shot", "ef two_shot+server"]
    chosen += cross(mesh, two_and_four, ["plain", "ef", "ef, worst", "ef, typical", "ef, whole", "ef, fitted"])
    chosen += cross(mesh, two_and_four, ["loco", "ef21", *shots]) + cross(mesh, ["int4", "fp8"], ["plain", "ef"])
    chosen += cross(["gossip"], two_and_four, ["plain", "ef", "ef, worst"])
    chosen += cross(mesh, nonuniform, ["plain", "ef"]) + cross(mesh, adapted, ["plain", "ef"])
    chosen += cross(["local_sgd"], [*two_and_four, "int4"], ["plain", "ef"])
    chosen += cross(mesh, two_and_four, ["plain", "ef", "two_shot"], (8, 2)) + cross(mesh, ["int4"], ["ef"], (8, 2))
    chosen += cross(mesh, ["int4"], ["loco", "ef21", "two_shot", "two_shot+server", "ef two_shot+server"])
    chosen += cross(mesh, [*adapted, *nonuniform], ["loco", "ef21"])
    chosen += cross(["gossip"], [*nonuniform, "int4", "fp8"], ["plain", "ef"])
    chosen += cross(["local_sgd"], two_and_four, ["ef, worst", "two_shot"]) + cross(mesh, nonuniform, ["two_shot"])
    chosen += cross(mesh, ["fp8"], ["loco", "ef21", "two_shot", "two_shot+server", "ef two_shot+server"])
    chosen += cross(mesh, two_and_four, ["loco, worst", "ef21, worst", "ef two_shot, worst"])
    wanted = [run for run in dict.fromkeys(chosen) if run.place in given.places and run.workers in given.workers]
    # Runs of one program one after the other, since only the last one is kept.
    order = {program_of(run): number for number, run in reversed([*enumerate(wanted)])}
    yield from sorted(wanted, key=lambda run: order[program_of(run)])


def measure(run: Run, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Trains with each optimizer at each rate, and yields a row for each optimizer."""
    _, _, how = run.form.partition(", ")
    factor = factor_of(codes()[run.code], how) if how and how != "fitted" else 1.0
    began = time.perf_counter()
    found = try_rates(make_program(program_of(run)), run.place, seeds, factor)
    took = round(time.perf_counter() - began, 1)
    for row in rows_of_rates(found, seeds):
        yield run._asdict() | row | {"factor": round(factor, 4), "seconds": took, "jax": jax.__version__}


def try_rates(program: Program, place: str, seeds: list[int], factor: float = 1.0) -> dict[str, dict[float, Any]]:
    """The losses of all seeds by optimizer and rate: those of a place, and further ones where the best is an end."""
    # The same number of rates again, so that they run in the same program.
    grids, found = dict(RATES[place]), {name: {} for name in RATES[place]}
    for _ in range(3):
        each = [(rate, name == "adamw", factor) for name, values in grids.items() for rate in values]
        settings = Setting(*(jnp.asarray(x) for x in zip(*each, strict=True)))
        losses = np.asarray(program(settings, jnp.asarray(seeds, jnp.uint32)))
        for (rate, is_adam, _), row in zip(each, losses, strict=True):
            found["adamw" if is_adam else "momentum"][rate] = row
        grids = {name: beyond(grids[name], found[name]) for name in grids}
        if all(grid[0] in found[name] and grid[-1] in found[name] for name, grid in grids.items()):
            break
    return found


def rows_of_rates(found: dict[str, dict[float, Any]], seeds: list[int]) -> Iterator[dict[str, Any]]:
    for name, by_rate in found.items():
        rates = sorted(by_rate)
        # What diverged has no number.
        losses = [[round(float(x), 5) if np.isfinite(x) else None for x in by_rate[rate]] for rate in rates]
        yield {"optimizer": name, "rates": rates, "seeds": seeds, "losses": losses}


def beyond(grid: tuple[float, ...], found: dict[float, Any]) -> tuple[float, ...]:
    """Three rates that go on where the best one is the last or the first; otherwise the old ones."""
    best = best_rate(found)
    if best == max(found):
        return tuple(best * factor for factor in (1, 2, 4))
    return tuple(best * factor for factor in (0.25, 0.5, 1)) if best == min(found) else grid


def best_rate(found: dict[float, Any]) -> float:
    means = {rate: np.mean([np.nan if x is None else x for x in row]) for rate, row in found.items()}
    return min(means, key=lambda rate: means[rate] if np.isfinite(means[rate]) else np.inf)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


NAMES = {
    "plain": "the code alone",
    "ef": "`error_feedback`, in gossip `choco`",
    "loco": "`loco`",
    "ef21": "`ef21`",
    "two_shot": "`two_shot`",
    "two_shot+server": "`two_shot`, server feedback",
    "ef two_shot": "`error_feedback(two_shot)`",
    "ef two_shot+server": "the same, server feedback",
}


def make_table(rows: list[dict[str, Any]]) -> str:
    """Held-out losses above `exact`, each at its best rate, in percent: the mean over seeds and half of the range."""
    columns = [(place, optimizer) for place, rates in RATES.items() for optimizer in rates]
    at_best = {}
    for row in rows:
        found = dict(zip(row["rates"], row["losses"], strict=True))
        at_best[tuple(row[name] for name in Run._fields), row["optimizer"]] = found[best_rate(found)]
    heads = [f"{place}, {'AdamW' if optimizer == 'adamw' else 'momentum'}" for place, optimizer in columns]
    lines = [f"| workers | code | form | {' | '.join(heads)} |", f"|--:|---|---|{'--:|' * len(columns)}"]
    # In the order of the forms, and not of the runs.
    kinds = [form for name in NAMES for form in (name, *(f"{name}, {how}" for how in SHRUNK))]
    lines_of = {(row["workers"], row["code"], row["form"]) for row in rows}
    names = ["exact", *codes(), "alq, 2 bits", "alq, 4 bits"]
    for workers, code, form in sorted(lines_of, key=lambda k: (k[0] != 4, k[0], names.index(k[1]), kinds.index(k[2]))):
        cells = []
        for place, optimizer in columns:
            base = at_best.get((Run(place, "exact", "plain", workers), optimizer))
            own = at_best.get((Run(place, code, form, workers), optimizer))
            cells.append(_cell(own, None if code == "exact" else base))
        name, _, how = form.partition(", ")
        shown = "" if code == "exact" else NAMES[name] + (f", {SHRUNK[how]}" if how else "")
        lines.append(f"| {workers} | {code} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(own: list[float | None] | None, base: list[float] | None) -> str:
    if own is None:
        return ""
    if base is None:
        return f"{np.mean(own):.3f}"
    if None in own or np.mean(own) > 2 * np.mean(base):
        return "diverges"
    above = [100 * (x / y - 1) for x, y in zip(own, base, strict=True)]
    return f"{np.mean(above):+.1f} ±{(max(above) - min(above)) / 2:.1f} %"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--places", nargs="+", default=list(RATES))
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--codes", nargs="*", help="only these, such as exact or 'qsgd, 2 bits'; none for the table alone"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/feedback"))


def main(given: argparse.Namespace) -> None:
    done = {tuple(row[name] for name in Run._fields) for row in read_rows(given.out / "feedback.jsonl")}
    for run in runs(given):
        if tuple(run) in done or (given.codes is not None and run.code not in given.codes):
            continue
        rows = [*measure(run, given.seeds)]
        append_rows(given.out, "feedback", rows)
        for row in rows:
            print(*run, row["optimizer"], row["losses"], row["seconds"], flush=True)
    table = make_table(read_rows(given.out / "feedback.jsonl"))
    (given.out / "feedback.md").write_text(table + "\n")
    print(table)

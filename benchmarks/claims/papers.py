"""Claims of papers in scenes where they can appear: one function for each, three seeds, and intervals.

    python benchmarks/claims papers CLAIM --out benchmarks/reports/NAME

`post_local`, `ada_comm` and `slowmo_sgp` train a network of 2,410 parameters on handwritten digits, all seeds and rates
in one program. `ringmaster` and `ringleader` minimize a noisy quadratic, and `any_batch` solves two convex tasks, on
the virtual clock of `replay`. The rate of a method is the best of a grid on a seed of its own; the others count.
Intervals are Student's at 95 %.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record
from digits_network import SEEDS, TUNING_SEED, accuracy, digits, losses, network
from scipy import stats

import jaxdist as jd
from jaxdist.asynchronous import durations, replay, rules
from jaxdist.asynchronous.errors import NonFiniteGradientError

HELD_OUT = ("training loss", "held-out loss", "accuracy, %")


def interval(values: Any) -> dict[str, Any]:
    """The mean and half the width of the interval; without one where a run never got there."""
    values = np.asarray(values, np.float64)
    if not np.isfinite(values).all():
        return {"mean": None, "half": None, "values": [x if np.isfinite(x) else None for x in values.tolist()]}
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return {"mean": float(values.mean()), "half": float(half), "values": values.tolist()}


def in_words(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return "never in " + f"{sum(x is None for x in found['values'])} of {len(found['values'])}"
    digits = max(0, 2 - int(np.floor(np.log10(max(abs(found["mean"]), 1e-9)))))
    return f"{found['mean']:.{digits}f} ±{found['half']:.{digits}f}"


# Programs of all workers, seeds and rates at once.


def of_all(worker: Callable, rates: tuple[float, ...], workers: int) -> np.ndarray:
    """`worker(index, seed, rate)` for all of them; the result of worker 0, `[1 + seeds, rates, ...]`."""
    every = jax.vmap(worker, in_axes=(0, None, None), axis_name="data")
    every = jax.vmap(jax.vmap(every, in_axes=(None, None, 0)), in_axes=(None, 0, None))
    given = jnp.arange(workers), jnp.array((TUNING_SEED, *SEEDS)), jnp.array(rates)
    return np.asarray(jax.jit(every)(*given))[:, :, 0]


def draw_batch(train: Any, seed: Any, count: Any, index: Any, size: int) -> Any:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), index)
    drawn = jax.random.randint(key, (size,), 0, len(train[1]))
    return tuple(part[drawn] for part in train)


def evaluate(params: Any, train: Any, held_out: Any) -> Any:
    """Of the mean of the workers' models."""
    mean = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), params)
    parts = losses(mean, *train).mean(), losses(mean, *held_out).mean(), 100 * accuracy(mean, *held_out)
    return jnp.stack(parts)


def train_all(make: Callable, *, rates: tuple[float, ...], workers: int, batch: int, steps: int) -> np.ndarray:
    """Losses and accuracy at the end, `[1 + seeds, rates, 3]`, with the transformation `make(rate)`."""
    train, held_out = jax.tree.map(jnp.asarray, digits())

    def worker(index, seed, rate):
        tx = make(rate)
        params = network(jax.random.key(seed))

        def step(state, count):
            x, opt = state
            gradient = jax.grad(lambda x, *data: losses(x, *data).mean())
            updates, opt = tx.update(gradient(x, *draw_batch(train, seed, count, index, batch)), opt, x)
            return (optax.apply_updates(x, updates), opt), None

        (x, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))
        return evaluate(x, train, held_out)

    return of_all(worker, rates, workers)


def best_rate(found: np.ndarray, rates: tuple[float, ...], column: int) -> dict[str, Any]:
    """The row of the rate with the lowest loss on the tuning seed."""
    chosen = int(np.nanargmin(found[0, :, column]))
    row = {name: interval(found[1:, chosen, i]) for i, name in enumerate(HELD_OUT)}
    return {"rate": rates[chosen], **row}


def print_row(row: dict[str, Any]) -> None:
    cells = [in_words(value) if isinstance(value, dict) else str(value) for value in row.values() if value is not None]
    print("| " + " | ".join(cells) + " |", flush=True)


# Post-local SGD (Lin et al.): a drop of the rate at half of the steps, from where on workers average every H steps.

STEPS, DROPS, PERIOD, MOMENTUM_RATES = 480, (240, 360), 16, (0.05, 0.1, 0.2, 0.4, 0.8)


def dropping(rate: Any) -> Callable:
    return lambda count: rate * jnp.where(count < DROPS[0], 1.0, jnp.where(count < DROPS[1], 0.1, 0.01))


def nesterov(rate: Any) -> optax.GradientTransformation:
    return optax.sgd(dropping(rate), momentum=0.9, nesterov=True)


def post_local() -> Iterator[dict[str, Any]]:
    """Sixteen workers with 16 images each, of 1,437; the paper has sixteen with 128 of 50,000."""
    exact = jd.all_reduce(jd.exact())
    cases: dict[str, tuple[Callable, int, float]] = {
        "synchronous, 16 x 16": (lambda rate: optax.chain(exact, nesterov(rate)), 16, 1.0),
        "local SGD, H = 16": (
            lambda rate: jd.local_sgd.local_sgd(nesterov(rate), sync_period=PERIOD),
            16,
            1 / PERIOD,
        ),
        "post-local SGD, H = 16": (
            lambda rate: jd.local_sgd.post_local_sgd(nesterov(rate), switch_step=DROPS[0], sync_period=PERIOD),
            16,
            0.5 + 0.5 / PERIOD,
        ),
        "synchronous, 16 x 2": (lambda rate: optax.chain(exact, nesterov(rate)), 2, 1.0),
    }
    for name, (make, batch, rounds) in cases.items():
        runs = train_all(make, rates=MOMENTUM_RATES, workers=16, batch=batch, steps=STEPS)
        yield {"method": name, "all-reduces a step": rounds} | best_rate(runs, MOMENTUM_RATES, 1)


# SlowMo on SGP (Wang et al.): an exact average and a slow step every τ steps of stochastic gradient push.


def slowmo_sgp() -> Iterator[dict[str, Any]]:
    graph = jd.topology.one_peer_exponential(16)

    def gossip(rate):
        return jd.gossip(nesterov(rate), graph, method=jd.decentralized.sgp())

    def slowmo(momentum, inner, period, rate):
        settings = {"sync_period": period, "learning_rate": dropping(rate), "momentum": momentum}
        return jd.local_sgd.slowmo(inner(rate), buffers="reset", **settings)

    cases = {"all-reduce": lambda rate: optax.chain(jd.all_reduce(jd.exact()), nesterov(rate)), "SGP": gossip}
    cases |= {f"SGP-SlowMo, τ = 48, β = {m}": partial(slowmo, m, gossip, 48) for m in (0.0, 0.4, 0.6)}
    for name, make in cases.items():
        runs = train_all(make, rates=MOMENTUM_RATES, workers=16, batch=8, steps=STEPS)
        yield {"method": name} | best_rate(runs, MOMENTUM_RATES, 0)


# AdaComm (Wang, Joshi): the training loss over virtual time, where an average takes as long as four steps.

COMMUNICATION, HORIZON, INTERVAL, CHUNK = 4.0, 2000.0, 100.0, 10
PLAIN_RATES = (0.1, 0.2, 0.4, 0.8, 1.6)


def ada_comm_curves(period: int, adaptive: bool) -> np.ndarray:
    """Seconds and training loss after every ten steps, and `H`: `[1 + seeds, rates, chunks, 3]`. Batches of 4."""
    train, _ = jax.tree.map(jnp.asarray, digits())
    rule = jd.schedule.ada_comm(period)

    def worker(index, seed, rate):
        tx = jd.local_sgd.local_sgd(optax.sgd(rate), sync_period=period)
        params = network(jax.random.key(seed))

        def step(state, count):
            x, opt, control, since, now, mean = state
            data = draw_batch(train, seed, count, index, 4)
            value, gradient = jax.value_and_grad(lambda x: losses(x, *data).mean())(x)
            updates, opt = tx.update(gradient, opt, x, sync_period=control.period)
            since = since + 1
            due = since >= control.period
            # A step takes a second, and so the slowest of equal workers too.
            later = now + 1.0 + jnp.where(due, COMMUNICATION, 0.0)
            # The mean over about a hundred steps of all workers, as the loss of the controller.
            value = jax.lax.pmean(value, "data")
            mean = jnp.where(count == 0, value, 0.97 * mean + 0.03 * value)
            if adaptive:
                changed = rule.update(control, loss=mean, learning_rate=rate)
                crossed = (count == 0) | (later // INTERVAL > now // INTERVAL)
                control = jax.tree.map(lambda a, b: jnp.where(crossed, a, b), changed, control)
            state = optax.apply_updates(x, updates), opt, control, jnp.where(due, 0, since), later, mean
            return state, None

        def run_chunk(state, number):
            state, _ = jax.lax.scan(step, state, number * CHUNK + jnp.arange(CHUNK))
            # Each worker takes its share of the images.
            mean = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), state[0])
            share = (jax.lax.dynamic_slice_in_dim(part, index * 179, 179) for part in train)
            loss = jax.lax.pmean(losses(mean, *share).mean(), "data")
            return state, jnp.stack((state[4], loss, state[2].period.astype(jnp.float32)))

        zero = jnp.zeros(())
        start = params, tx.init(params), rule.init(), jnp.zeros((), jnp.int32), zero, zero
        return jax.lax.scan(run_chunk, start, jnp.arange(int(HORIZON) // CHUNK))[1]

    return of_all(worker, PLAIN_RATES, 8)


def seconds_to(curve: np.ndarray, level: float) -> float:
    """The first time with three evaluations in a row at the level."""
    below = np.convolve(curve[:, 1] <= level, np.ones(3), "valid") == 3
    return float(curve[np.argmax(below), 0]) if below.any() else np.inf


def ada_comm() -> Iterator[dict[str, Any]]:
    """All at one rate, the best of synchronous SGD, as in the paper."""

    def at_end(curve):
        return float(curve[curve[:, 0] <= HORIZON][-10:, 1].mean())

    chosen = None
    for name, case in {"H = 1": (1, False), "H = 4": (4, False), "H = 32": (32, False), "AdaComm": (32, True)}.items():
        curves = ada_comm_curves(*case)
        if chosen is None:
            chosen = int(np.nanargmin([at_end(curve) for curve in curves[0]]))
        runs = [curve[curve[:, 0] <= HORIZON] for curve in curves[1:, chosen]]
        row: dict[str, Any] = {"method": name, "rate": PLAIN_RATES[chosen]}
        row |= {f"seconds to {level}": interval([seconds_to(x, level) for x in runs]) for level in (1.0, 0.3, 0.1)}
        row |= {"loss at the end": interval([at_end(x) for x in runs]), "H at the end": float(runs[0][-1, 2])}
        yield row | {"curve of seed 0": runs[0][::4].round(4).tolist()}


# Quadratics on the virtual clock (Maranjyan, Tyurin, Richtárik): f(x) = x'Ax/2 - b'x, with noise in each gradient.

ENTRIES, QUADRATIC_RATES = 32, tuple(2.0**-k for k in range(-1, 10))


def quadratic_task(centers: np.ndarray, noise: float, ridge: float = 0.0) -> replay.Task:
    """`A` has -1/4, 1/2, -1/4 on its diagonals, and a ridge; worker i has `b_i`, a row.

    Evaluated is `f - f*` of the mean of all `b_i`, relative to the start.
    """
    matrix = (2 * np.eye(ENTRIES) - np.eye(ENTRIES, k=1) - np.eye(ENTRIES, k=-1)) / 4 + ridge * np.eye(ENTRIES)
    best = np.linalg.solve(matrix, centers.mean(0))
    a, center = jnp.asarray(matrix, jnp.float32), jnp.asarray(best, jnp.float32)

    def loss(params, drawn):
        return params @ a @ params / 2 - params @ drawn

    def draw(seed, worker, job):
        rng = np.random.default_rng((seed, worker, job))
        return (centers[worker] + noise * rng.standard_normal(ENTRIES)).astype(np.float32)

    excess = jax.jit(lambda params: (params - center) @ a @ (params - center) / (center @ a @ center))
    return replay.Task(np.zeros(ENTRIES, np.float32), loss, draw, lambda params: float(excess(params)))


def to_level(clocks: dict[Any, replay.Simulator], level: float, horizon: float) -> tuple[Any, float]:
    """Advances all side by side until one has three evaluations in a row at the level: its key, and the seconds.

    What diverges is left out.
    """
    states = {key: clock.init() for key, clock in clocks.items()}
    for piece in range(1, 41):
        reached = {}
        for key in list(states):
            try:
                states[key] = clocks[key].advance(states[key], seconds=horizon * piece / 40)
            except NonFiniteGradientError:
                del states[key]
                continue
            result = clocks[key].result(states[key])
            seconds = replay.time_to_target(result, level, persist=3)
            if not result.losses[-1] < 100:
                del states[key]
            elif np.isfinite(seconds):
                reached[key] = seconds
        if reached:
            chosen = min(reached, key=reached.__getitem__)
            return chosen, float(reached[chosen])
    return None, np.inf


def replayed(
    cases: dict[str, Callable], task: replay.Task, rates: tuple[float, ...], level: float, horizon: float, **scene: Any
) -> Iterator[dict[str, Any]]:
    """Seconds to the level of each rule at its best rate."""
    scene |= {"evaluate_every": horizon / 800, "record_events": False}
    for name, make in cases.items():
        rule = {rate: make(optax.sgd(rate)) for rate in rates}
        clocks = {rate: replay.simulator(rule[rate], task, seed=TUNING_SEED, **scene) for rate in rates}
        rate, tuned = to_level(clocks, level, horizon)
        seconds = [np.inf] * len(SEEDS)
        if rate is not None:
            made = [{rate: replay.simulator(rule[rate], task, seed=seed, **scene)} for seed in SEEDS]
            seconds = [to_level(clock, level, horizon)[1] for clock in made]
        row = {"rule": name, "rate": rate, "tuning": tuned if np.isfinite(tuned) else None}
        yield row | {"horizon": horizon, "seconds": interval(seconds)}


def ringmaster() -> Iterator[dict[str, Any]]:
    """64 workers, of which worker i takes `i + |N(0, i)|` seconds, as in the paper's experiment."""
    workers = 64
    order = np.arange(1, workers + 1)
    law = durations.constant((order + np.abs(np.random.default_rng(0).normal(0, np.sqrt(order)))).tolist())
    centers = np.zeros((workers, ENTRIES))
    centers[:, 0] = -1 / 4
    task = quadratic_task(centers, 0.03)
    cases = {f"`ringmaster({r})`": partial(rules.ringmaster, r) for r in (4, 16, 64)}
    cases |= {"`asgd`": rules.asgd, "`rennala(4)`": partial(rules.rennala, 4), "`bsp`": rules.bsp}
    yield from replayed(cases, task, QUADRATIC_RATES, 0.05, 3000.0, workers=workers, durations=law)


def ringleader() -> Iterator[dict[str, Any]]:
    """16 workers with much noise, of which two, whose data differ most, are 20 times slower."""
    law = durations.constant([1.0] * 14 + [20.0] * 2)
    centers = np.random.default_rng(0).normal(0, 0.1, (16, ENTRIES))
    centers[:, 0] -= np.repeat([1.0, 8.0], [14, 2])
    task = quadratic_task(centers, 1.0, ridge=0.25)
    cases = {"`ringleader`": rules.ringleader, "`dude`": rules.dude, "`bsp`": rules.bsp}
    yield from replayed(cases, task, QUADRATIC_RATES, 0.05, 4000.0, workers=16, durations=law)


# DABMD (Eshraghi, Liang) on the clock: rounds of fixed time against rounds of fixed batches, on a ring of ten.


def convex_task(squared: bool, batch: int) -> replay.Task:
    """Linear regression on the labels as vectors, or logistic regression, on digits."""
    train, held_out = digits()

    def loss(params, data):
        scores = data[0] @ params["w"] + params["b"][None]
        if squared:
            return jnp.square(scores - jax.nn.one_hot(data[1], 10)).sum(-1).mean()
        return optax.softmax_cross_entropy_with_integer_labels(scores, data[1]).mean()

    def draw(seed, worker, job):
        rows = np.random.default_rng((seed, worker, job)).integers(0, len(train[1]), batch)
        return train[0][rows], train[1][rows]

    evaluated = jax.jit(lambda params: loss(params, held_out))
    start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    return replay.Task(start, loss, draw, lambda params: float(evaluated(params)))


def any_batch() -> Iterator[dict[str, Any]]:
    """A worker's time for ten images is `1 + 1.5 Exp(1)` seconds, drawn once, times a lognormal of spread 0.2."""
    least = 1 + np.random.default_rng(0).exponential(1.5, 10)
    noise = np.exp(0.2 * np.random.default_rng(1).standard_normal((10, 500)))
    window = jd.schedule.anytime_window(2.5, workers=10, batch=100)
    tasks = {"linear": (True, (0.02, 0.04, 0.08, 0.16), 0.5), "logistic": (False, (1.6, 3.2, 6.4, 12.8, 25.6), 0.35)}
    for name, (squared, rates, level) in tasks.items():
        # Two images at a time, or ten.
        for rule, make, size in (
            ("DABMD", partial(rules.any_batch_gossip, window, jd.topology.ring), 2),
            ("fixed batches", partial(rules.d_psgd, jd.topology.ring), 10),
        ):
            law = durations.recorded((least[:, None] * noise * size / 10).tolist())
            task, scene = convex_task(squared, size), {"workers": 10, "durations": law}
            yield from replayed({f"{rule}, {name}": make}, task, rates, level, 400.0, **scene)


CLAIMS = {f.__name__: f for f in (post_local, slowmo_sgp, ada_comm, ringmaster, ringleader, any_batch)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("claim", choices=tuple(CLAIMS))
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    found = []
    for row in CLAIMS[given.claim]():
        found.append(row)
        print_row({key: value for key, value in row.items() if not isinstance(value, list)})
        write_record(given.out, given.claim, found)

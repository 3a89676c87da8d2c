"""Rounds of fixed time beside rounds of fixed batches: regret on a stream of digits, and the clock of stragglers.

python benchmarks/claims regret --out benchmarks/reports/2026-11-online
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record
from sklearn.datasets import load_digits

import jaxdist as jd
from jaxdist.online import (
    anytime_minibatch,
    ball,
    dynamic_regret,
    euclidean,
    mirror_descent,
    path_length,
    static_regret,
)
from jaxdist.schedule import anytime_window, count_processed, shifted_exponential

WORKERS, BATCH, MOST, SECONDS, POOL = 10, 10, 28, 400.0, 256
TALK = 0.1  # seconds of one round of consensus, or of an all-reduce
RATES = (0.1, 0.3, 1.0)
SEEDS = (0, 1)
GEOMETRY = euclidean(ball(8.0))
RATE = jnp.asarray(0.5)  # of the descent to the best fixed model
START = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
RING = jd.topology.ring(WORKERS)
# Name: how workers average, rounds of consensus, whether rounds have a fixed time.
METHODS = {
    "fixed batches, exact mean": (partial(mirror_descent, GEOMETRY), 1, False),
    "fixed batches, ring": (partial(mirror_descent, GEOMETRY, topology=RING), 1, False),
    "DABMD, exact mean": (partial(mirror_descent, GEOMETRY), 1, True),
    "DABMD, ring": (partial(mirror_descent, GEOMETRY, topology=RING), 1, True),
    "DABMD, ring, uniform weights": (partial(mirror_descent, GEOMETRY, topology=RING, weights="uniform"), 1, True),
    "DABMD, ring, 5 rounds": (partial(mirror_descent, GEOMETRY, topology=RING, rounds=5), 5, True),
    "AMB, exact mean": (partial(anytime_minibatch, GEOMETRY), 1, True),
    "AMB, ring, 5 rounds": (partial(anytime_minibatch, GEOMETRY, topology=RING, rounds=5), 5, True),
}


def losses(params, images):
    logits = images["x"] @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, images["y"])


def clock(rng, anytime, rounds, persistent):
    """Seconds and examples `[W]` of each round. `persistent`: a slow worker stays slow."""
    slow = shifted_exponential(rng, (WORKERS,), least=1.0, excess=1.5)
    window, now, out = anytime_window(2.5, workers=WORKERS, batch=WORKERS * BATCH), 0.0, []
    while True:
        share = slow if persistent else shifted_exponential(rng, (WORKERS,), least=1.0, excess=1.5)
        counts = np.full(WORKERS, BATCH)
        if anytime:
            counts = count_processed(np.broadcast_to(share[:, None] / BATCH, (WORKERS, MOST)), window)
        seconds = (window if anytime else float(share.max())) + rounds * TALK
        now += seconds
        if now > SECONDS:
            return np.array([x for x, _ in out]), np.stack([b for _, b in out])
        out.append((seconds, counts))


def pools(seconds, total):
    """The window of the stream in each round, over the digits in the order in which they were written."""
    return ((np.cumsum(seconds) / SECONDS) * (total - POOL)).astype(np.int32)


def learn(make, images, counts, drawn, first):
    """The loss of all workers' models in each round, `[rates, rounds]`, before they learn from it."""
    gradient = jd.online.any_batch(losses)

    def worker(rate, counts, drawn):
        tx = make(lambda count: rate)

        def step(state, inputs):
            x, opt = state
            count, rows, start = inputs
            pool = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, POOL), images)
            lost = jax.lax.pmean(losses(x, pool).mean(), "data")
            _, grads = gradient(x, jax.tree.map(lambda a: a[rows], images), count)
            updates, opt = tx.update(grads, opt, x, examples=count)
            return (optax.apply_updates(x, updates), opt), lost

        return jax.lax.scan(step, (START, tx.init(START)), (counts, drawn, first))[1]

    every = jax.vmap(worker, in_axes=(None, 1, 1), out_axes=None, axis_name="data")
    return np.asarray(jax.jit(jax.vmap(every, in_axes=(0, None, None)))(jnp.array(RATES), counts, drawn))


def best(images, starts, steps):
    """The best model in the ball on each pool of the stream."""

    def fit_pool(start):
        pool = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, POOL), images)

        def step(x, _):
            return GEOMETRY.step(x, jax.grad(lambda x: losses(x, pool).mean())(x), jnp.asarray(1.0)), None

        x = jax.lax.scan(step, START, length=steps)[0]
        return losses(x, pool).mean(), jnp.concatenate([x["w"].ravel(), x["b"]])

    return [np.asarray(x) for x in jax.jit(jax.vmap(fit_pool))(jnp.asarray(starts))]


def straggling(rng):
    """The clock model beside its closed form: `ζ + excess H_n` against the mean."""
    rows = []
    for workers in (10, 20, 50):
        slowest = shifted_exponential(rng, (100_000, workers), least=1.0, excess=1.5).max(1).mean()
        exact = 1 + 1.5 * sum(1 / k for k in range(1, workers + 1))
        rows.append(
            {"workers": workers, "slowest": slowest, "closed_form": exact, "ratio": slowest / 2.5}
            | {"bound": 1 + 1.5 / 2.5 * np.sqrt(workers - 1)}
        )
    return rows


def add_options(parser):
    parser.add_argument("--out", type=Path)


def main(given):
    x, y = load_digits(return_X_y=True)
    images = {"x": jnp.asarray(x / 16, jnp.float32), "y": jnp.asarray(y, jnp.int32)}
    fixed, descend = START, jax.jit(lambda x: GEOMETRY.step(x, jax.grad(lambda x: losses(x, images).mean())(x), RATE))
    for _ in range(1000):
        fixed = descend(fixed)
    paid = np.asarray(losses(fixed, images))
    grid = np.linspace(0, len(y) - POOL, 24).astype(np.int32)
    lows, models = best(images, grid, 500)
    found = {"clock": straggling(np.random.default_rng(0)), "path_length": float(path_length(models)[-1]), "runs": []}
    for persistent in (False, True):
        for name, (make, rounds, anytime) in METHODS.items():
            runs = []
            for seed in SEEDS:
                rng = np.random.default_rng(seed)
                seconds, counts = clock(rng, anytime, rounds, persistent)
                first = pools(seconds, len(y))
                drawn = first[:, None, None] + rng.integers(0, POOL, (len(first), WORKERS, MOST))
                lost = learn(make, images, counts, drawn, first)
                static = np.array([paid[start : start + POOL].mean() for start in first])
                moving = np.interp(first, grid, lows)
                weighed = [(seconds * loss)[:, None] for loss in lost]
                runs.append(
                    {
                        "rounds": len(seconds),
                        "examples": int(counts.sum()),
                        "static": [float(static_regret(loss, (seconds * static)[:, None])[-1]) for loss in weighed],
                        "dynamic": [float(dynamic_regret(loss, seconds * moving)[-1]) for loss in weighed],
                    }
                )
            of_rate = np.mean([run["static"] for run in runs], axis=0)
            chosen = int(of_rate.argmin())
            row = {"speeds": "persistent" if persistent else "drawn anew", "method": name, "rate": RATES[chosen]}
            row |= {key: float(np.mean([run[key] for run in runs])) for key in ("rounds", "examples")}
            row |= {key: [run[key][chosen] for run in runs] for key in ("static", "dynamic")}
            found["runs"].append(row | {"static_of_each_rate": of_rate.tolist()})
            print(name, row, flush=True)
            write_record(given.out, "any_batch", found)

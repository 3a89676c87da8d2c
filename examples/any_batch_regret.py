"""Online learning on workers of unequal speed: rounds of fixed time beside rounds of fixed batches.

A stream of real handwritten digits, in the order of their writing, so that it changes over time. Eight workers on a
ring learn a linear classifier from it; a worker takes 1 to 10 seconds for ten images. With fixed batches all wait for
the slowest; in rounds of fixed time each processes as many as it can. Prints, and plots, the regret of each method: the
loss of its models minus that of the best fixed one, summed over the seconds that they were in use.

    python examples/any_batch_regret.py regret.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jaxdist as jd
from jaxdist.online import anytime_minibatch, ball, euclidean, mirror_descent, static_regret
from jaxdist.schedule import anytime_window, count_processed, shifted_exponential

WORKERS, BATCH, MOST, SECONDS, POOL = 8, 10, 28, 400.0, 256
GEOMETRY = euclidean(ball(8.0))
START = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
SPECS = {"own": PartitionSpec("data"), "examples": PartitionSpec("data"), "pool": PartitionSpec()}


def losses(params, images):  # of each image by itself
    logits = images["x"] @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, images["y"])


def rounds(anytime, rng):
    """The duration of each round, and the number of images that each worker processes."""
    window = anytime_window(2.5, workers=WORKERS, batch=WORKERS * BATCH)
    while True:
        share = shifted_exponential(rng, (WORKERS, 1), least=1.0, excess=1.5)  # seconds for a fixed batch
        if anytime:
            yield window, count_processed(np.broadcast_to(share / BATCH, (WORKERS, MOST)), window)
        else:
            yield float(share.max()), np.full(WORKERS, BATCH)


def learn(tx, anytime, images):
    """Seconds of each round, the loss of all workers' models in it, and the images of the stream at that time."""
    gradient = jd.online.any_batch(losses)

    def step(state, batch):  # as one worker sees it
        lost = jax.lax.pmean(losses(state["x"], batch["pool"]).mean(), "data")  # before it learns
        _, grads = gradient(state["x"], batch["own"], batch["examples"][0])
        updates, opt = tx.update(grads, state["opt"], state["x"], examples=batch["examples"][0])
        return {"x": optax.apply_updates(state["x"], updates), "opt": opt}, lost

    state = jd.place({"x": jd.PerWorker(START), "opt": tx.init(START)}, WORKERS)
    run = jd.simulate(step, workers=WORKERS, batch_specs=SPECS)
    rng, now, took, lost, pools = np.random.default_rng(0), 0.0, [], [], []
    for seconds, examples in rounds(anytime, rng):
        now += seconds
        if now > SECONDS:
            break
        first = int(now / SECONDS * (len(images["y"]) - POOL))
        drawn = rng.integers(first, first + POOL, WORKERS * MOST)
        own, pool = ({key: x[rows] for key, x in images.items()} for rows in (drawn, slice(first, first + POOL)))
        state, loss = run(state, {"own": own, "examples": examples, "pool": pool})
        took, lost, pools = [*took, seconds], [*lost, float(loss)], [*pools, first]
    return np.array(took), np.array(lost), pools


def main():
    x, y = load_digits(return_X_y=True)
    images = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    fixed = START  # the best in hindsight, by descent on the whole stream
    descend = jax.jit(lambda p: GEOMETRY.step(p, jax.grad(lambda p: losses(p, images).mean())(p), jnp.asarray(0.5)))
    for _ in range(500):
        fixed = descend(fixed)
    paid, ring = np.asarray(losses(fixed, images)), jd.topology.ring(WORKERS)
    primal, dual = (tx(GEOMETRY, 0.5, topology=ring) for tx in (mirror_descent, anytime_minibatch))
    curves = {}
    for name, tx, anytime in (("fixed", primal, False), ("any-batch", primal, True), ("anytime", dual, True)):
        took, lost, pools = learn(tx, anytime, images)
        best = np.array([paid[first : first + POOL].mean() for first in pools])
        curves[name] = np.cumsum(took), static_regret((took * lost)[:, None], (took * best)[:, None])
        print(f"{name:10} {len(took)} rounds in {SECONDS:.0f} s, regret {curves[name][1][-1]:.1f} nats s")
    if len(sys.argv) > 1:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds", ylabel="regret beside the best fixed model (nats s)")
        for (name, curve), color in zip(curves.items(), ("#000000", "#0072B2", "#E69F00"), strict=True):
            axes.plot(*curve, color=color, label=name, linestyle="--" if name == "anytime" else "-")
        axes.legend(frameon=False)
        figure.savefig(sys.argv[-1], dpi=150)
    waited, learned = (curves[name][1][-1] for name in ("fixed", "any-batch"))
    print(f"{waited / learned:.2f} times less regret than with fixed batches")


if __name__ == "__main__":
    main()

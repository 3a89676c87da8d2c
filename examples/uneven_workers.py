"""Eight workers of which one is six times slower: which rules wait for it, and which images count less.

    python examples/uneven_workers.py

Everything happens on a virtual clock, with real gradients. First all workers draw from the same images; it prints the
time that each rule takes to reach a loss. Then each has a share of the images sorted by digit, so that only the slow
one sees most zeros; it prints the accuracy on zeros and on all digits. Plain asynchronous SGD learns zeros worse than
other digits, and two rules repair that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxdist.asynchronous import durations, links, replay, rules

WORKERS, IMAGES, TARGET = 8, 16, 0.55
# A gradient takes about 5 ms, and worker 0 needs six times as long; 1 Gbit/s.
CLUSTER = {
    "workers": WORKERS,
    "durations": durations.one_slow(durations.lognormal(5e-3, 0.2), worker=0, factor=6),
    "links": links.alpha_beta(5e-5, 1.25e8, nic=True),
    "evaluate_every": 0.02,
}


def digits():
    """Images of 4 by 4 pixels, sorted by digit, and their labels; every fifth is kept for tests."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16) / 4).astype(np.float32)
    order = np.argsort(labels, kind="stable")
    test = np.arange(len(labels)) % 5 == 0
    return [(images[order[chosen]], labels[order[chosen]].astype(np.int32)) for chosen in (~test, test)]


TRAIN, TEST = digits()
SHARES = np.array_split(np.arange(len(TRAIN[1])), WORKERS)


def logits(params, images):
    return images @ params["kernel"] + params["bias"]


def loss(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]).mean()


def same_images(seed, worker, job):
    chosen = np.random.default_rng((seed, worker, job)).integers(0, len(TRAIN[1]), IMAGES)
    return TRAIN[0][chosen], TRAIN[1][chosen]


def own_images(seed, worker, job):
    chosen = np.random.default_rng((seed, worker, job)).choice(SHARES[worker], IMAGES)
    return TRAIN[0][chosen], TRAIN[1][chosen]


def task(batch):
    params = {"kernel": jnp.zeros((16, 10)), "bias": jnp.zeros(10)}
    return replay.Task(params, loss, batch, evaluate=jax.jit(lambda params: loss(params, TEST)))


def accuracy(params, digit=None):
    chosen = slice(None) if digit is None else TEST[1] == digit
    return float((logits(params, TEST[0]).argmax(-1) == TEST[1])[chosen].mean())


def main():
    print("all draw from the same images:")
    waits = replay.run(rules.bsp(optax.sgd(0.4)), task(same_images), seconds=6, **CLUSTER)
    slowest = replay.time_to_target(waits, TARGET, persist=3)
    for rule in (rules.asgd(optax.sgd(0.05)), rules.ringmaster(WORKERS, optax.sgd(0.05))):
        seconds = replay.time_to_target(replay.run(rule, task(same_images), seconds=1, **CLUSTER), TARGET, persist=3)
        print(f"  {rule.name:11} {seconds:.2f} s to a loss of {TARGET}, {slowest / seconds:.1f} times faster than bsp")
    print("each has images of its own, and the slow one the zeros:")
    made = rules.asgd(optax.sgd(0.02)), rules.ringleader(optax.sgd(0.02)), rules.dude(optax.sgd(0.02))
    for rule in made:
        run = replay.run(rule, task(own_images), seconds=3, **CLUSTER)
        print(
            f"  {rule.name:11} knows {accuracy(run.params):.1%} of all, and {accuracy(run.params, 0):.1%} of the zeros"
        )


if __name__ == "__main__":
    main()

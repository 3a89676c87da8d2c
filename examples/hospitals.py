"""Sixteen hospitals that may not pool their images, each with few kinds of them, train one model in a ring.

    python examples/hospitals.py

Prints the accuracy on images of all kinds: of models trained alone, of the ring with plain averaging, with quasi-global
momentum, and of the all-reduce that a ring does without. Only models are sent, and only to the two neighbors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist as jd

HOSPITALS, STEPS, IMAGES, RATE = 16, 150, 16, 0.1
RING = jd.topology.ring(HOSPITALS)


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def hospitals():
    """Images and labels of each hospital, sorted by kind so that one has one or two kinds, and a test set of all."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    by_kind = np.argsort(labels[:1440], kind="stable").reshape(HOSPITALS, -1)
    return images[by_kind], labels[by_kind], (images[1440:], labels[1440:])


def init_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, 64)) / 8, "bias": jnp.zeros(64)},
        "out": {"kernel": jax.random.normal(second, (64, 10)) / 8, "bias": jnp.zeros(10)},
    }


def logits(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def train(tx, *, local=True):
    """The params after `STEPS` steps: all hospitals' if they differ, else the one model."""

    def train_step(state, batch):  # as one hospital sees it
        _, grads = jd.local_value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), {}

    params = init_params(jax.random.key(0))
    state = jd.place(TrainState(jd.PerWorker(params) if local else params, tx.init(params)), HOSPITALS)
    step = jax.jit(jd.simulate(train_step, workers=HOSPITALS))
    images, labels, _ = hospitals()
    rng, each = np.random.default_rng(1), np.arange(HOSPITALS)[:, None]
    for _ in range(STEPS):
        chosen = each, rng.integers(0, images.shape[1], (HOSPITALS, IMAGES))
        state, _ = step(state, (images[chosen].reshape(-1, 64), labels[chosen].reshape(-1)))
    return state.params


def accuracy(params):
    images, labels = hospitals()[2]
    return (jnp.argmax(logits(params, images), axis=-1) == labels).mean()


def main():
    alone = train(jd.transforms.per_worker(optax.sgd(RATE, momentum=0.9)))
    print(f"alone                  {jax.vmap(accuracy)(alone.value).mean():.1%}, on average")
    methods = {
        "plain averaging": (jd.decentralized.d_psgd(), 0.9),
        "quasi-global momentum": (jd.decentralized.quasi_global_momentum(RATE), None),
    }
    for name, (method, momentum) in methods.items():
        params = train(jd.gossip(optax.sgd(RATE, momentum=momentum), RING, method=method))
        apart = jd.decentralized.consensus_distance(params)
        print(f"{name:22} {accuracy(jd.consensus(params)):.1%}, models {apart:.2f} apart")
    pooled = train(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(RATE, momentum=0.9)), local=False)
    print(f"all-reduce             {accuracy(pooled):.1%}")


if __name__ == "__main__":
    main()

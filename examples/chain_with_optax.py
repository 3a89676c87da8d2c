"""Compressed gradients in an optax chain, on a mesh of all devices: digits, a small network, PowerSGD with feedback.

    python examples/chain_with_optax.py

If there is only a CPU, it is used as four devices. Prints the loss, the test accuracy, and the bytes that a worker
sent beside those of a plain all-reduce.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist as jd


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def init_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, 256)) / 8, "bias": jnp.zeros(256)},
        "out": {"kernel": jax.random.normal(second, (256, 10)) / 16, "bias": jnp.zeros(10)},
    }


def logits(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def loss_fn(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["image"]), batch["label"]).mean()


def accuracy(state, batch):
    right = logits(state.params, batch["image"]).argmax(-1) == batch["label"]
    return jax.lax.pmean(right.mean(), "data")


# Rank 4 for matrices; vectors are sent uncompressed, in the same collectives.
reducer = jd.reducers.with_stats(jd.error_feedback(jd.power_sgd(rank=4)))
tx = jd.skip_nonfinite(
    optax.chain(
        jd.all_reduce(reducer),  # the one line that talks to other workers
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(3e-3, 300)),
    )
)


def train_step(state, batch):  # as one worker sees it
    loss, grads = jd.local_value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), jax.lax.pmean(loss, "data")


def main():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    data = {"image": (images[order] / 16).astype(np.float32), "label": labels[order].astype(np.int32)}
    train, test = ({name: x[part] for name, x in data.items()} for part in (slice(1400), slice(1400, 1796)))

    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    mesh = jd.make_mesh()
    state = jd.init_state(lambda: TrainState(p := init_params(jax.random.key(0)), tx.init(p)), mesh)
    step = jd.distribute(train_step, mesh)
    rng = np.random.default_rng(1)
    for number in range(300):
        chosen = rng.integers(0, 1400, 128)
        state, loss = step(state, {name: x[chosen] for name, x in train.items()})
        if number % 100 == 99:
            print(f"step {number + 1}: loss {float(loss):.3f}")
    figures = jd.transforms.stats(state.opt_state)
    plain = 300 * 2 * (mesh.size - 1) / mesh.size * 4 * sum(x.size for x in jax.tree.leaves(state.params))
    print(f"test accuracy {float(jd.evaluate(accuracy, mesh)(state, test)):.3f}")
    print(f"sent {float(figures['bytes']) / 1e6:.1f} MB a worker; plain all-reduce would send {plain / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""Two clusters of two devices: DiLoCo between the clusters against synchronous training, on handwritten digits.

    python examples/two_clusters.py

Prints the loss of both, and what a device sends, on average per step, inside its cluster and to the other one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist as jd

AXES, PERIOD, STEPS = ("pod", "chip"), 20, 120
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    loss: Any


def init_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, 128)) / 8, "bias": jnp.zeros(128)},
        "out": {"kernel": jax.random.normal(second, (128, 10)) / 11, "bias": jnp.zeros(10)},
    }


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# Every step: the mean in a cluster, and then over the clusters.
SYNCHRONOUS = optax.chain(*(jd.all_reduce(jd.exact(), axis=axis) for axis in reversed(AXES)), OPTIMIZER)
# Every step: the mean in a cluster. Every 20th: one Nesterov step along the mean of how far the clusters got.
INNER = optax.chain(jd.all_reduce(jd.exact(), axis="chip"), OPTIMIZER)
DILOCO = jd.local_sgd.diloco(INNER, sync_period=PERIOD, learning_rate=0.6, momentum=0.9, axis="pod")


def sent(program, branch, mesh):
    """The bytes that a device sends in one step: inside its cluster, and outside."""
    found = jd.analysis.collectives(program, branch=branch)
    outside = found.across(mesh, "pod").wire_bytes
    return found.wire_bytes - outside, outside


def train(name, tx, mesh, train_set, test_set):
    local = tx is DILOCO

    def train_step(state, batch):  # as one device sees it
        loss, grads = jd.local_value_and_grad(loss_fn, axis=AXES)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, jax.lax.pmean(loss, "chip")), {}

    def make_state():
        params = init_params(jax.random.key(0))
        held = jd.PerWorker(params, axis="pod") if local else params
        return TrainState(held, tx.init(params), jd.PerWorker(jnp.zeros(()), axis="pod"))

    def held_out(state, batch):
        params = jd.local_sgd.global_params(state.opt_state) if local else state.params
        return jax.lax.pmean(loss_fn(params, batch), AXES)

    state, rng = jd.init_state(make_state, mesh, axis=AXES), np.random.default_rng(1)
    step = jd.distribute(train_step, mesh, axis=AXES)
    step = step.lower(state, {key: x[:128] for key, x in train_set.items()}).compile()
    for _ in range(STEPS):
        rows = rng.integers(0, 1400, 128)
        state, _ = step(state, {key: x[rows] for key, x in train_set.items()})
    loss = jd.evaluate(held_out, mesh, axis=AXES)(state, test_set)
    quiet, meeting = sent(step, "min", mesh), sent(step, "max", mesh)
    outside = ((PERIOD - 1) * quiet[1] + meeting[1]) / PERIOD if local else meeting[1]
    print(f"{name:12} held-out loss {loss:.3f}; a step sends {meeting[0]:,.0f} bytes inside, {outside:,.0f} outside")
    return outside


def main():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    data = {"image": (images[order] / 16).astype(np.float32), "label": labels[order].astype(np.int32)}
    splits = [{key: x[part] for key, x in data.items()} for part in (slice(1400), slice(1400, 1796))]
    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    mesh = jd.make_mesh({"pod": 2, "chip": 2})
    dense, rare = (train(name, tx, mesh, *splits) for name, tx in (("synchronous", SYNCHRONOUS), ("DiLoCo", DILOCO)))
    print(f"{dense / rare:.0f} times fewer bytes between clusters")


if __name__ == "__main__":
    main()

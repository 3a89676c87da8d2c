"""A model that does not fit: the state that ZeRO and a disk leave on a device, and training with it.

    python examples/does_not_fit.py

Prints, for each way to train the same model on four devices, the bytes of its state on one of them, as the compiler
counts them, and the loss after the same steps, which is equal.
"""

import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist as jd

LAYERS, WIDTH, STEPS, IMAGES = 8, 128, 20, 256
ADAM = optax.adam(1e-3)


class TrainState(NamedTuple):
    params: Any
    opt_state: Any  # of the optimizer, or the gradients for one that works outside the step


def init_params(key):
    keys = jax.random.split(key, LAYERS + 2)
    return {
        "first": {"w": jax.random.normal(keys[0], (64, WIDTH)) / 8},
        "layers": [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 40, "b": jnp.zeros(WIDTH)} for k in keys[2:]],
        "last": {"w": jax.random.normal(keys[1], (WIDTH, 10)) / 11},
    }


def loss_fn(params, batch, *, cut):
    images, labels = batch
    wrap = jd.zero.gathered if cut else lambda f: f

    def layer(p, x):
        return x + jax.nn.relu(x @ p["w"] + p["b"][None])

    x = wrap(lambda p, x: x @ p["w"])(params["first"], images)
    if cut:  # one layer whole at a time
        x = jd.zero.gathered_scan(layer, params["layers"], x)
    else:
        for p in params["layers"]:
            x = layer(p, x)
    logits = wrap(lambda p, x: x @ p["w"])(params["last"], x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(name, tx, mesh, data, *, cut=False, disk=None):
    """With `disk`, the step only makes gradients, and Adam passes over them there."""

    def train_step(state, batch):  # as one device sees it
        loss, grads = jd.local_value_and_grad(lambda p, b: loss_fn(p, b, cut=cut))(state.params, batch)
        loss = jax.lax.pmean(loss, "data")
        if disk:
            return TrainState(state.params, grads), {"loss": loss}
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}

    def make_state():
        params = init_params(jax.random.key(0))
        params = jd.zero.shard(params, smallest=0) if cut else params
        return TrainState(params, jax.tree.map(jnp.zeros_like, params) if disk else tx.init(params))

    state, rng = jd.init_state(make_state, mesh), np.random.default_rng(0)
    if disk:
        state = state._replace(params=disk.init(state.params))
    step = jd.distribute(train_step, mesh).lower(state, tuple(x[:IMAGES] for x in data)).compile()
    for _ in range(STEPS):
        rows = rng.integers(0, len(data[0]), IMAGES)
        state, metrics = step(state, tuple(x[rows] for x in data))
        if disk:
            state = state._replace(params=disk.apply(state.params, state.opt_state))
    taken = jd.analysis.memory(step).arguments / 1e6
    print(f"{name:28} {taken:5.2f} MB on a device, loss {float(metrics['loss']):.4f}")


def main():
    images, labels = load_digits(return_X_y=True)
    data = (images / 16).astype(np.float32), labels.astype(np.int32)
    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    mesh = jd.make_mesh()
    train("all of it", optax.chain(jd.all_reduce(jd.exact()), ADAM), mesh, data)
    train("moments cut (stage 1)", jd.zero_redundancy(ADAM), mesh, data)
    train("parameters cut too (stage 3)", jd.zero_redundancy(ADAM), mesh, data, cut=True)
    with tempfile.TemporaryDirectory() as folder:
        disk = jd.offload.nvme(ADAM, jd.offload.Store(folder))
        train("and the moments on disk", None, mesh, data, cut=True, disk=disk)
        print(f"{disk.stats().state_bytes / 1e6:.1f} MB of Adam's moments are in {folder}")


if __name__ == "__main__":
    main()

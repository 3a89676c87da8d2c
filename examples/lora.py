"""Fine-tunes low-rank adapters (LoRA) of a flax model: only they are trained, so only they are sent.

    python examples/lora.py

A classifier of digits is trained once. Then four workers teach it digits that lie on their side, by DiLoCo on the
adapters alone, in 4 bits. Prints accuracies, and the bytes that a worker sends beside an all-reduce of all weights.
"""

import functools

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxdist as jd

RANK, WIDTH, SYNC_PERIOD, STEPS, BATCH = 4, 512, 10, 200, 128
IMAGES, LABELS = load_digits(return_X_y=True)
UPRIGHT = (IMAGES / 16).astype(np.float32)
TURNED = np.rot90(UPRIGHT.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
TEST = np.arange(len(LABELS)) % 5 == 0


class Classifier(nnx.Module):
    def __init__(self, rngs):
        # y = x W + x A B: W is the layer's own, A and B are its adapter, and B is zero at first.
        self.first = nnx.LoRALinear(64, WIDTH, lora_rank=RANK, rngs=rngs)
        self.second = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)
        self.last = nnx.LoRALinear(WIDTH, 10, lora_rank=RANK, rngs=rngs)

    def __call__(self, images):
        return self.last(nnx.relu(self.second(nnx.relu(self.first(images)))))


@functools.cache
def split():
    """A new model as its structure, its adapters and its weights."""
    return nnx.split(Classifier(nnx.Rngs(0)), nnx.LoRAParam, ...)


def apply(adapters, weights, images):
    return nnx.merge(split()[0], adapters, weights)(images)


def loss_fn(adapters, weights, batch):
    logits = apply(adapters, weights, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(adapters, weights, images):
    logits = apply(adapters, weights, images[TEST])
    return float((logits.argmax(-1) == LABELS[TEST]).mean())


def batches(images, steps):
    rng, images, labels = np.random.default_rng(0), images[~TEST], LABELS[~TEST]
    for _ in range(steps):
        rows = rng.integers(0, len(labels), BATCH)
        yield {"image": images[rows], "label": labels[rows]}


def pretrain(adapters, weights):
    """Trains all weights on upright digits, on one device, as whoever publishes a model does."""
    adam = optax.adam(1e-3)
    state = adam.init(weights)
    gradient = jax.jit(jax.grad(loss_fn, argnums=1))
    for batch in batches(UPRIGHT, STEPS):
        updates, state = adam.update(gradient(adapters, weights, batch), state)
        weights = optax.apply_updates(weights, updates)
    return weights


def fine_tune(adapters, weights, mesh):
    code = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    # The transformation has a state for the adapters, and nothing for the weights.
    tx = jd.local_sgd.diloco(optax.adam(3e-3), sync_period=SYNC_PERIOD, reducer=code)

    def make_state():
        # The adapters differ between workers until these meet; the weights never change.
        return {"adapters": jd.PerWorker(adapters), "weights": weights, "opt_state": tx.init(adapters)}

    def train_step(state, batch):
        loss, grads = jd.local_value_and_grad(loss_fn)(state["adapters"], state["weights"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["adapters"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return state | {"adapters": adapters, "opt_state": opt_state}, {"loss": jax.lax.pmean(loss, "data")}

    state, step = jd.init_state(make_state, mesh), jd.distribute(train_step, mesh)
    sent = jd.analysis.collectives(step.lower(state, next(batches(TURNED, 1))).compile(), branch="max").wire_bytes
    for batch in batches(TURNED, STEPS):
        state, _ = step(state, batch)
    return jd.local_sgd.global_params(state["opt_state"]), sent


def main():
    mesh, (_, adapters, weights) = jd.make_mesh(), split()
    trained, all_of_them = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (adapters, weights))
    weights = pretrain(adapters, weights)
    print(f"before: {accuracy(adapters, weights, UPRIGHT):.1%} of upright digits are recognized")
    print(f"and {accuracy(adapters, weights, TURNED):.1%} of turned ones")
    adapters, sent = fine_tune(adapters, weights, mesh)
    print(f"after:  {accuracy(adapters, weights, TURNED):.1%}, by {trained:,} trained numbers beside {all_of_them:,}")
    whole = 2 * (mesh.size - 1) / mesh.size * 4 * all_of_them
    print(f"a worker sends {sent / SYNC_PERIOD:,.0f} bytes a step, {whole * SYNC_PERIOD / sent:,.0f} times fewer")


if __name__ == "__main__":
    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    main()

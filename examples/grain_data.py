"""Trains on records that grain reads, stops in the middle, and resumes at the same batch.

    python examples/grain_data.py

Prints the loss of each part. With several processes, each reads its part of every batch; they share the folder:

    jaxdist launch -n 2 examples/grain_data.py runs/grain
"""

import sys
import tempfile
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd

GLOBAL_BATCH, SAVE_EVERY = 96, 10
TEACHER = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=2))), optax.adam(0.05))


class Records:
    """A thousand examples that can be read in any order, as from an ArrayRecord file."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(32, np.float32)
        return {"id": np.int32(index), "x": x, "y": x @ TEACHER}


def read_batches(shard):
    """One process's part of every global batch, of an endless sequence that is shuffled again in each epoch."""
    records = grain.MapDataset.source(Records()).shuffle(seed=0).repeat()
    # Every process takes its records out of the same window of the sequence.
    own = records[shard.shard_index :: shard.shard_count]
    batches = own.batch(GLOBAL_BATCH // shard.shard_count, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))


def train_step(state, batch):
    params, opt_state = state
    loss, grads = jd.local_value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")


def make_state():
    params = {"w": jnp.zeros((32, 16))}
    return params, tx.init(params)


def train(folder, steps):
    """Continues from the newest checkpoint in a folder; returns the numbers of the records in each batch."""
    mesh = jd.make_mesh()
    batches = read_batches(grain.sharding.ShardByJaxProcess())
    found = jd.checkpoint.resume(folder, jd.init_state(make_state, mesh))
    if found.data is not None:
        batches.set_state(found.data["batches"])
    state, step, seen = found.state, jd.distribute(train_step, mesh), []
    with jd.checkpoint.writing(folder, keep=2) as writer:
        for number in range(found.step, steps):
            own = next(batches)
            seen.append(own["id"].tolist())
            state, loss = step(state, jd.global_batch(own, mesh))
            if (number + 1) % SAVE_EVERY == 0:
                writer.save(state, number + 1, data={"batches": batches.get_state()})
    if jax.process_index() == 0:
        print(f"steps {found.step} to {steps}: loss {float(loss):.4f}")
    return seen


def main(folder):
    whole = train(folder / "whole", 40)
    first = train(folder / "parts", 25)  # steps 20 to 24 are lost: they come after the last checkpoint
    rest = train(folder / "parts", 40)
    assert first[:20] + rest == whole
    saved = [jd.checkpoint.load(folder / name, step=40).state for name in ("whole", "parts")]
    bits = [[leaf.tobytes() for leaf in jax.tree.leaves(state)] for state in saved]
    assert bits[0] == bits[1]
    if jax.process_index() == 0:
        print(f"the same {len(whole)} batches, and the same bits at the end")


if __name__ == "__main__":
    jd.runtime.use_cpu_devices(4)
    jd.initialize()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))

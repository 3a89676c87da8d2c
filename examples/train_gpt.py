"""Trains a GPT on bytes: grain data, bfloat16 compute, ZeRO or DiLoCo, checkpoints, tokens/s and MFU.

    python examples/train_gpt.py

trains the smallest size on four CPU devices, in a temporary folder, in seconds. The same script on a pod:

    srun python examples/train_gpt.py runs/gpt --size 125m --data text.txt --method diloco --pods 2 --steps 20000

Started again with the same folder, the run continues at the next batch, also on another number of devices; `--plan`
only compiles the step. It prints the number of parameters, what a device holds and sends, and every ten steps loss,
tokens/s and MFU (nan on a CPU), which are also in `log.jsonl`. Tokens are bytes: there is no tokenizer to download.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist as jd

AXES, VOCABULARY, LOG_EVERY, SAVE_EVERY = ("pod", "data"), 256, 10, 500


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int
    batch: int  # sequences in the global batch
    at_once: int  # sequences that a device computes at once; the others follow in a loop
    rate: float


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, context=64, batch=16, at_once=4, rate=3e-3),
    "125m": Size(layers=18, width=768, heads=12, context=2048, batch=256, at_once=8, rate=6e-4),
    "1b": Size(layers=20, width=2048, heads=16, context=2048, batch=512, at_once=2, rate=2e-4),
}

# Products are in bfloat16, parameters and their gradients in float32.
norm = partial(nnx.RMSNorm, use_scale=False)
dense = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, kernel_init=nnx.initializers.normal(0.02))


class Block(nnx.Module):
    """Causal attention and a four times wider MLP, each added to the residual stream."""

    def __init__(self, size, rngs):
        # Small at first, so that depth does not change the scale of the stream.
        into_stream = partial(dense, kernel_init=nnx.initializers.normal(0.02 / (2 * size.layers) ** 0.5), rngs=rngs)
        self.heads, self.norm = size.heads, norm(size.width, rngs=rngs)
        self.qkv, self.out = dense(size.width, 3 * size.width, rngs=rngs), into_stream(size.width, size.width)
        self.up, self.down = dense(size.width, 4 * size.width, rngs=rngs), into_stream(4 * size.width, size.width)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class GPT(nnx.Module):
    """Logits of the next byte, `[batch, length]` tokens -> `[batch, length, 256]`."""

    def __init__(self, size, rngs):
        embed = partial(nnx.Embed, features=size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.tokens, self.positions = embed(VOCABULARY), embed(size.context)
        self.blocks = jax.vmap(lambda key: Block(size, nnx.Rngs(key)))(jax.random.split(rngs(), size.layers))
        self.norm, self.head = norm(size.width, rngs=rngs), dense(size.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        # Compiled once for all blocks; the backward pass computes each again, and keeps only its input.
        apply_block = jax.checkpoint(lambda x, block: (block(x), None), prevent_cse=False)
        x, _ = jax.lax.scan(apply_block, x, self.blocks)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model, batch):
    tokens = batch.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def optimizer(args, size):
    rate = optax.warmup_cosine_decay_schedule(0.0, size.rate, args.steps // 10, args.steps, size.rate / 10)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    if args.method == "zero":
        return jd.zero_redundancy(adam, axis=AXES)
    # ZeRO within a pod, in every step; between pods one Nesterov step along the mean of how far they got.
    return jd.local_sgd.diloco(jd.zero_redundancy(adam, axis="data"), sync_period=args.sync_period, axis="pod")


def read_batches(path, size):
    """This process's part of every global batch, of an endless sequence that is shuffled again in each epoch."""
    text, shard = np.memmap(path, np.uint8, "r"), grain.sharding.ShardByJaxProcess()
    starts = grain.MapDataset.range(0, len(text) - size.context, size.context).shuffle(seed=0).repeat()
    # One byte more: the targets are the inputs one byte later.
    records = starts[shard.shard_index :: shard.shard_count].map(lambda i: np.array(text[i : i + size.context + 1]))
    batches = records.batch(size.batch // shard.shard_count, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))


def compile_step(args, size, mesh):
    """Returns `make_state` and the compiled step, and prints what it needs; nothing is allocated."""
    tx = optimizer(args, size)

    def make_state():
        model = GPT(size, nnx.Rngs(0))
        own = jd.PerWorker(model, axis="pod") if args.method == "diloco" else model
        # Of each pod: a mean over all would use the slow links in every step.
        loss = jd.PerWorker(jnp.zeros(()), axis="pod")
        return {"model": own, "opt_state": tx.init(model), "loss": loss}

    def train_step(state, batch):  # as one device sees it
        parts = max(1, len(batch) // size.at_once)
        loss, grads = jd.local_value_and_grad(loss_fn, axis=AXES, micro_batches=parts)(state["model"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["model"])
        model = optax.apply_updates(state["model"], updates)
        return {"model": model, "opt_state": opt_state, "loss": jax.lax.pmean(loss, "data")}, {}

    batch = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.uint8)
    shapes = jd.analysis.pods.abstract(make_state, batch, mesh, axis=AXES)
    step = jd.distribute(train_step, mesh, axis=AXES).lower(*shapes).compile()
    least, most = (jd.analysis.collectives(step, branch=branch).wire_bytes for branch in ("min", "max"))
    if jax.process_index() == 0:
        print(f"{args.size}: {count(GPT, size):,} parameters, {args.method} on {dict(mesh.shape)}")
        print(f"each holds {jd.analysis.memory(step).arguments:,} bytes and sends {least:,.0f} to {most:,.0f} a step")
    return make_state, step


def count(module, size):
    """The number of parameters, without making any."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: module(size, nnx.Rngs(0)))))


def full_speed(size):
    """Tokens a second at an MFU of 1 (Chowdhery et al., arXiv:2204.02311, 2022), on chips that jaxdist knows."""
    kind = jax.devices()[0].device_kind.lower().replace(" lite", "e")
    peaks = [chip.flops for chip in jd.analysis.cost.CHIPS.values() if chip.name in kind] or [{"other": np.nan}]
    matrices = size.layers * count(Block, size) + size.width * VOCABULARY
    flops = 6 * matrices + 12 * size.layers * size.width * size.context  # without recomputation
    return jax.device_count() * peaks[0].get("bfloat16", peaks[0]["other"]) / flops


def train(args, size, mesh, folder):
    make_state, step = compile_step(args, size, mesh)
    if args.plan:
        return
    batches = read_batches(args.data, size)
    found = jd.checkpoint.resume(folder / "checkpoints", jd.init_state(make_state, mesh, axis=AXES))
    if found.data is not None:
        batches.set_state(found.data["batches"])
    write, tokens, most = jd.runtime.json_log(folder / "log.jsonl"), size.batch * size.context, full_speed(size)
    state, since, started = found.state, found.step, time.perf_counter()
    saving, watching = jd.checkpoint.writing(folder / "checkpoints", keep=2), jd.processes.watchdog(600)
    with saving as writer, watching as watch:
        for number in range(found.step + 1, args.steps + 1):
            state, _ = watch(step, state, jd.global_batch(next(batches), mesh, axis=AXES))
            if number % LOG_EVERY == 0:
                loss, now = float(state["loss"].value.mean()), time.perf_counter()  # waits for the step
                speed, since, started = (number - since) * tokens / (now - started), number, now
                write({"step": number, "loss": loss, "tokens_per_second": speed, "mfu": speed / most})
                if jax.process_index() == 0:
                    print(f"step {number}: loss {loss:.3f}, {speed:.1f} tokens/s, MFU {speed / most:.1%}", flush=True)
            leave = jd.processes.preemption_requested(number)
            if leave or number == args.steps or number % SAVE_EVERY == 0:
                writer.save(state, number, data={"batches": batches.get_state()})
            if leave:
                break


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="of checkpoints and log; a temporary one by default")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--method", choices=("zero", "diloco"), default="zero")
    parser.add_argument("--pods", type=int, default=1, help="groups of devices with fast links")
    parser.add_argument("--sync-period", type=int, default=10, help="steps between two meetings of DiLoCo; 30 to 500")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--data", type=Path, default=argparse.__file__, help="any file")
    parser.add_argument("--plan", action="store_true", help="compile the step, and stop")
    args = parser.parse_args(arguments)
    mesh = jd.make_mesh(dict(zip(AXES, (args.pods, jax.device_count() // args.pods), strict=True)))
    with tempfile.TemporaryDirectory() as temporary:
        train(args, SIZES[args.size], mesh, args.folder or Path(temporary))


if __name__ == "__main__":
    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    jd.initialize()
    main()

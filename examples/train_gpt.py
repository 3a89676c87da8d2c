"""Trains a GPT on bytes: dropout, averaged weights, evaluation, checkpoints, trackers, and a choice of methods.

    python examples/train_gpt.py

trains the smallest size on four CPU devices, in a temporary folder, in seconds. The same script on a pod:

    srun python examples/train_gpt.py runs/gpt --size 125m --data text.txt --method diloco --pods 2 --steps 20000

`--method` is `exact`, `power_sgd`, `zero`, `diloco`, or `islands` for jobs that share nothing but a folder or bucket.
Started again with the same folder, the run continues at the next batch, also on another number of devices; `--plan`
only compiles the step. It prints the number of parameters, what a device holds and sends, and every ten steps loss,
tokens/s and MFU (nan on a CPU), which are also in `log.jsonl`, and now and then the loss of the averaged weights on
text that training never sees. Tokens are bytes: there is no tokenizer to download.
"""

import argparse
import tempfile
import time
import zlib
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jaxdist as jd

AXES, VOCABULARY, HELD_OUT = ("pod", "data"), 256, 2  # batches
LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 10, 20, 500  # steps


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

    def __call__(self, x, keys, dropout):
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
        attended = self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        x = x + drop(attended, keys[0], dropout)
        return x + drop(self.down(jax.nn.gelu(self.up(self.norm(x)))), keys[1], dropout)


def drop(x, key, rate):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0) if rate else x


class GPT(nnx.Module):
    """Logits of the next byte, `[batch, length]` tokens -> `[batch, length, 256]`."""

    def __init__(self, size, rngs):
        embed = partial(nnx.Embed, features=size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers, self.tokens, self.positions = size.layers, embed(VOCABULARY), embed(size.context)
        self.blocks = jax.vmap(lambda key: Block(size, nnx.Rngs(key)))(jax.random.split(rngs(), size.layers))
        self.norm, self.head = norm(size.width, rngs=rngs), dense(size.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, key, dropout):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        # Compiled once for all blocks; the backward pass computes each again, and keeps only its input.
        apply_block = jax.checkpoint(lambda x, at: (at[0](x, at[1], dropout), None), prevent_cse=False)
        x, _ = jax.lax.scan(apply_block, x, (self.blocks, jax.random.split(key, (self.layers, 2))))
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model, batch, key, dropout=0.0):
    tokens = batch.astype(jnp.int32)
    logits = model(tokens[:, :-1], key, dropout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def optimizer(args, size):
    rate = optax.warmup_cosine_decay_schedule(0.0, size.rate, args.steps // 10, args.steps, size.rate / 10)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    # Between pods or islands, one Nesterov step along the mean of how far they got.
    diloco = partial(jd.local_sgd.diloco, sync_period=args.sync_period)
    match args.method:
        case "exact":
            return optax.chain(jd.all_reduce(jd.exact(), axis=AXES), adam)
        case "power_sgd":
            return optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=4)), axis=AXES), adam)
        case "zero":
            return jd.zero_redundancy(adam, axis=AXES)
        case "diloco":  # ZeRO within a pod, in every step
            return diloco(jd.zero_redundancy(adam, axis="data"), axis="pod")
        case "islands":
            code = jd.error_feedback(jd.compressed(jd.qsgd(4, code="entropy")))
            return diloco(jd.zero_redundancy(adam, axis=AXES), axis=None, reducer=code)


class Streamed:
    """Sequences of a data set of Hugging Face that is read while training: its documents, joined and cut.

    All processes read all documents, and each keeps its rows. So the position is one for all of them, and holds for
    another number of processes too.
    """

    def __init__(self, documents, args, size, shard):
        self.documents, self.column, self.shard = documents, args.column, shard
        self.shape, self.left, self.read, self.reader = (size.batch, size.context + 1), bytearray(), 0, iter(documents)
        self.position = documents.state_dict()

    def __next__(self):
        length = self.shape[0] * self.shape[1]
        while len(self.left) < length:
            self.left += next(self.reader)[self.column].encode() + b"\n\n"
            self.read, self.position = self.read + 1, self.documents.state_dict()
        batch = np.frombuffer(self.left[:length], np.uint8).reshape(self.shape)
        del self.left[:length]
        return batch[self.shard.shard_index :: self.shard.shard_count]

    def get_state(self):
        # Not that of the data set, which after `load_state_dict` is the beginning until a document has been read.
        return {"documents": self.position, "left": self.left.decode("latin-1")}

    def set_state(self, state):
        self.position = state["documents"]
        self.documents.load_state_dict(self.position)
        self.left, self.reader = bytearray(state["left"], "latin-1"), iter(self.documents)


def stream_batches(args, size, shard):
    import datasets  # pip install datasets

    documents = datasets.load_dataset(args.dataset, split="train", streaming=True)
    first = Streamed(documents, args, size, shard)
    held_out = [next(first) for _ in range(HELD_OUT)]
    # Without what is held out, in every epoch; islands begin at different documents.
    rest = documents.skip(first.read).repeat(None).skip(seed_of(args) % 10_000)
    return held_out, Streamed(rest, args, size, shard)


def seed_of(args):
    """Islands differ in the order of their data and in what they drop."""
    return zlib.crc32(args.name.encode()) if args.method == "islands" else 0


def read_batches(args, size):
    """This process's part of the held-out batches, and of an endless sequence of batches that is without them."""
    shard = grain.sharding.ShardByJaxProcess()
    if args.dataset:
        return stream_batches(args, size, shard)
    text = np.memmap(args.data, np.uint8, "r")
    # One byte more: the targets are the inputs one byte later.
    starts = grain.MapDataset.range(0, len(text) - size.context, size.context)
    sequences = starts.map(lambda i: np.array(text[i : i + size.context + 1]))
    if len(sequences) < (1 + HELD_OUT) * size.batch:
        raise ValueError(f"{args.data} has {len(text)} bytes: too few for {HELD_OUT} held-out batches and one to train")

    def batched(records):
        """Batches of which this process reads its rows, ahead of their use."""
        rows = records[shard.shard_index :: shard.shard_count].batch(
            size.batch // shard.shard_count, drop_remainder=True
        )
        return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))

    train, held_out = sequences[: -HELD_OUT * size.batch], sequences[-HELD_OUT * size.batch :]
    # Shuffled again in each epoch.
    return list(batched(held_out)), batched(train.shuffle(seed=seed_of(args)).repeat())


def compile_step(args, size, mesh):
    """Returns `make_state` and the compiled step, and prints what it needs; nothing is allocated."""
    tx = optimizer(args, size)
    no_rounds = {"sync": ()} if args.method == "islands" else {}  # they meet between two steps

    def make_state():
        model = GPT(size, nnx.Rngs(0))
        of_pod = partial(jd.PerWorker, axis="pod") if args.method == "diloco" else lambda tree: tree
        # The average of a pod's models is its own. So is the loss: a mean over all pods would use the slow links.
        average = of_pod(jax.tree.map(jnp.copy, model))
        loss = jd.PerWorker(jnp.zeros(()), axis="pod")
        return {
            "model": of_pod(model), "opt_state": tx.init(model), "average": average, "loss": loss, "step": jnp.int32(0),
        }  # fmt: skip

    def train_step(state, batch):  # as one device sees it
        model, number = state["model"], state["step"]
        parts = max(1, len(batch) // size.at_once)
        gradient = jd.local_value_and_grad(partial(loss_fn, dropout=args.dropout), axis=AXES, micro_batches=parts)
        key = jax.random.fold_in(jax.random.key(seed_of(args)), number)
        loss, grads = gradient(model, batch, jd.runtime.worker_key(key, axis=AXES))
        updates, opt_state = tx.update(grads, state["opt_state"], model, **no_rounds)
        model = optax.apply_updates(model, updates)
        # Short at first, so that the average soon forgets the beginning.
        decay = jnp.minimum(args.decay, (1 + number) / (10 + number))
        average = optax.incremental_update(model, state["average"], 1 - decay)
        loss = jax.lax.pmean(loss, "data")
        return {"model": model, "opt_state": opt_state, "average": average, "loss": loss, "step": number + 1}, {}

    batch = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.uint8)
    shapes = jd.analysis.pods.abstract(make_state, batch, mesh, axis=AXES)
    step = jd.distribute(train_step, mesh, axis=AXES).lower(*shapes).compile()
    least, most = (jd.analysis.collectives(step, branch=branch).wire_bytes for branch in ("min", "max"))
    if jax.process_index() == 0:
        print(f"{args.size}: {count(GPT, size):,} parameters, {args.method} on {dict(mesh.shape)}")
        print(f"each holds {jd.analysis.memory(step).arguments:,} bytes and sends {least:,.0f} to {most:,.0f} a step")
    return tx, make_state, step


def evaluation(size, mesh):
    """Returns a function of the state and of this process's held-out batches: the loss of the averaged weights."""

    def held_out_loss(model, batch):
        parts = batch.reshape(-1, min(size.at_once, len(batch)), batch.shape[1])
        losses = jax.lax.map(lambda part: loss_fn(model, part, jax.random.key(0)), parts)
        return jax.lax.pmean(losses.mean(), AXES)

    mean, run = jax.jit(jd.consensus), jd.evaluate(held_out_loss, mesh, axis=AXES)

    def evaluate(state, batches):
        model = mean(state["average"])  # over pods
        return float(np.mean([run(model, jd.global_batch(batch, mesh, axis=AXES)) for batch in batches]))

    return evaluate


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


@contextmanager
def open_log(folder, args):
    """Yields a function that writes metrics to `log.jsonl` and to each tracker of `--tracker`, from process 0."""
    lines = jd.runtime.json_log(folder / "log.jsonl")
    trackers = args.tracker if jax.process_index() == 0 else []
    run = {"project": "train_gpt", "name": folder.name, "config": vars(args), "resume": "allow"}
    with ExitStack() as stack:
        logs = []
        if "wandb" in trackers:
            import wandb

            logs.append(stack.enter_context(wandb.init(id=folder.name, dir=folder, **run)).log)
        if "trackio" in trackers:
            import trackio

            logs.append(trackio.init(**run).log)
            stack.callback(trackio.finish)
        if "tensorboard" in trackers:
            from tensorboard.summary import Writer

            board = Writer(str(folder / "tensorboard"))
            stack.callback(board.close)
            logs.append(lambda metrics, step: [board.add_scalar(k, v, step) for k, v in metrics.items()])

        def write(step, metrics):
            lines({"step": step, **metrics})
            for log in logs:
                log(metrics, step=step)

        yield write


class Meter:
    """Logs and prints losses and speeds; reading a loss waits for the step that computes it."""

    def __init__(self, write, size, step):
        self.write, self.tokens, self.full, self.step = write, size.batch * size.context, full_speed(size), step
        self.started = time.perf_counter()

    def training(self, number, loss):
        loss, now = float(loss.value.mean()), time.perf_counter()  # of all pods
        speed = (number - self.step) * self.tokens / (now - self.started)
        self.step, self.started = number, now
        self.write(number, {"loss": loss, "tokens_per_second": speed, "mfu": speed / self.full})
        self.show(f"step {number}: loss {loss:.3f}, {speed:.1f} tokens/s, MFU {speed / self.full:.1%}")

    def held_out(self, number, loss):
        self.write(number, {"held_out_loss": loss})
        self.show(f"step {number}: held-out loss {loss:.3f}")
        self.started = time.perf_counter()

    def meeting(self, number, report):
        self.write(number, {"members": len(report.members), "wait_seconds": report.wait_seconds})
        self.show(f"step {number}: met as {' and '.join(report.members)}, waited {report.wait_seconds:.1f} s")

    def show(self, line):
        if jax.process_index() == 0:
            tqdm.write(line)  # above the bar


@contextmanager
def join_islands(args, tx, state, step):
    """Yields state and step as the run has them, and a function that meets the other islands where that is due."""
    if args.method != "islands":
        yield state, step, lambda state, number, leave: (state, None)
        return

    def shared(state):  # a meeting takes no second copy of the model
        return {name: state[name] for name in ("model", "opt_state")}

    with jd.islands.join(args.store, tx, name=args.name, round_timeout=args.timeout) as island:

        def meet(state, number, leave):
            if not (leave or island.due(number - 1)):
                return state, None
            met, report = (island.leave if leave else island.meet)(shared(state))
            return state | met, report

        state |= island.enter(shared(state))
        yield state, max(step, int(state["opt_state"].count)), meet


def train(args, size, mesh, folder):
    tx, make_state, step = compile_step(args, size, mesh)
    if args.plan:
        return
    held_out, batches = read_batches(args, size)
    found = jd.checkpoint.resume(folder / "checkpoints", jd.init_state(make_state, mesh, axis=AXES))
    if found.data is not None:
        batches.set_state(found.data["batches"])
    evaluate = evaluation(size, mesh)
    with ExitStack() as stack:
        writer = stack.enter_context(jd.checkpoint.writing(folder / "checkpoints", keep=2))
        watch = stack.enter_context(jd.processes.watchdog(600))
        state, since, meet = stack.enter_context(join_islands(args, tx, found.state, found.step))
        meter = Meter(stack.enter_context(open_log(folder, args)), size, since)
        hidden = jax.process_index() > 0 or None  # None: where there is no terminal
        for number in tqdm(range(since + 1, args.steps + 1), initial=since, total=args.steps, disable=hidden):
            state, _ = watch(step, state, jd.global_batch(next(batches), mesh, axis=AXES))
            leave = jd.processes.preemption_requested(number)
            last = leave or number == args.steps
            state, report = meet(state, number, leave)
            if report:
                meter.meeting(number, report)
            if number % LOG_EVERY == 0:
                meter.training(number, state["loss"])
            if number % EVALUATE_EVERY == 0 or last:
                meter.held_out(number, evaluate(state, held_out))
            if number % SAVE_EVERY == 0 or last:
                writer.save(state, number, data={"batches": batches.get_state()})
            if leave:
                break


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="of checkpoints and logs; a temporary one by default")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--method", choices=("exact", "power_sgd", "zero", "diloco", "islands"), default="zero")
    parser.add_argument("--pods", type=int, default=1, help="groups of devices with fast links")
    parser.add_argument("--sync-period", type=int, default=10, help="steps between two meetings of DiLoCo; 30 to 500")
    parser.add_argument("--store", help="of islands: a folder or bucket that all see")
    parser.add_argument("--name", default="", help="of this island")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that an island waits for others")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.0, help="0.1 if the text is read more than once")
    parser.add_argument("--decay", type=float, default=0.999, help="of the averaged weights; 0 evaluates the last ones")
    parser.add_argument("--data", type=Path, default=argparse.__file__, help="any file")
    parser.add_argument("--dataset", help="of Hugging Face, instead of a file: a name, or a folder")
    parser.add_argument("--column", default="text", help="of the data set's text")
    parser.add_argument("--tracker", nargs="*", default=[], choices=("wandb", "trackio", "tensorboard"))
    parser.add_argument("--plan", action="store_true", help="compile the step, and stop")
    args = parser.parse_args(arguments)
    if args.method == "islands" and not (args.store and args.name):
        parser.error("--method islands needs --store and --name")
    if args.method == "diloco" and args.pods < 2:
        parser.error("--method diloco needs --pods 2 or more: a single pod averages gradients in every step")
    mesh = jd.make_mesh(dict(zip(AXES, (args.pods, jax.device_count() // args.pods), strict=True)))
    with tempfile.TemporaryDirectory() as temporary:
        train(args, SIZES[args.size], mesh, args.folder or Path(temporary))


if __name__ == "__main__":
    jd.runtime.use_cpu_devices(4)  # without effect where there are GPUs or TPUs
    jd.initialize()
    main()

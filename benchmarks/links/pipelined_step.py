"""One process (one device) of `pipelined.py`: ways to train one model, chosen by lines of JSON.

`none`: no communication. `exact`, `bucketed`: `all_reduce` of everything at once, and of 4 MiB buckets. `late`:
`all_reduce(delay=1)`. `pipelined:K`: `jd.overlap.pipelined`, K layers deferred. These are one program each.
`late_thread`: the iterates of `late`, with the reduction in a program of its own that a second thread runs.
`layers`: no communication, with a program for the forward and one for the backward pass of each layer.
`queue:POLICY:KIB:PARTS`: the same with a queue of messages as in ByteScheduler (`queued.py`), in partitions of so many
KiB, of which so many may be on their way. POLICY: `priority`, `fifo`, or `barrier`, where the next step waits for all.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A collective that waits for the network keeps a thread waiting; one computes, two communicate.
os.environ.setdefault("NPROC", "3")

import functools

import jax
import jax.numpy as jnp
import optax
from background import Reducing, join, split
from jaxdist_step import LOSSES, normalize, optimizer
from problems import HEADS, LAYERS, PROBLEMS, WIDTH
from queued import queued
from server import Way, serve

import jaxdist as jd


def embed(w, batch):
    return w["embedding"][batch[0]] + w["position"][: batch[0].shape[1]]


def block(layer, w, x):
    size, length, _ = x.shape
    visible = jnp.tril(jnp.ones((length, length), bool))
    qkv = normalize(x, w[f"attention_gain_{layer}"]) @ w[f"qkv_{layer}"]
    q, k, v = qkv.reshape(size, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5
    mixed = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v
    x = x + mixed.transpose(0, 2, 1, 3).reshape(size, length, WIDTH) @ w[f"out_{layer}"]
    hidden = normalize(x, w[f"feed_gain_{layer}"]) @ w[f"up_{layer}"]
    return x + jax.nn.gelu(hidden) @ w[f"down_{layer}"]


def head(w, x, targets):
    logits = normalize(x, w["gain"]) @ w["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def dense(layer, w, x):
    return jax.nn.relu(x @ w[f"weight_{layer}"] + w[f"bias_{layer}"])


def classify(layer, w, x, targets):
    logits = x @ w[f"weight_{layer}"] + w[f"bias_{layer}"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def layers_of(name, params):
    """The names of the parameters of each layer, in forward order, and its function."""
    if name == "mlp":
        count = len(params) // 2
        names = [(f"weight_{i}", f"bias_{i}") for i in range(count)]
        middle = [functools.partial(dense, i) for i in range(1, count - 1)]
        return names, [lambda w, batch: dense(0, w, batch[0]), *middle, functools.partial(classify, count - 1)]
    kinds = ("attention_gain", "qkv", "out", "feed_gain", "up", "down")
    blocks = [tuple(f"{kind}_{i}" for kind in kinds) for i in range(LAYERS)]
    names = [("embedding", "position"), *blocks, ("gain", "head")]
    return names, [embed, *(functools.partial(block, i) for i in range(LAYERS)), head]


def local(name, problem):
    tx, loss = optimizer(name), LOSSES[name]

    @jax.jit
    def run(state, batch):
        value, gradients = jax.value_and_grad(loss)(state[0], batch)
        updates, opt = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    params, batches = jax.tree.map(jnp.asarray, (problem.params, problem.batches))
    return one_program(run, (params, tx.init(params)), batches)


def one_program(run, state, batches, loss_of=lambda state, out: out):
    def step(number):
        nonlocal state
        state, out = run(state, batches[number % len(batches)])
        return float(loss_of(state, out).addressable_data(0).ravel()[0])

    return Way(step, lambda: jax.block_until_ready(state), counts=True)


def reduced_inside(name, problem, mesh, reducer, delay=0):
    tx, loss = optax.chain(jd.all_reduce(reducer, delay=delay), optimizer(name)), LOSSES[name]

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state[0], batch)
        updates, opt = tx.update(gradients, state[1], state[0])
        # Each worker's own loss: the compiler would merge its mean with the late reduction, which then waits for it.
        return (optax.apply_updates(state[0], updates), opt, value), ()

    def make_state():
        params = jax.tree.map(jnp.asarray, problem.params)
        return params, tx.init(params), jd.PerWorker(jnp.zeros(()))

    batches = jd.global_batch(problem.batches, mesh)
    state = jd.place(make_state(), mesh)
    return one_program(jd.distribute(step, mesh), state, batches, lambda state, out: state[2].value)


def late_thread(name, problem, mesh):
    """The update of `late`: the mean of the last gradients arrives while this step computes the next ones."""
    tx, loss, reducing = optimizer(name), LOSSES[name], Reducing(mesh)

    @jax.jit
    def differentiate(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return value, join(jax.tree.leaves(gradients))

    @jax.jit
    def move(state, flat, likes):
        leaves, structure = jax.tree.flatten(likes)
        updates, opt = tx.update(structure.unflatten(split(flat, leaves)), state[1], state[0])
        return optax.apply_updates(state[0], updates), opt

    params, batches = jax.tree.map(jnp.asarray, (problem.params, problem.batches))
    state, arriving = (params, tx.init(params)), None

    def step(number):
        nonlocal state, arriving
        value, flat = differentiate(state[0], batches[number % len(batches)])
        jax.block_until_ready(flat)
        if arriving is not None:
            state = move(state, arriving.result(), state[0])
        arriving = reducing.submit(flat)
        return float(value)

    return Way(step, lambda: arriving and arriving.result(), counts=True)


def make_pipelined(name, problem, mesh, defer):
    names, _ = layers_of(name, problem.params)
    pipeline = jd.overlap.pipelined(LOSSES[name], optimizer(name), defer=defer, layers=names)
    state = jd.place(pipeline.init(jax.tree.map(jnp.asarray, problem.params)), mesh)
    return one_program(jd.distribute(pipeline.step, mesh), state, jd.global_batch(problem.batches, mesh))


def build(name, mode, problem, mesh):
    kind, *options = mode.split(":")
    bucketed = jd.reducers.bucketed(jd.exact(), bucket_bytes=4 << 20)
    ways = {
        "none": lambda: local(name, problem),
        "exact": lambda: reduced_inside(name, problem, mesh, jd.exact()),
        "bucketed": lambda: reduced_inside(name, problem, mesh, bucketed),
        "late": lambda: reduced_inside(name, problem, mesh, jd.exact(), delay=1),
        "late_thread": lambda: late_thread(name, problem, mesh),
        "pipelined": lambda: make_pipelined(name, problem, mesh, int(*options)),
        "layers": lambda: queued(*layers_of(name, problem.params), optimizer(name), problem, None),
        "queue": lambda: queued(*layers_of(name, problem.params), optimizer(name), problem, mesh, *options),
    }
    return ways[kind]()


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    name = os.environ["PROBLEM"]
    problem, mesh = PROBLEMS[name](jax.process_index()), jd.make_mesh()
    serve(lambda mode: build(name, mode, problem, mesh), {"jax": jax.__version__, "jaxdist": jd.__version__})
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

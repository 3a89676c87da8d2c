"""One process (one device) of `pipelined.py`: five ways to train one model, chosen by lines of JSON.

`none`: no communication. `exact`, `bucketed`: `all_reduce` of everything at once, and of 4 MiB buckets. `pipelined`:
`jd.overlap.pipelined`, one program. `threads`: the schedule of `pipelined`, by hand: a program for the forward and
one for the backward pass of each layer, and a second thread that runs the reductions, one program for each layer.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With a single thread, a collective that waits for the network would keep all else waiting.
os.environ.setdefault("NPROC", "2")

import functools
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxdist_step import LOSSES, normed, optimizer
from problems import HEADS, LAYERS, PROBLEMS, WIDTH

import jaxdist as jd

WARM_UP = 3


class Way(NamedTuple):
    """`step(number) -> loss`, perhaps before everything of the step is done; `finish()` waits for the rest."""

    step: Callable[[int], Any]
    finish: Callable[[], Any]


def embed(w, batch):
    return w["embedding"][batch[0]] + w["position"][: batch[0].shape[1]]


def block(layer, w, x):
    size, length, _ = x.shape
    visible = jnp.tril(jnp.ones((length, length), bool))
    qkv = normed(x, w[f"attention_gain_{layer}"]) @ w[f"qkv_{layer}"]
    q, k, v = qkv.reshape(size, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5
    mixed = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v
    x = x + mixed.transpose(0, 2, 1, 3).reshape(size, length, WIDTH) @ w[f"out_{layer}"]
    hidden = normed(x, w[f"feed_gain_{layer}"]) @ w[f"up_{layer}"]
    return x + jax.nn.gelu(hidden) @ w[f"down_{layer}"]


def head(w, x, targets):
    logits = normed(x, w["gain"]) @ w["head"]
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


def one_program(run, state, batches):
    def step(number):
        nonlocal state
        state, loss = run(state, batches[number % len(batches)])
        return jax.block_until_ready(loss)

    return Way(step, lambda: jax.block_until_ready(state))


def reduced_inside(name, problem, mesh, reducer):
    tx, loss = optax.chain(jd.all_reduce(reducer), optimizer(name)), LOSSES[name]

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state[0], batch)
        updates, opt = tx.update(gradients, state[1], state[0])
        # As `pipelined`, so that all send alike.
        return (optax.apply_updates(state[0], updates), opt), lax.pmean(value, "data")

    def make_state():
        params = jax.tree.map(jnp.asarray, problem.params)
        return params, tx.init(params)

    batches = jd.global_batch(problem.batches, mesh)
    return one_program(jd.distribute(step, mesh), jd.init_state(make_state, mesh), batches)


def make_pipelined(name, problem, mesh, defer):
    names, _ = layers_of(name, problem.params)
    pipeline = jd.overlap.pipelined(LOSSES[name], optimizer(name), defer=defer, layers=names)
    state = jd.init_state(lambda: pipeline.init(jax.tree.map(jnp.asarray, problem.params)), mesh)
    return one_program(jd.distribute(pipeline.step, mesh), state, jd.global_batch(problem.batches, mesh))


def threads(name, problem, mesh, defer):
    names, functions = layers_of(name, problem.params)
    tx, last = optimizer(name), len(names) - 1
    parts = [{key: jnp.asarray(problem.params[key]) for key in of_layer} for of_layer in names]
    states = [tx.init(part) for part in parts]
    batches = jax.tree.map(jnp.asarray, problem.batches)
    # Tokens and labels have no gradient.
    forward = [jax.jit(lambda w, batch: jax.vjp(lambda w: functions[0](w, batch), w))]
    forward += [jax.jit(lambda w, x, f=f: jax.vjp(f, w, x)) for f in functions[1:-1]]
    forward += [jax.jit(lambda w, x, targets: jax.vjp(lambda w, x: functions[-1](w, x, targets), w, x))]
    backward = jax.jit(lambda pull, cotangent: pull(cotangent))
    cut = NamedSharding(mesh, PartitionSpec("data"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    def mean(rows):
        return lax.pmean(rows[0], "data")

    @jax.jit
    def flat(gradients):
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)])[None]

    @jax.jit
    def move(part, state, arrived):
        leaves, structure = jax.tree.flatten(part)
        ends = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
        pieces = [x.reshape(leaf.shape) for x, leaf in zip(jnp.split(arrived, ends), leaves)]
        updates, state = tx.update(structure.unflatten(pieces), state, part)
        return optax.apply_updates(part, updates), state

    orders: queue.Queue = queue.Queue()
    arriving: list[Future | None] = [None] * len(names)

    def reduce_for_ever():
        while True:
            row, arrived = orders.get()
            shape = (mesh.size, row.shape[1])
            found = mean(jax.make_array_from_single_device_arrays(shape, cut, [row]))
            arrived.set_result(jax.block_until_ready(found.addressable_data(0)))

    threading.Thread(target=reduce_for_ever, daemon=True).start()

    def send(i, gradients):
        arriving[i] = Future()
        orders.put((flat(gradients), arriving[i]))

    def take(i):
        if arriving[i] is not None:
            parts[i], states[i] = move(parts[i], states[i], arriving[i].result())
            arriving[i] = None

    def step(number):
        batch = batches[number % len(batches)]
        x, pulls = batch, []
        for i in range(last):
            take(i)
            x, pull = forward[i](parts[i], x)
            pulls.append(pull)
        take(last)
        loss, pull = forward[last](parts[last], x, batch[1])
        gradients: list[Any] = [None] * len(names)
        cotangent = jnp.ones_like(loss)
        for i in range(last, -1, -1):
            gradients[i], *rest = backward(pull, cotangent)
            if i:
                pull, (cotangent,) = pulls[i - 1], rest
            if i >= defer:
                send(i, gradients[i])
        for i in range(defer):
            send(i, gradients[i])
        return jax.block_until_ready(loss)

    def finish():
        for i in range(len(names)):
            take(i)
        jax.block_until_ready(parts)

    return Way(step, finish)


def build(name, mode, problem, mesh):
    kind, _, defer = mode.partition(":")
    ways = {
        "none": lambda: local(name, problem),
        "exact": lambda: reduced_inside(name, problem, mesh, jd.exact()),
        "bucketed": lambda: reduced_inside(name, problem, mesh, jd.reducers.bucketed(jd.exact(), bucket_bytes=4 << 20)),
        "pipelined": lambda: make_pipelined(name, problem, mesh, int(defer)),
        "threads": lambda: threads(name, problem, mesh, int(defer)),
    }
    return ways[kind]()


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    name = os.environ["PROBLEM"]
    problem, mesh = PROBLEMS[name](jax.process_index()), jd.make_mesh()
    answers.write(json.dumps({"ready": {"jax": jax.__version__, "jaxdist": jd.__version__}}) + "\n")
    ways: dict[str, Way] = {}
    done: dict[str, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        mode = asked["mode"]
        if mode not in ways:
            ways[mode], done[mode] = build(name, mode, problem, mesh), 0
            asked["steps"] = WARM_UP
        way, start, losses = ways[mode], time.perf_counter(), []
        for number in range(done[mode], done[mode] + asked["steps"]):
            losses.append(float(way.step(number).addressable_data(0)))
        way.finish()
        done[mode] += asked["steps"]
        answers.write(json.dumps({"seconds": time.perf_counter() - start, "losses": losses}) + "\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

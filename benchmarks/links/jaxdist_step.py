"""jaxdist over gloo, as one process (one device) of `compare.py`, and two steps in plain JAX to compare with.

Modes: `none` (no communication), `exact`, `f16`, `power_sgd` (rank 4), `qsgd` (4 bits), `two_shot` (the same in two
phases), `top_k` (1 %), `sign` (1 bit); the biased ones inside error feedback. BAGUA's six algorithms: `allreduce`,
`bytegrad`, `qadam` and `qadam_1bit`, `decentralized` and `shift_one`, `low_precision`, `async` (an average every eighth
step, one program) and `async_clock` (an average every 0.5 s, by a second thread). `hand_flat` is a hand-written step
with one `lax.pmean` of all gradients, `hand_leaf` the naive one with a `pmean` for each leaf.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One thread, as in the other system: with two, XLA:CPU computes in both, and the processes of two hosts compete.
os.environ.setdefault("NPROC", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from background import Averages
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from problems import HEADS, LAYERS, MOMENTUM, PROBLEMS, RATES
from server import WARM_UP, Way, serve

import jaxdist as jd
from jaxdist.recipes import bagua

REDUCERS = {
    "exact": lambda: jd.exact(),
    "f16": lambda: jd.compressed(jd.compressors.cast(jnp.float16)),
    "power_sgd": lambda: jd.error_feedback(jd.power_sgd(rank=4)),
    "qsgd": lambda: jd.compressed(jd.qsgd(4)),
    "two_shot": lambda: jd.two_shot(jd.qsgd(4)),
    "top_k": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.01))),
    "sign": lambda: jd.error_feedback(jd.compressed(jd.compressors.scaled_sign())),
    "two_shot_sign": lambda: jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())),
}
# BAGUA's algorithms, from the optimizer and the number of workers. Momenta in eight bits or one are sent from the first
# step that is timed.
SYNC_PERIOD, CLOCK_SECONDS, ADAM_RATE = 8, 0.5, 1e-3
ALGORITHMS = {
    "allreduce": lambda tx, workers: bagua.gradient_allreduce(tx),
    "bytegrad": lambda tx, workers: bagua.bytegrad(tx),
    "qadam": lambda tx, workers: bagua.qadam(ADAM_RATE, warmup_steps=WARM_UP),
    "qadam_1bit": lambda tx, workers: bagua.qadam(
        ADAM_RATE, warmup_steps=WARM_UP, compressor=jd.compressors.scaled_sign(), feedback=True
    ),
    "decentralized": lambda tx, workers: bagua.decentralized(tx, workers),
    "shift_one": lambda tx, workers: bagua.decentralized(tx, workers, peers="shift_one"),
    "low_precision": lambda tx, workers: bagua.low_precision_decentralized(tx, workers),
    "async": lambda tx, workers: bagua.async_model_average(tx, sync_period=SYNC_PERIOD),
}
# Those after which each worker has a model of its own.
OWN_MODELS = {"decentralized", "shift_one", "low_precision", "async"}


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    loss: Any  # this worker's own: averaging it would be one more collective


def normalize(x, gain):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * gain


@jax.custom_vjp
def project(x, w):
    """`x @ w`, `[batch, length, inputs]` by `[inputs, outputs]`, whose gradient for `w` XLA:CPU computes fast.

    JAX writes it as the transpose of a product. XLA:CPU then copies the gradient of the result into another layout and
    multiplies two transposed matrices, at half of the speed.
    """
    return x @ w


def project_forward(x, w):
    return x @ w, (x, w)


def project_backward(kept, gradient):
    x, w = kept
    return gradient @ w.T, lax.dot_general(x, gradient, (((0, 1), (0, 1)), ((), ())))


project.defvjp(project_forward, project_backward)


def language_model_loss(w, batch):
    tokens, targets = batch
    (size, length), width = tokens.shape, w["embedding"].shape[1]
    visible = jnp.tril(jnp.ones((length, length), bool))
    x = w["embedding"][tokens] + w["position"][:length]
    for layer in range(LAYERS):
        qkv = project(normalize(x, w[f"attention_gain_{layer}"]), w[f"qkv_{layer}"])
        q, k, v = qkv.reshape(size, length, 3, HEADS, width // HEADS).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) * (width // HEADS) ** -0.5
        mixed = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v
        x = x + project(mixed.transpose(0, 2, 1, 3).reshape(size, length, width), w[f"out_{layer}"])
        hidden = project(normalize(x, w[f"feed_gain_{layer}"]), w[f"up_{layer}"])
        x = x + project(jax.nn.gelu(hidden), w[f"down_{layer}"])
    logits = project(normalize(x, w["gain"]), w["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def classifier_loss(w, batch):
    x, labels = batch
    layers = len([name for name in w if name.startswith("weight")])
    for layer in range(layers):
        x = x @ w[f"weight_{layer}"] + w[f"bias_{layer}"]
        x = jax.nn.relu(x) if layer < layers - 1 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


LOSSES = {"lm": language_model_loss, "mlp": classifier_loss}


def optimizer(name):
    return optax.adam(RATES[name]) if name == "lm" else optax.sgd(RATES[name], momentum=MOMENTUM)


def jaxdist_step(name, mode, params, mesh):
    """The step and its state, as a user of the library writes them."""
    if mode in ALGORITHMS:
        tx = ALGORITHMS[mode](optimizer(name), mesh.size)
    else:
        tx = optax.chain(jd.all_reduce(REDUCERS[mode]()), optimizer(name))

    def step(state, batch):
        loss, gradients = jd.local_value_and_grad(LOSSES[name])(state.params, batch)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, loss), ()

    def make_state():
        fresh = jax.tree.map(jnp.asarray, params)
        opt_state = tx.init(fresh)
        return TrainState(jd.PerWorker(fresh) if mode in OWN_MODELS else fresh, opt_state, jd.PerWorker(jnp.zeros(())))

    # `init_state` would compile the given parameters into a program, which takes longer than all the rest.
    return jd.distribute(step, mesh), jd.place(make_state(), mesh), lambda state: state.loss.value


def local_step(name, problem):
    """Makes a step without mesh or communication, on this process's device: the least time that a step can take."""
    tx = optimizer(name)

    @partial(jax.jit, donate_argnums=(0,))
    def run(state, batch):
        params, opt_state, _ = state
        loss, gradients = jax.value_and_grad(LOSSES[name])(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return TrainState(optax.apply_updates(params, updates), opt_state, loss)

    params, batches = jax.tree.map(jnp.asarray, (problem.params, problem.batches))
    state = TrainState(params, tx.init(params), jnp.zeros(()))

    def step(number):
        nonlocal state
        state = run(state, batches[number % len(batches)])
        return float(jax.block_until_ready(state).loss)

    return Way(step)


def clock_step(name, problem, mesh):
    """BAGUA's asynchronous average as in its public code: a thread averages snapshots, and steps never wait for it."""
    tx = optimizer(name)

    @jax.jit
    def run(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(LOSSES[name])(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # x <- x + (mean(x̂) - x̂): the steps taken meanwhile are kept.
    merge = jax.jit(lambda params, mean, sent: jax.tree.map(lambda x, m, s: x + (m - s), params, mean, sent))
    params, batches = jax.tree.map(jnp.asarray, (problem.params, problem.batches))
    opt_state, averages, last = tx.init(params), Averages(mesh), 0.0

    def step(number):
        nonlocal params, opt_state, last
        params, opt_state, loss = jax.block_until_ready(run(params, opt_state, batches[number % len(batches)]))
        arrived = averages.take()
        if arrived is not None:
            params = merge(params, *arrived)
        # Before the clock's time, and while an average is on its way, this does nothing.
        if time.perf_counter() - last >= CLOCK_SECONDS and averages.offer(params):
            last = time.perf_counter()
        return float(loss)

    return Way(step, averages.pause)


def hand_written_step(name, mode, params, mesh):
    """The same in plain JAX."""
    tx = optimizer(name)
    cut, whole = PartitionSpec("data"), PartitionSpec()

    def mean(gradients):
        if mode == "hand_leaf":
            return jax.tree.map(lambda g: lax.pmean(g, "data"), gradients)
        leaves, structure = jax.tree.flatten(gradients)
        flat = lax.pmean(jnp.concatenate([leaf.ravel() for leaf in leaves]), "data")
        ends = np.cumsum([leaf.size for leaf in leaves])
        return structure.unflatten([part.reshape(leaf.shape) for part, leaf in zip(jnp.split(flat, ends[:-1]), leaves)])

    @partial(jax.jit, donate_argnums=(0,))
    @partial(jax.shard_map, mesh=mesh, in_specs=((whole, whole, cut), cut), out_specs=(whole, whole, cut))
    def run(state, batch):
        params, opt_state, _ = state
        local = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        loss, gradients = jax.value_and_grad(LOSSES[name])(local, batch)
        updates, opt_state = tx.update(mean(gradients), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss[None]

    def make_state():
        fresh = jax.tree.map(jnp.asarray, params)
        return fresh, tx.init(fresh), jnp.zeros(jax.device_count())

    everywhere, per_worker = NamedSharding(mesh, whole), NamedSharding(mesh, cut)
    state = jax.jit(make_state, out_shardings=(everywhere, everywhere, per_worker))()
    return lambda state, batch: (run(state, batch), ()), state, lambda state: state[2]


def build(name, mode, problem, mesh):
    if mode == "none":
        return local_step(name, problem)
    if mode == "async_clock":
        return clock_step(name, problem, mesh)
    make = hand_written_step if mode.startswith("hand") else jaxdist_step
    run, state, loss_of = make(name, mode, problem.params, mesh)
    batches = jd.global_batch(problem.batches, mesh)

    def step(number):
        nonlocal state
        state, _ = run(state, batches[number % len(batches)])
        jax.block_until_ready(state)
        return float(loss_of(state).addressable_shards[0].data[0])

    return Way(step)


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    name = os.environ["PROBLEM"]
    problem = PROBLEMS[name](jax.process_index())
    mesh = jd.make_mesh()
    serve(lambda mode: build(name, mode, problem, mesh), {"jax": jax.__version__, "jaxdist": jd.__version__})
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

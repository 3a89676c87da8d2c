"""One model with BatchNorm and Dropout in three styles: flax nnx, flax linen, and plain pytrees.

    python examples/flax_models.py [nnx|linen|plain]

Each trains on eight simulated workers, is saved, and resumes on four. All three send compressed gradients with error
feedback, so that the optimizer's state has residuals of each worker. Prints the test accuracy of each, before and after
the move to four workers.
"""

import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd

STEPS, FEATURES, CLASSES, WIDTH, RATE = 40, 16, 4, 32, 0.1
TX = optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=2))), optax.adam(1e-2))


class State(NamedTuple):
    """The whole training state; `statistics` are the running statistics of BatchNorm."""

    params: Any
    statistics: Any
    opt: Any
    key: Any
    count: Any


class Model(NamedTuple):
    """The two functions that differ between the styles.

    Attributes:
      init: `key -> (params, statistics)`.
      apply: `(params, statistics, x, key) -> (logits, statistics)`; without a key it evaluates.
    """

    init: Any
    apply: Any


def nnx_model():
    """Flax nnx: the structure of the module is static, and its variables are the state."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(RATE)
            self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x, rngs=None):
            return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x))), rngs=rngs))

    structure = nnx.graphdef(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def init(key):
        _, params, statistics = nnx.split(Net(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return params, statistics

    def apply(params, statistics, x, key=None):
        # A copy: the variables of this trace, which `BatchNorm` may change.
        net = nnx.merge(structure, params, statistics, copy=True)
        if key is None:
            net.eval()
            return net(x), statistics
        net.train()
        return net(x, nnx.Rngs(dropout=key)), nnx.state(net, nnx.BatchStat)

    return Model(init, apply)


def linen_model():
    """Flax linen: `apply` is a pure function already."""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(WIDTH)(x))
            return nn.Dense(CLASSES)(nn.Dropout(RATE, deterministic=not train)(nn.relu(x)))

    def init(key):
        variables = Net().init(key, jnp.zeros((1, FEATURES)), train=False)
        return variables["params"], variables["batch_stats"]

    def apply(params, statistics, x, key=None):
        variables = {"params": params, "batch_stats": statistics}
        if key is None:
            return Net().apply(variables, x, train=False), statistics
        logits, new = Net().apply(variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    return Model(init, apply)


def plain_model():
    """Plain pytrees, as of equinox: a module is a tree of arrays, and functions take it as an argument."""

    def init(key):
        first, second = jax.random.split(key)
        params = {
            "hidden": {"w": jax.random.normal(first, (FEATURES, WIDTH)) / FEATURES**0.5, "b": jnp.zeros(WIDTH)},
            "out": {"w": jax.random.normal(second, (WIDTH, CLASSES)) / WIDTH**0.5, "b": jnp.zeros(CLASSES)},
        }
        return params, {"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}

    def apply(params, statistics, x, key=None):
        x = x @ params["hidden"]["w"] + params["hidden"]["b"]
        used = statistics if key is None else {"mean": x.mean(0), "var": x.var(0)}
        x = jax.nn.relu((x - used["mean"]) / jnp.sqrt(used["var"] + 1e-5))
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x / (1 - RATE), 0)
            statistics = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, statistics, used)
        return x @ params["out"]["w"] + params["out"]["b"], statistics

    return Model(init, apply)


MODELS = {"nnx": nnx_model, "linen": linen_model, "plain": plain_model}


def train_step_of(model):
    """The step of one worker."""

    def loss_fn(params, batch, statistics, key):
        logits, statistics = model.apply(params, statistics, batch["x"], key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), statistics

    def train_step(state, batch):
        key = jd.runtime.worker_key(jax.random.fold_in(state.key, state.count))
        value_and_grad = jd.local_value_and_grad(loss_fn, has_aux=True)
        (loss, statistics), grads = value_and_grad(state.params, batch, state.statistics, key)
        updates, opt = TX.update(grads, state.opt, state.params)
        # Each worker has measured its own batch: the mean keeps the statistics replicated.
        statistics = jax.lax.pmean(statistics, "data")
        new = State(optax.apply_updates(state.params, updates), statistics, opt, state.key, state.count + 1)
        return new, {"loss": jax.lax.pmean(loss, "data")}

    return train_step


def accuracy_of(model):
    """Evaluates one worker's part of a batch, with running statistics and without dropout."""

    def accuracy(state, batch):
        logits, _ = model.apply(state.params, state.statistics, batch["x"])
        return jax.lax.pmean((logits.argmax(-1) == batch["y"]).mean(), "data")

    return accuracy


def data(step, examples=64):
    """A batch from the number of the step, so that a resumed run reads the same data."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((examples, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES]).argmax(-1).astype(np.int32)}


def run(model, workers, folder, steps):
    """Trains on a number of workers, from the newest checkpoint in the folder, and returns the test accuracy."""
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])

    def build():
        params, statistics = model.init(jax.random.key(0))
        return State(params, statistics, TX.init(params), jax.random.key(1), jnp.int32(0))

    found = jd.checkpoint.resume(folder, jd.init_state(build, mesh))
    state, step = found.state, jd.distribute(train_step_of(model), mesh)
    for number in range(found.step, steps):
        state, _ = step(state, jd.global_batch(data(number), mesh))
    jd.checkpoint.save(folder, state, step=steps)
    accuracy = jd.evaluate(accuracy_of(model), mesh)(state, jd.global_batch(data(10**6, 512), mesh))
    print(f"  {workers} workers, steps {found.step} to {steps}: accuracy {accuracy:.2f}")
    return float(accuracy)


def main(names):
    jd.runtime.use_cpu_devices(8)
    for name in names:
        print(f"{name}:")
        with tempfile.TemporaryDirectory() as folder:
            model = MODELS[name]()
            run(model, 8, folder, STEPS)
            run(model, 4, folder, 2 * STEPS)


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))

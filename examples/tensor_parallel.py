"""Tensor parallelism and compressed data parallelism on one mesh: a transformer over four workers of two devices.

    python examples/tensor_parallel.py

Trains on bytes, first on one device, then with heads and hidden units sharded over the axis "model", with all of each
gradient and with PowerSGD, on Auto and on Explicit axes. Prints the bytes that a device sends along each axis, which
PowerSGD reduces for "data" and leaves alone for "model", and checks that without compression the losses are those of
the single device.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist as jd

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, STEPS = 2, 64, 4, 32, 32, 20
TEXT = np.fromfile(typing.__file__, np.uint8)
ADAM = optax.adam(3e-3, eps=1e-6)
REDUCERS = {"exact": jd.exact(), "PowerSGD": jd.error_feedback(jd.power_sgd(rank=4))}

# Columns of the first product and rows of the second: the heads, or hidden units, of one device stay together, and
# there is one sum over the axis for each pair (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, 2019).
LAYER = {"qkv": P(None, "model"), "out": P("model", None), "up": P(None, "model"), "down": P("model", None)}
SPECS = {"embed": P(), "layers": [LAYER] * LAYERS, "head": P()}


def init_params(key):
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes = {"embed": (256, WIDTH), "layers": [shapes] * LAYERS, "head": (WIDTH, 256)}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([0.1 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def sum_over_model(x, w):
    """A product along a sharded dimension. On Explicit axes it says how its result is sharded: not at all."""
    explicit = any(jax.typeof(w).sharding.spec)
    return jnp.einsum("btf,fd->btd", x, w, out_sharding=P(None, None, None) if explicit else None)


def loss_fn(params, batch):
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][tokens]
    for layer in params["layers"]:
        # The columns of a head follow each other, so that a shard has whole heads.
        q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(CONTEXT, dtype=bool)[None, None], scores, -1e9))
        x = x + sum_over_model(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), layer["out"])
        x = x + sum_over_model(jax.nn.gelu(norm(x) @ layer["up"]), layer["down"])
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["head"], targets).mean()


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(0, len(TEXT) - CONTEXT, (BATCH, 1))
        yield TEXT[starts + np.arange(CONTEXT + 1)].astype(np.int32)


def train_alone():
    """The losses of the same model on one device, without a mesh."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(0))
    opt_state, losses = ADAM.init(params), []
    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


def train(mesh, reducer):
    """The losses on a mesh, and the bytes that a device sends in a step along each axis."""
    # `specs`: the reducer works on each shard separately, and never gathers one.
    tx = optax.chain(jd.all_reduce(reducer, specs=SPECS), ADAM)

    def train_step(state, batch):  # as one worker sees it: its part of the batch, and all of the model
        params, opt_state = state
        loss, grads = jd.local_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    def make_state():
        params = init_params(jax.random.key(0))
        return params, tx.init(params)

    def shard(leaf, spec):
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    # The state of the reducer has its shards already; parameters and moments get those of SPECS.
    params, (reduced, adam) = jd.init_state(make_state, mesh)
    state = jax.tree.map(shard, params, SPECS), (reduced, optax.tree.map_params(ADAM, shard, adam, SPECS))
    step = jd.distribute(train_step, mesh).lower(state, next(batches())).compile()
    losses = []
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, sent(step, mesh)


def sent(step, mesh):
    """The bytes along each axis."""
    found = jd.analysis.collectives(step)
    return {axis: found.across(mesh, axis).wire_bytes for axis in mesh.axis_names}


def main():
    jd.runtime.use_cpu_devices(8)  # without effect where there are GPUs or TPUs
    alone, sizes = train_alone(), {}
    print(f"{'one device':18} loss {alone[0]:.3f} to {alone[-1]:.3f}")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        for name, reducer in REDUCERS.items():
            losses, sizes[kind, name] = train(mesh, reducer)
            axes = ", ".join(f"{axis} {size:,.0f} bytes" for axis, size in sizes[kind, name].items())
            print(f"{kind.name + ', ' + name:18} loss {losses[0]:.3f} to {losses[-1]:.3f}; {axes}")
            if name == "exact":
                np.testing.assert_allclose(losses, alone, rtol=1e-3)
    exact, compressed, *explicit = sizes.values()
    assert exact["model"] == compressed["model"]
    times = exact["data"] / compressed["data"]
    print(f"PowerSGD sends {times:.1f} times fewer bytes along data, and equally many along model")
    print("the losses without compression are those of one device")
    if explicit[0]["model"] > exact["model"]:
        print("Explicit axes: before jax 0.12 the parameters are gathered along model in every step")


if __name__ == "__main__":
    main()

"""FSDP and tensor parallelism inside slices, by the shardings of a plain jit, and PowerSGD between them: a transformer.

    python examples/fsdp_between_slices.py

Trains by JAX alone, then with two lines changed, marked +; prints the bytes between slices and inside of one.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import jaxdist as jd

jd.runtime.use_cpu_devices(8)  # without effect where there are GPUs or TPUs
mesh = jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
jax.set_mesh(mesh)
L, D, HEADS, CONTEXT, BATCH, STEPS = 2, 64, 4, 32, 32, 20  # L layers of width D
TEXT = np.fromfile(typing.__file__, np.uint8).astype(np.int32)
STARTS = np.random.default_rng(0).integers(0, len(TEXT) - CONTEXT, (STEPS, BATCH, 1))
SHAPES = {"embed": (256, D), "down": (L, 4 * D, D), "out": (L, D, D), "qkv": (L, D, 3 * D), "up": (L, D, 4 * D)}
ROWS, COLUMNS = P(None, "model", "fsdp"), P(None, "fsdp", "model")
SPECS = {"embed": P("model", "fsdp"), "qkv": COLUMNS, "out": ROWS, "up": COLUMNS, "down": ROWS}


def init_params():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {name: 0.1 * jax.random.normal(key, SHAPES[name]) for name, key in zip(SHAPES, keys, strict=True)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 1e-6).astype(x.dtype)


def apply_layer(x, layer):
    q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
    x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return jax.lax.with_sharding_constraint(x, P("fsdp")), None


def loss_fn(params, batch):
    layers = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    embed = layers.pop("embed")
    table = jax.lax.with_sharding_constraint(embed, P())  # gathered before the look-up, not after
    x, _ = jax.lax.scan(jax.checkpoint(apply_layer), table[batch[:, :-1]], layers)
    logits = (norm(x) @ embed.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def train(name, first, value_and_grad):
    tx = optax.chain(first, optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = jd.init_state(lambda: (init_params(), tx.init(init_params())), mesh, axis="dcn", specs=SPECS)
    step, losses = jax.jit(train_step, donate_argnums=0), []
    for starts in STARTS:
        batch = jax.device_put(TEXT[starts + np.arange(CONTEXT + 1)], P(("dcn", "fsdp")))
        state, loss = step(state, batch)
        losses.append(float(loss))
    sent = jd.analysis.collectives(step.lower(state, batch))
    between = sent.across(mesh, "dcn").wire_bytes
    sizes = f"{between:,.0f} bytes between slices, {sent.wire_bytes - between:,.0f} inside"
    print(f"{name:9} loss {losses[0]:.3f} to {losses[-1]:.3f}; {sizes}")
    return between


sent = [train("JAX alone", optax.identity(), jax.value_and_grad)]
for name, reducer in {"exact": jd.exact(), "PowerSGD": jd.error_feedback(jd.power_sgd(rank=4))}.items():
    first = jd.all_reduce(reducer, axis="dcn", specs=SPECS)  # +
    sent += [train(name, first, lambda loss: jd.transforms.per_worker_value_and_grad(loss, axis="dcn"))]  # +
print(f"PowerSGD sends {sent[1] / sent[2]:.1f} times fewer bytes between slices than exact")

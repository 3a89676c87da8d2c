"""A step of a GPT whose optimizer state is in host memory, streamed through the device layer by layer.

Bfloat16 parameters on the device (or on the host too), float32 master parameters and Adam's moments on the host, as in
ZeRO-Offload: 2 bytes a parameter on the device instead of 16. Gradients leave the device as they arise: a loop that
differentiated parameters on the device would pile them up there. For blocks only; embeddings and head, a few percent of
a large model, stay on the device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import stages

import jaxdist as jd
from jaxdist._cli.models import gpt
from jaxdist._cli.models.base import LayerRunner

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
RATE, FIRST, SECOND = 1e-3, 0.9, 0.999


def to(space, tree):
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


@jax.custom_vjp
def use_parameters(params, gradients):
    """Returns the parameters; their gradient goes to the memory of `gradients`, averaged over the workers."""
    del gradients
    return jd.comm.over("data").varying(params)  # else their gradient would be summed before it comes here


def use_parameters_backward(_, g):
    mean = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), g)
    return jax.tree.map(jnp.zeros_like, mean), matrices(partial(to, HOST), mean, 2)


use_parameters.defvjp(lambda params, gradients: (use_parameters(params, gradients), None), use_parameters_backward)


def make_offloaded_step(config: gpt.GPTConfig, *, params_on_host: bool = False) -> stages.StageStep:
    base = stages.stage_step(config, 0, master=True)
    tx = optax.adam(RATE)

    def make_state():
        params = dict(base.make_state().params)
        blocks = params.pop("blocks")
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), blocks)
        zeros = jax.tree.map(jnp.zeros_like, wide)
        return {
            "blocks": matrices(jd.OnHost, blocks) if params_on_host else blocks,
            # Half precision, as the parameters: the host's buffer for gradients.
            "gradients": matrices(jd.OnHost, jax.tree.map(jnp.zeros_like, blocks)),
            "adam": jax.tree.map(jd.OnHost, {"master": wide, "mu": zeros, "nu": zeros}),
            "ends": params,
            "opt": tx.init(params),
            "count": jnp.zeros((), jnp.int32),
        }

    def through_blocks(f, stacked, x):
        @partial(jax.checkpoint, prevent_cse=False)
        def body(x, each):
            params, buffer = each
            params = to(DEVICE, params) if params_on_host else params
            return f(use_parameters(params, buffer), x), None

        return jax.lax.scan(body, x, stacked)[0]

    def loss(ends, gradients, blocks, tokens):
        params = {**ends, "blocks": (jax.lax.stop_gradient(blocks), gradients)}
        return gpt.loss(config, params, tokens, layers=LayerRunner(jax.checkpoint, through_blocks))

    def adam(state, g, count):
        g = g.astype(jnp.float32)
        mu = FIRST * state["mu"] + (1 - FIRST) * g
        nu = SECOND * state["nu"] + (1 - SECOND) * g * g
        step = (mu / (1 - FIRST**count)) / (jnp.sqrt(nu / (1 - SECOND**count)) + 1e-8)
        return {"master": state["master"] - RATE * step, "mu": mu, "nu": nu}

    def step(state, batch):
        tokens = batch.astype(jnp.int32)
        plain = jax.tree.map(lambda m: m.value if isinstance(m, jd.OnHost) else m, state, is_leaf=is_host)
        value, (ends, gradients) = jax.value_and_grad(loss, argnums=(0, 1))(
            jd.comm.over("data").varying(plain["ends"]), plain["gradients"], plain["blocks"], tokens
        )
        ends = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), ends)
        updates, opt = tx.update(ends, plain["opt"])
        count = plain["count"] + 1

        def update(_, each):
            leaves, g = to(DEVICE, each)
            names = jax.tree.structure(g)
            flat = [jax.tree.leaves(leaves[name]) for name in ("master", "mu", "nu")]
            new = [
                adam(dict(zip(("master", "mu", "nu"), parts)), one, count.astype(jnp.float32))
                for *parts, one in zip(*flat, jax.tree.leaves(g))
            ]
            trees = {name: names.unflatten([leaf[name] for leaf in new]) for name in ("master", "mu", "nu")}
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trees["master"])
            return None, (to(HOST, trees), matrices(partial(to, HOST), params, 2) if params_on_host else params)

        adams, blocks = jax.lax.scan(update, None, (plain["adam"], gradients))[1]
        new = {
            "blocks": matrices(jd.OnHost, blocks) if params_on_host else blocks,
            "gradients": matrices(jd.OnHost, gradients),
            "adam": jax.tree.map(jd.OnHost, adams),
            "ends": optax.apply_updates(plain["ends"], updates),
            "opt": opt,
            "count": count,
        }
        return new, {"loss": jax.lax.pmean(value, "data")}

    return stages.StageStep(step, make_state, base.parameters, base.ends)


def matrices(f, tree, dimensions=3):
    """Applies `f` to stacked matrices: XLA:TPU cannot slice bfloat16 vectors in host memory."""
    return jax.tree.map(lambda x: f(x) if x.ndim >= dimensions else x, tree)


def is_host(x):
    return isinstance(x, jd.OnHost)

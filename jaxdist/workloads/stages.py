"""A training step of a GPT under each stage of ZeRO, to be compiled and weighed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._marks import is_mark
from .._typing import Metrics, PyTree, State
from ..parallel import gathered, gathered_scan, local_value_and_grad, shard
from ..reducers import exact
from ..transforms import all_reduce, zero_redundancy
from . import gpt


class Weighed(NamedTuple):
    """A step as one worker sees it, what makes its state, its parameters, and how many of them are outside blocks."""

    step: Callable[[State, Any], tuple[State, Metrics]]
    make_state: Callable[[], State]
    parameters: int
    ends: int


class StageState(NamedTuple):
    """Parameters, cut for stage 3, and the optimizer's state."""

    params: PyTree
    opt: State


def stage_step(config: gpt.GPTConfig, stage: int, *, master: bool = False, unrolled: bool = False) -> Weighed:
    """One step of Adam on a GPT, whose blocks are computed again in the backward pass.

    Args:
      config: the sizes.
      stage: 0 (an all-reduce) to 3.
      master: bfloat16 parameters and gradients, and float32 ones beside Adam's state. Else all is float32.
      unrolled: blocks one after the other in the program, not in a loop: gradients of one may be sent and dropped
        before those of the next exist. Stage 3 always loops.

    Returns:
      The step and its state.
    """
    dtype = jnp.bfloat16 if master else jnp.float32
    optimizer = optax.adam(1e-3)
    master_dtype = jnp.float32 if master else None
    if stage == 0 and master:
        alone = zero_redundancy(optimizer, reducer=None, master_dtype=master_dtype, axis=None)
        tx = optax.chain(all_reduce(exact()), alone)
    elif stage == 0:
        tx = optax.chain(all_reduce(exact()), optimizer)
    else:
        tx = zero_redundancy(optimizer, stage=2 if stage == 2 else 1, master_dtype=master_dtype)

    def make_params():
        params = jax.tree.map(lambda x: x.astype(dtype), dict(gpt.init(config, jax.random.key(0))))
        blocks = [params.pop(f"block_{i}") for i in range(config.layers)]
        params["blocks"] = blocks
        if stage == 3:
            return shard(params, smallest=config.width + 1)
        if not unrolled:
            params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return params

    def make_state():
        params = make_params()
        return StageState(params, tx.init(params))

    def loss(params, batch):
        tokens = batch.astype(jnp.int32)
        x = (gathered(_embed) if stage == 3 else _embed)(_of(params, "tokens", "positions"), tokens[:, :-1])
        block = _block(config)
        if stage == 3:
            x = gathered_scan(block, params["blocks"], x)
        elif unrolled:
            for layer in params["blocks"]:
                x = jax.checkpoint(block)(layer, x)
        else:
            again = jax.checkpoint(block, prevent_cse=False)
            x = jax.lax.scan(lambda x, layer: (again(layer, x), None), x, params["blocks"])[0]
        head = gathered(_head) if stage == 3 else jax.checkpoint(_head)
        return head(_of(params, "final_norm", "out"), x, tokens[:, 1:])

    def step(state, batch):
        value, grads = local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return StageState(params, opt), {"loss": jax.lax.pmean(value, "data")}

    shapes = jax.eval_shape(make_params)
    blocks = _entries(shapes.pop("blocks"))
    return Weighed(step, make_state, blocks + _entries(shapes), _entries(shapes))


def _entries(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_mark))


def _of(params: PyTree, *names: str) -> PyTree:
    return {name: params[name] for name in names}


def _block(config: gpt.GPTConfig) -> Callable[..., Any]:
    return lambda layer, x: gpt.Block(config).apply({"params": layer}, x)


def _embed(params: PyTree, tokens: Any) -> Any:
    return params["tokens"]["embedding"][tokens] + params["positions"][None, : tokens.shape[1]]


def _head(params: PyTree, x: Any, targets: Any) -> Any:
    wide = x.astype(jnp.float32)
    normed = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)
    logits = (normed.astype(x.dtype) * params["final_norm"]["scale"][None, None]) @ params["out"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

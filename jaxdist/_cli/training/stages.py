"""A training step of a GPT under each stage of ZeRO, to be compiled and weighed."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.types import Metrics, PyTree, State
from ...reducers.exact import exact
from ...state.marks import is_mark
from ...transforms.all_reduce import all_reduce
from ...transforms.local_value_and_grad import local_value_and_grad
from ...zero.base import zero_redundancy
from ...zero.gathered import gathered, gathered_scan, shard
from ..models import gpt
from ..models.base import Layers, looped


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

    plain = Layers(jax.checkpoint, _in_turn if unrolled else looped)
    layers = Layers(gathered, gathered_scan) if stage == 3 else plain
    loss = partial(gpt.loss, config, layers=layers)

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


def _in_turn(f: Callable[..., Any], blocks: Sequence[PyTree], x: Any) -> Any:
    for params in blocks:
        x = jax.checkpoint(f)(params, x)
    return x

"""A training step of a GPT under each stage of ZeRO, to measure its memory and bytes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist._cli.models import gpt
from jaxdist._cli.models.base import LayerRunner, apply_in_loop

PyTree = Any


class StageStep(NamedTuple):
    """One worker's step, the factory of its state, and the number of parameters, in all and outside the blocks."""

    step: Callable[[PyTree, Any], tuple[PyTree, dict]]
    make_state: Callable[[], PyTree]
    parameters: int
    ends: int


class StageState(NamedTuple):
    """Parameters, sharded for stage 3, and the optimizer state."""

    params: PyTree
    opt: PyTree


def stage_step(
    config: gpt.GPTConfig,
    stage: int,
    *,
    master: bool = False,
    unrolled: bool = False,
    on_host: bool = False,
    state_compressor: jd.compressors.Compressor | None = None,
) -> StageStep:
    """Makes a step of Adam on a GPT whose blocks are recomputed in the backward pass.

    Args:
      config: the sizes.
      stage: 0 (an all-reduce) to 3.
      master: bfloat16 parameters and gradients, with float32 copies in the optimizer state; otherwise all float32.
      unrolled: unroll the blocks instead of looping, so that the gradients of one block can be sent and freed before
        those of the next exist. Stage 3 always loops.
      on_host: keep the optimizer's state in the host's memory, and compute the update there.
      state_compressor: of the optimizer's state, with stages 1 to 3.
    """
    dtype = jnp.bfloat16 if master else jnp.float32
    optimizer = optax.adam(1e-3)
    master_dtype = jnp.float32 if master else None
    if stage == 0 and master:
        # With a single worker, ZeRO only adds the float32 copies.
        with_master = jd.zero_redundancy(optimizer, reducer=None, master_dtype=master_dtype, axis=None)
        tx = optax.chain(jd.all_reduce(jd.exact()), with_master)
    elif stage == 0:
        tx = optax.chain(jd.all_reduce(jd.exact()), optimizer)
    else:
        options = {"master_dtype": master_dtype, "state_compressor": state_compressor}
        tx = jd.zero_redundancy(optimizer, stage=2 if stage == 2 else 1, **options)
    if on_host:
        tx = jd.offload.host(tx)

    def make_params() -> PyTree:
        params = jax.tree.map(lambda x: x.astype(dtype), dict(gpt.init(config, jax.random.key(0))))
        blocks = [params.pop(f"block_{i}") for i in range(config.layers)]
        params["blocks"] = blocks
        if stage == 3:
            return jd.zero.shard(params, smallest=config.width + 1)
        if not unrolled:
            params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return params

    def make_state() -> StageState:
        params = make_params()
        return StageState(params, tx.init(params))

    plain = LayerRunner(jax.checkpoint, _apply_blocks if unrolled else apply_in_loop)
    layers = LayerRunner(jd.zero.gathered, jd.zero.gathered_scan) if stage == 3 else plain
    loss = partial(gpt.loss, config, layers=layers)

    def step(state: StageState, batch: Any) -> tuple[StageState, dict]:
        value, grads = jd.local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return StageState(params, opt), {"loss": jax.lax.pmean(value, "data")}

    shapes = jax.eval_shape(make_params)
    blocks = _count_entries(shapes.pop("blocks"))
    return StageStep(step, make_state, blocks + _count_entries(shapes), _count_entries(shapes))


def _count_entries(tree: PyTree) -> int:
    return sum(
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jd.PerWorker | jd.Sharded))
    )


def _apply_blocks(f: Callable[..., Any], blocks: Sequence[PyTree], x: Any) -> Any:
    for params in blocks:
        x = jax.checkpoint(f)(params, x)
    return x

"""jaxdist over gloo, as one process (one device, one thread) of `sharding.py`.

Modes: `exact` (replicated), `zero_1`, `zero_2` and `zero_3` (`gathered_scan` over the blocks, which computes each block
again in the backward pass).
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# One thread computes, as in PyTorch; the second one is for collectives.
os.environ["NPROC"] = "2"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax_model import apply_affine, apply_block, compute_loss
from worker import DECAY, EPSILON, RATE, Problem, bytes_at_start, draw_batch, initial_params, serve, take_output

import jaxdist as jd


class State(NamedTuple):
    params: Any
    opt: Any
    loss: Any  # this worker's own: averaging it would be one more collective


def compute_gathered_loss(params: Any, batch: Any) -> jax.Array:
    """The same loss of parameters that are sharded: a layer is whole only while it computes."""
    x, labels = batch
    affine = jd.zero.gathered(apply_affine)
    x = jd.zero.gathered_scan(apply_block, params["blocks"], affine(params["first"], x))
    return optax.softmax_cross_entropy_with_integer_labels(affine(params["last"], x), labels).mean()


def make_transformation(mode: str) -> optax.GradientTransformationExtraArgs:
    adamw = optax.adamw(RATE, eps=EPSILON, weight_decay=DECAY)
    if mode == "exact":
        return optax.chain(jd.all_reduce(jd.exact()), adamw)
    # Parameters that are sharded already (stage 3) make stage 1 of the rest.
    return jd.zero_redundancy(adamw, stage=2 if mode == "zero_2" else 1)


def build(mode: str, problem: Problem, mesh: jax.sharding.Mesh) -> tuple[Any, Any, dict[str, int]]:
    """The compiled step, its state, and what the compiler says of its memory."""
    tx = make_transformation(mode)
    loss = compute_gathered_loss if mode == "zero_3" else compute_loss

    def take_step(state: State, batch: Any) -> tuple[State, tuple]:
        value, gradients = jd.local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt, value), ()

    def make_state() -> State:
        params = jax.tree.map(jnp.asarray, initial_params(problem))
        params = jd.zero.shard(params, smallest=problem.width + 1) if mode == "zero_3" else params
        return State(params, tx.init(params), jd.PerWorker(jnp.zeros(())))

    state = jd.place(make_state(), mesh)
    batch = jd.global_batch(draw_batch(problem, 0, 0), mesh)
    compiled = jd.distribute(take_step, mesh).lower(state, batch).compile()
    found = compiled.memory_analysis()
    sizes = {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes}
    sizes["sent"] = jd.analysis.collectives(compiled).wire_bytes
    return compiled, state, sizes


def main() -> None:
    output = take_output()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", os.environ["COMPILED"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    mode, problem = sys.argv[1], Problem(*map(int, sys.argv[2].split(",")))
    mesh, rank = jd.make_mesh(), jax.process_index()
    jax.block_until_ready(jnp.zeros(1) + 1)  # starts the backend
    before = bytes_at_start()
    compiled, state, sizes = build(mode, problem, mesh)

    def step(number: int) -> float:
        nonlocal state
        state, _ = compiled(state, jd.global_batch(draw_batch(problem, rank, number), mesh))
        jax.block_until_ready(state)
        return float(state.loss.value.addressable_shards[0].data[0])

    serve(output, {"before": before, "version": jax.__version__, **sizes}, step)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

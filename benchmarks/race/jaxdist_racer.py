"""jaxdist over gloo, as one process (one device, one thread) of the race.

Modes: `none` (no communication), `exact`, `f16`, `power_sgd` (rank 4, error feedback), `two_shot` (4 bits), `local`
(every 8 steps), `diloco` (the same with an outer step), `top_k` (1 %, error feedback, the inner optimizer on each
worker before the mean).
"""

from streams import STREAMS  # isort: skip  # puts the folder of the models on the path
import jaxdist_step  # isort: skip  # sets the threads of this process: JAX reads their number when it is imported

import os
from typing import Any

import answers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxdist_step import LOSSES, TrainState
from problems import MOMENTUM

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis import step_time
from jaxdist.analysis.measured import measure_link

H = 8
REDUCERS = jaxdist_step.REDUCERS | {"two_shot": lambda: jd.two_shot(jd.qsgd(4))}
SYNCS = {
    "local": lambda inner: jd.local_sgd.local_sgd(inner, sync_period=H),
    "diloco": lambda inner: jd.local_sgd.diloco(inner, sync_period=H, learning_rate=0.7, momentum=0.5),
}


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies by `-rate`, an argument of the update, so that one compiled step serves every learning rate."""

    def update(updates, state, params=None, *, rate, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer(name: str, mode: str) -> optax.GradientTransformationExtraArgs:
    moments = optax.scale_by_adam() if name == "lm" else optax.trace(MOMENTUM)
    if mode in SYNCS:
        return SYNCS[mode](optax.chain(moments, scale_by_rate()))
    # On a mesh of one worker, as that of `none`, a mean is the identity.
    mean = jd.all_reduce(REDUCERS["exact" if mode == "none" else mode]())
    if mode == "top_k":
        # Sparse means would spoil the moments: each worker keeps its own, of its dense gradients.
        return optax.chain(jd.transforms.per_worker(moments), mean, scale_by_rate())
    return optax.chain(mean, moments, scale_by_rate())


class JaxdistRacer:
    """One mode: its compiled step and, from `start` on, its state."""

    def __init__(self, name: str, mode: str, stream: Any, mesh: jax.sharding.Mesh):
        self.name, self.mode, self.stream = name, mode, stream
        # Without communication every process trains for itself.
        self.mesh = jd.make_mesh({"data": 1}, devices=jax.local_devices()) if mode == "none" else mesh
        self.transformation = optimizer(name, mode)
        self.evaluation = jax.jit(LOSSES[name])
        self.compiled = None

    def start(self, rate: float, seed: int) -> None:
        self.rate, self.seed = np.float32(rate), seed
        self.state = jd.init_state(self.make_state, self.mesh)
        if self.compiled is None:
            specs = (PartitionSpec("data"), PartitionSpec())
            step = jd.distribute(self.take_step, self.mesh, batch_specs=specs)
            self.compiled = step.lower(self.state, self.batch(0)).compile()

    def make_state(self) -> TrainState:
        params = jax.tree.map(jnp.asarray, self.stream.params)
        held = jd.PerWorker(params, resize="mean") if self.mode in SYNCS else params
        return TrainState(held, self.transformation.init(params), jd.PerWorker(jnp.zeros(())))

    def take_step(self, state: TrainState, batch: Any) -> tuple[TrainState, tuple]:
        own, rate = batch
        loss, gradients = jd.local_value_and_grad(LOSSES[self.name])(state.params, own)
        updates, opt_state = self.transformation.update(gradients, state.opt_state, state.params, rate=rate)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, loss), ()

    def batch(self, number: int) -> Any:
        return jd.global_batch(self.stream.batch(self.seed, number), self.mesh), self.rate

    def step(self, number: int) -> float:
        self.state, _ = self.compiled(self.state, self.batch(number))
        jax.block_until_ready(self.state)
        return float(self.state.loss.value.addressable_shards[0].data[0])

    def evaluate(self) -> float:
        """The held-out loss of this process's parameters, which are those of all after a round."""
        leaves = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(self.state.params)]
        structure = jax.tree.structure(self.stream.params)
        shapes = [leaf.shape for leaf in jax.tree.leaves(self.stream.params)]
        params = structure.unflatten(leaf.reshape(shape) for leaf, shape in zip(leaves, shapes, strict=True))
        return float(np.mean([self.evaluation(params, batch) for batch in self.stream.held_out]))

    def cost(self) -> dict[str, Any]:
        """What the model of a step's time needs: coding measured here, bytes and hops of the compiled step."""
        workers = self.mesh.size
        found = (analysis.collectives(self.compiled, branch=branch) for branch in ("max", "min"))
        most, least = (step_time.traffic(each, workers=workers, gloo=True) for each in found)
        period = H if self.mode in SYNCS else 1
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.stream.params)
        # The rounds of local methods average with `exact`.
        coding = analysis.codec_seconds(REDUCERS.get(self.mode, jd.exact)(), like, workers=workers)
        kinds = [
            (op.kind, op.dtype, op.bytes, op.messages, op.wire_bytes) for op in analysis.collectives(self.compiled).ops
        ]
        mean = step_time.mean_traffic(most, least, 1 / period)
        return {"coding": coding, "traffic": mean, "schedule": step_time.Schedule(period), "collectives": kinds}

    def link(self) -> dict[str, float]:
        """Seconds of a hop and bytes per second, as `jaxdist compare --link measured` finds them."""
        found = measure_link(self.mesh, turns=3)
        return {"latency": found.latency, "bandwidth": found.bandwidth}


def main() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if folder := os.environ.get("COMPILED"):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # Machines that stop these processes for minutes, to measure others, end them otherwise.
    patience = {"heartbeat_timeout_seconds": 3600}
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), **patience)
    problem = os.environ["PROBLEM"]
    name = "lm" if problem.startswith("lm") else "mlp"
    stream = STREAMS[problem](jax.process_index(), jax.process_count())
    mesh = jd.make_mesh()
    answers.serve(lambda mode: JaxdistRacer(name, mode, stream, mesh), {"jax": jax.__version__})
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

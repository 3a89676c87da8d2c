"""The register of pairs: ZeRO on the chips of each pod, and a synchronizer between pods.

`test_zero_pods.py` runs every line of one table with some of the other, on a mesh and in simulation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import TrainState

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist import decentralized

BOTH = ("pod", "chip")
PODS = {"pod": 2, "chip": 4}
RING = jd.topology.ring(2)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


class Inside(NamedTuple):
    """What a pod does.

    Attributes:
      make: gives the transformation, over axis "chip".
      off: how far parameters may be from those of `CLIPPED` on the mean gradient of the pod. `None`: another method.
      cut: parameters are `Sharded` (stage 3).
    """

    make: Callable[[], optax.GradientTransformation]
    off: float | None = 1e-6
    cut: bool = False


class Between(NamedTuple):
    """What pods do between them.

    Attributes:
      make: gives the transformation, over axis "pod", around another.
      whole: it sees more than single entries of whole leaves, and so other numbers where these are cut.
      apart: how far a mesh may be from the simulation: a last bit may turn a draw, or a small norm.
    """

    make: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    whole: bool = False
    apart: float = 1e-6


def zero(inner: optax.GradientTransformation = CLIPPED, **options: Any):
    return lambda: jd.zero_redundancy(inner, **options, axis="chip")


def local(**options):
    return lambda inner: jd.local_steps(inner, NESTEROV, **{"sync_period": 2, "axis": "pod", **options})


def mixing(method=None, graph=RING, **options):
    return lambda inner: jd.gossip(inner, graph, method=method, axis="pod", **options)


MASTER: dict[str, Any] = {"master_dtype": jnp.float32}
STATE: dict[str, Any] = {"state_compressor": jc.dynamic_fp8(block=8)}
INSIDE = {
    "1": Inside(zero()),
    "2": Inside(zero(stage=2)),
    "3": Inside(zero(), cut=True),
    "1, masters": Inside(zero(**MASTER)),
    "2, masters": Inside(zero(stage=2, **MASTER)),
    "3, masters": Inside(zero(**MASTER), cut=True),
    "3, coded updates of what is whole": Inside(zero(compressor=jc.int8()), 0.1, cut=True),
    "1, coded gradients and updates": Inside(zero(reducer=jd.two_shot(jc.int8()), compressor=jc.int8()), 0.1),
    "2, feedback": Inside(zero(stage=2, reducer=jd.error_feedback(jd.two_shot(jc.int8()))), 0.1),
    "1, coded state": Inside(zero(**STATE), 0.03),
    "3, coded state": Inside(zero(**STATE), 0.03, cut=True),
    "1 on the host": Inside(lambda: jd.offload.host(zero()())),
    "2 on the host, masters": Inside(lambda: jd.offload.host(zero(stage=2, **MASTER)())),
    "3 on the host": Inside(lambda: jd.offload.host(zero()()), cut=True),
    "3 streamed from the host": Inside(lambda: jd.offload.host(zero()(), compute="device"), cut=True),
    "1, factors": Inside(zero(optax.adafactor(1e-2, min_dim_size_to_factor=2)), None),
    "3, factors": Inside(zero(optax.adafactor(1e-2, min_dim_size_to_factor=2)), None, cut=True),
    "3, products": Inside(zero(optax.contrib.muon(1e-2)), None, cut=True),
    "1, branches": Inside(zero(optax.apply_if_finite(optax.lamb(1e-2), 3)), None),
}
BETWEEN = {
    "diloco": Between(local()),
    "streaming": Between(local(sync_period=4, fragments=2, delay=1, merge_alpha=0.5)),
    "progress is kept": Between(local(sync_period=3, delay=1, overlap_correction=True)),
    "eager": Between(local(sync_period=3, delay=2, eager=True)),
    "averaging buffers": Between(local(buffers="average")),
    # Young moments: where a gradient is near zero, Adam divides its rounding by little more than that.
    "resetting buffers": Between(local(buffers="reset"), apart=1e-3),
    "after a warm-up": Between(local(warmup_steps=2)),
    "int8": Between(local(reducer=jd.compressed(jc.int8())), whole=True, apart=1e-3),
    "feedback": Between(local(reducer=jd.error_feedback(jd.compressed(jd.top_k(0.25)))), whole=True),
    "two shots": Between(
        local(reducer=jd.error_feedback(jd.two_shot(jc.int8(), second=jd.qsgd(8)))), whole=True, apart=1e-3
    ),
    "palsgd": Between(
        lambda inner: jd.local_sgd.palsgd(inner, learning_rate=0.1, sync_period=2, warmup_steps=1, axis="pod")
    ),
    "noloco": Between(lambda inner: jd.local_sgd.noloco(inner, sync_period=2, axis="pod")),
    "d_psgd": Between(mixing()),
    "sgp": Between(mixing(decentralized.sgp())),
    "osgp": Between(mixing(decentralized.osgp())),
    "d2": Between(mixing(decentralized.d2())),
    "quasi-global": Between(mixing(decentralized.quasi_global_momentum(learning_rate=0.1))),
    "relay": Between(mixing(decentralized.relay_sgd(), jd.topology.path(2))),
    "choco": Between(mixing(decentralized.choco(jc.int8(), step_size=0.5)), whole=True, apart=1e-3),
    "dcd": Between(mixing(decentralized.dcd_psgd(jc.int8())), whole=True, apart=1e-3),
    "diloco of gossip": Between(lambda inner: local()(mixing()(inner))),
    "slow momentum of gossip": Between(
        lambda inner: jd.local_sgd.local_slow_momentum(mixing()(inner), NESTEROV, sync_period=2, axis="pod")
    ),
}


def params():
    """One leaf is large enough for a compressed state; neither divides among the chips."""
    return {"b": jnp.zeros(5), "w": jax.random.normal(jax.random.key(1), (64, 65)) * 0.1}


def batch(seed, examples=16):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((examples, 64)).astype(np.float32)
    noise = rng.standard_normal((examples, 65)).astype(np.float32)
    return {"x": x, "y": np.tanh(x.mean(1, keepdims=True) * 6) + 0.1 * noise}


def loss(params, data):
    return jnp.mean((jnp.tanh(data["x"] @ params["w"] + params["b"].mean()) - data["y"]) ** 2)


def fresh(tx, place, *, cut=False, start=params):
    """A train state on a mesh or for a simulation; with `cut` the large leaf is `Sharded`."""

    def make_state():
        given = jd.zero.shard(start(), smallest=100, axis="chip") if cut else start()
        return TrainState(jd.PerWorker(given, axis="pod"), tx.init(given))

    return jd.init_state(make_state, place, axis=BOTH)


def make_step(tx):
    gathered = jd.zero.gathered(loss, axis="chip")

    def step(state, data, **static):
        _, gradient = jd.local_value_and_grad(gathered, axis=BOTH)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, **static)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def run(tx, place, *, cut=False, steps=5, start=params):
    """The state after some steps, on a mesh or in simulation."""
    state, make = fresh(tx, place, cut=cut, start=start), make_step(tx)
    step = jd.simulate(make, place, axis=BOTH) if isinstance(place, dict) else jd.distribute(make, place, axis=BOTH)
    for number in range(steps):
        state, _ = step(state, batch(number))
    return state


def whole(placed):
    """The parameters of each pod, `[pods, *s]`, whether they are cut or not."""

    def join(x):
        if not isinstance(x, jd.Sharded):
            return x
        return x.value[:, : int(np.prod(x.shape))].reshape(-1, *x.shape)

    return jax.tree.map(join, placed.value, is_leaf=lambda x: isinstance(x, jd.Sharded))

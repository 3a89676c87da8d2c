"""The register of training methods, among them the reducers and optimizers that have registers of their own.

`test_fresh_states.py` makes the state of every line, and `in_x64.py` takes steps with it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax
from optimizers_run import OPTIMIZERS
from register import CASES
from register_run import PODS

import jaxdist as jd
from jaxdist import local_sgd, online
from jaxdist.recipes import bagua

WORKERS = 4
RING, PATH = jd.topology.ring(WORKERS), jd.topology.path(WORKERS)


class Line(NamedTuple):
    """A method and how it is run.

    Attributes:
      make: gives the transformation.
      drifts: parameters differ between workers, and are marked.
      axis: what its workers lie along.
      extra: what `update` is passed besides.
    """

    make: Callable[[], optax.GradientTransformation]
    drifts: bool = False
    axis: Any = "data"
    extra: Mapping[str, Any] = MappingProxyType({})

    @property
    def workers(self) -> int | dict[str, int]:
        return WORKERS if self.axis == "data" else dict.fromkeys(PODS, 2)


def momentum():
    return optax.sgd(0.1, momentum=0.9)


def adam():
    return optax.adam(0.1)


def geometry():
    return online.euclidean()


def feedback():
    return jd.error_feedback(jd.compressed(jd.top_k(0.25)))


def reduced(case):
    axis = "data" if case.levels == 1 else tuple(PODS)
    return Line(lambda: optax.chain(jd.all_reduce(case.make(), axis=axis), adam()), axis=axis)


def apart(make, **extra):
    return Line(make, drifts=True, extra=extra)


def gossiping(method, graph=RING):
    return apart(lambda: jd.gossip(momentum(), graph, method=method()))


REDUCED = {name: reduced(case) for name, case in CASES.items()}
INSIDE = {name: Line(lambda one=one: one.make(0.1), drifts=one.drifts) for name, one in OPTIMIZERS.items()}
AGREED = {
    "ddp": Line(lambda: optax.chain(jd.recipes.ddp(), adam())),
    "compressed_adam": Line(lambda: jd.recipes.compressed_adam(0.1, feedback())),
    "gradient_allreduce": Line(lambda: bagua.gradient_allreduce(adam())),
    "bytegrad": Line(lambda: bagua.bytegrad(adam(), feedback=True)),
    "bagua.qadam": Line(lambda: bagua.qadam(0.1, warmup_steps=1)),
    "zero_redundancy 1": Line(lambda: jd.zero_redundancy(adam())),
    "zero_redundancy 2": Line(lambda: jd.zero_redundancy(adam(), stage=2)),
    "zero_redundancy coded": Line(lambda: jd.zero_redundancy(adam(), compressor=jd.compressors.int8())),
    "zero_redundancy by leaves": Line(lambda: jd.zero_redundancy(optax.adafactor(0.1))),
    "skip_nonfinite": Line(lambda: jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), adam()))),
    "loss_scale": Line(lambda: jd.transforms.dynamic_loss_scale(optax.chain(jd.all_reduce(jd.exact()), adam()))),
    "all_reduce late": Line(lambda: optax.chain(jd.all_reduce(feedback(), delay=1), adam())),
    "accumulate": Line(lambda: jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), adam()), 2)),
    "per_worker": Line(
        lambda: optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact()), optax.sgd(0.1))
    ),
    "quantized_state": Line(
        lambda: optax.chain(jd.all_reduce(jd.exact()), jd.transforms.quantized_state(adam(), smallest=1)),
    ),
    "anytime_minibatch": Line(lambda: online.anytime_minibatch(geometry(), 0.1), extra={"examples": 3}),
}
LOCAL = {
    "local_sgd": apart(lambda: jd.local_sgd.local_sgd(adam(), sync_period=2)),
    "local_sgd averaging buffers": apart(lambda: jd.local_sgd.local_sgd(adam(), sync_period=2, buffers="average")),
    "local_sgd resetting buffers": apart(lambda: jd.local_sgd.local_sgd(adam(), sync_period=1, buffers="reset")),
    "local_sgd, quadratic rule": apart(
        lambda: jd.local_sgd.local_sgd(adam(), sync_period=jd.schedule.quadratic(lambda step: 0.1 / (1 + step), 0.1, 1))
    ),
    "post_local_sgd": apart(lambda: jd.local_sgd.post_local_sgd(adam(), switch_step=1, sync_period=2)),
    "slowmo": apart(lambda: jd.local_sgd.slowmo(momentum(), sync_period=2, learning_rate=0.1)),
    "diloco": apart(lambda: jd.local_sgd.diloco(adam(), sync_period=2, warmup_steps=1)),
    "diloco of examples": apart(lambda: jd.local_sgd.diloco(adam(), sync_period=2), examples=3, learning_rate=0.1),
    "diloco with feedback": apart(lambda: jd.local_sgd.diloco(adam(), sync_period=2, reducer=feedback())),
    "diloco by directions": apart(lambda: jd.local_sgd.diloco(adam(), sync_period=2, merge="rda"), examples=3),
    "diloco of eager workers": apart(lambda: jd.local_sgd.diloco(adam(), sync_period=3, delay=2, eager=True)),
    "streaming_diloco": apart(lambda: jd.local_sgd.streaming_diloco(adam(), sync_period=2, fragments=2)),
    "muloco": apart(lambda: jd.local_sgd.muloco(0.02, adam_learning_rate=0.01, sync_period=2)),
    "palsgd": apart(lambda: jd.local_sgd.palsgd(adam(), learning_rate=0.1, sync_period=2, warmup_steps=1)),
    "sparse_loco": apart(lambda: jd.local_sgd.sparse_loco(adam(), sync_period=2, block=32, values_block=16)),
    "local_slow_momentum": apart(
        lambda: local_sgd.local_slow_momentum(jd.gossip(momentum(), RING), momentum(), sync_period=2), learning_rate=0.1
    ),
    "noloco": apart(lambda: local_sgd.noloco(adam(), sync_period=2)),
    "mirror_descent": apart(lambda: online.mirror_descent(geometry(), 0.1, topology=RING, rounds=2), examples=3),
    "async_model_average": apart(lambda: bagua.async_model_average(adam(), sync_period=2)),
    "decentralized": apart(lambda: bagua.decentralized(adam(), WORKERS)),
    "low_precision": apart(lambda: bagua.low_precision_decentralized(adam(), WORKERS)),
    "d_psgd": gossiping(jd.decentralized.d_psgd),
    "matcha": gossiping(jd.decentralized.d_psgd, jd.topology.matcha(RING)),
    "sgp": gossiping(jd.decentralized.sgp, jd.topology.one_peer_exponential(WORKERS)),
    "osgp": gossiping(jd.decentralized.osgp, jd.topology.one_peer_exponential(WORKERS)),
    "slowmo around sgp": apart(
        lambda: jd.local_sgd.slowmo(
            jd.gossip(momentum(), RING, method=jd.decentralized.sgp()), sync_period=2, learning_rate=0.1
        )
    ),
    "relay_sgd": gossiping(jd.decentralized.relay_sgd, PATH),
    "choco": gossiping(lambda: jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)),
    "dcd_psgd": gossiping(lambda: jd.decentralized.dcd_psgd(jd.qsgd(8))),
    "ecd_psgd": gossiping(lambda: jd.decentralized.ecd_psgd(jd.qsgd(8))),
    "d2": gossiping(jd.decentralized.d2),
    "gradient_tracking": gossiping(jd.decentralized.gradient_tracking),
    "quasi_global_momentum": gossiping(lambda: jd.decentralized.quasi_global_momentum(learning_rate=0.1)),
    "quasi_global_momentum over choco": gossiping(
        lambda: jd.decentralized.quasi_global_momentum(
            learning_rate=0.1, method=jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)
        )
    ),
    "quasi_global_adam": gossiping(lambda: jd.decentralized.quasi_global_adam()),
}
LINES = {**REDUCED, **INSIDE, **AGREED, **LOCAL}

"""Passes compressors for reducers, reducers for compressors, and halves; prints the errors as JSON.

In a process of its own: the type checks of the tests would raise first.
"""
# pyright: reportArgumentType=false

import json

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist.asynchronous import rules

CODE = jd.qsgd(4)
SGD = optax.sgd(0.1)

CALLS = {
    "all_reduce": lambda: jd.all_reduce(CODE),
    "error_feedback": lambda: jd.error_feedback(CODE),
    "loco": lambda: jd.reducers.loco(CODE),
    "ef21": lambda: jd.reducers.ef21(CODE),
    "bucketed": lambda: jd.reducers.bucketed(CODE),
    "partitioned": lambda: jd.reducers.partitioned(CODE),
    "hierarchical, inner": lambda: jd.reducers.hierarchical(inner=CODE, outer=jd.exact()),
    "hierarchical, outer": lambda: jd.reducers.hierarchical(inner=jd.exact(), outer=CODE),
    "per_leaf": lambda: jd.reducers.per_leaf(lambda path, leaf: "all", {"all": CODE}),
    "reducer_schedule": lambda: jd.reducers.reducer_schedule(jd.exact(), CODE, 10),
    "with_stats": lambda: jd.reducers.with_stats(CODE),
    "accordion": lambda: jd.reducers.accordion(CODE, jd.exact(), epoch_steps=10, interval_steps=10),
    "ddp": lambda: jd.recipes.ddp(CODE),
    "local_steps": lambda: jd.local_steps(SGD, SGD, sync_period=2, reducer=CODE),
    "diloco": lambda: jd.local_sgd.diloco(SGD, sync_period=2, reducer=CODE),
    "zero_redundancy": lambda: jd.zero_redundancy(SGD, reducer=CODE),
    "gathered": lambda: jd.zero.gathered(lambda p: p, reducer=CODE),
    "one_bit_adam": lambda: jd.optimizers.one_bit_adam(0.1, freeze_step=2, reducer=CODE),
    "qadam": lambda: jd.optimizers.qadam(0.1, reducer=CODE),
    "zero_one_adam": lambda: jd.optimizers.zero_one_adam(0.1, freeze_step=2, reducer=CODE),
    "pipelined": lambda: jd.overlap.pipelined(lambda p, b: jnp.sum(p), SGD, defer=1, reducer=CODE),
    "wavelet": lambda: jd.overlap.wavelet(
        lambda p, x: x, lambda p, x, batch: jnp.sum(x), SGD, mode="rolling", reducer=CODE
    ),
}


REDUCER = jd.exact()
REVERSED = {
    "compressed": lambda: jd.compressed(REDUCER),
    "two_shot": lambda: jd.two_shot(REDUCER),
    "two_shot, second": lambda: jd.two_shot(CODE, second=REDUCER),
    "ring": lambda: jd.reducers.ring(REDUCER),
    "scaled": lambda: jd.compressors.scaled(REDUCER),
    "chained, sparse": lambda: jd.compressors.chained(REDUCER, CODE),
    "chained, dense": lambda: jd.compressors.chained(jd.top_k(0.1), REDUCER),
    "choco": lambda: jd.decentralized.choco(REDUCER, step_size=0.5),
    "dcd_psgd": lambda: jd.decentralized.dcd_psgd(REDUCER),
    "ecd_psgd": lambda: jd.decentralized.ecd_psgd(REDUCER),
    "saps_psgd": lambda: jd.decentralized.saps_psgd(REDUCER),
    "zero_redundancy, updates": lambda: jd.zero_redundancy(SGD, compressor=REDUCER),
    "zero_redundancy, state": lambda: jd.zero_redundancy(SGD, state_compressor=REDUCER),
    "gathered": lambda: jd.zero.gathered(lambda p: p, compressor=REDUCER),
    "gathered_scan": lambda: jd.zero.gathered_scan(
        lambda p, x: x, [jnp.ones(1)], 0.0, axis=None, compressor=REDUCER, prefetch=True
    ),
    "quantized_state": lambda: jd.transforms.quantized_state(SGD, REDUCER),
    "rules.compressed": lambda: rules.compressed(rules.asgd(SGD), {"gradient": REDUCER}),
}
OPTIMIZERS = {
    "asgd": lambda: rules.asgd(0.1),
    "d_psgd": lambda: rules.d_psgd(jd.topology.ring, 0.1),
    "any_batch_gossip": lambda: rules.any_batch_gossip(3.5, jd.topology.ring, 0.1),
}
HALVES = {
    "trim": lambda: jd.reducers.trimmed_mean(1.5),
    "rank": lambda: jd.power_sgd(1.5),
    "defer": lambda: jd.overlap.pipelined(lambda p, b: jnp.sum(p), SGD, defer=1.5),
}


def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    groups = {"reducers": CALLS, "compressors": REVERSED, "optimizers": OPTIMIZERS, "halves": HALVES}
    print(
        json.dumps({group: {name: error_of(call) for name, call in calls.items()} for group, calls in groups.items()})
    )

"""The cost of the codes of ZeRO++ in loss: a small GPT on text, four simulated workers in two groups, equal batches.

    python benchmarks/zero coded --out benchmarks/reports/NAME

Parameters are sharded (stage 3) and trained by Adam. All begin with the same values; what differs is how layers are
gathered (qwZ), how gradients are averaged (qgZ) and whether the backward pass gathers inside the groups (hpZ).
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from common import write_record

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist._cli.models.base import LayerRunner
from jaxdist._cli.models.gpt import GPTConfig
from jaxdist._cli.models.text import text_workload

PLACE = {"pod": 2, "chip": 2}
AXES = tuple(PLACE)
CONFIG = GPTConfig(layers=2, width=96, heads=3, context=64)
BATCH = 16
EXACT = jd.hierarchical(inner=jd.exact(), outer=jd.exact())


def encode_gradients(code: jd.compressors.Compressor) -> jd.reducers.Reducer:
    return jd.hierarchical(inner=jd.two_shot(code), outer=jd.two_shot(code))


VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"reducer": EXACT},
    "qwZ, int8": {"reducer": EXACT, "compressor": jc.int8()},
    "qgZ, int4": {"reducer": encode_gradients(jc.int4())},
    "qwZ int8 + qgZ int4": {"reducer": encode_gradients(jc.int4()), "compressor": jc.int8()},
    "qwZ int8 + qgZ int4 + hpZ": {
        "reducer": encode_gradients(jc.int4()),
        "compressor": jc.int8(),
        "secondary_partition": True,
    },
    "qwZ int4 + qgZ int4": {"reducer": encode_gradients(jc.int4()), "compressor": jc.int4()},
}


class State(NamedTuple):
    params: Any
    opt: Any


def train(name: str, steps: int, seed: int) -> dict[str, Any]:
    options = VARIANTS[name]
    workload = text_workload(CONFIG)
    layers = LayerRunner(
        lambda f: jd.zero.gathered(f, axis=AXES, **options),
        lambda f, params, x: jd.zero.gathered_scan(f, params, x, axis=AXES, **options),
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, steps)
    tx = jd.zero_redundancy(optax.adam(rate), axis=AXES)
    loss = partial(workload.loss, layers=layers)

    def make_state():
        params = jd.zero.shard(workload.init(jax.random.key(seed)), smallest=1)
        return State(params, tx.init(params))

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss, axis=AXES)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(value, AXES)

    start = time.perf_counter()
    simulated = jax.jit(jd.simulate(step, PLACE, axis=AXES), donate_argnums=0)
    state, losses = jd.init_state(make_state, PLACE, axis=AXES), []
    for n in range(steps):
        state, value = simulated(state, workload.batch(seed, n, BATCH))
        losses.append(float(value))
    params = jd.consensus(state.params)
    held = [float(workload.loss(params, batch)) for batch in workload.held_out(64)[:8]]
    found = {
        "name": name,
        "seed": seed,
        "steps": steps,
        "train": float(np.mean(losses[-20:])),
        "held_out": float(np.mean(held)),
    }
    return found | {"seconds": round(time.perf_counter() - start)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS))


def main(given: argparse.Namespace) -> None:
    rows = []
    for seed in range(given.seeds):
        for name in given.only or VARIANTS:
            rows.append(train(name, given.steps, seed))
            print(json.dumps(rows[-1]), flush=True)
    write_record(given.out, "coded", {"jax": jax.__version__, "runs": rows})
    for name in given.only or VARIANTS:
        means = [np.mean([row[key] for row in rows if row["name"] == name]) for key in ("train", "held_out")]
        print(f"| {name} | {means[0]:.4f} | {means[1]:.4f} |")

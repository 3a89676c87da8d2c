"""What coding adds to a step, without a link: the classifier's gradients, two payloads, momentum SGD, one thread.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 python benchmarks/codecs coding --out benchmarks/reports/NAME

Each step codes the gradients of a classifier of 10.5 M parameters, decodes two payloads (its own and a copy of it that
differs), averages and applies them. Neither the gradients nor messages are computed or sent, so the rest of a step is
`none`, the same without a reducer. Medians of all turns; the modes take turns.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import optax
from common import write_record
from links.problems import MOMENTUM, RATES, classifier

import jaxdist as jd
from jaxdist.reducers.messages import as_generator
from jaxdist.reducers.reducer import NO_EXTRAS, Messages, Reduced, Reducer

REDUCERS = {
    "none": None,
    "compressed(qsgd(4))": jd.compressed(jd.qsgd(4)),
    "two_shot(qsgd(4))": jd.two_shot(jd.qsgd(4)),
    "error_feedback(compressed(scaled_sign()))": jd.error_feedback(jd.compressed(jd.compressors.scaled_sign())),
    "error_feedback(compressed(top_k(0.01)))": jd.error_feedback(jd.compressed(jd.top_k(0.01))),
}


class TwoWorkers:
    """Stands for a `Comm`: reducers that yield messages only ask for the number of workers and their own."""

    size, index = 2, jnp.int32(0)


def answer(sent: Messages) -> Messages:
    """What two workers receive, the second of which sent nearly the same; another array, so that it is decoded too."""

    def other(x: jax.Array) -> jax.Array:
        return x ^ jnp.ones((), x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else 0.5 * x

    gather = [jnp.stack([x, other(x)]) for x in sent.gather]
    return Messages(gather=gather, exchange=[jnp.stack([x[0], other(x[0])]) for x in sent.exchange])


def reduce(reducer: Reducer, gradients: Any, state: Any) -> tuple[Reduced, Any]:
    run = as_generator(reducer, gradients, state, TwoWorkers(), NO_EXTRAS)
    try:
        sent = next(run)
        while True:
            sent = run.send(answer(sent))
    except StopIteration as end:
        return end.value


def measure(turns: int) -> dict[str, float]:
    params = jax.tree.map(jnp.asarray, classifier(rank=0).params)
    keys = iter(jax.random.split(jax.random.key(0), len(params)))
    gradients = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    tx = optax.sgd(RATES["mlp"], momentum=MOMENTUM)
    runs, seconds = {}, {name: [] for name in REDUCERS}
    for name, reducer in REDUCERS.items():

        def step(params, opt_state, state, gradients, reducer=reducer):
            if reducer is not None:
                reduced, state = reduce(reducer, gradients, state)
                gradients = reduced.mean
            updates, opt_state = tx.update(gradients, opt_state)
            return optax.apply_updates(params, updates), opt_state, state

        start = params, tx.init(params), () if reducer is None else reducer.init(params)
        runs[name] = jax.jit(step, donate_argnums=(0, 1, 2)), jax.tree.map(jnp.array, start)
    for turn in range(turns + 2):
        for name, (run, state) in runs.items():
            begin = time.perf_counter()
            runs[name] = run, jax.block_until_ready(run(*state, gradients))
            if turn > 1:  # the first compiles, and the second fetches memory
                seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    found = measure(given.turns)
    rows = [f"| `{name}` | {ms:.0f} | {ms - found['none']:.0f} |" for name, ms in found.items()]
    table = "\n".join(["| | step ms | coding ms |", "|---|--:|--:|", *rows])
    print(table)
    write_record(given.out, "coding", {"jax": jax.__version__, "turns": given.turns, "ms": found}, table)

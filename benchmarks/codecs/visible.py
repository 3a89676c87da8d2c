"""How many entries of a DiLoCo drift bfloat16 sees, and what it costs to send these alone, on a byte-level GPT.

    python benchmarks/codecs visible --out benchmarks/reports/NAME

A GPT of the demo is trained by AdamW at 2e-3; from there DiLoCo goes on with AdamW on float32 parameters at each of the
`--rates`, once with `exact()`, once with what `compute_visible` passes of each drift inside error feedback, from the
same parameters and on the same batches. A row has the share of entries that were sent in each round, and both held-out
losses.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import append_rows

import jaxdist as jd
from jaxdist._cli.models import gpt, text


def train(given, config, work, params, rate, reducer):
    """DiLoCo from these parameters: the last global ones, and the share of entries without residual in each round."""
    tx = jd.local_sgd.diloco(optax.adamw(rate), sync_period=given.period, momentum=0.9, reducer=reducer)

    def step(state, batch):
        grads = jax.grad(lambda params: gpt.loss(config, params, batch[0]))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": jd.PerWorker(params), "opt": tx.init(params)}, given.workers)
    run, sent = jd.simulate(step, given.workers), []
    for number in range(given.rounds * given.period):
        batch = jnp.stack([work.batch(1, number * given.workers + w, given.batch) for w in range(given.workers)])
        state, _ = run(state, batch)
        if (number + 1) % given.period == 0 and reducer is not None:
            left = jax.tree.leaves(state["opt"].reducer[0].residual.value)
            sent.append(float(sum((x == 0).sum() for x in left) / sum(x.size for x in left)))
    return jd.local_sgd.global_params(state["opt"]), sent


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="demo", choices=gpt.SIZES)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--before", type=int, default=200, help="steps at 2e-3 before")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    config = gpt.SIZES[given.size]
    work = text.text_workload(config)
    params, tx = gpt.init(config, jax.random.key(0)), optax.adamw(2e-3)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(lambda p: gpt.loss(config, p, batch))(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for number in range(given.before):
        params, opt_state = step(params, opt_state, work.batch(0, number, 16))
    held_out = work.held_out(64)[0]
    loss = jax.jit(lambda p: gpt.loss(config, p, held_out))
    print(f"{given.size}: loss {float(loss(params)):.4f} after {given.before} steps", flush=True)
    visible = jd.error_feedback(jd.reducers.compute_visible(jd.exact()))
    for rate in given.rates:
        plain, _ = train(given, config, work, params, rate, None)
        found, sent = train(given, config, work, params, rate, visible)
        row = {
            "rate": rate,
            "sent": sent,
            "before": float(loss(params)),
            "loss_exact": float(loss(plain)),
            "loss_visible": float(loss(found)),
        }
        about = {key: value for key, value in vars(given).items() if key not in ("out", "rates", "subcommand")}
        append_rows(given.out, "visible", [about | row])
        print(f"{rate:g}: {np.mean(sent):.2%} sent, loss {row['loss_visible']:.4f}, of exact() {row['loss_exact']:.4f}")

"""Bytes of patches beside a whole bfloat16 copy and beside zstd, on a byte-level GPT that goes on training.

    python benchmarks/codecs weights --out benchmarks/reports/NAME        # needs zstandard: pip install zstandard

A GPT of the demo is trained by AdamW at 2e-3; from there AdamW on float32 parameters goes on at each of the `--rates`,
with fresh moments or (`--moments kept`) with those it has, and publishes in bfloat16 after every step, through a store
in memory. Beside each `put`, what it takes to copy the same numbers to the host. Beside each patch, of the same two
states: zstd at `--levels` of the XOR of their bits and of the difference of their bit patterns. A follower reads every
state, and compares it with the trainer's bit for bit.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import zstandard
from common import append_rows

import jaxdist as jd
from jaxdist._cli.models import gpt, text


def join_bits(params):
    return np.concatenate(
        [np.asarray(x.astype(jnp.bfloat16)).reshape(-1).view(np.uint16) for x in jax.tree.leaves(params)]
    )


def make_step(config, tx):
    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda params: gpt.loss(config, params, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def measure_rate(given, config, work, params, opt_state, rate):
    tx = optax.adamw(rate)
    step = make_step(config, tx)
    opt_state = tx.init(params) if opt_state is None else opt_state
    narrow = jax.jit(lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    store, rows = jd.islands.memory(), []
    codecs = {level: zstandard.ZstdCompressor(level) for level in given.levels}
    following = jd.publish.follow(store, like=params, start="oldest", timeout=0, poll=0)
    with jd.publish.open(store, dtype=jnp.bfloat16, compare_on=given.compare_on, anchor_every=10**6) as out:
        old = None
        for number in range(given.steps + 1):
            jax.block_until_ready(params)
            start, used = time.perf_counter(), time.process_time()
            jax.device_get(narrow(params))
            copy, used_to_copy = time.perf_counter() - start, time.process_time() - used
            start, used = time.perf_counter(), time.process_time()
            out.put(params, step=number)
            put, used_to_put = time.perf_counter() - start, time.process_time() - used
            out.flush()
            sent, used_to_send = time.perf_counter() - start, time.process_time() - used
            found, found_step = next(following)
            read, used_to_read = time.perf_counter() - start - sent, time.process_time() - used - used_to_send
            new = join_bits(params)
            assert found_step == number
            assert (join_bits(found) == new).all()
            if old is not None:
                tried = {"xor": (new ^ old).tobytes(), "difference": (new - old).tobytes()}
                sizes = {
                    f"{name} {level}": len(codec.compress(body))
                    for name, body in tried.items()
                    for level, codec in codecs.items()
                }
                row = {
                    "changed": float(np.mean(old != new)),
                    "patch": out.newest.patch_bytes or out.newest.anchor_bytes,
                    "zstd": sizes,
                    "copy_seconds": copy,
                    "put_seconds": put,
                    "copy_processor_seconds": used_to_copy,
                    "put_processor_seconds": used_to_put,
                    "sent_seconds": sent,
                    "sent_processor_seconds": used_to_send,
                    "read_seconds": read,
                    "read_processor_seconds": used_to_read,
                }
                rows.append(row)
            old = new
            params, opt_state, loss = step(params, opt_state, work.batch(1, number, given.batch))
    assert np.isfinite(float(loss))
    return rows


def summarize(rate, rows, whole):
    zstd = {name: statistics.mean(row["zstd"][name] for row in rows) for name in rows[0]["zstd"]}
    best = min(zstd, key=zstd.get)
    patch = statistics.mean(row["patch"] for row in rows)
    found = {
        "rate": rate,
        "steps": len(rows),
        "changed": statistics.mean(row["changed"] for row in rows),
        "whole": whole,
        "patch": patch,
        "share": patch / whole,
        "first_share": rows[0]["patch"] / whole,
        "largest_share": max(row["patch"] for row in rows) / whole,
        "last_share": rows[-1]["patch"] / whole,
        "zstd": zstd,
        "best_zstd": best,
        "of_best_zstd": patch / zstd[best],
    }
    return found | {name: statistics.median(row[name] for row in rows) for name in rows[0] if "seconds" in name}


def make_table(found):
    titles = (
        "rate",
        "words that change",
        "patch / whole copy",
        "first step",
        "last step",
        "smallest zstd / whole copy",
        "patch / smallest zstd",
        "put / copy to the host, s",
        "encode and send, processor s",
        "read and check, processor s",
    )
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in found:
        best = row["zstd"][row["best_zstd"]] / row["whole"]
        cells = (
            f"{row['rate']:g}",
            f"{row['changed']:.2%}",
            f"{row['share']:.2%}",
            f"{row['first_share']:.2%}",
            f"{row['last_share']:.2%}",
            f"{best:.2%} ({row['best_zstd']})",
            f"{row['of_best_zstd']:.2f}",
            f"{row['put_seconds']:.4f} / {row['copy_seconds']:.4f}",
            f"{row['sent_processor_seconds']:.2f}",
            f"{row['read_processor_seconds']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="demo", choices=gpt.SIZES)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=100, help="of each rate")
    parser.add_argument("--before", type=int, default=500, help="steps at 2e-3 before")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--moments", choices=("fresh", "kept"), default="fresh")
    parser.add_argument("--compare-on", choices=("host", "device"), default="host")
    parser.add_argument("--levels", type=int, nargs="+", default=[3, 19], help="of zstd")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    config = gpt.SIZES[given.size]
    work = text.text_workload(config)
    params = gpt.init(config, jax.random.key(0))
    tx = optax.adamw(2e-3)
    step, opt_state = make_step(config, tx), tx.init(params)
    for number in range(given.before):
        params, opt_state, loss = step(params, opt_state, work.batch(0, number, given.batch))
    whole = 2 * sum(x.size for x in jax.tree.leaves(params))
    print(f"{given.size}: {whole // 2:,} parameters, loss {loss:.3f} after {given.before} steps", flush=True)
    kept = opt_state if given.moments == "kept" else None
    about = {key: value for key, value in vars(given).items() if key not in ("out", "rates", "subcommand")}
    found = []
    for rate in given.rates:
        found.append(summarize(rate, measure_rate(given, config, work, params, kept, rate), whole))
        print(make_table(found[-1:]).splitlines()[-1], flush=True)
        append_rows(given.out, "rates", [about | {"loss": float(loss)} | found[-1]])

"""How fast the codes are: GB/s of float32 in and out, beside straightforward versions in numpy and jax.numpy.

    python benchmarks/codecs.py --out benchmarks/reports/NAME

A rate counts the bytes of the uncompressed array once. The contestants take turns, and the fastest of all turns counts,
since noise only ever adds time. `copy` is the bound of anything that reads and writes the array.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist as jd
from jaxdist.compressors import cast, uniform_threefry

BUCKET = 512


def codes() -> dict[str, Any]:
    return {
        "cast(float16)": cast(jnp.float16),
        "cast(bfloat16)": cast(jnp.bfloat16),
        "qsgd(8)": jd.qsgd(8),
        "qsgd(4)": jd.qsgd(4),
        "qsgd(2)": jd.qsgd(2),
        "qsgd(4), threefry noise": jd.qsgd(4, noise=uniform_threefry),
        "scaled_sign()": jd.scaled_sign(),
        "top_k(0.01)": jd.top_k(0.01),
        "random_k(0.01)": jd.random_k(0.01),
    }


def plain_qsgd(np_or_jnp, x, uniforms):
    """Four bits as written in the paper, two codes to a byte."""
    buckets = x.reshape(-1, BUCKET)
    norms = np_or_jnp.abs(buckets).max(1, keepdims=True)
    level = np_or_jnp.floor(np_or_jnp.abs(buckets) / norms * 7 + uniforms.reshape(-1, BUCKET)).astype("uint8")
    bits = (level | ((buckets < 0).astype("uint8") << 3)).reshape(-1, 2)
    return bits[:, 0] | (bits[:, 1] << 4), norms


def plain_versions(x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What one would write first, random numbers included."""
    on_device, kept = jnp.asarray(x), x.size // 100
    random = np.random.default_rng(0)
    half = jax.jit(lambda x: x.astype(jnp.float16))
    quantised = jax.jit(lambda x, key: plain_qsgd(jnp, x, jax.random.uniform(key, x.shape)))
    signs = jax.jit(lambda x: (jnp.packbits(x >= 0), jnp.abs(x).mean()))
    largest = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), kept))
    return {
        "numpy float16": lambda: x.astype(np.float16),
        "jnp float16": lambda: half(on_device),
        "numpy qsgd 4 bit": lambda: plain_qsgd(np, x, random.random(x.size, np.float32)),
        "jnp qsgd 4 bit": lambda: quantised(on_device, jax.random.key(0)),
        "numpy sign": lambda: (np.packbits(x >= 0), np.abs(x).mean()),
        "jnp sign": lambda: signs(on_device),
        "numpy top-k 1 %": lambda: np.argpartition(np.abs(x), x.size - kept)[-kept:],
        "jnp top-k 1 %": lambda: largest(on_device),
        "copy": lambda: x.copy(),
    }


def best_times(contestants: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    best = {}
    for turn in range(turns + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds = time.perf_counter() - start
            if turn:  # the first compiles
                best[name] = min(best.get(name, seconds), seconds)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2**24, help="elements")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the folder of the report")
    given = parser.parse_args()
    x = np.random.default_rng(0).standard_normal(given.size, np.float32)
    on_device, key = jnp.asarray(x), jax.random.key(0)
    contestants, ratios = {}, {}
    for name, code in codes().items():
        compress = jax.jit(code.compress)
        decompress = jax.jit(
            lambda payload, code=code: code.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype))
        )
        payload = compress(on_device, key)
        ratios[name] = x.nbytes / sum(part.nbytes for part in jax.tree.leaves(payload))
        contestants[name, "compress"] = lambda compress=compress: compress(on_device, key)
        contestants[name, "decompress"] = lambda decompress=decompress, payload=payload: decompress(payload)
    contestants |= {(name, "compress"): run for name, run in plain_versions(x).items()}
    rates = {name: x.nbytes / seconds / 1e9 for name, seconds in best_times(contestants, given.turns).items()}
    print("| code | smaller by | compress GB/s | decompress GB/s |\n|---|--:|--:|--:|")
    rows = []
    for name, direction in rates:
        if direction == "compress":
            back = rates.get((name, "decompress"))
            row = {"code": name, "ratio": ratios.get(name), "compress": rates[name, direction], "decompress": back}
            rows.append(row)
            cells = [
                f"{row['ratio']:.1f}x" if row["ratio"] else "",
                f"{row['compress']:.2f}",
                f"{back:.2f}" if back else "",
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"elements": given.size, "gigabytes_per_second": rows, "jax": jax.__version__}
        (given.out / "codecs.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

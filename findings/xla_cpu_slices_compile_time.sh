#!/usr/bin/env bash
# XLA:CPU takes many times as long to compile arithmetic on slices of one array as on separate arrays.
#
# Versions: jax 0.12.0.1 (Python 3.12 or 3.13), CPU.
# Valid input: parts of [64, 64] that are joined into one buffer and cut again, as for one all-reduce of many gradients,
# and then some arithmetic on each part.
# Expected: joining and cutting cost about as much as the arithmetic.
# Seen: seconds of the processor for 784 parts: 0.4 for separate arrays, 12.9 for parts of one buffer. Cut in two steps,
# 28 pieces behind jax.lax.optimization_barrier and then their parts, they take 1.8. All three grow about linearly.
# Exits with an error if one buffer no longer takes more than twice as long as the two steps.
set -euo pipefail
python=${PYTHON:-python3.13}
if ! command -v "$python" > /dev/null; then
  python=python3.12
fi
if ! command -v "$python" > /dev/null; then
  echo "needs Python 3.12 or 3.13; set PYTHON"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.12.0.1"
cat >"$work/slices.py" <<'PY'
import math
import time

import jax
import jax.numpy as jnp
from jax import lax

SIDE = 64


def arithmetic(part, moment):
    return part.reshape(SIDE, SIDE) / (jnp.sqrt(moment) + 1e-8) * 0.9 + moment


def cut(flat, number, size):
    return [lax.slice_in_dim(flat, i * size, (i + 1) * size) for i in range(number)]


def separate(parts, moments):
    return [arithmetic(part, moment) for part, moment in zip(parts, moments)]


def one_buffer(parts, moments):
    flat = jnp.cumsum(jnp.concatenate(parts))
    return separate(cut(flat, len(parts), SIDE * SIDE), moments)


def two_steps(parts, moments):
    flat = jnp.cumsum(jnp.concatenate(parts))
    pieces = math.isqrt(len(parts))
    each = len(parts) // pieces
    groups = lax.optimization_barrier(tuple(cut(flat, pieces, each * SIDE * SIDE)))
    return separate([x for group in groups for x in cut(group, each, SIDE * SIDE)], moments)


def seconds(function, number):
    parts = [jax.ShapeDtypeStruct((SIDE * SIDE,), jnp.float32)] * number
    moments = [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * number
    lowered = jax.jit(function).lower(parts, moments)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


seconds(separate, 4)
found = {f.__name__: [seconds(f, n) for n in (196, 784)] for f in (separate, one_buffer, two_steps)}
for name, (few, many) in found.items():
    print(f"{name}: {few:.1f} s for 196 parts, {many:.1f} s for 784, {many / few:.1f} times")
assert found["one_buffer"][1] > 2 * found["two_steps"][1], "cutting one buffer is as fast as cutting in two steps"
PY
JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/slices.py"

#!/usr/bin/env bash
# jax.lax.platform_dependent traces the branches of all platforms anew in each program, unless they are the same objects.
#
# Versions: jax 0.12.0.1 (Python 3.12 or 3.13), CPU.
# Valid input: one function of an array, with a branch for TPU, one for GPU and a default, used in ten jitted programs
# with equal shapes on a machine that has a CPU alone.
# Expected: as JAX keeps the traces of functions, the branches are traced once, or that of the CPU alone is.
# Seen: branches made where they are used, as `functools.partial` or a lambda, are traced 30 times, three in each program,
# though one of them runs. The same three partial objects in all programs are traced three times in all.
# So a library with many branches should keep them, as in `functools.lru_cache` around `functools.partial`.
# Exits with an error if fresh branches are no longer traced in each program, or kept ones are.
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
cat >"$work/branches.py" <<'PY'
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax

traced = []


def scale(factor, x):
    traced.append(factor)
    return jnp.tanh(x) * factor


def count(make):
    """How often branches are traced in ten programs."""
    traced.clear()
    for _ in range(10):
        program = jax.jit(
            lambda x: lax.platform_dependent(x, tpu=make(scale, 2.0), cuda=make(scale, 3.0), default=make(scale, 4.0))
        )
        assert float(program(jnp.ones(4))[0]) == float(jnp.tanh(1.0) * 4)
    return len(traced)


fresh, kept = count(partial), count(lru_cache(partial))
print(f"jax {jax.__version__}: fresh branches are traced {fresh} times, kept ones {kept} times")
assert fresh == 30, "fresh branches are no longer traced in each program"
assert kept == 3, "branches that are kept are traced again"
PY
JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/branches.py"

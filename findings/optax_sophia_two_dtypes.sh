#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2.
# optax.contrib.sophia estimates the diagonal of the Hessian by a derivative along a random direction. One expects it to
# take parameters of which matrices are bfloat16 and vectors float32, as other optimizers of optax do. Seen: with all
# parameters in bfloat16, or all in float32, it works; with both in one tree the first update raises jax.jvp's TypeError
# about primal and tangent dtypes, which names no parameter.
# Exits with an error if mixed dtypes work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from optax.contrib import sophia


def loss(params):
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(params))


def try_update(matrix, vector):
    params = {"matrix": jnp.ones((2, 2), matrix), "vector": jnp.ones(2, vector)}
    tx = sophia(0.1)
    try:
        tx.update(jax.grad(loss)(params), tx.init(params), params, obj_fn=loss)
    except TypeError as error:
        return f"TypeError: {str(error)[:80]}"
    return "works"


alike, mixed = try_update(jnp.bfloat16, jnp.bfloat16), try_update(jnp.bfloat16, jnp.float32)
print("bfloat16 alone:", alike)
print("bfloat16 and float32:", mixed)
assert alike == "works"
assert mixed.startswith("TypeError: primal and tangent")
PY

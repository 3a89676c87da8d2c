#!/usr/bin/env bash
# jax 0.12.0.1 on CPU.
# One expects the "flops" of compiled.cost_analysis() to be those of the program. The body of a loop counts once, however
# often it runs: 100 products in a jax.lax.scan have the flops of one, and unrolled those of 100, though the compiler
# knows the count (known_trip_count stands in the text of the program). A model with scan over layers, or gradients
# accumulated in a loop, seems so many times cheaper than it is.
# Exits with an error if the loop comes to be counted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy
cat > "$folder/flops.py" <<'PY'
import jax
import jax.numpy as jnp

COUNT, SIZE = 100, 64


def compiled(unroll):
    def products(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=COUNT, unroll=unroll)[0]

    return jax.jit(products).lower(jnp.ones((SIZE, SIZE))).compile()


one = 2 * SIZE**3
loop, unrolled = compiled(1), compiled(COUNT)
found = [program.cost_analysis()["flops"] / one for program in (loop, unrolled)]
print(f"products by cost_analysis: {found[0]:.2f} in a loop, {found[1]:.2f} unrolled")
assert '"known_trip_count":{"n":"100"}' in loop.as_text()
assert 0.9 < found[0] < 1.1 and 99 < found[1] < 101
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/flops.py"

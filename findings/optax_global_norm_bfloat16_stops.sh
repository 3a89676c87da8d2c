#!/usr/bin/env bash
# optax 0.2.8, jax 0.12.0.1 on CPU.
# One expects optax.global_norm of bfloat16 gradients to be right to the two or three digits of bfloat16. It adds the
# squares of the leaves one by one in bfloat16, where 256 + 1 is 256: a tree of 1,000 leaves of one entry 1 has norm 16
# for 31.6, one of 1,000 leaves of 1,000 entries 0.1 has 64 for 100, and more leaves add nothing. So the same clip lets
# pass twice the norm where layers are many leaves and not one stacked leaf, which is right (31.625).
# Exits with an error if the norms become right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 optax==0.2.8 numpy
cat > "$folder/norms.py" <<'PY'
import jax
import jax.numpy as jnp
import optax

norm = jax.jit(optax.global_norm)
ones = [jnp.ones(1, jnp.bfloat16)] * 1000
tenths = [jnp.full(1000, 0.1, jnp.bfloat16)] * 1000
clip = optax.clip_by_global_norm(1.0)
clipped, _ = clip.update(ones, clip.init(ones))
found = [float(norm(tree)) for tree in (ones, jnp.stack(ones), tenths)]
true = float(norm([x.astype(jnp.float32) for x in clipped]))
print(f"1,000 ones: {found[0]}, stacked {found[1]}, a million tenths: {found[2]}; norm after a clip to 1: {true:.2f}")
assert found == [16.0, 31.625, 64.0], found
assert 1.9 < true < 2.1
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/norms.py"

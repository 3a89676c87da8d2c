#!/usr/bin/env bash
# optax 0.2.8, jax 0.12.0.1 on CPU.
# One expects that the second moment of Adam with b2=0.999 forgets a gradient after some thousand steps, whatever its
# dtype. Of bfloat16 parameters moments are bfloat16, and the decay, which takes their dtype, is 1 there: after 200
# gradients of one, 5,000 steps of zero leave the moment as it was (0.196; in float32 it falls from 0.181 to 0.0012), so
# that steps stay small for ever after one large gradient. optax.ema(0.999) of ones ends at 0.5 for the same reason and
# because a thousandth is lost in a sum (float32: 0.95 after 3,000 steps). accumulator_dtype of ema, and float32 copies of
# the parameters, are the cure; Adam has mu_dtype, and nothing for the second moment.
# Exits with an error if bfloat16 comes to decay.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 optax==0.2.8 numpy
cat > "$folder/decays.py" <<'PY'
import jax
import jax.numpy as jnp
import optax


def second_moment(dtype):
    adam = optax.scale_by_adam(b2=0.999)
    state, update = adam.init(jnp.zeros(1, dtype)), jax.jit(adam.update)
    for _ in range(200):
        _, state = update(jnp.ones(1, dtype), state)
    before = float(state.nu[0])
    for _ in range(5000):
        _, state = update(jnp.zeros(1, dtype), state)
    return before, float(state.nu[0])


def average(dtype):
    ema = optax.ema(0.999, debias=False)
    state, update = ema.init(jnp.zeros(1, dtype)), jax.jit(ema.update)
    for _ in range(3000):
        _, state = update(jnp.ones(1, dtype), state)
    return float(state.ema[0])


for dtype in (jnp.float32, jnp.bfloat16):
    print(f"{dtype.__name__}: second moment {second_moment(dtype)}, average of ones {average(dtype):.3f}")
before, after = second_moment(jnp.bfloat16)
assert before == after > 0.19
assert second_moment(jnp.float32)[1] < 0.002
assert average(jnp.bfloat16) == 0.5 and average(jnp.float32) > 0.94
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/decays.py"

#!/usr/bin/env bash
# optax 0.2.8, jax 0.12.0.1 on CPU.
# One expects that a model whose layers are stacked for jax.lax.scan trains as the same model with separate layers.
# optax.contrib.muon takes matrices, which are leaves of two dimensions: a stack [layers, inputs, outputs] goes to Adam,
# all of its hidden layers, without a word, and what is left for Muon are embeddings and the head, which it is not made
# for. The first update of the same matrix differs. muon_weight_dimension_numbers is the cure.
# Exits with an error if the stack is given to Muon.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 optax==0.2.8 numpy
cat > "$folder/stacked.py" <<'PY'
import jax
import jax.numpy as jnp
import optax

gradient = jax.random.normal(jax.random.key(0), (3, 8, 8))


def first_update(gradients, **options):
    tx = optax.contrib.muon(0.1, **options)
    params = jax.tree.map(jnp.zeros_like, gradients)
    return jax.jit(tx.update)(gradients, tx.init(params), params)[0]


apart = jnp.stack(first_update([*gradient]))
stacked = first_update([gradient])[0]
named = first_update([gradient], muon_weight_dimension_numbers=[optax.contrib.MuonDimensionNumbers(1, 2)])[0]
adam = optax.adam(0.1, nesterov=True)
by_adam = adam.update(gradient, adam.init(gradient))[0]
far, near, cured = (float(jnp.abs(x - y).max()) for x, y in ((stacked, apart), (stacked, by_adam), (named, apart)))
print(f"stacked layers differ from separate ones by {far:.3f}, from Adam by {near:.0e}; with dimensions named {cured:.0e}")
assert far > 0.05 and near < 1e-4 and cured < 1e-3
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/stacked.py"

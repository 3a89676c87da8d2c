#!/usr/bin/env bash
# jax 0.10.2 on CPU, two devices.
# jax.lax.all_gather(x, "d", to="invarying") inside jax.shard_map. Each device's loss weighs all gathered rows by a
# number of that device, so the derivative with respect to its own row has a part from each loss. One expects the same
# gradient whether or not shard_map checks types. Seen: with check_vma=True the parts of both losses are added (3 on
# each device for weights 1 and 2); with check_vma=False, silently, each device keeps the part of its own loss alone (1
# and 2). A library whose users turn the check off, as for losses that cannot be typed, trains on another gradient.
# Exits with an error if both are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


def loss(row):
    rows = jax.lax.all_gather(row, "d", to="invarying")
    return (1.0 + jax.lax.axis_index("d")) * jnp.sum(rows)


found = {}
for check in (True, False):
    gradient = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=check
    )
    found[check] = jax.jit(gradient)(jnp.zeros((2, 1))).ravel().tolist()
    print(f"check_vma={check}: gradient {found[check]}")
assert found == {True: [3.0, 3.0], False: [1.0, 2.0]}, found
PY

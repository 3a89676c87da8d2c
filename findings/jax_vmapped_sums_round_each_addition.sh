#!/usr/bin/env bash
# jax 0.12.0.1 on CPU.
# One expects workers that are simulated by jax.vmap(axis_name=) to get the mean that workers on a mesh get. In bfloat16
# they do not: on a mesh XLA's CPU backend adds in float32 and rounds once, the rule by which psum is batched adds in
# bfloat16 and rounds each addition. Of eight workers with 256 and seven ones, 263, the mesh has 264 (the nearest number
# there is) and vmap 256: all seven are lost. float16, which has 263, is right in both. So a simulation in bfloat16 can
# say that small gradients do nothing, or hide that they do.
# Exits with an error if the two answers become one, or others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy
cat > "$folder/sums.py" <<'PY'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("workers",), axis_types=(AxisType.Auto,))


def add(x):
    return jax.lax.psum(x, "workers")


def answers(dtype):
    values = jnp.ones(8, dtype).at[0].set(256)
    on_mesh = jax.jit(jax.shard_map(lambda x: add(x[0]), mesh=mesh, in_specs=P("workers"), out_specs=P()))(values)
    simulated = jax.jit(jax.vmap(add, axis_name="workers"))(values)
    return float(on_mesh), sorted({float(x) for x in simulated})


found = {dtype.__name__: answers(dtype) for dtype in (jnp.bfloat16, jnp.float16)}
for name, (on_mesh, simulated) in found.items():
    print(f"{name}: mesh {on_mesh:g}, vmap {simulated}")
assert found == {"bfloat16": (264.0, [256.0]), "float16": (263.0, [263.0])}
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/sums.py"

#!/usr/bin/env bash
# jax 0.12.0.1 on CPU.
# shard_map checks by types which values vary over a mesh axis, and refuses to return a value that varies as one that
# all devices share. One expects the result of jax.pure_callback or io_callback to vary where its argument does: the
# same arithmetic without a callback is refused. Seen: the result is typed as equal on all devices, so that
# out_specs=P() is taken, and the "replicated" array has other numbers on each device; what one prints or saves is the
# first device's. A codec or an optimizer on the host, called so, is wrong without a message; lax.pcast of the result to
# "varying" brings the refusal back.
# Exits with an error if the callbacks are refused, or the plain arithmetic is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
MESH = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


def double(x):
    return 2 * np.asarray(x)


def on_devices(function):
    try:
        mapped = jax.jit(jax.shard_map(function, mesh=MESH, in_specs=P("x"), out_specs=P()))
        found = mapped(jnp.arange(4.0))
    except ValueError as error:
        return "refused" if "which require replication" in str(error) else str(error)
    assert found.sharding.is_fully_replicated
    return [np.asarray(shard.data).tolist() for shard in found.addressable_shards]


tried = {
    "2 * x": lambda x: 2 * x,
    "pure_callback": lambda x: jax.pure_callback(double, SHAPE, x),
    "io_callback": lambda x: io_callback(double, SHAPE, x),
    "pcast of pure_callback": lambda x: jax.lax.pcast(jax.pure_callback(double, SHAPE, x), "x", to="varying"),
}
found = {name: on_devices(function) for name, function in tried.items()}
for name, answer in found.items():
    print(f"{name}: {answer}")
assert found["2 * x"] == found["pcast of pure_callback"] == "refused"
assert found["pure_callback"] == found["io_callback"] == [[0.0, 2.0], [4.0, 6.0]]
PY

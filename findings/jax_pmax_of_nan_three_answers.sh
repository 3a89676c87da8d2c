#!/usr/bin/env bash
# jax 0.12.0.1 on CPU, collectives between processes by gloo.
# One expects jax.lax.pmax and pmin of values of which one is NaN to give one answer, and that of jnp.max is NaN. Seen:
# three. Under jax.vmap the answer is NaN. On a mesh of one process NaN is left out, and of NaNs alone pmax is -inf and
# pmin inf. Between two processes it depends on the order: NaN if process 0 has it, the number of process 0 if only
# process 1 has NaN. So a norm or a loss scale that a program takes by pmax can hide, on one machine or on two, what a
# simulated run shows.
# Exits with an error if any of these answers changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy
cat > "$folder/pmax.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# Of worker 0 and of worker 1: NaN in one, in the other, and in both.
VALUES = np.array([[np.nan, 1.0, np.nan], [1.0, np.nan, np.nan]], np.float32)
PLACES = {"pmax": jax.lax.pmax, "pmin": jax.lax.pmin}


def on_a_mesh(combine):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    values = jax.make_array_from_callback(VALUES.shape, sharding, lambda index: VALUES[index])
    found = jax.jit(jax.shard_map(lambda x: combine(x[0], "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(values)
    return np.asarray(found.addressable_data(0)).tolist()


if len(sys.argv) > 1:
    number, port = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    found = {name: on_a_mesh(combine) for name, combine in PLACES.items()}
    if number == "0":
        print("two processes", found)
        assert str(found) == "{'pmax': [nan, 1.0, nan], 'pmin': [nan, 1.0, nan]}"
else:
    jax.config.update("jax_num_cpu_devices", 2)
    found = {name: jax.vmap(lambda x: f(x, "x"), axis_name="x")(jnp.asarray(VALUES))[0] for name, f in PLACES.items()}
    print("vmap", found)
    assert all(jnp.isnan(x).all() for x in found.values())
    found = {name: on_a_mesh(combine) for name, combine in PLACES.items()}
    print("one process", found)
    assert str(found) == "{'pmax': [1.0, 1.0, -inf], 'pmin': [1.0, 1.0, inf]}"
PY
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/pmax.py"
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/python" "$folder/pmax.py" 1 "$port" & other=$!
"$folder/venv/bin/python" "$folder/pmax.py" 0 "$port"
wait "$other"

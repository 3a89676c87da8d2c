"""Prints, as integers, the bits of the maximum over processes of values that each of them has in turn."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jaxdist as jd


def step(x):
    return jd.comm.over("data").max(x[0])


def main():
    jax.config.update("jax_enable_x64", True)
    jd.runtime.use_cpu_devices(1)
    jd.processes.initialize()
    mesh = jd.make_mesh()
    workers = mesh.size
    # A row for each worker: NaN of both signs, infinities, zeros of both signs, and more than 4,096 entries.
    values = np.zeros((workers, 6))
    values[0] = [1.0, np.nan, -np.inf, -0.0, 5e4, 3.0]
    values[1:] = [np.inf, 2.0, -np.inf, -0.0, -5e4, -np.nan]
    values[-1, 2:4] = [-1.0, 0.0]

    found = {}
    for dtype in ("float64", "float32", "bfloat16", "float16", "float8_e5m2"):
        place = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P()))
        word = f"uint{8 * jnp.dtype(dtype).itemsize}"
        for turn in range(workers):
            rows = np.tile(np.roll(values, turn, 0), (1, 1000)).astype(dtype)
            mine = jax.make_array_from_callback(
                rows.shape, jax.NamedSharding(mesh, P("data")), lambda index, r=rows: r[index]
            )
            bits = np.asarray(place(mine).addressable_data(0)).view(word).reshape(1000, 6)
            assert (bits == bits[0]).all()
            simulated = np.asarray(jax.vmap(lambda x: jd.comm.over("data").max(x), axis_name="data")(rows)[0]).view(
                word
            )
            found[f"{dtype} {turn}"] = [bits[0].tolist(), simulated[:6].tolist()]
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

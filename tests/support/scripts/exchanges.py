"""Prints whether all rows of long exchanges between processes arrive bit for bit; the argument is a number of bytes."""

import json
import sys

import jax
import numpy as np
from jax import P

import jaxdist as jd


def main():
    jd.runtime.use_cpu_devices(1)
    jd.processes.initialize()
    mesh = jd.make_mesh()
    workers, rank = mesh.size, jax.process_index()
    rows = np.random.default_rng(0).integers(0, 256, (workers, workers, int(sys.argv[2])), np.uint8)
    sharding = jax.NamedSharding(mesh, P("data"))
    mine = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def run(x):
        comm = jd.comm.over("data")
        return comm.all_to_all(x[0])[None], comm.all_gather(x[0, 0])

    moved = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P())))
    exchanged, gathered = (np.asarray(x.addressable_data(0)) for x in moved(mine))
    found = [np.array_equal(exchanged[0], rows[:, rank]), np.array_equal(gathered, rows[:, 0])]
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Publishes parameters that are split over processes, from all of them, and follows them in each."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jaxdist as jd


def make_params(mesh, number):
    """Leaves that are cut over the processes in rows and columns, that all have, and that one has for itself."""
    rng = np.random.default_rng(number)
    wide = rng.normal(size=(8, 6)).astype(np.float32)
    values = {"rows": (wide, P("data")), "columns": (wide.T.copy(), P(None, "data")), "copies": (wide + 1, P())}
    placed = {
        name: jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for name, (x, spec) in values.items()
    }
    return placed | {"own": jnp.asarray(wide[0])}, {name: x for name, (x, _) in values.items()} | {"own": wide[0]}


def main():
    url = f"{sys.argv[1]}/policy"
    jd.runtime.use_cpu_devices(2)
    jd.processes.initialize()
    mesh = jd.make_mesh()
    found = {}
    for place in ("host", "device"):
        wanted = []
        with jd.publish.open(f"{url}-{place}", dtype=jnp.bfloat16, compare_on=place, anchor_every=2) as out:
            for number in range(4):
                params, values = make_params(mesh, number)
                out.put(params, step=number)
                out.flush()
                wanted.append(values)
        # A reader may be further than the publisher, which is another process.
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), wanted[0])
        seen = jd.publish.follow(f"{url}-{place}", like=like, start="oldest", poll=0.01, timeout=60)
        found[place] = []
        for (params, step), values in zip(seen, wanted, strict=False):
            same = jax.tree.map(lambda x, y: bool((np.asarray(x) == y.astype(jnp.bfloat16)).all()), params, values)
            found[place].append([step, all(same.values())])
            if step == 3:
                break
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

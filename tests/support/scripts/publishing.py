"""Publishes parameters that are split over processes, from all of them, and follows them in each.

The folder is the first argument, and the second one says what happens: `all`, or `kill PROCESS CALL`, where a process
ends before its request of that number, or `last`, which goes on after that.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jaxdist as jd

STATES = 4


def make_params(mesh, number):
    """Leaves that are cut over the processes in rows and columns, that all have, and that one has for itself."""
    wide = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    # Few enough that no patch is larger than the anchor of its part.
    wide[:, number] += 1
    values = {"rows": (wide, P("data")), "columns": (wide.T.copy(), P(None, "data")), "copies": (wide + 1, P())}
    placed = {
        name: jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for name, (x, spec) in values.items()
    }
    return placed | {"own": jnp.asarray(wide[0])}, {name: x for name, (x, _) in values.items()} | {"own": wide[0]}


def counted(url, end_at=None):
    """A folder, and the bytes that this process has put there; it ends before its call of number `end_at`."""
    store, calls, sent = jd.islands.folder(url), [0], {"patches": 0, "anchors": 0}

    def wrap(name, function):
        def call(*arguments):
            if calls[0] == end_at:
                os._exit(3)
            calls[0] += 1
            if name == "put" and not arguments[0].startswith("layouts"):
                sent[arguments[0].partition("/")[0]] += len(arguments[1])
            return function(*arguments)

        return call

    return jd.islands.SharedStore(*map(wrap, store._fields, store)), sent


def publish(url, mesh, place, first=0, end_at=None):
    """Puts the states from the first one on; returns the values of all, and what was sent from here."""
    store, sent = counted(url, end_at)
    wanted = [make_params(mesh, number)[1] for number in range(STATES)]
    with jd.publish.open(store, dtype=jnp.bfloat16, compare_on=place, anchor_every=2) as out:
        for number in range(first, STATES):
            out.put(make_params(mesh, number)[0], step=number)
            out.flush()
    return wanted, sent


def follow(url, wanted):
    """Each step that is there, and whether all its bits are those that were put."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), wanted[0])
    found = []
    for params, step in jd.publish.follow(url, like=like, start="oldest", timeout=0):
        same = jax.tree.map(lambda x, y: bool((np.asarray(x) == y.astype(jnp.bfloat16)).all()), params, wanted[step])
        found.append([step, all(same.values())])
    return found


def follow_together(url, mesh, wanted):
    """The same in all processes, whose devices share each leaf, in other ways than in the trainer."""
    specs = {"rows": P(None, "data"), "columns": P("data"), "copies": P("data"), "own": P()}
    like = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, specs[name]))
        for name, x in wanted[0].items()
    }
    found = []
    for params, step in jd.publish.follow(url, like=like, start="oldest", timeout=0):
        shards = [(shard, name) for name, x in params.items() for shard in x.addressable_shards]
        values = {name: x.astype(jnp.bfloat16) for name, x in wanted[step].items()}
        same = [bool((np.asarray(shard.data) == values[name][shard.index]).all()) for shard, name in shards]
        found.append([step, all(same) and all(params[name].sharding == like[name].sharding for name in like)])
    return found


def main():
    folder, what, *numbers = sys.argv[1:]
    jd.runtime.use_cpu_devices(2)
    jd.processes.initialize()
    mesh, process = jd.make_mesh(), jax.process_index()
    found = {}
    for place in ("host", "device") if what == "all" else ("host",):
        url = f"{folder}/policy-{place}"
        # After a kill the last state alone is put.
        end_at = int(numbers[1]) if what == "kill" and int(numbers[0]) == process else None
        wanted, sent = publish(url, mesh, place, STATES - 1 if what == "last" else 0, end_at)
        found[place] = {"seen": follow(url, wanted), "together": follow_together(url, mesh, wanted), "sent": sent}
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Processes of two devices each, whose batches and values differ: what each of them saw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd

BATCHES = (2, 5)  # of each process
LIKE = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def batches(process):
    return [np.full((2, 3), 10 * process + number + 1, np.float32) for number in range(BATCHES[process])]


def train(mesh, process, divisor):
    """SGD on a linear loss: each step moves by the mean of the batches that there are."""
    tx = optax.chain(jd.recipes.ddp(normalize_by=divisor), optax.sgd(1.0))

    def step(state, data):
        batch, examples = data
        _, gradient = jd.local_value_and_grad(lambda p, x: jnp.mean(x @ p))(state["p"], batch)
        updates, opt = tx.update(gradient, state["opt"], state["p"], examples=examples[0])
        return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, {}

    run = jd.distribute(step, mesh)
    state = jd.init_state(lambda: {"p": jnp.zeros(3), "opt": tx.init(jnp.zeros(3))}, mesh)
    path = [0.0]
    for data in jd.runtime.join_uneven(batches(process), LIKE, mesh):
        state, _ = run(state, data)
        path.append(float(state["p"][0]))
    return np.diff(path).tolist(), int(jd.transforms.stats(state["opt"])["empty"])


def seen(mesh, source, **options):
    """The first entry of each batch of this process and the examples of all, and how it ended."""
    found, ended = [], "well"
    try:
        for batch, examples in jd.runtime.join_uneven(source, LIKE, mesh, **options):
            here = float(np.asarray(batch.addressable_shards[0].data)[0, 0])
            found.append((here, np.asarray(jax.device_get(examples.addressable_shards[0].data)).tolist()))
    except ValueError as error:
        ended = str(error)
    return found, ended


def raised(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def report(mesh):
    process = jax.process_index()
    found: dict[str, Any] = {divisor: train(mesh, process, divisor) for divisor in ("active", "workers")}
    found["lengths"] = seen(mesh, batches(process))
    found["streams"] = seen(mesh, iter(batches(process)))
    found["mixed"] = seen(mesh, iter(batches(process)) if process else batches(process), prefetch=3)
    for way in ("stop", "raise"):
        found[way] = seen(mesh, batches(process), on_uneven=way)
        found[f"{way} stream"] = seen(mesh, iter(batches(process)), on_uneven=way, prefetch=2)

    odd = {
        "w": np.arange(3.0),
        "layer": {"b": jnp.full(2, -0.0 if process else 1.5, jnp.bfloat16), "flag": np.array(bool(process))},
        "key": jax.random.key(process),
    }
    found["differs"] = raised(jd.processes.assert_same, odd)
    for source in range(2):
        same = jd.processes.broadcast(odd, source=source)
        jd.processes.assert_same(same)
        found[f"from {source}"] = [
            np.signbit(np.asarray(same["layer"]["b"], np.float32)).tolist(),
            same["layer"]["flag"].tolist(),
            jax.random.key_data(same["key"]).tolist(),
            isinstance(same["w"], np.ndarray) and isinstance(same["layer"]["b"], jax.Array),
        ]
        same["w"] += 1  # as the caller's own
        found[f"no source {source}"] = raised(jd.processes.broadcast, odd, source=3 * source - 1)
    found["shape"] = raised(jd.processes.broadcast, {"w": np.ones(3 + process)})
    found["structure"] = raised(jd.processes.assert_same, {"w": np.ones(3)} if process else [np.ones(3), np.ones(3)])
    jd.processes.check_consistency({"w": np.ones(3)}, mesh=mesh, recipe={"seed": 0})
    found["agree"] = raised(jd.processes.check_consistency, {"w": np.ones(3 + process)}, mesh=mesh)
    # A function is made anew in each process, at another address.
    with_function = {"model": jax.tree_util.Partial(lambda w: w, np.ones(3))}
    jd.processes.check_consistency(with_function)
    found["function"] = raised(jd.processes.assert_same, jd.processes.broadcast(with_function))
    found["late"] = "" if process else raised(jd.processes.check_consistency, {}, timeout_seconds=1)
    placed = jd.place({"w": jnp.ones(3), "key": jax.random.key(5)}, mesh)
    shards = [one.data for x in (placed["w"], jax.random.key_data(placed["key"])) for one in x.addressable_shards]
    found["parts"] = [np.asarray(x).tolist() for x in shards]
    found["placed"] = raised(jd.processes.broadcast, {"w": placed["w"]})
    return found

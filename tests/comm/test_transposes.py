"""Gradients through every function of a `Comm`: those of NumPy in float64, however the step is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import jaxdist as jd
from jaxdist.comm import alone, nested, over, split_group

BOTH = ("pod", "chip")
PARTS = [(0, 6, 3, 1), (2, 4, 7, 5)]
EVERY_WORKER = [tuple(range(8))]
# name: the axes that are bound, the group, its members by worker number
GROUPS = {
    "one axis": (("data",), lambda: over("data"), EVERY_WORKER),
    "two axes": (BOTH, lambda: over(BOTH), EVERY_WORKER),
    "slow axis": (BOTH, lambda: over(BOTH).outer, [(0, 4), (1, 5), (2, 6), (3, 7)]),
    "nested": (BOTH, lambda: nested(over("chip"), over("pod")), EVERY_WORKER),
    "parts": (("data",), lambda: split_group(over("data"), PARTS), PARTS),
    "alone": (("data",), alone, [(i,) for i in range(8)]),
}
FUNCTIONS = {
    "sum": lambda comm, x: comm.sum(x[0]),
    "mean": lambda comm, x: comm.mean(x[0]),
    "max": lambda comm, x: comm.max(x[0]),
    "all_gather": lambda comm, x: comm.all_gather(x[0]),
    "all_gather, differing": lambda comm, x: comm.all_gather(x[0], agreed=False),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "reduce_scatter_mean": lambda comm, x: comm.reduce_scatter_mean(x),
    "ppermute": lambda comm, x: comm.ppermute(x[0], [(i, (i + 1) % comm.size) for i in range(comm.size)][:3]),
    "varying": lambda comm, x: comm.varying(x[0]),
}
RUNS = ("types", "values", "simulate")


def transposed(name, x, y):
    """What the workers of one group get for cotangents `y`: `x` and the result are `[workers, workers, ...]`."""
    size = len(x)
    out = np.zeros(x.shape)
    if name in ("sum", "mean"):
        out[:, 0] = y.sum(0) / (size if name == "mean" else 1)
    elif name == "max":
        best = x[:, 0] == x[:, 0].max(0)
        out[:, 0] = best / best.sum(0) * y.sum(0)
    elif name.startswith("all_gather"):
        out[:, 0] = y.sum(0)
    elif name == "all_to_all":
        out = np.swapaxes(y, 0, 1)
    elif name == "reduce_scatter_mean":
        out[:] = y / size
    elif name == "ppermute":
        for source in range(min(size, 3)):
            out[source, 0] = y[(source + 1) % size]
    else:
        out[:, 0] = y
    return out


def differentiate(axes, make, run, names, derive):
    """`derive(f, *rows)` of each function, for the rows `[8, ...]` of all workers."""

    def each(*rows):
        return {name: derive(lambda x, name=name: FUNCTIONS[name](make(), x), name, *rows) for name in names}

    if run == "simulate":
        sizes = (8,) if axes == ("data",) else (2, 4)
        mapped = each
        for axis in reversed(axes):
            mapped = jax.vmap(mapped, axis_name=axis)
        compiled = jax.jit(mapped)
        return lambda *rows: jax.tree.map(
            lambda a: np.asarray(a).reshape(8, *a.shape[len(sizes) :]),
            compiled(*jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[1:]), rows)),
        )
    mesh = jd.make_mesh({"data": 8} if axes == ("data",) else {"pod": 2, "chip": 4})

    def on_mesh(*rows):
        return jax.tree.map(lambda a: a[None], each(*jax.tree.map(lambda a: a[0], rows)))

    checked = run == "types"
    return jax.jit(jax.shard_map(on_mesh, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=checked))


def cotangents_like(name, size, workers, rng):
    rows = (size, 3) if name.startswith("all_") else (3,)
    return rng.integers(-9, 9, (workers, *rows)).astype(np.float32)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
def test_gradients_are_those_of_the_transposes_of_numpy(group, run):
    """Each worker has a loss of its own, `<y, c>`; its gradient is that of the sum of all losses."""
    axes, make, groups = GROUPS[group]
    size = len(groups[0])
    names = [name for name in FUNCTIONS if name != "ppermute" or group != "nested"]
    rng = np.random.default_rng(0)
    # Small integers: sums are exact, and maxima are shared.
    x = rng.integers(-2, 3, (8, size, 3)).astype(np.float32)
    y = {name: cotangents_like(name, size, 8, rng) for name in names}

    def derive(f, name, x, y):
        return jax.grad(lambda x: jnp.sum(f(x) * y[name]))(x)

    found = differentiate(axes, make, run, names, derive)(x, y)
    for name in names:
        wanted = np.zeros(x.shape)
        for members in map(list, groups):
            wanted[members] = transposed(name, x[members].astype(np.float64), y[name][members].astype(np.float64))
        if name == "max" and group == "nested":
            # Chips of a pod share its part, and pods the whole.
            assert (np.asarray(found[name]).sum(0) == wanted.sum(0)).all()
            continue
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, err_msg=f"{run}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_directions_and_second_derivatives(run):
    """Forward, and forward over reverse: of a square, whose second derivative is twice that of the linear function."""
    axes, make, _ = GROUPS["one axis"]
    names = [name for name in FUNCTIONS if name != "max"]
    rng = np.random.default_rng(1)
    x, t = rng.normal(size=(2, 8, 8, 3)).astype(np.float32)

    def derive(f, name, x, t):
        def square(x):
            return jnp.sum(jnp.square(f(x))) / 2

        value, slope = jax.jvp(f, (x,), (t,))
        pulled = jax.vjp(f, x)[1](slope)[0]
        curved = jax.jvp(jax.grad(square), (x,), (t,))[1]
        return over("data").varying((f(t) - slope, pulled - curved, value))

    for name, (forward, reverse, _) in differentiate(axes, make, run, names, derive)(x, t).items():
        np.testing.assert_allclose(forward, 0 * forward, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(reverse, 0 * reverse, atol=1e-4, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_travels_as_words_has_the_same_gradients(run, dtype):
    axes, make, _ = GROUPS["one axis"]
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.integers(-2, 3, (8, 8, 3)), dtype)
    y = {name: jnp.asarray(cotangents_like(name, 8, 8, rng), dtype) for name in FUNCTIONS}

    def derive(f, name, x, y):
        return jax.grad(lambda x: jnp.sum((f(x) * y[name]).astype(jnp.float32)))(x)

    found = differentiate(axes, make, run, list(FUNCTIONS), derive)(x, y)
    for name in FUNCTIONS:
        wanted = transposed(name, np.asarray(x, np.float64), np.asarray(y[name], np.float64))
        assert found[name].dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(found[name], np.float64), wanted, rtol=2e-2, err_msg=f"{run}: {name}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("run", ["types", "values"])
def test_of_two_workers_and_of_one(run, workers):
    """Which exchange words by sums, and nothing."""
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    long = 2**16 + 8
    rng = np.random.default_rng(3)
    x = rng.normal(size=(workers, workers, long)).astype(np.float32)
    y = {
        name: rng.normal(size=(workers, *((workers, long) if name.startswith("all_") else (long,))))
        for name in FUNCTIONS
    }

    def derive(x, y):
        def loss(x, name):
            return jnp.sum(FUNCTIONS[name](over("data"), x[0]) * y[name][0])

        return {name: jax.grad(loss)(x, name) for name in FUNCTIONS}

    checked = run == "types"
    step = jax.jit(jax.shard_map(derive, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=checked))
    for name, found in step(x, jax.tree.map(lambda a: a.astype(np.float32), y)).items():
        wanted = transposed(name, x.astype(np.float64), y[name]) if name != "ppermute" or workers > 1 else None
        wanted = np.asarray(y[name])[:, None] if wanted is None else wanted
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)

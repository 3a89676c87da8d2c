"""Every optimizer of optax on parameters in bfloat16, and of two dtypes: as by itself, or refused with the way out.

What is refused, and why, is a table of docs/faq.md.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_register import APART, EXTRAS, NO_LOSS, NOISY, REGISTER, make

import jaxdist as jd

# optax deprecates some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
WORKERS, STEPS, RATE = 2, 3, 0.1
DTYPES = {"bfloat16": (jnp.bfloat16, jnp.bfloat16), "mixed": (jnp.bfloat16, jnp.float32)}
# In the last place of bfloat16, of the largest entry: nearly all agree in all bits, and a rounding may go either way.
UNITS = 1.0

PLACES = {
    "all_reduce": lambda tx: optax.chain(jd.all_reduce(jd.exact()), tx),
    "zero": jd.zero_redundancy,
    "masters": lambda tx: jd.zero_redundancy(tx, master_dtype=jnp.float32),
    "host": lambda tx: jd.offload.host(jd.zero_redundancy(tx)),
    "inner": lambda tx: jd.local_steps(tx, optax.sgd(1.0), sync_period=2),
    "outer": lambda tx: jd.local_steps(optax.sgd(1.0), tx, sync_period=1),
}
OWN_MODELS = {"inner", "outer"}

# What is refused: by jaxdist with the way out, or by optax itself. `None`: optax itself ends with NaN.
CHANGES = r"keeps it in another dtype from its first update on, .* master_dtype=jnp.float32"
MIXES = "must be equal|the same dtypes"
WITHOUT_MASTERS = ("all_reduce", "zero", "host", "inner")


def without_masters(name, dtypes, reason):
    return {(name, dtypes, where): reason for where in WITHOUT_MASTERS}


REFUSED: dict[tuple[str, str, str], str | None] = {
    **without_masters("dadapt_adamw", "mixed", CHANGES),
    **without_masters("prodigy", "mixed", CHANGES),
    **without_masters("momo", "mixed", CHANGES),
    **without_masters("momo_adam", "mixed", CHANGES),
    **without_masters("inject_hyperparams", "mixed", CHANGES),
    **without_masters("inject_stateful_hyperparams", "mixed", CHANGES),
    **without_masters("scale_by_distance_over_gradients", "bfloat16", CHANGES),
    **without_masters("scale_by_distance_over_gradients", "mixed", CHANGES),
    **without_masters("inject_hyperparams", "bfloat16", None),
    **without_masters("inject_stateful_hyperparams", "bfloat16", None),
    **without_masters("mechanize", "mixed", MIXES),
    **without_masters("sophia", "mixed", MIXES),
    **{("lbfgs", dtypes, "host"): "inside a `scan`, .*: put host around the parts" for dtypes in DTYPES},
}


@pytest.fixture(autouse=True)
def promotion():
    """optax's own code promotes ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def start(name, dtypes):
    matrix, vector = DTYPES[dtypes]
    params = {"w": jax.random.normal(jax.random.key(0), (5, 3)).astype(matrix)}
    return params if name == "scale_by_muon" else params | {"b": jnp.array([1.0, 0.5, -0.3, 2.0], vector)}


def optimizer(name):
    return optax.with_extra_args_support(make(name, learning_rate=RATE))


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def round_like(tree, like):
    return jax.tree.map(lambda x, p: x.astype(p.dtype), tree, like)


def loss(params):
    return sum(jnp.sum((x - 2) ** 2) / 2 for x in jax.tree.leaves(wide(params)))


def gradient(params, number, factor=1.0):
    found = jax.tree.map(lambda x: x - 2 + jnp.sin(3 * x + number), wide(params))
    # A factor of 2 or 0 rounds nothing: the mean over workers is the plain gradient.
    return jax.tree.map(lambda g, x: g.astype(x.dtype) * jnp.asarray(factor, x.dtype), found, params)


def extras(name, params, mean):
    given = {"value": loss(params), "grad": mean, "value_fn": loss, "obj_fn": loss}
    return {key: given[key] for key in EXTRAS.get(name, ())}


def plain(name, dtypes, kind):
    """The optimizer on the mean gradient: of a float32 copy for `masters`, of a float32 anchor's drift for `outer`."""
    tx, model = optimizer(name), start(name, dtypes)
    kept = wide(model) if kind in ("masters", "outer") else model

    @jax.jit
    def step(kept, model, state, number):
        mean = gradient(model, number)
        if kind == "outer":
            moved = wide(optax.apply_updates(model, jax.tree.map(jnp.negative, mean)))
            drift = jax.tree.map(jnp.subtract, wide(round_like(kept, model)), moved)
            updates, state = tx.update(drift, state, kept)
            kept = optax.apply_updates(kept, updates)
            # The update that merges the anchor is rounded too.
            merge = jax.tree.map(jnp.subtract, wide(round_like(kept, model)), wide(model))
            return kept, optax.apply_updates(model, round_like(merge, model)), state
        mean = wide(mean) if kind == "masters" else mean
        updates, state = tx.update(mean, state, kept, **extras(name, model, mean))
        kept = optax.apply_updates(kept, updates)
        return kept, round_like(kept, model), state

    state = tx.init(kept)
    for number in range(STEPS):
        kept, model, state = step(kept, model, state, jnp.float32(number))
    return model


def dtypes_of(tree):
    return [x.dtype for x in jax.tree.leaves(tree)]


def train(name, place, cases, *, alone=False) -> dict[Any, Any]:
    """For each case the parameters, or the error that refuses it. One program has all cases: compiling takes longest.

    With models of their own all workers have the same gradient.
    """
    found, apart = {}, set()
    txs = {(d, where): optax.with_extra_args_support(PLACES[where](optimizer(name))) for d, where in cases}

    def update(case, params, opt, number, factor):
        own = case[1] in OWN_MODELS
        local = params if own else jax.tree.map(lambda x: x + 0 * factor.astype(x.dtype), params)
        mine = gradient(local, number, 1 if own else factor)
        mean = mine if own else jax.lax.pmean(mine, "data")
        told = {} if case[1] == "outer" else extras(name, params, mean)
        updates, new = txs[case].update(mine, opt, params, **told)
        return optax.apply_updates(params, updates), new

    def step(state, batch):
        new = {}
        for case in cases:
            before = state[*case, "params"], state[*case, "opt"]
            try:
                after = update(case, *before, *batch[0])
            except (TypeError, ValueError) as error:
                found[case], after = error, before
            # The step refuses other dtypes for all of its state: by itself, to see what it says.
            if not alone and dtypes_of(after) != dtypes_of(before):
                apart.add(case)
                after = before
            new |= dict(zip(((*case, "params"), (*case, "opt")), after, strict=True))
        return new, {}

    state: dict[Any, Any] = {}
    for case in cases:
        params = start(name, case[0])
        state[*case, "params"] = jd.PerWorker(params) if case[1] in OWN_MODELS else params
        state[*case, "opt"] = txs[case].init(params)
    state = jd.place(state, place)
    run = jd.simulate(step, place) if isinstance(place, int) else jd.distribute(step, place)
    for number in range(STEPS):
        state, _ = run(state, np.array([[number, 2], [number, 0]], np.float32))
    for case in set(cases) - set(found) - apart:
        params = state[*case, "params"]
        found[case] = jax.tree.map(lambda x: x[0], params.value) if case[1] in OWN_MODELS else params
    for case in apart:
        with pytest.raises(ValueError, match="before the step and is now") as info:
            train(name, place, [case], alone=True)
        found[case] = info.value
    return found


def applies(name, where, place):
    if where == "outer":
        return name not in {*NO_LOSS, "momo", "momo_adam"}  # it sees no loss
    # Noise is each worker's own, and loops of line searches have no types.
    return where != "inner" or name not in {*NOISY, *(() if isinstance(place, int) else NO_LOSS)}


def units_apart(x, y):
    x, y = (np.asarray(a, np.float32) for a in (x, y))
    return np.abs(x - y).max() / 2.0 ** (np.floor(np.log2(np.abs(y).max())) - 7)


def check(name, place, dtypes=tuple(DTYPES), places=tuple(PLACES)):
    """Within the rounding of the parameters, or an error that says what to do instead."""
    cases = [(d, where) for d in dtypes for where in places if applies(name, where, place)]
    by_itself = functools.cache(functools.partial(plain, name))
    for (d, where), got in sorted(train(name, place, cases).items()):
        label, reason = f"{name} {d} {where}", REFUSED.get((name, d, where), "")
        if isinstance(got, Exception):
            assert reason, f"{label}: {got}"
            with pytest.raises(type(got), match=reason):
                raise got
            if isinstance(got, TypeError):  # optax by itself refuses it too
                with pytest.raises(TypeError, match=reason):
                    by_itself(d, "plain")
            continue
        assert not reason, f"{label} is not refused"
        expected = by_itself(d, where if where in ("masters", "outer") else "plain")
        assert dtypes_of(got) == dtypes_of(start(name, d)), label
        finite = all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(expected))
        assert finite == (reason is not None), label
        for key in expected if finite else ():
            assert units_apart(got[key], expected[key]) <= UNITS, f"{label} {key}: {got[key]} {expected[key]}"


def test_the_table_of_the_docs():
    words = {"two dtypes": "mixed", "zero_redundancy": "zero", "offload.host": "host", "local_steps": "inner"}
    text = (Path(__file__).parents[2] / "docs/faq.md").read_text()
    rows = text.split("| optimizers | parameters |")[1].split("\n\n")[0].splitlines()[2:]
    columns = [[[x.strip(" `") for x in cell.split(",")] for cell in row.split("|")[1:4]] for row in rows]
    cases = [case for row in columns for case in itertools.product(*row)]
    assert sorted((name, words.get(d, d), words.get(where, where)) for name, d, where in cases) == sorted(REFUSED)


OPTIMIZERS = sorted(set(REGISTER) - APART - {"sam"})


@pytest.mark.parametrize(("name", "where"), [("lion", "masters"), ("prodigy", "zero")])
def test_some(name, where):
    check(name, WORKERS, ["mixed"], [where])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_simulated(name):
    check(name, WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_mesh(name):
    check(name, jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS]))

"""Codes under every reducer that can carry them, and under feedback; what cannot work says why when it is built.

All pairs are built. By default each code is traced under a few carriers, in turn, so that all of them meet codes of
every family; all pairs with `--slow`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from register import CODES, turn

import jaxdist as jd

PODS = {"pod": 2, "chip": 2}
LIKE = {"w": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)}

CARRIERS = {
    "compressed": jd.compressed,
    "two_shot": jd.two_shot,
    "ring": jd.reducers.ring,
    "hierarchical": lambda code: jd.hierarchical(inner=jd.exact(), outer=jd.compressed(code)),
    "hierarchical two_shot": lambda code: jd.hierarchical(inner=jd.exact(), outer=jd.two_shot(code)),
    "bucketed": lambda code: jd.reducers.bucketed(jd.compressed(code)),
    "bucketed two_shot": lambda code: jd.reducers.bucketed(jd.two_shot(code)),
    "per_leaf": lambda code: jd.reducers.per_leaf(lambda path, leaf: path, {"w": jd.compressed(code)}),
    "tracked": lambda code: jd.reducers.with_stats(jd.compressed(code)),
    "reducer_schedule": lambda code: jd.reducers.reducer_schedule(jd.exact(), jd.two_shot(code), 1),
    "hierarchical feedback": lambda code: jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(jd.two_shot(code))),
}
CORRECTED = ("compressed", "two_shot", "bucketed")
FEEDBACK = {"error_feedback": jd.error_feedback, "ef21": jd.reducers.ef21, "loco": jd.reducers.loco}
MESSAGES = {
    "unknown": "neither its contraction δ nor its variance",
    "grows": "grow with the number of workers",
    "drifts": "one pod diverge",
    "twice": "has error feedback already",
    "noisy": "would pile up",
}


def problem(code, carrier, feedback):
    """Why this cannot work, if it cannot."""
    second_shot = "two_shot" in carrier or carrier in ("reducer_schedule", "hierarchical feedback")
    unknown = code.contraction is None and code.variance is None
    if unknown and second_shot:
        return "unknown"
    if feedback is None:
        return None
    if "hierarchical" in carrier:
        return "twice" if carrier == "hierarchical feedback" else "unknown" if unknown else "drifts"
    if carrier == "ring":
        return "grows"
    if unknown:
        return "unknown"
    return "noisy" if feedback == "ef21" and second_shot and code.variance is not None else None


@functools.cache
def built(name):
    """The reducers of a code that can be built; the others must say why not."""
    code, reducers = CODES[name].make(), {}
    for carrier, carry in CARRIERS.items():
        for feedback, wrap in {None: lambda reducer: reducer, **FEEDBACK}.items():
            reason = problem(code, carrier, feedback)
            if reason is None and feedback and carrier not in CORRECTED:
                continue  # what is around the carrier does not see the code
            if reason is None:
                reducers[f"{feedback} of {carrier}" if feedback else carrier] = wrap(carry(code))
            else:
                with pytest.raises(ValueError, match=MESSAGES[reason]):
                    wrap(carry(code))
    return reducers


@pytest.mark.sampled(26)
@pytest.mark.parametrize("name", CODES)
def test_every_pair_is_traced_or_refused(name, request):
    """For one worker, which is the cheapest; the mean is like the updates and the state stays as it is."""
    reducers = built(name)
    if not request.config.getoption("--slow"):
        # Five of up to twenty, from another start for each code.
        reducers = dict(list(reducers.items())[turn(name, 4) :: 4])
    comm = jd.comm.nested(jd.comm.alone(), jd.comm.alone())._replace(ppermute=jd.comm.alone().ppermute)
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), LIKE)
    for reducer in reducers.values():
        state = jax.eval_shape(reducer.init, LIKE)
        reduced, after = jax.eval_shape(lambda x, state: reducer.reduce(x, state, comm), LIKE, state)  # noqa: B023
        assert jax.tree.map(lambda x: (x.shape, x.dtype), reduced.mean) == wanted
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert jax.tree.leaves(after) == jax.tree.leaves(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e4m3", "qsgd 4", "random_k", "scaled_sign", "top_k"])
def test_some_of_them_run(name):
    """Sixty steps on a constant update: finite, and with feedback its mean comes through."""
    reducers = built(name)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal((4, *x.shape)), x.dtype), LIKE)

    def step(state, batch):
        """All of them for four workers in two pods."""
        updates, comm = jax.tree.map(lambda x: x[0], batch), jd.comm.over(tuple(PODS))
        reduced = {name: reducer.reduce(updates, state[0][name], comm) for name, reducer in reducers.items()}
        return ({name: after for name, (_, after) in reduced.items()},), {
            name: found.mean for name, (found, _) in reduced.items()
        }

    def first():
        return ({name: reducer.init(LIKE) for name, reducer in reducers.items()},)

    state, run = jd.init_state(first, PODS, axis=tuple(PODS)), jd.simulate(step, PODS)
    totals = None
    for _ in range(60):
        state, means = run(state, batch)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), means)
        totals = wide if totals is None else jax.tree.map(jnp.add, totals, wide)
    for reducer, total in totals.items():
        for leaf, x in batch.items():
            mean = np.asarray(x, np.float32).mean(0)
            off = np.asarray(total[leaf]) / 60 - mean
            assert np.isfinite(off).all(), reducer
            if "feedback" in reducer:
                assert np.linalg.norm(off) < 0.5 * np.linalg.norm(mean), (reducer, leaf)

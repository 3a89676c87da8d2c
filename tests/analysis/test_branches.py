"""Conditionals that no step takes together are not added up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis.branches import Terms

ONE = 2 * 7 / 8 * 4 * 64  # the bytes of one mean


def skip(x):
    return x


def send(x):
    return lax.pcast(lax.pmean(x, "data"), "data", to="varying")


@pytest.mark.parametrize(
    ("conditions", "least", "most"),
    [
        pytest.param((lambda n, f: n < 8, lambda n, f: (n % 4 == 3) & ~(n < 8)), 0, 1, id="and not"),
        pytest.param((lambda n, f: f, lambda n, f: ~f), 1, 1, id="either or"),
        pytest.param((lambda n, f: n == 3, lambda n, f: n == 5, lambda n, f: n + 2 == 3), 0, 1, id="numbers"),
        pytest.param((lambda n, f: n < 8, lambda n, f: n + 1 == 8, lambda n, f: n >= 8), 1, 2, id="intervals"),
        pytest.param((lambda n, f: n % 4 == 1, lambda n, f: n % 4 == 3), 0, 1, id="remainders"),
        pytest.param((lambda n, f: jnp.where(f, n < 3, n < 5), lambda n, f: f, lambda n, f: n > 3), 1, 2, id="select"),
        pytest.param((lambda n, f: n < 3, lambda n, f: f), 0, 2, id="independent"),
    ],
)
def test_the_largest_and_the_smallest_step(mesh, conditions, least, most):
    def step(count, flag, x):
        for condition in conditions:
            x = lax.cond(condition(count, flag), send, skip, x)
        return x

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data")))
    args = jnp.int32(0), jnp.array(True), jnp.ones((8, 64))
    program = mapped.lower(*args).compile().as_text()
    for branch, expected in (("min", least), ("max", most)):
        assert analysis.collectives(program, branch=branch).wire_bytes == expected * ONE
        assert analysis.logical_collectives(mapped, *args, branch=branch).wire_bytes == expected * ONE
        assert sum(op.collective.wire_bytes for op in analysis.overlap(program, branch=branch).ops) == expected * ONE


def test_the_warm_up_of_local_steps():
    """A step of it sends the gradient and at its end the models, and none of them a round."""
    mesh, params = jd.make_mesh({"data": 2}, devices=jax.devices()[:2]), jnp.zeros((64, 64))
    tx = jd.local_sgd.diloco(optax.adam(1e-2), sync_period=4, warmup_steps=8)

    def step(state, x):
        _, gradient = jd.local_value_and_grad(lambda p, x: jnp.mean((x @ p - 1) ** 2))(state["p"], x)
        updates, opt = tx.update(gradient, state["opt"], state["p"])
        return {"p": state["p"] + updates, "opt": opt}, {}

    state = jd.init_state(lambda: {"p": jd.PerWorker(params), "opt": tx.init(params)}, mesh)
    lowered = jd.distribute(step, mesh).lower(state, np.ones((8, 64), np.float32))
    program = lowered.compile()
    bounds = analysis.collectives(program)
    assert bounds.wire_bytes == 2 * params.nbytes
    assert any("counted 0, for the maximum of the step" in line for line in bounds.warnings)
    assert analysis.collectives(program, branch="min").wire_bytes == 0
    assert analysis.collectives(program, branch="all").wire_bytes == 3 * params.nbytes


def test_too_many_comparisons_are_taken_one_by_one():
    terms = Terms()
    flags = [terms.add("parameter", (), i, boolean=True) for i in range(13)]
    costs = [[(0.0,), (1.0,)]] * 14
    first = terms.add("not", flags[:1], boolean=True)
    assert terms.choose([first, *flags], costs, "max") == [1] * 14
    assert terms.choose([first, *flags[:1]], costs[:2], "max") in ([0, 1], [1, 0])

"""Optimizers whose state has other dtypes, or another tree, after their first update."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdist as jd


def run_step(tx, place):
    params = {"w": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.ones(4)}

    def step(state, batch):
        gradients = jax.tree.map(lambda p: p * (1 + batch.mean()).astype(p.dtype), state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": params, "opt": tx.init(params)}, place)
    return jd.simulate(step, place)(state, jnp.arange(4.0))[0]["params"]


@pytest.mark.parametrize("around", [jd.zero_redundancy, lambda tx: optax.chain(jd.all_reduce(jd.exact()), tx)])
def test_optimizers_whose_state_widens_are_refused_with_the_way_out(around):
    with pytest.raises(ValueError, match=r"`opt.*estim_lr` .* zero_redundancy\(optimizer, master_dtype=jnp.float32\)"):
        run_step(around(optax.contrib.prodigy(0.1)), 2)
    found = run_step(jd.zero_redundancy(optax.contrib.prodigy(0.1), master_dtype=jnp.float32), 2)
    assert found["w"].dtype == jnp.bfloat16


MONITOR = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))


@pytest.mark.parametrize(
    "tx",
    [
        jd.zero_redundancy(MONITOR),
        jd.offload.host(jd.zero_redundancy(MONITOR)),
        jd.accumulate(jd.zero_redundancy(MONITOR), 2),
        jd.skip_nonfinite(jd.zero_redundancy(MONITOR)),
        optax.chain(jd.all_reduce(jd.exact()), MONITOR),
    ],
)
def test_states_that_change_their_tree_are_named(tx):
    with pytest.raises(ValueError, match=r"state MonitorState has another tree.* optax.monitor begins without"):
        run_step(tx, 2)

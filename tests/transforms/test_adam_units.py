"""The Adams that send momenta in units of their variance: entries of small variance stay where Adam keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd

RATE = optax.linear_schedule(0.02, 0.0, 200)
SLOPES = (10.0 ** np.random.default_rng(7).permutation(np.linspace(-3, 0, 64))).astype(np.float32)
NOISE = 0.3 * np.random.default_rng(0).standard_normal((200, 4, 64)).astype(np.float32)
ADAMS = {
    "one_bit_adam": (lambda: jd.optimizers.one_bit_adam(RATE, freeze_step=20), False),
    "qadam": (lambda: jd.optimizers.qadam(RATE, warmup_steps=20), False),
    "zero_one_adam": (
        lambda: jd.optimizers.zero_one_adam(RATE, freeze_step=60, refreshes=10, doubling_steps=30),
        True,
    ),
}


def distances(tx, *, drifts):
    """From the optimum, of 64 entries whose gradients span three decades and their squares six, after each step."""

    def step(state, batch):
        gradients = SLOPES * (state["params"] + batch[0])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    def make_state():
        params = jnp.full(64, -1.0)
        return {"params": jd.PerWorker(params) if drifts else params, "opt": tx.init(params)}

    state, run, found = jd.init_state(make_state, 4), jd.simulate(step, 4), []
    for batch in NOISE:
        state, _ = run(state, batch)
        found.append(state["params"])
    return np.abs([x.value.mean(0) if drifts else x for x in jax.device_get(found)])


@pytest.fixture(scope="module")
def adam():
    x, m, v, found = np.full(64, -1.0), np.zeros(64), np.zeros(64), []
    for t, noise in enumerate(NOISE):
        gradient = SLOPES * (x + noise.mean(0))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        length = np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8
        x = x - 0.02 * (1 - t / 200) * m / (1 - 0.9 ** (t + 1)) / length
        found.append(np.abs(x))
    return np.array(found)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ADAMS)
def test_entries_of_small_variance_are_not_thrown_away(name, adam):
    """With one scale for raw momenta entries went 0.56 (8 bits), 9.1 and 11.6 (signs) too far; Adam's 0.09."""
    make, drifts = ADAMS[name]
    found = distances(make(), drifts=drifts)
    assert found[100:].max() < 4 * adam[100:].max()
    assert found[-1].max() < 0.2

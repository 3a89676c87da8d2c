"""Wrappers of optax that keep a gradient back or drop it, on the mean gradient: as optax alone with that gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd

WORKERS = 2
PARAMS = {"b": jnp.linspace(-1, 1, 5), "w": jnp.linspace(-2, 2, 12).reshape(3, 4)}


def gradients():
    """Of six steps; one worker's is NaN in two of them in a row, and infinite in the last but one."""
    rng = np.random.default_rng(0)
    found = [
        {k: rng.standard_normal((WORKERS, *x.shape)).astype(np.float32) for k, x in PARAMS.items()} for _ in "123456"
    ]
    found[1]["w"][0, 2, 3] = found[2]["w"][1, 0, 0] = np.nan
    found[4]["b"][1, 4] = np.inf
    return found


def is_finite(gradient):
    return all(np.isfinite(x).all() for x in gradient.values())


def accumulated(tx, steps):
    return optax.MultiSteps(tx, steps, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()


INNER = {
    "apply_if_finite": lambda: optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 1),
    "skip_not_finite": lambda: accumulated(optax.adam(0.1), 2),
    "accumulated_if_finite": lambda: optax.apply_if_finite(accumulated(optax.adam(0.1), 2), 5),
    "if_finite_accumulated": lambda: optax.MultiSteps(
        optax.apply_if_finite(optax.adam(0.1), 1), 2
    ).gradient_transformation(),
}
AROUND = {
    "all_reduce": lambda tx: optax.chain(jd.all_reduce(jd.exact()), tx),
    "zero": jd.zero_redundancy,
    "zero_of_means": lambda tx: optax.chain(jd.all_reduce(jd.exact()), jd.zero_redundancy(tx, reducer=None)),
    "skip_zero": lambda tx: jd.skip_nonfinite(jd.zero_redundancy(tx)),
    "accumulate_zero": lambda tx: jd.accumulate(jd.zero_redundancy(tx), 2),
}


def means(around):
    """What optax gets: the mean of each step, of each two calls, or of those steps that are not skipped."""
    found = [jax.tree.map(lambda x: x.mean(0), one) for one in gradients()]
    if around == "accumulate_zero":
        return [None if i % 2 == 0 else jax.tree.map(lambda x, y: (x + y) / 2, *found[i - 1 : i + 1]) for i in range(6)]
    return [None if around == "skip_zero" and not is_finite(one) else one for one in found]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", AROUND)
def test_as_optax_alone_on_the_mean(around, inner):
    tx, alone = AROUND[around](INNER[inner]()), INNER[inner]()

    def step(state, gradient):
        local = jax.tree.map(lambda x: x[0], gradient)
        updates, opt = tx.update(local, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    run, state = jd.simulate(step, WORKERS), jd.place(TrainState(PARAMS, tx.init(PARAMS)), WORKERS)
    params, opt, update = PARAMS, alone.init(PARAMS), jax.jit(alone.update)
    for gradient, mean in zip(gradients(), means(around), strict=True):
        state, _ = run(state, gradient)
        if mean is not None:
            updates, opt = update(mean, opt, params)
            params = optax.apply_updates(params, updates)
        assert_close(state.params, params, 3e-5)

"""NaN, Inf and huge numbers at random places of random workers' gradients: what a guarded method keeps of them.

Every case is a step of a run that goes on before and after it, for every kind of state that would keep a NaN: moments,
residuals, bases, levels, keys, anchors, neighbors' models, parts of a cut state.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from injected_methods import ALONE, CASES, LOCAL, METHODS, STEPS, WORKERS, momentum
from problems import assert_close, numbers
from register_run import State, gradients, params, train_step

import jaxdist as jd


class Ran(NamedTuple):
    """A run without faults: its compiled step, and the states before and after each step."""

    step: Any
    states: list[State]


@functools.cache
def ran(name) -> Ran:
    tx = jd.skip_nonfinite(METHODS[name]())

    def make_state():
        return State(jd.PerWorker(params()) if name in LOCAL else params(), tx.init(params()))

    run = jd.simulate(train_step(tx, "data"), WORKERS)
    states = [jd.init_state(make_state, WORKERS)]
    for number in range(STEPS):
        states.append(run(states[-1], gradients(number, WORKERS))[0])
    return Ran(run, states)


def poisoned(rng, step):
    """The gradients of a step with one entry that is no number, somewhere."""
    found = gradients(step, WORKERS)
    leaf = found[rng.choice(sorted(found))]
    where = (rng.integers(WORKERS), *(rng.integers(size) for size in leaf.shape[1:]))
    leaf[where] = rng.choice([np.nan, np.inf, -np.inf])
    return found


def without_count(state):
    return state._replace(opt=state.opt.inner)


def moved(after, before):
    return max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (after, before)), strict=True))


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", METHODS)
def test_a_fault_is_a_step_that_did_not_happen(name):
    rng, run = np.random.default_rng(list(METHODS).index(name)), ran(name)
    for _ in range(CASES):
        number = int(rng.integers(STEPS))
        before = run.states[number]
        after, _ = run.step(before, poisoned(rng, number))
        assert_close(without_count(after), without_count(before), 0)
        assert (int(jd.transforms.stats(before.opt)["skips"]), int(jd.transforms.stats(after.opt)["skips"])) == (0, 1)
        # The next step is the one that would have come in its place, and it is one.
        later, _ = run.step(after, gradients(number, WORKERS))
        assert_close(without_count(later), without_count(run.states[number + 1]), 0)
        assert moved(numbers(later.params), numbers(before.params)) > 1e-3
        for leaf in jax.tree.leaves(numbers(later)):
            assert not jnp.issubdtype(leaf.dtype, jnp.floating) or np.isfinite(leaf).all()


HUGE = [1e19, 1e20, 1e30, 1e38, 3e38]


def with_huge(rng, step, value):
    """The gradients of a step with huge entries of random signs: one, a worker's whole array, or that of all."""
    found = gradients(step, WORKERS)
    leaf = found[rng.choice(["b", "w"])]
    signs, how = np.where(rng.random(leaf.shape) < 0.5, -1, 1), int(rng.integers(3))
    where = (rng.integers(WORKERS), *(rng.integers(size) for size in leaf.shape[1:]))[: (leaf.ndim, 1, 0)[how]]
    leaf[where] = (value * signs)[where]
    return found


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", METHODS)
def test_a_huge_entry_costs_at_most_a_step(name):
    """Finite, and so let in by a guard that looks no further; what a state keeps of it may overflow a step later."""
    rng, run = np.random.default_rng(list(METHODS).index(name)), ran(name)
    for value in 2 * HUGE:
        number = int(rng.integers(STEPS - 1))
        before = run.states[number]
        state, _ = run.step(before, with_huge(rng, number, value))
        if int(state.opt.skipped):
            assert_close(without_count(state), without_count(before), 0)
        for later in range(number, STEPS):
            state, _ = run.step(state, gradients(later, WORKERS))
            for leaf in jax.tree.leaves(numbers(state)):
                assert not jnp.issubdtype(leaf.dtype, jnp.floating) or np.isfinite(leaf).all()
        assert (int(state.opt.skipped) <= 1, int(state.opt.consecutive)) == (True, 0)


# ---- each worker guards its own step, and no other hears of it


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", ALONE)
def test_one_worker_sits_a_step_out(name):
    """What it does then is what `active=False` does, in the step in which workers meet and in the others."""
    tx = ALONE[name](jd.skip_nonfinite(momentum(), axis=None))

    def step(state, batch):
        gradient, active = jax.tree.map(lambda x: x[0], batch)
        updates, opt = tx.update(gradient, state.opt, state.params, active=active)
        return State(optax.apply_updates(state.params, updates), opt), {}

    def make_state():
        return State(jd.PerWorker(params()), tx.init(params()))

    mesh = jd.make_mesh({"data": WORKERS})
    rng, run, everyone = np.random.default_rng(0), jd.distribute(step, mesh, donate=False), np.ones(WORKERS, bool)
    clean = jd.init_state(make_state, mesh)
    for number in range(STEPS):
        bad = poisoned(rng, number)
        (found,) = {int(np.argwhere(~np.isfinite(x))[0, 0]) for x in bad.values() if not np.isfinite(x).all()}
        after, _ = run(clean, (bad, everyone))
        sat_out, _ = run(clean, (gradients(number, WORKERS), np.arange(WORKERS) != found))
        assert_close(after.params, sat_out.params, 0)
        assert int(jd.transforms.stats(after.opt)["skips"]) == 1
        inner = after.opt.inner.value
        assert inner.skipped.tolist() == [int(worker == found) for worker in range(WORKERS)]
        assert_close(
            after.opt._replace(inner=inner.inner), sat_out.opt._replace(inner=sat_out.opt.inner.value.inner), 0
        )
        clean, _ = run(clean, (gradients(number, WORKERS), everyone))
        assert moved(numbers(after.params), numbers(clean.params)) > 1e-3

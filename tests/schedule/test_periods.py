"""Schedules of the number of local steps against their papers' formulas."""

import math
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run

import jaxdist as jd
from jaxdist import schedule


def values(period, steps):
    """Traced once, as in a training step."""
    found = jax.jit(jax.vmap(period))(jnp.asarray(steps, jnp.int32))
    assert found.dtype == jnp.int32
    return found.tolist()


def test_schedules_of_the_step():
    steps = range(12)
    assert values(schedule.constant(7), steps) == [7] * 12
    assert values(schedule.post_local(3, 16), steps) == [1] * 3 + [16] * 9
    assert values(schedule.doubling(2, 11), steps) == [1, 1, 2, 2, 4, 4, 8, 8, 11, 11, 11, 11]
    assert values(schedule.linear(9, 5), steps) == [1 + min(4 * t // 9, 4) for t in steps]
    # Far beyond any training, where powers of two and products would overflow.
    far = [2**31 - 1]
    assert values(schedule.doubling(1, 500), far) == [500]
    assert values(schedule.linear(10**6, 500), far) == [500]


def test_the_quadratic_rule():
    rates = np.array([0.008, 0.004, 0.002, 0.001, 0.0035, 0.0175, 0.05, 1e-12, 0.0], np.float32)
    rule = schedule.quadratic(lambda step: jnp.asarray(rates)[step], 0.0175, 4, most=10**6)
    # The fifth is a whole number, 5² = 25, which float32 alone makes 24.99.
    assert values(rule, range(9)) == [4, 19, 76, 306, 25, 4, 4, 10**6, 10**6]


def ada_comm(first, observed):
    """The paper's rule on `(loss, rate)` after each interval."""
    (loss0, rate0), period, last, found = observed[0], first, observed[0][1], [first]
    for loss, rate in observed[1:]:
        wanted = math.ceil(first * math.sqrt(rate0 / rate * loss / loss0))
        period = max(period // 2, 1) if wanted >= period and rate == last else max(wanted, 1)
        last = rate
        found.append(period)
    return found


def test_ada_comm_follows_its_formula():
    observed = [(2.3, 0.1), (1.9, 0.1), (1.2, 0.1), (1.25, 0.1), (0.6, 0.1), (0.6, 0.01), (0.5, 0.01), (1e-9, 0.01)]
    observed += [(3.0, 0.01)] * 3
    rule = schedule.ada_comm(24)
    state, update = rule.init(), jax.jit(rule.update)
    found = []
    for loss, rate in observed:
        state = update(state, loss=jnp.float32(loss), learning_rate=jnp.float32(rate))
        found.append(int(state.period))
    assert found == ada_comm(24, observed)
    assert update._cache_size() == 1


def test_ada_comm_ignores_what_is_not_a_number():
    rule = schedule.ada_comm(8, most=10)
    state = rule.update(rule.init(), loss=jnp.nan, learning_rate=0.1)  # says nothing, and is not the first loss
    state = rule.update(state, loss=1.0, learning_rate=0.1)
    for loss, rate in ((jnp.inf, 0.01), (jnp.nan, 0.02), (1.0, 0.0)):
        assert int(rule.update(state, loss=loss, learning_rate=rate).period) == 8
    assert int(rule.update(state, loss=4.0, learning_rate=0.05).period) == 10


def test_proportional_steps():
    seconds = np.array([0.58, 0.75, 1.51, 3.33])
    assert schedule.proportional_steps(1 / seconds, 20).tolist() == [20, 15, 8, 3]
    assert schedule.proportional_steps(1 / seconds, 20, minimum=5, rounding="down").tolist() == [20, 15, 7, 5]
    # The fast ones of Biased Local SGD take 32 steps while the slow one takes one.
    assert schedule.proportional_steps([32.0, 1.0, 0.01], 32).tolist() == [32, 1, 1]
    # 10 · 0.7 / 1.0 is a little less than 7 in float64 for some speeds; the number of steps is not.
    speeds = np.arange(1, 100) / 99 * 0.3
    assert schedule.proportional_steps(speeds, 99, rounding="down").tolist() == list(range(1, 100))


def test_local_steps_meet_when_a_schedule_says():
    """A round ends as soon as it is as long as the rule of that step wants; what is passed to the update wins."""
    rule = schedule.quadratic(lambda step: jnp.where(jnp.asarray(step) < 8, 0.008, 0.004), 0.0175, 4)
    drawn = np.random.default_rng(0).standard_normal((60, 2, 1)).astype(np.float32)

    def rounds_at(**given):
        _, anchors, _ = run(jd.local_sgd.local_sgd(optax.sgd(0.1), sync_period=rule), drawn, **given)
        moved = np.diff(anchors[:, 0], prepend=0) != 0
        return (np.flatnonzero(moved) + 1).tolist()

    assert rounds_at() == [4, 8, 27, 46]
    assert rounds_at(sync_period=np.where(np.arange(60) < 30, 10, 15)) == [10, 20, 30, 45, 60]


@pytest.mark.parametrize(("steps", "expected"), [((10, 10), 0.713442), ((20, 10), None), ((20, 1), None)])
def test_unequal_steps_move_the_optimum(steps, expected):
    """Losses `a_i/2 (x - b_i)²`: rounds of `H_i` steps come to rest at weights `1 - (1 - γ a_i)^H_i`."""
    rate, a, b = 0.05, np.array([1.0, 10.0]), np.array([0.0, 1.0])
    assert schedule.proportional_steps(np.array(steps) / 7, max(steps)).tolist() == list(steps)
    weights = 1 - (1 - rate * a) ** np.array(steps)
    if expected is not None:
        assert (weights @ b) / weights.sum() == pytest.approx(expected, abs=1e-6)
    expected = (weights @ b) / weights.sum()
    period, rounds = max(steps), 30
    drawn = {name: np.tile(np.float32(x), (period * rounds, 1)) for name, x in (("a", a), ("b", b))}
    active = np.arange(period * rounds)[:, None] % period < np.array(steps)
    tx = jd.local_sgd.local_sgd(optax.sgd(rate), sync_period=period)
    _, anchors, _ = run(
        tx, drawn, jnp.zeros(()), gradient=lambda x, worker: worker["a"] * (x - worker["b"]), active=active
    )
    assert anchors[-1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedule.constant(0), "period must be at least 1, got 0"),
        (lambda: unwrap(schedule.constant)(2.5), "period must be a whole number, got 2.5"),
        (lambda: unwrap(schedule.doubling)(2.5, 4), "every must be a whole number, got 2.5"),
        (lambda: unwrap(schedule.ada_comm)(2.5), "period must be a whole number, got 2.5"),
        (lambda: schedule.post_local(-1, 2), "switch_step must be at least 0, got -1"),
        (lambda: schedule.post_local(2**31, 2), r"switch_step must be less than 2\*\*31, got 2147483648"),
        (lambda: schedule.quadratic(lambda step: 0.1, 0, 2), "alpha must be positive, got 0"),
        (lambda: schedule.quadratic(lambda step: 0.1, 1, 8, most=4), r"most must be in \[base=8"),
        (lambda: schedule.linear(2**20, 2**20), "must be less than"),
        (lambda: schedule.doubling(0, 2), "every must be at least 1"),
        (lambda: schedule.doubling(1, 2**31), f"period must be at most {2**30}, got {2**31}"),
        (lambda: schedule.constant(2**31), f"period must be at most {2**30}, got {2**31}"),
        (lambda: schedule.ada_comm(0), "period must be at least 1, got 0"),
        (lambda: schedule.ada_comm(2, most=2**31), f"most must be at most {2**30}, got {2**31}"),
        (lambda: schedule.proportional_steps([1.0, 0.0], 4), "speeds must be positive"),
        (lambda: schedule.proportional_steps([1.0], 4, rounding="up"), "rounding must be"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bounds_of_rounds():
    with pytest.raises(ValueError, match="minimum must be at most period=3, got 5"):
        schedule.proportional_steps([1, 2], 3, minimum=5)
    with pytest.raises(ValueError, match=r"most must be a whole number, got 10\.5"):
        unwrap(schedule.quadratic)(lambda step: 0.0, 1.0, 2, most=10.5)

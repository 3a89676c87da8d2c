"""Islands that take the outer step along their own share while a drift is under way."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import archived
from islands_run import (
    GOALS,
    H,
    begin,
    compiled_programs,
    decoded,
    global_params,
    left_of,
    make_method,
    method,
    sgd,
    step_of,
    total,
)
from problems import assert_close
from reference.local_steps import rda

import jaxdist as jd
from jaxdist import islands

RATE, OUTER, MOMENTUM = 0.1, 0.7, 0.9


def wait_until_sent(island):
    """Until the store has the drift that is under way; its thread goes on to read those of the others."""
    sender = island._outbox._sender
    assert sender is None or sender.is_sent.wait(20)


def loop(rounds, merge):
    """Two islands in float64: what they train on after each meeting, and the global parameters.

    In their first round each expects no other.
    """
    start, goals = total(begin(method()).params), [{"w": goal, "b": np.zeros(3)} for goal in total(GOALS[:2])]
    anchor, models = dict(start), [dict(start), dict(start)]
    momentum, flight, out = {name: np.zeros_like(x) for name, x in start.items()}, None, []

    def outer(momentum, drift):
        momentum = MOMENTUM * momentum + drift
        return momentum, OUTER * (drift + MOMENTUM * momentum)

    shares: list = []
    for number in range(rounds):
        for model, goal in zip(models, goals, strict=True):
            for name in model:
                model[name] = goal[name] + (1 - RATE) ** H * (model[name] - goal[name])
        for name in anchor:
            if flight is not None:
                drifts = np.stack([flight[i][name].ravel() for i in range(2)])
                mean = (rda(drifts) if merge == "rda" else drifts.mean(0)).reshape(anchor[name].shape)
                momentum[name], step = outer(momentum[name], mean)
                anchor[name] = anchor[name] - step
                for model, share in zip(models, shares, strict=True):
                    model[name] = model[name] + anchor[name] - share[name]
        flight = [{name: anchor[name] - model[name] for name in anchor} for model in models]
        members = 2 if number else 1
        shares = [
            {name: anchor[name] - outer(momentum[name], x / members)[1] for name, x in drift.items()}
            for drift in flight
        ]
        models = [dict(share) for share in shares]
        out.append(([dict(share) for share in shares], dict(anchor)))
    return out


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_two_islands_are_a_loop_in_float64(merge):
    store, tx = islands.memory(), method(inner=sgd(RATE), merge=merge)
    step, names = step_of(tx), ["a", "b"]
    with contextlib.ExitStack() as stack:
        options = {"overlap": True, "eager": True, "round_timeout": 20}
        joined = [stack.enter_context(islands.join(store, tx, name=name, **options)) for name in names]
        states = [island.enter(begin(tx)) for island in joined]
        for models, anchor in loop(5, merge):
            for i, island in enumerate(joined):
                for _ in range(H):
                    states[i] = step(states[i], GOALS[i])
                states[i], report = island.meet(states[i])
                wait_until_sent(island)
                # The first sends alone, and counts on the second from then on.
                if report.members:
                    assert report.members == ("a", "b")
            for state, model in zip(states, models, strict=True):
                assert_close(state.params, model, tolerance=1e-5)
                assert_close(global_params(state), anchor, tolerance=1e-5)
        assert_close(global_params(states[0]), global_params(states[1]), tolerance=0)


@pytest.mark.parametrize("lasts", [True, False], ids=["counted later", "encoded again"])
def test_nothing_is_lost_of_a_drift_of_which_the_model_has_a_share(lasts):
    (store, bodies, commits), tx = archived(islands.memory()), method(inner=sgd(RATE))
    step = step_of(tx)
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(islands.join(store, tx, name="slow", round_timeout=0.05, overlap=True, eager=True))
        fast = stack.enter_context(islands.join(store, tx, name="fast", round_timeout=0.05))
        states = {"slow": slow.enter(begin(tx)), "fast": fast.enter(begin(tx))}
        slow._replay.lasts = lasts
        moved, late = jax.tree.map(np.zeros_like, total(states["slow"].params)), 0
        for meeting in itertools.count():
            for _ in range(H):
                before = total(states["slow"].params)
                states["slow"] = step(states["slow"], GOALS[0])
                moved = jax.tree.map(lambda m, b, a: m + b - a, moved, before, total(states["slow"].params))
                states["fast"] = step(states["fast"], GOALS[1])
            for _ in range(1 + meeting % 3):
                states["fast"], _ = fast.meet(states["fast"])
            states["slow"], report = slow.meet(states["slow"])
            late += report.late
            wait_until_sent(slow)
            flight = slow._outbox.flight
            hidden = jax.tree.map(np.zeros_like, moved)
            if flight is not None:
                hidden = jax.tree.map(np.subtract, total(flight.drift), total(flight.ahead))
            # On a busy machine a share is not under way after every meeting.
            if meeting >= 5 and late > 1 and max(np.abs(x).max() for x in jax.tree.leaves(hidden)) > 0.1:
                break
        left, body = left_of(states["slow"]), flight.body
    taken = jax.tree.map(np.zeros_like, moved)
    for commit in commits.values():
        for member in commit.members:
            if member.name == "slow" and member.body != body:
                taken = jax.tree.map(np.add, taken, decoded(bodies[member.body], member.body, tx, states["slow"]))
    assert_close(jax.tree.map(lambda *parts: sum(parts), taken, left, hidden), moved, tolerance=1e-5)


def test_a_meeting_compiles_nothing():
    tx = make_method(inner=sgd(RATE))
    step = step_of(tx)
    with islands.join(islands.memory(), tx, name="a", overlap=True, eager=True) as island:
        state = step(island.enter(begin(tx)), GOALS[0])
        with compiled_programs() as compiled:
            for _ in range(3):
                state, _ = island.meet(step(state, GOALS[0]))
                wait_until_sent(island)
        assert not compiled


def test_who_leaves_takes_back_what_no_round_has():
    """A drift whose round did not count it is whole in the state that `leave` returns."""
    tx = method(inner=sgd(RATE))
    step = step_of(tx)
    with islands.join(islands.memory(), tx, name="a", overlap=True, eager=True, begin_with=1) as island:
        state = island.enter(begin(tx))
        trained = step(state, GOALS[0])
        state, _ = island.meet(trained)
        assert np.abs(np.asarray(state.params["w"] - trained.params["w"])).max() > 0.01
        flight = island._outbox.flight
        model = islands.fragments.FragmentModel(state.opt, state.params)
        island._take_back([model])
        assert_close(model.params, trained.params, tolerance=1e-6)
        assert flight is island._outbox.flight


def test_eager_needs_overlap():
    tx = method()
    with (
        pytest.raises(ValueError, match="join with overlap=True too"),
        islands.join(islands.memory(), tx, name="a", eager=True),
    ):
        pass


@pytest.mark.slow
def test_half_precision_keeps_what_is_under_way():
    tx = jd.local_steps(optax.sgd(RATE), optax.sgd(1.0), sync_period=H, axis=None)
    params = {"w": jnp.zeros((12, 5), jnp.bfloat16)}
    store = islands.memory()
    with islands.join(store, tx, name="a", overlap=True, eager=True) as island:
        state = island.enter({"params": params, "opt": tx.init(params)})
        state["params"] = {"w": jnp.asarray(GOALS[0], jnp.bfloat16)}
        for number in range(2):
            state, report = island.meet(state)
            wait_until_sent(island)
            assert report.counted == bool(number)
        # Alone, its share is everything, and nothing is left.
        flight = island._outbox.flight
        assert flight is not None
        assert not np.asarray(flight.drift["w"], np.float32).any()
        assert state["params"]["w"].dtype == jnp.bfloat16

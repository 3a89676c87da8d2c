"""Prague: what groups keep, in which order they run, who is left out of them, and how fast that is."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference.prague import prague as transcribed

from jaxdist.asynchronous import SERVER, Message, Send, Site, durations, links, replay, rules
from jaxdist.asynchronous.rules.peers.prague import (
    decode_members,
    divide,
    divide_nodes,
    node_schedule,
    shuffle,
    static_schedule,
)

SGD = optax.sgd(0.1)
MODES = ("static", "random", "smart")
NODES = {"static nodes": {"groups": "static", "node_size": 3}, "smart nodes": {"groups": "smart", "node_size": 2}}
GOALS = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
TASK = replay.Task(
    np.zeros(3, np.float32), lambda x, goal: 0.5 * jnp.sum((x - goal) ** 2), lambda seed, i, k: GOALS[i] * (1 + k % 3)
)
UNEVEN = durations.one_slow(durations.lognormal(1.0, 0.1), worker=0, factor=6)
WIRE = links.alpha_beta(1e-3, 1e9)
BIG = replay.Task(np.zeros(25_000_000, np.float32), lambda x, batch: x.sum(), lambda *job: None)  # 100 MB, for timing


def prague(groups, size, workers, law, seconds, task=None, nodes=None, **settings):
    rule = rules.prague(SGD, group_size=size, groups=groups, **(nodes or {}))
    settings = {"timing_only": True, "record_events": False, "seed": 0} | settings
    return replay.run(rule, task, workers=workers, durations=law, seconds=seconds, **settings)


def speeds(run):
    return np.bincount(run.trace.gradients.worker) / run.seconds


def disjoint(workers, size, iteration):
    plan = static_schedule(workers, size)
    return [list(group) for group in sorted(set(plan[iteration % len(plan)]))]


@pytest.mark.parametrize("mode", [*MODES, *NODES])
def test_groups_keep_the_sum_and_bring_models_nearer(mode):
    """One gradient each, then none: what is left is averaging, with members failing meanwhile."""
    moving = TASK._replace(loss=lambda x, push: x @ push, batch=lambda seed, i, k: GOALS[i] if k == 0 else 0 * GOALS[i])
    law = durations.failures(durations.exponential(1.0), up=9, down=1)
    rule = rules.prague(optax.sgd(1.0), group_size=3, **NODES.get(mode, {"groups": mode}))
    clock = replay.simulator(rule, moving, workers=6, durations=law, links=links.alpha_beta(0.05, 50.0), seed=1)
    state, sums, spreads = clock.init(), [], []
    for until in range(5, 65):
        state = clock.advance(state, seconds=until)
        if all(role.steps for role in state.roles[:6]):
            models = np.stack([role.params for role in state.roles[:6]])
            sums.append(models.sum(0))
            spreads.append(((models - models.mean(0)) ** 2).sum())
    assert len(sums) > 30
    np.testing.assert_allclose(sums, np.broadcast_to(-GOALS[:6].sum(0), (len(sums), 3)), atol=1e-5)
    assert (np.diff(spreads) <= 1e-6).all()
    assert spreads[-1] < 1e-3


def test_a_schedule_computes_the_same_in_any_order_of_its_groups():
    """Disjoint groups come in the order of speeds, which random durations shuffle; the models are the schedule's."""
    models = transcribed(
        lambda k: disjoint(6, 2, k), lambda x, i, k: x - GOALS[i] * (1 + k % 3), np.zeros((6, 3)), 60, 0.1
    )
    rule = rules.prague(SGD, group_size=2, groups="static")
    check_schedule(rule, models)


def check_schedule(rule, models):
    for seed in (0, 1):
        clock = replay.simulator(rule, TASK, workers=6, durations=durations.exponential(1.0), seed=seed)
        state = clock.advance(clock.init(), gradients=120)
        steps = [role.steps for role in state.roles[:6]]
        assert max(steps) > min(steps)
        for worker, role in enumerate(state.roles[:6]):
            if role.phase == "computing":
                np.testing.assert_allclose(role.params, models[role.steps, worker], rtol=1e-4, atol=1e-6)


def test_a_schedule_of_nodes_is_the_papers():
    """Inside the nodes {0 1 2} and {3 4 5}, by pairs in two iterations, then between workers of equal place."""
    plan = [sorted(set(iteration)) for iteration in node_schedule(6, 2, 3)]
    assert plan == [[(0, 1), (2,), (3, 4), (5,)], [(0, 2), (1,), (3, 5), (4,)], [(0, 3), (1, 4), (2, 5)]]
    groups = [[list(group) for group in iteration] for iteration in plan]
    gradient = lambda x, i, k: x - GOALS[i] * (1 + k % 3)  # noqa: E731
    models = transcribed(lambda k: groups[k % 3], gradient, np.zeros((6, 3)), 60, 0.1)
    check_schedule(rules.prague(SGD, group_size=2, groups="static", node_size=3), models)
    mixing = np.eye(16)
    for iteration in node_schedule(16, 4, 4):  # within and across: an exact mean
        for group in sorted(set(iteration)):
            mixing[list(group)] = mixing[list(group)].mean(0)
    np.testing.assert_allclose(mixing, 1 / 16)


def test_idle_workers_are_divided_within_and_between_nodes():
    # Nodes of four; worker 5 asked. One of each node crosses, then the others of each node, then all of each.
    assert divide_nodes([5, 1, 0, 6, 9, 2, 4], 4, 4) == [[5, 1, 9], [6, 4], [0, 2], [5, 6, 4], [1, 0, 2]]
    # Alone in its node it crosses only; with no other node there are groups inside only; alone it gets a group of one.
    assert divide_nodes([5, 1, 0], 4, 4) == [[5, 1], [1, 0]]
    assert divide_nodes([5, 4, 6], 4, 4) == [[4, 6], [5, 4, 6]]
    assert divide_nodes([5], 4, 4) == [[5]]


def test_nodes_keep_most_messages_off_slow_links():
    """Four nodes of four workers, 1 GB/s inside and 0.1 GB/s between: more gradients in the same time."""
    node = np.arange(17) // 4
    wire = links.alpha_beta(1e-3, np.where(node[:, None] == node, 1e9, 1e8))
    law = durations.lognormal(1.0, 0.1)
    found = {}
    for nodes in (None, 4):
        rule = rules.prague(SGD, group_size=4, node_size=nodes)
        run = replay.run(rule, BIG, workers=16, durations=law, seconds=100, links=wire, timing_only=True)
        found[nodes] = len(run.trace.gradients)
    assert found[4] > 1.3 * found[None]


@pytest.mark.parametrize("workers", [2, 3, 5, 6, 8, 9, 16, 27])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_schedule_reaches_everybody(workers, size):
    mixing = np.eye(workers)
    for t in range(12):
        groups = disjoint(workers, size, t)
        assert sorted(worker for group in groups for worker in group) == list(range(workers))
        assert max(map(len, groups)) <= size
        for group in groups:
            mixing[group] = mixing[group].mean(0)
        if workers in (size, size**2, size**3) and size ** (t + 1) == workers:
            np.testing.assert_allclose(mixing, 1 / workers)
    assert mixing.min() > 0


def test_a_schedule_takes_a_gradient_and_an_all_reduce():
    run = prague("static", 4, 8, durations.constant(1.0), 50.5, BIG, links=WIRE)
    each = 1 + 2 * 3 * 1e-3 + 2 * 3 / 4 * 0.1
    np.testing.assert_allclose(
        run.trace.steps.tick[::8] / 1e9, 1 + each * np.arange(len(run.trace.steps) // 8), rtol=1e-9
    )
    assert run.sent.tolist() == [150_000_000 * (len(run.trace.steps) // 8)] * 8 + [0]


def told(actions):
    return [(action.to, action.message.kind, action.message.version) for action in actions if type(action) is Send]


def test_groups_that_overlap_run_in_the_order_in_which_they_were_made():
    server = rules.prague(SGD, group_size=3, groups="random").server
    assert server is not None
    state, _ = server.init(Site(SERVER, 4), None)
    state, first = server.receive(state, 0, Message("request", None, 1))
    assert {(kind, number) for _, kind, number in told(first)} == {("group", 0), ("join", 0)}
    assert [to for to, kind, _ in told(first) if kind == "group"] == [0]
    for other in (1, 2):  # three of four always share a member with three of four
        state, nothing = server.receive(state, other, Message("request", None, 1))
        assert nothing == ()
    again = told(server.receive(state, 0, Message("pull"))[1])
    assert again == [(0, "group", 0)]
    for number in (0, 1):
        state, following = server.receive(state, 0, Message("done", None, number))
        assert {which for _, _, which in told(following)} == {number + 1}
        assert len(following) == 3


def test_a_request_divides_all_who_are_idle_and_near():
    server = rules.prague(SGD, group_size=2, max_lag=2).server
    assert server is not None
    state, _ = server.init(Site(SERVER, 6), None)
    state, actions = server.receive(state, 3, Message("request", None, 1))
    groups = {decode_members(action.message.tag) for action in actions}
    assert sorted(sum(groups, ())) == list(range(6))
    assert [len(group) for group in groups] == [2, 2, 2]
    state, nothing = server.receive(state, 1, Message("request", None, 1))  # it is in its buffer
    assert nothing == ()
    for number in range(3):
        state, _ = server.receive(state, 0, Message("done", None, number))
    state = state._replace(requests=(1, 4, 3, 4, 2, 3), memberships=(1, 4, 3, 4, 2, 3))
    state, actions = server.receive(state, 1, Message("request", None, 5))
    assert sorted(action.to for action in actions) in ([1, 3], [1, 2], [1, 5], [1, 2, 3, 5])[-1:]  # 0 and 4 are too far


def test_divisions_and_draws():
    assert [len(part) for part in divide(range(10), 4)] == [4, 3, 3]
    assert divide([5, 1, 2], 2) == [[5, 1]]
    assert divide([5], 3) == [[5]]
    counts = np.zeros((5, 5), int)
    for draw in range(3000):
        for place, value in enumerate(shuffle([0, 1, 2, 3, 4], 5, 7, draw)):
            counts[place, value] += 1
    assert np.abs(counts / 3000 - 0.2).max() < 0.03
    assert decode_members(sum(1 << k for k in (0, 5, 700))) == (0, 5, 700)


def test_smart_groups_leave_a_slow_worker_out():
    """Eight workers, one of them six times slower, a model of 100 MB over 1 GB/s."""
    law = UNEVEN
    bsp = replay.run(rules.bsp(SGD), BIG, workers=8, durations=law, seconds=200, links=WIRE, timing_only=True)
    smart = speeds(prague("smart", 3, 8, law, 200, BIG, links=WIRE))
    everybody = rules.prague(SGD, group_size=3, max_lag=float("inf"))
    blind = speeds(replay.run(everybody, BIG, workers=8, durations=law, seconds=200, links=WIRE, timing_only=True))
    even = speeds(prague("smart", 3, 8, durations.lognormal(1.0, 0.1), 200, BIG, links=WIRE))
    assert smart[1:].mean() > 0.9 * even.mean()  # its share of the others' time is small
    assert smart.sum() > 4 * len(bsp.trace.gradients) / 200
    assert smart.sum() > 1.15 * blind.sum()
    assert smart[0] > 0.13  # and it is not stopped


def test_nobody_waits_for_ever():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        mode, workers = MODES[seed % 3], int(rng.integers(3, 8))
        nodes = {"node_size": 2} if seed % 7 == 0 and workers % 2 == 0 and mode != "random" else {}
        size = int(rng.integers(2, 4))
        law = durations.constant(rng.uniform(0.5, 3, workers).tolist()) if seed % 2 else durations.exponential(1.0)
        law = durations.failures(law, up=8, down=2)
        wire = links.alpha_beta(0.01, 100.0, nic=seed % 5 == 0)
        run = prague(mode, size, workers, law, 90, seed=seed, links=wire, nodes=nodes)
        late = run.trace.gradients.tick > 45e9
        assert set(run.trace.gradients.worker[late].tolist()) == set(range(workers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"group_size": 2, "node_size": 1}, "node_size must be at least 2 and groups static or smart, got node_size=1"),
        ({"group_size": 2, "node_size": 2, "groups": "random"}, "got node_size=2 and groups='random'"),
        ({"group_size": 2, "max_lag": 0}, "max_lag must be at least 1.*got 0"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rules.prague(SGD, **options)
    with pytest.raises(ValueError, match="group_size must be at most the 3 workers, got 4"):
        replay.run(rules.prague(SGD, group_size=4), workers=3, seconds=1)
    with pytest.raises(ValueError, match="node_size must divide the 3 workers, got 2"):
        replay.run(rules.prague(SGD, group_size=2, node_size=2), workers=3, seconds=1)

"""Rules without a server on the virtual clock: who averages with whom, what is kept, and what is lost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import gossip as reference
from reference import mirror_descent as mirror_reference
from reference import peers

import jaxdist as jd
from jaxdist._cli.spellings.parse import parse_rule
from jaxdist._cli.sweep import staleness
from jaxdist.asynchronous import durations, links, replay, rules
from jaxdist.asynchronous.rules.peers import pairs as pair_rules

SGD = optax.sgd(0.05)
SEVEN_AND_A_SLOW_ONE = [1, 1, 1, 1, 1, 1, 1, 6]
GOALS = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)
MATRIX = replay.Task(
    {"w": np.zeros((6, 5), np.float32)}, lambda x, b: 0.5 * jnp.sum((x["w"] - b) ** 2), lambda s, i, k: GOALS[i]
)
# Every worker's first step takes it to its own goal; then there is only averaging.
APART = optax.sgd(lambda count: jnp.where(count == 0, 1.0, 0.0))


def seen(rule, workers, seconds, law, **settings):
    return replay.run(rule, durations=law, workers=workers, seconds=seconds, record_events=False, **settings)


# Speed and staleness.


def test_nobody_waits_for_the_slow_one():
    run = seen(rules.ad_psgd(jd.topology.ring, SGD), 8, 1200, durations.constant(SEVEN_AND_A_SLOW_ONE))
    assert len(run.trace.steps) / 1200 == pytest.approx(7 + 1 / 6, abs=1e-3)
    assert replay.peer_delays(run.trace).mean() == pytest.approx(7, abs=0.01)  # the number of workers less one
    slow = replay.peer_delays(run.trace, 7)
    assert slow.mean() == pytest.approx(42, abs=0.1)
    assert np.allclose(run.computing, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("n", "expected"), [(8, 2.168), (16, 2.279), (64, 2.360)])
def test_a_local_barrier_waits_for_less_than_all(n, expected):
    law, iterations = durations.exponential(1.0), 400
    run = seen(rules.d_psgd(jd.topology.ring, SGD), n, 2.4 * iterations, law)
    measured = 2.4 * iterations * n / len(run.trace.steps)
    assert measured == pytest.approx(expected, rel=0.05)
    drawn = np.array([list(itertools.islice(durations.stream(law, 0, i), iterations)) for i in range(n)])
    ready = np.zeros(n)
    for k in range(iterations):
        done = ready + drawn[:, k]
        ready = np.maximum(done, np.maximum(np.roll(done, 1), np.roll(done, -1)))
    assert measured == pytest.approx(ready.mean() / iterations, rel=0.01)


def test_a_slow_neighbor_slows_all():
    run = seen(rules.d_psgd(jd.topology.ring, SGD), 8, 1204, durations.constant(SEVEN_AND_A_SLOW_ONE))
    assert 1200 * 8 / len(run.trace.steps) == pytest.approx(6, rel=0.01)
    # Its neighbors have its models at once; then an iteration ahead for each hop.
    done = np.bincount(run.trace.gradients.worker)
    assert (done - done[7]).tolist() == [0, 1, 2, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(("rate", "seconds"), [(1e3, 1.0), (24.0, 3.0)])
def test_the_mean_of_all_travels_beside_the_gradient(rate, seconds):
    line = links.alpha_beta(0.0, rate)  # a ring of four sends 3/2 of a model of 48 bytes: 0.072 s or 3 s
    task = MATRIX._replace(params={"w": np.zeros(12, np.float32)})
    run = replay.run(rules.delay_by_one(SGD), task, links=line, workers=4, seconds=30, timing_only=True)
    assert len(run.trace.steps) == 30 / seconds
    assert set(replay.step_delays(run.trace)[1:]) == {1}


# Models.


def in_order(run):
    """What happened to models, for the transcription: even workers ask, and their exchange is over at once."""
    params = run.trace.words.index("params")
    for event in run.trace.events:
        if event.what == 2:
            yield (event.place,)
        elif event.word == params and event.place % 2:
            yield (event.sender, event.place)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("seconds", "limit"), [(SEVEN_AND_A_SLOW_ONE, 3.105), ([1] * 8, 3.499)])
@pytest.mark.parametrize("choice", ["uniform", "in_turn"])
def test_ad_psgd_is_the_papers(seconds, limit, choice):
    """Its mean is that of the goals weighted by speed, 3.093, where one is slow: the true one is 3.5."""
    task = replay.Task(jnp.zeros(()), lambda x, b: 0.5 * (x - b) ** 2, lambda seed, worker, job: float(worker))
    rule = rules.ad_psgd(jd.topology.ring, SGD, choice=choice)
    clock = replay.simulator(rule, task, workers=8, durations=durations.constant(seconds))
    state = clock.advance(clock.init(), seconds=400)
    events = list(in_order(clock.result(state)))
    models = peers.ad_psgd(events, np.arange(8.0), 0.05)
    np.testing.assert_allclose([float(role.params) for role in state.roles[:8]], models[-1], rtol=1e-4)
    pairs = {event for event in events if len(event) == 2}
    assert pairs == {(i, (i + side) % 8) for i in (0, 2, 4, 6) for side in (-1, 1)}
    steps = np.array([len(event) == 1 for event in events])
    assert models[steps][1500:].mean() == pytest.approx(limit, abs=0.02)


def effective(state, exchange, workers):
    """Each worker's model with the reply that is under way to it, and what its group has not heard yet."""
    models = []
    roles = [role for role in state.roles[:workers] if not hasattr(role, "site") or role.site.index % 2 == 0]
    for role in roles:
        model = role.averaged if hasattr(role, "averaged") else role.params
        other = role.pairs.partner
        if other >= 0:
            edge, there = role.pairs.edges[other], roles[other].pairs.edges[role.peer.index]
            if there.count > edge.count:
                model, _ = exchange.settle(model, edge.memory, role.pairs.request, there.reply, 1, edge.count)
        models.append(np.asarray(model["w"], np.float64))
    return np.array(models)


EXCHANGES = {
    "whole": rules.whole_models(),
    "power": rules.power_gossip(2),
    "choco": rules.choco_exchange(jd.top_k(0.3), step_size=0.4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["whole", "power", "choco", "groups"])
def test_averaging_keeps_the_sum_also_in_flight_and_through_failures(name):
    exchange = EXCHANGES.get(name, EXCHANGES["whole"])
    if name == "groups":
        rule, workers = rules.hierarchical_ad_psgd(jd.topology.ring, APART, group_size=2), 8
    else:
        rule, workers = rules.ad_psgd(jd.topology.ring, APART, exchange=exchange), 4
    task = MATRIX._replace(batch=lambda seed, worker, job: GOALS[worker * 4 // workers])
    law = durations.failures(durations.exponential(0.3), up=3, down=1)
    clock = replay.simulator(rule, task, workers=workers, durations=law, links=links.alpha_beta(0.2), seed=1)
    state, totals, spreads, caught = clock.init(), [], [], 0
    for tenth in range(250):
        state = clock.advance(state, seconds=tenth / 10)
        if not all(role.version for role in state.roles[:workers]):
            continue
        models = effective(state, exchange, workers)
        caught += any((models[i] != state.roles[i * workers // 4].params["w"]).any() for i in range(4))
        totals.append(models.sum(0))
        spreads.append(((models - models.mean(0)) ** 2).sum())
    assert caught > 5
    assert len(totals) > 150
    assert "recovered" in clock.result(state).trace.words
    np.testing.assert_allclose(totals, [GOALS.sum(0)] * len(totals), atol=2e-5)
    assert name == "choco" or (np.diff(spreads) <= 1e-6).all()
    assert spreads[-1] < 0.02 * ((GOALS - GOALS.mean(0)) ** 2).sum()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", [5.3, 5.7])
def test_others_go_on_while_one_is_gone(who, when):
    """It fails before the other half has its question, or before it has the reply."""

    def outages(rng, worker):
        yield (when, 20.0) if worker == who else (1e6, 1.0)
        yield 1e6, 1.0

    law = durations.constant(1.0)._replace(outages=outages)
    run = replay.run(
        rules.ad_psgd(jd.topology.ring, SGD), durations=law, workers=4, seconds=60, links=links.alpha_beta(0.4)
    )
    steps = np.bincount(run.trace.gradients.worker)
    assert steps[[i for i in range(4) if i != who]].tolist() == [60, 60, 60]
    assert steps[who] == 5 + int(60 - when - 20)
    events = run.trace.events
    asked = events.tick[(events.word == run.trace.words.index("params")) & (events.place == 1)] / 1e9
    assert (asked > when + 20).sum() > 20  # it is asked as before


# Decentralized SGD with a barrier.


@pytest.mark.parametrize(
    ("graph", "order"),
    [(jd.topology.ring, "adapt_then_combine"), (jd.topology.one_peer_exponential, "combine_then_adapt")],
)
def test_d_psgd_is_what_gossip_does(graph, order):
    optimizer = optax.adam(0.05)
    tx = jd.gossip(optimizer, graph(4), method=jd.decentralized.d_psgd(order=order))

    def step(state, goal):
        grads = jax.tree.map(lambda x: x - goal[0], state["x"])
        updates, opt = tx.update(grads, state["opt"], state["x"])
        return {"x": optax.apply_updates(state["x"], updates), "opt": opt}, {}

    simulated = jd.simulate(step, workers=4)
    state = jd.place({"x": jd.PerWorker({"w": jnp.zeros((6, 5))}), "opt": tx.init({"w": jnp.zeros((6, 5))})}, 4)
    for _ in range(8):
        state, _ = simulated(state, GOALS)
    clock = replay.simulator(rules.d_psgd(graph, optimizer, order=order), MATRIX, workers=4)
    roles = clock.advance(clock.init(), seconds=8).roles
    np.testing.assert_allclose(
        [role.params["w"] for role in roles[:4]], jax.tree.leaves(state["x"])[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("graph", "order"),
    [
        ("ring", "adapt_then_combine"),
        ("ring", "combine_then_adapt"),
        ("one_peer_exponential", "adapt_then_combine"),
        ("one_peer_exponential", "combine_then_adapt"),
        ("random_matchings", "adapt_then_combine"),
        ("delay", "combine_then_adapt"),
    ],
)
def test_no_failure_changes_what_d_psgd_computes(graph, order):
    first = order == "combine_then_adapt"
    topology = jd.topology.complete(4) if graph == "delay" else getattr(jd.topology, graph)(4)
    rule = rules.delay_by_one(SGD) if graph == "delay" else rules.d_psgd(topology, SGD, order=order)
    law = durations.failures(durations.exponential(0.5), up=6, down=2)
    clock = replay.simulator(rule, MATRIX, workers=4, durations=law, links=links.alpha_beta(0.1), seed=3)
    state = clock.advance(clock.init(), seconds=60)
    done = [role.version for role in state.roles[:4]]
    assert min(done) > 8
    assert clock.result(state).down.sum() > 0.1
    goals = GOALS.reshape(4, -1)
    matrices = [jd.topology.matrix(topology, k) for k in range(max(done))]
    wanted = reference.d_psgd(lambda t, x: x - goals, np.zeros_like(goals, float), matrices, 0.05, combine_first=first)
    for i, role in enumerate(state.roles[:4]):
        np.testing.assert_allclose(role.params["w"].reshape(-1), wanted[done[i] - 1, i], rtol=2e-5, atol=1e-6)
        if graph != "delay":
            assert len({k for _, k in role.outbox}) <= 4  # what others have used is not kept


# Any batches.

FOUR_SPEEDS = durations.constant([1, 1, 3, 10])  # 3, 3, 1 and 0 gradients in a window of 3.5 seconds


def counts_of(run, workers):
    """`[rounds, workers]`: the gradients in each round, from the trace."""
    found = np.zeros((1 + run.trace.gradients.read.max(), workers))
    np.add.at(found, (run.trace.gradients.read, run.trace.gradients.worker), 1)
    return found


def any_batches(rule, workers=4, **settings):
    """The models of all workers, their rounds, and the numbers of gradients in each."""
    clock = replay.simulator(rule, MATRIX, workers=workers, **settings)
    state = clock.advance(clock.init(), seconds=60)
    peers = [role.peers for role in state.roles[:workers]]
    return (
        [x.params["w"].reshape(-1) for x in peers],
        [x.version for x in peers],
        counts_of(clock.result(state), workers),
    )


@pytest.mark.parametrize("weights", ["batch", "uniform"])
@pytest.mark.parametrize(
    ("graph", "law"),
    [
        ("ring", FOUR_SPEEDS),
        ("random_matchings", FOUR_SPEEDS),
        ("one_peer_exponential", durations.failures(durations.exponential(1.0), up=9, down=2)),
    ],
    ids=["ring", "matchings", "failures"],
)
def test_any_batch_mirror_descent_is_the_papers(graph, law, weights):
    mirror = jd.online.mirror_descent(jd.online.euclidean(), 0.05, axis=None)
    topology = getattr(jd.topology, graph)(4)
    rule = rules.any_batch_gossip(3.5, topology, mirror, weights=weights)
    models, rounds, counts = any_batches(rule, durations=law, links=links.alpha_beta(0.1), seed=3)
    assert min(rounds) > 8
    if law is FOUR_SPEEDS:
        assert counts[:8].tolist() == [[3, 3, 1, 0]] * 8
    goals = np.broadcast_to(GOALS.reshape(4, -1), (max(rounds), 4, 30))
    wanted = mirror_reference.mirror_descent(
        np.zeros(30),
        goals,
        counts[: max(rounds)],
        matrices=lambda k: jd.topology.matrix(topology, k),
        rounds=1,
        rate=lambda t: 0.05,
        step=mirror_reference.euclidean,
        weights=weights,
        order="adapt_then_combine",
    )
    for i, model in enumerate(models):
        np.testing.assert_allclose(model, wanted[rounds[i] - 1, i], rtol=2e-5, atol=1e-6)


def test_on_a_complete_graph_it_is_any_batch():
    settings = {"durations": FOUR_SPEEDS, "workers": 4, "seconds": 36}
    gossip = replay.run(rules.any_batch_gossip(3.5, jd.topology.complete, SGD), MATRIX, **settings)
    exact = replay.run(rules.any_batch(3.5, SGD), MATRIX, **settings)
    np.testing.assert_allclose(gossip.params["w"], exact.params["w"], rtol=1e-5, atol=1e-6)
    assert counts_of(gossip, 4)[:9].tolist() == counts_of(exact, 4)[:9].tolist()


def test_uniform_weights_count_slow_workers_alike():
    """With data that differ, weights by batch count gradients alike, and uniform ones workers."""
    law, goals = durations.constant([1, 1, 1, 3]), GOALS.reshape(4, -1)
    found = {}
    for weights in ("batch", "uniform"):
        rule = rules.any_batch_gossip(3.5, jd.topology.complete, optax.sgd(0.2), weights=weights)
        found[weights] = np.mean(any_batches(rule, durations=law)[0], axis=0)
    distances = {name: np.abs(x - goals.mean(0)).max() for name, x in found.items()}
    assert distances["uniform"] < 0.05 < distances["batch"]
    np.testing.assert_allclose(found["batch"], np.average(goals, axis=0, weights=[3, 3, 3, 1]), atol=0.05)


def test_any_batch_gossip_sends_models_and_weights():
    rule = rules.any_batch_gossip(3.5, jd.topology.ring, SGD)
    run = replay.run(rule, MATRIX, durations=FOUR_SPEEDS, workers=4, seconds=7.1)
    assert run.links[0, 1] == 2 * (4 * 30 + 4)


# Groups.


def test_a_group_of_one_is_a_worker():
    models = []
    for rule in (rules.ad_psgd(jd.topology.ring, SGD), rules.hierarchical_ad_psgd(jd.topology.ring, SGD, group_size=1)):
        clock = replay.simulator(rule, MATRIX, workers=4, durations=durations.constant([1.0, 1.137, 1.2911, 1.3379]))
        roles = clock.advance(clock.init(), seconds=20).roles[:4]
        models.append([(role.averaged if hasattr(role, "averaged") else role.params)["w"] for role in roles])
    np.testing.assert_allclose(*models, atol=1e-5)


def test_groups_have_one_model_and_wait_for_no_other_group():
    rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.adam(0.05), group_size=2)
    task = MATRIX._replace(batch=lambda seed, worker, job: GOALS[worker % 2])
    law = durations.constant([1, 2, 1, 1, 1, 1, 1, 1])
    clock = replay.simulator(rule, task, workers=8, durations=law)
    state = clock.advance(clock.init(), seconds=100)
    for first in range(0, 8, 2):
        np.testing.assert_array_equal(state.roles[first].params["w"], state.roles[first + 1].params["w"])
        np.testing.assert_allclose(state.roles[first].params["w"], GOALS[:2].mean(0), atol=0.05)
    assert [role.version for role in state.roles[:8]] == [50, 50, *[100] * 6]
    sent = clock.result(state).links
    assert all(source % 2 == to % 2 == 0 for source, to in sent)  # between groups first workers alone


# What pairs tell each other.


def test_power_gossip_sends_directions():
    task = MATRIX._replace(params={"b": np.zeros(7, np.float32), "w": np.zeros((6, 5), np.float32)})
    run = replay.run(
        rules.ad_psgd(jd.topology.ring, SGD, exchange=rules.power_gossip(2)),
        task,
        workers=2,
        seconds=3,
        timing_only=True,
    )
    events = run.trace.events
    right, left = 4 * (7 + 2 * 6), 4 * (7 + 2 * 5)
    assert events.bytes[events.what == 1].tolist() == [right, right, left, left] * 2


def test_power_gossip_of_full_rank_is_the_mean():
    runs = [
        replay.run(rules.ad_psgd(jd.topology.ring, SGD, exchange=one), MATRIX, workers=4, seconds=6)
        for one in (rules.power_gossip(5), rules.whole_models())
    ]
    np.testing.assert_array_equal(runs[0].params["w"], runs[1].params["w"])
    assert runs[0].links == runs[1].links


def test_power_gossip_finds_the_difference():
    """Of rank 2: two exchanges find it, and the third has nothing left to do."""
    exchange = rules.power_gossip(2)
    rng = np.random.default_rng(1)
    words = np.array([0, 0, 1], np.uint32)
    here = {"w": rng.standard_normal((6, 5)).astype(np.float32)}
    there = {"w": here["w"] + (rng.standard_normal((6, 2)) @ rng.standard_normal((2, 5))).astype(np.float32)}
    mean = (here["w"] + there["w"]) / 2
    memory = exchange.start(here, words)
    far = []
    for turn in range(3):
        asked = exchange.encode(here, memory, 1, turn, words)
        replied = exchange.encode(there, memory, -1, turn, words)
        here, after = exchange.settle(here, memory, asked, replied, 1, turn)
        there, same = exchange.settle(there, memory, asked, replied, -1, turn)
        for left, right in zip(jax.tree.leaves(after), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(left, right)
        memory = after
        far.append(np.abs(here["w"] - mean).max())
        np.testing.assert_allclose(here["w"] + there["w"], 2 * mean, atol=1e-5)
    assert far[0] > 0.1
    assert far[1] < 1e-5


def test_differences_without_a_code_are_the_mean():
    plain = rules.choco_exchange(jd.compressors.identity(), step_size=1.0)
    runs = [
        replay.run(rules.ad_psgd(jd.topology.ring, SGD, exchange=one), MATRIX, workers=4, seconds=10)
        for one in (plain, None)
    ]
    np.testing.assert_allclose(runs[0].params["w"], runs[1].params["w"], atol=1e-5)


def test_models_travel_coded():
    rule = rules.compressed(rules.ad_psgd(jd.topology.ring, SGD), {"params": jd.compressors.cast(jnp.float16)})
    run = replay.run(rule, MATRIX, workers=4, seconds=10)
    exact = replay.run(rules.ad_psgd(jd.topology.ring, SGD), MATRIX, workers=4, seconds=10)
    assert run.links == {pair: count // 2 for pair, count in exact.links.items()}
    np.testing.assert_allclose(run.params["w"], exact.params["w"], atol=2e-3)


def test_a_run_of_pairs_goes_on_from_a_file(tmp_path):
    law = durations.failures(durations.exponential(0.5), up=5, down=1)
    rule = rules.ad_psgd(jd.topology.ring, optax.adam(0.05), exchange=EXCHANGES["power"])
    clock, again = (
        replay.simulator(rule, MATRIX, workers=4, durations=law, links=links.alpha_beta(0.1)) for _ in range(2)
    )
    half = clock.advance(clock.init(), seconds=9.3)
    replay.save(tmp_path / "run.npz", clock, half)
    whole = clock.result(clock.advance(half, seconds=20))
    resumed = again.result(again.advance(replay.restore(tmp_path / "run.npz", again), seconds=20))
    np.testing.assert_array_equal(whole.trace.events, resumed.trace.events)
    np.testing.assert_array_equal(whole.params["w"], resumed.params["w"])


# Graphs, and how rules are spelled.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ad_psgd", "ad_psgd"),
        ("ad_psgd:relabeled-ring,rank=2,choice=in_turn", "ad_psgd"),
        ("ad_psgd:hypercube,group=2", "hierarchical_ad_psgd"),
        ("d_psgd:torus,order=combine_then_adapt", "d_psgd"),
        ("delay_by_one", "delay_by_one"),
    ],
)
def test_spellings(text, name):
    rule = parse_rule(text, SGD)
    assert rule.name == name
    run = seen(rule, 8, 20, durations.constant(1.0))
    assert set(staleness(text, run.trace)[20:]) == {7 if "ad_psgd" in name else int(name == "delay_by_one")}
    with pytest.raises(ValueError, match="sends models, and no gradients"):
        parse_rule(text, SGD, "f16")


def test_neighbors_are_chosen_evenly_and_the_same_each_time():
    halves = pair_rules.halves(jd.topology.complete(2))
    assert halves.active == (True, False)
    halves = pair_rules.halves(jd.topology.hypercube(16))
    drawn = [pair_rules.choose_neighbor(halves, "uniform", 5, 0, k) for k in range(800)]
    assert drawn == [pair_rules.choose_neighbor(halves, "uniform", 5, 0, k) for k in range(800)]
    assert set(drawn) == {1, 2, 4, 8}
    assert min(drawn.count(neighbor) for neighbor in (1, 2, 4, 8)) > 160


def test_a_relabeled_ring_of_halves_meets_everybody():
    run = seen(
        rules.ad_psgd(lambda n: jd.topology.relabeled_ring(n, halves=True), SGD), 8, 100, durations.constant(1.0)
    )
    assert set(run.links) == {pair for i in range(0, 8, 2) for j in range(1, 8, 2) for pair in ((i, j), (j, i))}


@pytest.mark.parametrize(
    ("make", "workers", "message"),
    [
        (
            lambda: rules.ad_psgd(jd.topology.ring, SGD),
            5,
            "odd cycle 2 - 1 - 0 - 4 - 3 - 2: use a ring of an even number",
        ),
        (lambda: rules.ad_psgd(jd.topology.relabeled_ring, SGD), 8, "the relabeled ring has the odd cycle"),
        (lambda: rules.ad_psgd(jd.topology.ring(4), SGD), 6, "the ring has 4 workers, but the run has 6"),
        (
            lambda: rules.d_psgd(jd.topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)]), SGD),
            3,
            "do not sum to 1 in both",
        ),
        (
            lambda: rules.hierarchical_ad_psgd(jd.topology.ring, SGD, group_size=2),
            5,
            "5 workers cannot be divided into groups of 2",
        ),
        (lambda: rules.hierarchical_ad_psgd(jd.topology.ring(4), SGD, group_size=2), 4, "the ring has 4 groups, but"),
        (
            lambda: rules.hierarchical_ad_psgd(jd.topology.ring, SGD, group_size=0),
            4,
            "group_size must be at least 1, got 0",
        ),
        (lambda: rules.power_gossip(0), 2, "rank must be at least 1, got 0"),
        (lambda: rules.choco_exchange(jd.top_k(0.1), step_size=1.5), 2, r"step_size must be in \(0, 1\], got 1.5"),
        (lambda: jd.topology.relabeled_ring(5, halves=True), 2, "a ring of two halves needs an even number .* got 5"),
    ],
)
def test_what_cannot_work_is_refused(make, workers, message):
    with pytest.raises(ValueError, match=message):
        replay.run(make(), workers=workers, seconds=1)

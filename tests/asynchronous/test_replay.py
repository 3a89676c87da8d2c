"""The virtual clock against what can be computed by hand, and against itself."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import topology
from jaxdist.asynchronous import Compute, Message, Role, Rule, Send, durations, links, replay, rules
from jaxdist.asynchronous.protocol import SERVER, GradientRecord, Site

SGD = optax.sgd(0.1)
GOALS = np.array([0.0, 1.0, 5.0, 2.0], np.float32)


def loss(x, goal):
    return 0.5 * jnp.sum((x["w"] - goal) ** 2)


def noisy(seed, worker, job):
    rng = np.random.default_rng((seed, worker, job))
    return GOALS[worker] + 0.1 * rng.standard_normal(3).astype(np.float32)


TASK = replay.Task(
    {"w": np.zeros(3, np.float32)}, loss, noisy, evaluate=jax.jit(lambda x: jnp.sum((x["w"] - 2.0) ** 2))
)
RULES = {
    "asgd": rules.asgd(SGD),
    "dc_asgd": rules.dc_asgd(SGD, decay=0.9),
    "ssp": rules.ssp(1, SGD),
    "bsp": rules.bsp(SGD),
    "backup": rules.backup_workers(1, SGD),
    "rennala": rules.rennala(3, SGD),
    "malenia": rules.malenia(4, SGD, stop=True),
    "ringmaster": rules.ringmaster(2, SGD, stop=True),
    "ringleader": rules.ringleader(SGD),
    "dude": rules.dude(SGD),
    "prague": rules.prague(SGD, group_size=3),
    "prague_random": rules.prague(SGD, group_size=2, groups="random"),
    "ad_psgd": rules.ad_psgd(jd.topology.ring, SGD),
    "hierarchical_ad_psgd": rules.hierarchical_ad_psgd(jd.topology.ring, SGD, group_size=2),
    "d_psgd": rules.d_psgd(jd.topology.ring, SGD),
    "delay_by_one": rules.delay_by_one(SGD),
    "hop": rules.hop(topology.ring, SGD, tokens=3, backup=1, skip=3),
    "pipe_sgd": rules.pipe_sgd(SGD, width=3),
    "dasgd": rules.dasgd(SGD, sync_period=2, delay=1),
    "lasgd": rules.lasgd(SGD),
    "palsgd": rules.palsgd(SGD, learning_rate=0.1, sync_period=2, probability=0.3),
    "any_batch": rules.any_batch(2.0, SGD),
    "any_batch_gossip": rules.any_batch_gossip(2.0, topology.ring, SGD),
    "task_allocation": rules.task_allocation(5, SGD),
}


def taus(*seconds):
    return {"durations": durations.constant(seconds), "workers": len(seconds)}


def harmonic(n):
    return sum(1 / k for k in range(1, n + 1))


def same(left, right):
    for a, b in zip(left, right):
        np.testing.assert_array_equal(a, b)


# Durations: what n workers wait for.


@pytest.mark.parametrize("n", [8, 16])
def test_the_longest_of_n_exponentials_takes_a_harmonic_number(n):
    run = replay.run(rules.bsp(SGD), durations=durations.exponential(1.0), workers=n, steps=400, record_events=False)
    assert run.seconds / 400 == pytest.approx(harmonic(n), rel=0.06)


@pytest.mark.parametrize("spare", [1, 2, 3])
def test_backup_workers_wait_for_an_order_statistic(spare):
    rule = rules.backup_workers(spare, SGD)
    run = replay.run(rule, durations=durations.exponential(1.0), workers=8, steps=400, record_events=False)
    assert run.seconds / 400 == pytest.approx(harmonic(8) - harmonic(spare), rel=0.06)


def test_shifted_exponential():
    law = durations.shifted_exponential(0.5, 0.5)
    run = replay.run(rules.bsp(SGD), durations=law, workers=8, steps=400, record_events=False)
    assert run.seconds / 400 == pytest.approx(1.858929, rel=0.04)


def test_random_slowdowns():
    law = durations.random_slow(durations.constant(1.0), factor=6, probability=1 / 8)
    run = replay.run(rules.bsp(SGD), durations=law, workers=8, steps=400, record_events=False)
    assert run.seconds / 400 == pytest.approx(4.2820, rel=0.04)
    run = replay.run(rules.asgd(SGD), durations=law, workers=8, seconds=600, record_events=False)
    assert len(run.trace.steps) / 600 == pytest.approx(4.923, rel=0.04)


def test_a_recorded_trace_may_end():
    law = durations.recorded([[1.0, 2.0], [4.0]], mode="stop")
    with pytest.raises(replay.DeadlockError, match="worker 0 computes forever; worker 1 computes forever"):
        replay.run(rules.asgd(SGD), durations=law, workers=2, steps=4)
    cycled = durations.recorded([[1.0, 2.0], [4.0]])
    assert replay.run(rules.asgd(SGD), durations=cycled, workers=2, seconds=12).trace.steps.tick.tolist() == [
        second * 10**9 for second in (1, 3, 4, 4, 6, 7, 8, 9, 10, 12, 12)
    ]


def test_speeds_that_change():
    """Off from 2.5 s to 4 s, then twice as fast; the other is off for good after one gradient and a half."""
    law = durations.power([0, 2.5, 4], [[1, 0, 2], [0.6, 0, 0]])
    run = replay.run(rules.asgd(SGD), durations=law, workers=2, seconds=5)
    np.testing.assert_allclose(run.trace.steps.tick / 1e9, [1, 1 / 0.6, 2, 4.25, 4.75])
    with pytest.raises(ValueError, match="speeds must be 2 numbers of at least 0"):
        durations.power([0, 1], [[1, -1]])
    with pytest.raises(ValueError, match="times must increase from 0"):
        durations.power([1, 2], [[1, 1]])


def test_durations_of_a_file(tmp_path):
    (tmp_path / "good.json").write_text("[[1.0, 2.0], [4]]")
    law = durations.from_file(tmp_path / "good.json")
    assert replay.run(rules.asgd(SGD), durations=law, workers=2, seconds=12).trace.steps.tick[0] == 10**9
    (tmp_path / "bad.json").write_text('[1, "x"]')
    with pytest.raises(ValueError, match="must contain a list of lists of seconds"):
        durations.from_file(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[[1e400], [1]]")
    with pytest.raises(ValueError, match="a list of lists of finite seconds"):
        durations.from_file(tmp_path / "bad.json")


# Rules: delays, throughput, what is thrown away.


@pytest.mark.parametrize("seconds", [(1.0, 2.0, 4.0), (1.0, 2**0.5, np.pi)])
def test_delays_of_asgd(seconds):
    run = replay.run(rules.asgd(SGD), seconds=600, **taus(*seconds))
    rates = 1 / np.array(seconds)
    assert len(run.trace.steps) / 600 == pytest.approx(rates.sum(), rel=1e-2)
    for worker, tau in enumerate(seconds):
        assert replay.delays(run.trace, worker).mean() == pytest.approx(tau * rates.sum() - 1, rel=1e-2)
    assert replay.delays(run.trace).mean() == pytest.approx(2, rel=1e-2)  # the number of workers less one


@pytest.mark.parametrize(("staleness", "steps"), [(0, 400), (1, 403), (3, 409), (10, 430)])
def test_ssp_goes_as_fast_as_the_slowest(staleness, steps):
    run = replay.run(rules.ssp(staleness, SGD), seconds=600, record_events=False, **taus(1, 1, 1, 6))
    assert len(run.trace.steps) == steps
    completed = np.cumsum(np.eye(4, dtype=int)[run.trace.gradients.worker], axis=0)
    assert (completed.max(1) - completed.min(1)).max() == staleness + 1


@pytest.mark.parametrize(
    ("max_delay", "used", "thrown", "most"),
    [(1, 1000, 2100, 0), (3, 3000, 100, 2), (10, 3000, 100, 2), (40, 3100, 0, 30)],
)
def test_ringmaster_throws_away_what_is_too_old(max_delay, used, thrown, most):
    run = replay.run(rules.ringmaster(max_delay, SGD), seconds=1000, **taus(1, 1, 1, 10))
    accepted = run.trace.gradients.accepted
    assert (accepted.sum(), (~accepted).sum(), replay.delays(run.trace).max()) == (used, thrown, most)


def test_ringmaster_with_stops_wastes_no_message():
    run = replay.run(rules.ringmaster(3, SGD, stop=True), seconds=1000, **taus(1, 1, 1, 10))
    assert run.trace.gradients.accepted.all()  # the slow worker never finishes, the others are in time
    assert len(run.trace.steps) == 3000
    assert run.computing[3] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("batch", "steps"), [(1, 1000), (3, 600), (6, 375), (30, 94)])
def test_rennala_gathers_at_one_model(batch, steps):
    run = replay.run(rules.rennala(batch, SGD), seconds=1000, **taus(1, 1, 1, 10))
    assert len(run.trace.steps) == steps
    assert replay.delays(run.trace).max() == 0


def test_rennala_with_stops_wastes_no_message():
    run = replay.run(rules.rennala(3, SGD, stop=True), seconds=1000, **taus(1, 1, 1, 10))
    assert run.trace.gradients.accepted.all()  # the slow worker is stopped at every step
    assert len(run.trace.steps) == 1000


@pytest.mark.parametrize("seconds", [(1, 2, 4), (1, 1, 1, 1, 10)])
def test_ringleader_steps_n_times_a_round(seconds):
    n = len(seconds)
    run = replay.run(rules.ringleader(SGD), seconds=1000, **taus(*seconds))
    assert replay.step_delays(run.trace).max() == 2 * n - 2
    assert run.trace.gradients.accepted.all()
    assert np.allclose(run.computing, 1)
    assert len(run.trace.steps) >= n * (1000 // (2 * max(seconds)))
    # Every step gives its worker, and nobody else, the new model: each once a round.
    told = run.trace.events.place[run.trace.events.word == run.trace.words.index("params")]
    rounds = told[: len(told) // n * n].reshape(-1, n)
    assert (np.sort(rounds, axis=1) == np.arange(n)).all()


@pytest.mark.parametrize(
    ("rule", "limit"), [("asgd", 1.0), ("ringleader", 2.0), ("dude", 2.0), ("malenia", 2.0), ("bsp", 2.0)]
)
def test_who_is_fast_counts_more_unless_the_rule_says_otherwise(rule, limit):
    task = replay.Task(jnp.zeros(()), lambda x, b: 0.5 * (x - b) ** 2, lambda seed, worker, job: GOALS[worker])
    slow = optax.sgd(0.03)
    made = {"asgd": rules.asgd, "ringleader": rules.ringleader, "dude": rules.dude, "bsp": rules.bsp}
    made["malenia"] = lambda optimizer: rules.malenia(3, optimizer)
    run = replay.run(made[rule](slow), task, steps=300, record_events=False, **taus(1, 2, 4))
    assert float(run.params) == pytest.approx(limit, abs=0.08)


# Numerics.


def test_one_worker_is_sgd():
    x = {"w": jnp.zeros(3)}
    for job in range(20):
        x = jax.tree.map(lambda leaf, g: leaf - 0.1 * g, x, jax.grad(loss)(x, noisy(0, 0, job)))
    for rule in (rules.asgd(SGD), rules.ringmaster(1, SGD), rules.ssp(0, SGD), rules.dude(SGD), rules.bsp(SGD)):
        np.testing.assert_allclose(replay.run(rule, TASK, workers=1, steps=20).params["w"], x["w"], rtol=1e-6)


def test_equal_workers_take_turns():
    """Delays of n - 1 in the order of the workers: SGD that reads a model of n - 1 steps ago."""
    models = [np.zeros(3)]
    for step in range(40):
        worker, job = step % 4, step // 4
        models.append(models[-1] - 0.1 * (models[max(0, step - 3)] - noisy(0, worker, job)))
    run = replay.run(rules.asgd(SGD), TASK, workers=4, steps=40)
    np.testing.assert_allclose(run.params["w"], models[-1], rtol=1e-5)
    assert run.trace.gradients.worker.tolist() == [0, 1, 2, 3] * 10


def test_bsp_is_what_simulate_does():
    optimizer = optax.adam(0.05)
    tx = optax.chain(jd.all_reduce(jd.exact()), optimizer)

    def step(state, batch):
        x, opt_state = state
        _, grads = jd.local_value_and_grad(lambda x, rows: loss(x, rows[0]))(x, batch)
        updates, opt_state = tx.update(grads, opt_state, x)
        return (optax.apply_updates(x, updates), opt_state), {}

    simulated = jd.simulate(step, workers=4)
    x = {"w": jnp.zeros(3)}
    state = (x, tx.init(x))
    for job in range(10):
        state, _ = simulated(state, np.concatenate([noisy(0, worker, job)[None] for worker in range(4)]))
    for rule in (rules.bsp(optimizer), rules.backup_workers(0, optimizer)):
        run = replay.run(rule, TASK, steps=10, **taus(1, 2, 3, 4))
        # To rounding: two programs, which a compiler may fuse each in its own way.
        np.testing.assert_allclose(run.params["w"], state[0]["w"], rtol=1e-6)


def test_dropped_gradients_are_never_computed():
    seen = []

    def batch(seed, worker, job):
        seen.append((worker, job))
        return noisy(seed, worker, job)

    run = replay.run(rules.ringmaster(1, SGD), TASK._replace(batch=batch), seconds=40, **taus(1, 1, 1, 10))
    assert len(seen) == len(run.trace.steps) == 40


def test_delay_compensation():
    """On f = h/2 (x - b)^2, g + λ g² (x - x_stale): 2.262 for the page's numbers, where fresh is 0.6 and stale 2.4."""
    task = replay.Task(jnp.asarray(1.0), lambda x, b: 1.5 * (x - 0.2) ** 2, lambda *job: 0)
    # Worker 0 takes x from 1 to 0.4 by a rate of 0.25; then worker 1, who read 1, arrives.
    run = replay.run(rules.dc_asgd(optax.sgd(0.25)), task, steps=2, **taus(1, 1.5))
    assert float(run.params) == pytest.approx(0.4 - 0.25 * (2.4 - 0.04 * 2.4**2 * 0.6), abs=1e-6)


def broken(seed, worker, job):
    return np.full(3, np.nan if worker == 1 and job >= 3 else GOALS[worker], np.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*RULES])
def test_a_gradient_that_is_not_finite_is_named(name):
    with pytest.raises(
        replay.NonFiniteGradientError, match=r"the gradient of worker 1 at its step \d+ is not finite"
    ) as error:
        replay.run(RULES[name], TASK._replace(batch=broken), workers=4, seconds=400)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.worker == 1
    assert again.step == error.value.step >= 3
    assert str(again) == str(error.value)


def test_a_model_that_has_diverged_is_named_as_such():
    with pytest.raises(
        replay.NonFiniteGradientError, match=r"the model that worker 0 read for its step .* is not finite: "
    ):
        replay.run(rules.asgd(optax.sgd(1e30)), TASK, workers=1, seconds=40)


def served(rule, *messages, params=1.0):
    """What the server of two workers makes of messages `(worker, kind, gradient, version)`."""
    state, _ = rule.server.init(Site(SERVER, 2), np.float32(params))
    books = []
    for worker, kind, value, version in messages:
        state, actions = rule.server.receive(state, worker, Message(kind, np.float32(value), version))
        books += [action for action in actions if isinstance(action, GradientRecord)]
    return float(rule.server.params(state)), [action.accepted for action in books]


@pytest.mark.parametrize("decay", [None, 0.5])
def test_without_delay_a_corrected_step_is_a_plain_one(decay):
    """Worker 0 failed and pulled after a step of worker 1: the model that its gradient is of is the current one."""
    corrected = rules.dc_asgd(optax.sgd(0.5), compensation=1.0, decay=decay)
    run = (1, "gradient", 2.0, 0), (0, "pull", 0.0, 0), (0, "gradient", 3.0, 1)
    assert served(corrected, *run) == served(rules.asgd(optax.sgd(0.5)), *run) == (1 - 1 - 1.5, [True, True])


def test_a_gradient_of_a_model_before_the_last_pull_is_not_corrected_by_the_wrong_one():
    """The worker got the reply to its last gradient, and sent another one before that to its pull arrived."""
    run = (0, "gradient", 2.0, 0), (1, "gradient", 2.0, 0), (0, "pull", 0.0, 1), (0, "gradient", 3.0, 1)
    assert served(rules.dc_asgd(optax.sgd(0.5), compensation=0.0), *run) == (1 - 2, [True, True, False])


def test_rates_follow_the_delay():
    still = replay.Task(jnp.zeros(()), lambda x, b: x, lambda *job: 0)  # every gradient is 1
    run = replay.run(rules.asgd(optax.sgd(1.0), rate=rules.staleness_aware()), still, steps=50, **taus(1, 2, 4))
    assert float(run.params) == pytest.approx(-(1 / np.maximum(replay.delays(run.trace), 1)).sum(), rel=1e-5)


# The clock itself.


@pytest.mark.sampled(10)
@pytest.mark.parametrize("rule", RULES)
def test_a_run_in_pieces_and_one_without_arrays_are_the_same_run(rule):
    law = durations.failures(durations.exponential(1.0), up=15, down=2)
    settings = {"durations": law, "links": links.alpha_beta(0.01, 1e3, nic=True), "workers": 4, "seed": 7}
    whole = replay.run(RULES[rule], TASK, seconds=30, evaluate_every=5, **settings)
    timing = replay.run(RULES[rule], TASK, seconds=30, timing_only=True, **settings)
    clock = replay.simulator(RULES[rule], TASK, evaluate_every=5, **settings)
    state = clock.init()
    for until in (3, 11.5, 30):
        state = clock.advance(state, seconds=until)
    pieces = clock.result(state)
    for other in (timing, pieces):
        same(whole.trace[:3], other.trace[:3])
        assert whole.links == other.links
    assert len(whole.trace.steps) > 5
    assert "recovered" in whole.trace.words
    np.testing.assert_array_equal(pieces.params["w"], whole.params["w"])
    np.testing.assert_array_equal(pieces.losses, whole.losses)
    assert whole.times.tolist() == [0, 5, 10, 15, 20, 25, 30]


def test_slower_by_four_is_four_times_the_ticks():
    fast = replay.run(RULES["ringleader"], TASK, steps=30, links=links.alpha_beta(0.25, 64.0), **taus(1, 2.5, 3.25))
    slow = replay.run(RULES["ringleader"], TASK, steps=30, links=links.alpha_beta(1.0, 16.0), **taus(4, 10, 13))
    np.testing.assert_array_equal(4 * fast.trace.events.tick, slow.trace.events.tick)
    np.testing.assert_array_equal(fast.params["w"], slow.params["w"])


def test_names_of_workers_do_not_matter():
    seconds, order = np.array([1.0, 1.7, 2.9]), [2, 0, 1]
    own = replay.run(rules.asgd(SGD), TASK, steps=40, **taus(*seconds))
    renamed = TASK._replace(batch=lambda seed, worker, job: noisy(seed, order[worker], job))
    other = replay.run(rules.asgd(SGD), renamed, steps=40, **taus(*seconds[order]))
    np.testing.assert_array_equal(np.array(order)[other.trace.gradients.worker], own.trace.gradients.worker)
    np.testing.assert_array_equal(other.params["w"], own.params["w"])


def test_every_rule_sees_the_same_data_and_durations():
    law = durations.exponential(1.0)
    seen = {}
    for name in ("asgd", "rennala"):
        calls = seen[name] = {}

        def batch(seed, worker, job, calls=calls):
            calls[worker, job] = noisy(seed, worker, job)
            return calls[worker, job]

        run = replay.run(RULES[name], TASK._replace(batch=batch), durations=law, workers=4, seconds=20, seed=3)
        events = run.trace.events
        done = [events.tick[(events.what == 2) & (events.place == worker)].tolist() for worker in range(4)]
        seen[name + " ticks"] = done
    both = seen["asgd"].keys() & seen["rennala"].keys()
    assert len(both) > 10
    assert all((seen["asgd"][key] == seen["rennala"][key]).all() for key in both)
    # Nobody ever waits under either, so that their gradients are done at the same times.
    assert seen["asgd ticks"] == seen["rennala ticks"]


def test_messages_take_their_time_in_order():
    line = links.alpha_beta(0.5, 12.0)  # a model of 12 bytes: 1.5 s
    run = replay.run(rules.asgd(SGD), TASK, seconds=8, links=line, **taus(1))
    assert run.trace.steps.tick.tolist() == [2_500_000_000, 6_500_000_000]
    assert run.links == {(0, -1): 24, (-1, 0): 24}
    crowd = replay.run(rules.asgd(SGD), TASK, seconds=4, links=line._replace(nic=True), **taus(1, 1))
    assert crowd.trace.steps.tick.tolist() == [2_500_000_000, 4_000_000_000]  # the server takes one at a time


@pytest.mark.parametrize("workers", [4, 9, 16])
def test_a_message_that_waits_for_its_receiver_does_not_hold_up_its_sender(workers):
    # Two messages of 1.5 s to each neighbor, of which a card sends one and receives one at a time.
    line = links.alpha_beta(0.5, 4.0, nic=True)
    rule = rules.d_psgd(jd.topology.ring, SGD)
    run = replay.run(rule, links=line, workers=workers, durations=durations.constant(1.0), seconds=120)
    assert len(run.trace.steps) / workers == 120 // (1 + 2 * 1.5)


def test_a_collective_is_applied_when_it_is_done():
    run = replay.run(rules.bsp(SGD), TASK, seconds=10, links=links.alpha_beta(0.5, 24.0), **taus(1, 2, 1.5))
    ring = 2 * 2 * 0.5 + 2 * 2 / 3 * 12 / 24
    np.testing.assert_allclose(run.trace.steps.tick / 1e9, [2 + ring, 4 + 2 * ring], atol=1e-8)
    assert run.sent.tolist() == [32, 32, 32, 0]


def role(receive, start=lambda site, params: (0, ())):
    return Role(start, receive, lambda state: None, lambda state: (1,) if state else ())


def test_deadlock_says_who_waits_for_whom():
    stuck = Rule("stuck", role(lambda state, sender, message: (1, ()), lambda site, params: (0, (Compute(params),))))
    with pytest.raises(replay.DeadlockError, match="worker 0 waits for worker 1") as error:
        replay.run(stuck, workers=2, seconds=10)
    assert error.value.waiting == {0: (1,), 1: (1,)}


def test_messages_in_a_circle_are_an_error():
    def receive(state, sender, message):
        return state, (Send(sender, Message("ping")),)

    circle = Rule("circle", role(receive, lambda site, params: (0, (Send(1 - site.index, Message("ping")),))))
    with pytest.raises(replay.TooManyEventsError, match="zero-latency cycle"):
        replay.run(circle, workers=2, seconds=1, events_per_tick=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        (taus(1, 2, 3) | {"workers": 2}, "durations are for 3 workers, got workers=2"),
        ({"workers": 2, "links": links.alpha_beta(np.ones((4, 4)))}, "links are for 3 workers"),
        ({"workers": 2, "evaluate_every": 1.0}, "needs a task with evaluate="),
        ({"workers": 2, "seconds": None}, "no stopping criterion"),
        ({"workers": 2, "seed": -1}, "seed must be at least 0, got -1"),
        ({"workers": 2, "target": 0.5}, "needs evaluate_every="),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replay.run(RULES["asgd"], **({"seconds": 1} | settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.ringmaster(0, SGD), "max_delay must be at least 1, got 0"),
        (lambda: rules.rennala(0, SGD), "batch must be at least 1, got 0"),
        (lambda: rules.ssp(-1, SGD), "staleness must be at least 0, got -1"),
        (lambda: rules.dc_asgd(SGD, decay=1.0), r"decay must be in \[0, 1\), got 1.0"),
        (
            lambda: replay.run(RULES["asgd"], TASK, workers=2, evaluate_every=1, target=np.nan),
            "target must be finite, got nan",
        ),
        (lambda: replay.run(rules.backup_workers(2, SGD), workers=2, seconds=1), "less than the 2 workers, got 2"),
        (lambda: durations.constant(0.0), "seconds must be positive and finite, got 0.0"),
        (lambda: durations.exponential(-1.0), "mean must be positive and finite, got -1.0"),
        (lambda: links.alpha_beta(-1.0), "latency must be at least 0 and finite, got -1.0"),
    ],
)
def test_factories_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "rule", [rules.bsp(SGD), rules.any_batch(1.5, SGD), rules.task_allocation(4, SGD)], ids=lambda rule: rule.name
)
def test_losses_times_their_share_of_the_examples_weigh_workers(rule):
    """Rules count each gradient once, whatever its batch."""
    goals, examples = np.arange(4.0), np.array([4.0, 1.0, 2.0, 0.0])
    shares = examples / examples.mean()
    task = replay.Task(
        params=jnp.asarray(10.0),
        loss=lambda x, batch: batch[1] * 0.5 * (x - batch[0]) ** 2,
        batch=lambda seed, worker, job: jnp.array([goals[worker], shares[worker]]),
        evaluate=lambda x: x,
    )
    found = replay.run(rule, task, durations=durations.constant([1.0] * 4), workers=4, steps=3).params
    expected, rate = 10.0, 0.1
    for _ in range(3):
        expected -= rate * (examples * (expected - goals)).sum() / examples.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)

"""Rules on real processes: against the replay, and with processes that are killed."""

import os
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_clock import VirtualClock

from jaxdist import topology
from jaxdist.asynchronous import Compute, Role, Rule, ray_engine, replay, rules
from jaxdist.asynchronous.ray_engine import driver
from jaxdist.asynchronous.ray_engine.role_runner import Records
from jaxdist.asynchronous.ray_engine.state_store import ActorReport, PlaceStatus, clock_since

ray = pytest.importorskip("ray")
GOALS = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
TASK = replay.Task(
    {"w": np.zeros(64, np.float32)},
    lambda x, goal: 0.5 * jnp.sum((x["w"] - goal) ** 2),
    lambda seed, worker, job: GOALS[worker],
    lambda x: float(np.sum((np.asarray(x["w"]) - GOALS.mean(0)) ** 2)),
)


class Made(Rule):
    """A rule that is made again where it is unpickled: functions under the type checks of this suite cannot travel."""

    def __reduce__(self):
        return self.make, ()


def made(make):
    rule = Made(*make())
    rule.make = make
    return rule


RULES = {
    "asgd": made(lambda: rules.asgd(optax.sgd(0.05))),
    "bsp": made(lambda: rules.bsp(optax.sgd(0.05))),
    "ssp": made(lambda: rules.ssp(2, optax.sgd(0.05))),
    "ringleader": made(lambda: rules.ringleader(optax.sgd(0.05))),
    "backup": made(lambda: rules.backup_workers(2, optax.sgd(0.05))),
    "ad_psgd": made(lambda: rules.ad_psgd(topology.ring, optax.sgd(0.05))),
    "hop": made(lambda: rules.hop(topology.ring, optax.sgd(0.05), tokens=3)),
    "any_batch_gossip": made(lambda: rules.any_batch_gossip(1.0, topology.ring, optax.sgd(0.3), weights="uniform")),
}


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


class Killer:
    """Kills one worker, once, when so many gradients were counted."""

    def __init__(self, worker, gradients=15):
        self.worker, self.gradients, self.seen = worker, gradients, []

    def __call__(self, status):
        if status.gradients >= self.gradients and not any(one.gradients >= self.gradients for one in self.seen):
            os.kill(status.processes[self.worker], signal.SIGKILL)
        self.seen.append(status)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_end(pids):
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.slow
def test_a_killed_worker_changes_nothing_but_the_time(cluster):
    """The model of a synchronous run is that of a replay, which nobody disturbs."""
    killer = Killer(1)
    run = ray_engine.run(RULES["bsp"], TASK, workers=3, steps=40, evaluate_every=0.5, progress=killer)
    steps = len(run.trace.steps)
    assert killer.seen[-1].starts == {0: 1, 1: 2, 2: 1}
    assert run.trace.steps.version.tolist() == list(range(1, steps + 1))
    expected = replay.run(RULES["bsp"], TASK, workers=3, steps=steps).params["w"]
    np.testing.assert_allclose(run.params["w"], expected, atol=0.02)  # a worker may have been stopped a step later
    assert {"failed", "recovered", "reduced"} <= set(run.trace.words)
    assert run.down[1] > 0
    assert run.losses[-1] < run.losses[0]
    assert all_end(killer.seen[-1].processes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ad_psgd", "hop", "any_batch_gossip"])
def test_peers_go_on_when_one_of_them_is_killed(cluster, name, tmp_path):
    killer = Killer(1)
    goal = GOALS[:2].mean(0)

    def batch(seed, worker, job):
        with (tmp_path / f"{worker}-{os.getpid()}").open("a") as jobs:
            jobs.write(".")
        return GOALS[worker]

    def evaluate(params):
        """The distance from the goal, as soon as the second process of worker 1 has done its share."""
        first = f"1-{killer.seen[0].processes[1]}" if killer.seen else ""
        shares = [jobs.stat().st_size for jobs in tmp_path.glob("1-*") if jobs.name != first]
        if not killer.seen or max(shares, default=0) < 30:
            return float("inf")
        return float(np.sum((params["w"] - goal) ** 2) / np.sum(goal**2))

    task = TASK._replace(batch=batch, evaluate=evaluate)
    stop = {"seconds": 300, "target": 0.05, "evaluate_every": 0.5}
    run = ray_engine.run(RULES[name], task, workers=2, **stop, progress=killer)
    assert killer.seen[-1].starts == {0: 1, 1: 2}
    counted = np.bincount(run.trace.gradients.worker, minlength=2)
    assert counted.min() > 20
    if name == "hop":
        assert np.ptp(counted) <= 3  # the tokens
    assert {"failed", "recovered"} <= set(run.trace.words)
    assert np.sum((run.params["w"] - goal) ** 2) < 0.1 * np.sum(goal**2)


@pytest.mark.slow
def test_no_worker_runs_too_far_ahead(cluster):
    killer = Killer(0, 30)
    slow = TASK._replace(batch=lambda seed, worker, job: time.sleep(0.02) or GOALS[worker])
    run = ray_engine.run(RULES["ssp"], slow, workers=3, gradients=60, slow={0: 5}, progress=killer)
    completed = np.cumsum(np.eye(3, dtype=int)[run.trace.gradients.worker], axis=0)
    assert (completed.max(1) - completed.min(1)).max() <= 3
    assert run.trace.steps.version.tolist() == list(range(1, len(run.trace.steps) + 1))
    assert run.computing[0] * run.seconds >= 0.02 * 5 * completed[-1, 0]  # it sleeps that long, however busy the cores
    assert run.links.keys() == {(place, -1) for place in range(3)} | {(-1, place) for place in range(3)}


@pytest.mark.slow
def test_without_the_dead_where_that_is_wanted(cluster):
    killer = Killer(2)
    run = ray_engine.run(RULES["asgd"], TASK, workers=3, gradients=90, on_death="continue", progress=killer)
    last = run.trace.gradients.worker[-20:].tolist()
    assert set(last) == {0, 1}
    assert run.down[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("job", [5, 0])
def test_a_gradient_that_is_not_finite_is_named(cluster, job):
    """Also the first one, on which a process tries its program before the clock starts."""
    broken = TASK._replace(batch=lambda seed, worker, at: GOALS[worker] * (np.nan if (worker, at) == (1, job) else 1))
    with pytest.raises(
        ray_engine.NonFiniteGradientError, match=f"of worker 1 at its step {job} is not finite"
    ) as error:
        ray_engine.run(RULES["bsp"], broken, workers=2, seconds=60)
    assert (error.value.worker, error.value.step) == (1, job)


@pytest.mark.slow
def test_who_dies_too_often_is_named(cluster):
    with pytest.raises(ray_engine.ActorLostError, match="worker 1 has died and is not started again") as error:
        ray_engine.run(RULES["bsp"], TASK, workers=2, seconds=60, restarts=0, progress=Killer(1, 4))
    assert error.value.place == 1


@pytest.mark.slow
def test_who_waits_is_named(cluster):
    role = Role(
        lambda site, params: (site.index, (Compute(params),)),
        lambda state, sender, message: (state, ()),
        lambda state: None,
        lambda state: (1 - state,),
    )
    with pytest.raises(
        ray_engine.StalledError, match="worker 0 waits for worker 1; worker 1 waits for worker 0"
    ) as error:
        ray_engine.run(Rule("stuck", role), TASK, workers=2, seconds=90, timeout=20)
    assert error.value.waiting == {0: (1,), 1: (0,)}


@pytest.mark.slow
def test_what_a_rule_raises_arrives(cluster):
    with pytest.raises(ValueError, match="spare must be less than the 2 workers, got 2"):
        ray_engine.run(RULES["backup"], TASK, workers=2, seconds=60)


@pytest.mark.slow
def test_what_a_loss_raises_arrives(cluster):
    """Also what it raises when it is traced, on which a process tries its program before the clock starts."""
    broken = TASK._replace(loss=lambda x, goal: (jnp.sum(x["w"]), {"of": goal}))
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        ray_engine.run(RULES["asgd"], broken, workers=1, seconds=60)


def test_a_long_evaluation_is_no_stall(monkeypatch):
    """The driver polls twice without a difference, and then evaluates for longer than the timeout."""
    evaluated, clock = [], VirtualClock(1)
    monkeypatch.setattr(driver, "time", mock.Mock(monotonic=clock.monotonic))

    def evaluate(params):
        clock.sleep(3.0)
        evaluated.append(params)
        return 1.0

    answers = {
        "status": lambda: ({0: PlaceStatus(0.0, 1, len(evaluated), ActorReport())}, len(evaluated), 0),
        "models": lambda places: {},
        "log": lambda: (Records([], [], []), [], {}),
        "open": lambda peers, begun: None,
        "ready": lambda: 1,
    }
    fake = mock.MagicMock(exceptions=ray.exceptions)
    actor = fake.remote.return_value.options.return_value.remote.return_value
    for name, answer in answers.items():
        getattr(actor, name).remote.side_effect = answer
    fake.get.side_effect = lambda call, timeout: call

    def wait(calls, num_returns, timeout):
        clock.sleep(timeout)
        return [], calls

    fake.wait.side_effect = wait
    options = {"task": TASK._replace(evaluate=evaluate), "steps": 2, "evaluate_every": 3.2}
    options |= {"timeout": 2.0, "seed": 0, "slow": {}, "on_death": "restart", "restarts": 0, "resources": {}}
    missing = dict.fromkeys(("seconds", "gradients", "target", "progress"))
    run = driver.Driver(fake, driver.RunOptions(rule=RULES["bsp"], workers=1, **options, **missing)).run()
    assert run.losses.tolist() == [1.0] * 3


@pytest.mark.slow
def test_a_server_is_replaced_too(cluster):
    killer = Killer(-1)
    run = ray_engine.run(RULES["ringleader"], TASK, workers=3, steps=60, progress=killer)
    assert run.trace.steps.version.tolist() == list(range(1, len(run.trace.steps) + 1))
    assert replay.step_delays(run.trace).max() <= 4


@pytest.mark.slow
def test_a_process_that_stands_still_is_replaced(cluster):
    stopped = []

    def stop(status):
        if status.gradients > 10 and not stopped:
            stopped.append(status.processes[0])
            os.kill(stopped[0], signal.SIGSTOP)

    run = ray_engine.run(RULES["bsp"], TASK, workers=2, steps=40, timeout=30, progress=stop)
    assert len(run.trace.steps) >= 40
    assert all_end(stopped)


@pytest.mark.slow
def test_processes_end_with_the_driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, numpy as np, optax\n"
        "from jaxdist.asynchronous import ray_engine, replay, rules\n"
        "task = replay.Task(np.zeros(3, np.float32), lambda x, b: ((x - b) ** 2).sum(), lambda *job: np.float32(1))\n"
        "def tell(status):\n"
        "    if status.steps > 3:\n"
        "        print(*status.processes.values(), flush=True)\n"
        "ray_engine.run(rules.asgd(optax.sgd(0.1)), task, workers=2, seconds=100, progress=tell)\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(number) for number in driver.stdout.readline().split()]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert len(pids) == 3
    assert all_end(pids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"seconds": None}, "no stopping criterion"),
        ({"target": 0.1}, "target=0.1 needs evaluate_every="),
        ({"target": float("nan"), "evaluate_every": 1.0}, "target must be finite, got nan"),
        ({"timeout": 0.0}, "timeout must be positive, got 0.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"slow": {3: 2.0}}, "workers below 2 to factors of at least 1, got 3: 2.0"),
        ({"restarts": -1}, "restarts must be at least 0, got -1"),
        ({"on_death": "continue"}, "needs a rule with a server, and bsp has none"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ray_engine.run(RULES["bsp"], TASK, **({"workers": 2, "seconds": 1.0} | settings))


def test_clocks_go_on_when_the_wall_clock_is_set_back(monkeypatch):
    wall = time.time_ns
    clock = clock_since(wall() - 5_000_000_000)
    before = clock()
    assert before >= 5_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: wall() - 3600 * 10**9)
    assert before <= clock() < before + 3600 * 10**9

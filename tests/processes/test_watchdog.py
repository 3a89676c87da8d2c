"""Steps that do not end, and who is named for it; processes only with `--slow`."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import flags_without_devices
from virtual_clock import VirtualClock

import jaxdist as jd
from jaxdist.processes import watchdog as make
from jaxdist.processes.watchdog import Heartbeat, Received

# What comes at once comes before this on a busy machine too; what nothing ends would wait for minutes.
SOON = 30.0
module = sys.modules["jaxdist.processes.watchdog"]


# ---- what is known of the others


def test_a_sign_is_new_when_its_count_is():
    first = module.merge_heartbeats({}, {1: '{"step": 3, "count": 8, "done": false}'}, now=10.0)
    assert first == {1: Received(Heartbeat(3, 8), 10.0)}
    assert module.merge_heartbeats(first, {1: '{"step": 3, "count": 8}'}, now=11.0) == first
    assert module.merge_heartbeats(first, {1: '{"step": 3, "count": 9}'}, now=11.0)[1].when == 11.0


def test_who_is_silent():
    seen = {
        0: Received(Heartbeat(3, 1), 9.0),
        1: Received(Heartbeat(3, 1), 5.0),
        2: Received(Heartbeat(1, 1, True), 5.0),
    }
    assert module.silent_processes(seen, range(4), now=10.0, seconds=2.0) == (1, 3)


def test_the_one_who_is_missing_is_named():
    seen = {
        1: Received(Heartbeat(12, 1), 9.0),
        2: Received(Heartbeat(11, 1), 9.0),
        3: Received(Heartbeat(9, 5, True), 9.0),
    }
    late, waiting = "step 12 timed out after 30 s", "(process 0 is waiting)"

    def error(seen, gone=()):
        found = module.timeout_error(seen, gone, 0, 12, 30.0)
        return found.process, found.step, str(found)

    assert error(seen) == (2, 12, f"{late}: process 2 is alive but has not started it {waiting}")
    assert error({3: seen[3]}) == (3, 12, f"{late}: process 3 left after step 9 {waiting}")
    assert error({1: seen[1]}) == (None, 12, f"{late} in process 0, but all processes have started it")
    silent = "process 1 shows no sign of life since it started step 12: it died or is stopped"
    assert error(seen, (1,)) == (1, 12, f"{late}: {silent} {waiting}")
    assert str(module.lost_error({}, (0,))) == "process 0 shows no sign of life: it died or is stopped"
    assert str(module.lost_error(seen, (4,))) == "process 4 shows no sign of life and never did: it died or is stopped"


# ---- the watchdog of process 0 of two, with a board in memory


@pytest.fixture
def clock(monkeypatch):
    """The time of the watchdog and of what waits in steps."""
    clock = VirtualClock(1)
    clock.rule(monkeypatch, [module])
    return clock


@pytest.fixture
def ended(clock, monkeypatch):
    """How the process would have ended, and when it has."""
    found, event = [], clock.Event()

    def leave(problem):
        found.append(problem)
        event.set()

    monkeypatch.setattr(module, "_end_process", leave)
    return found, event


def watch_of_two(other: Heartbeat, alive: bool, **options):
    """The other process says always the same, or what it says is always new."""
    texts, counts = {}, itertools.count(1)

    def read():
        said = other._replace(count=next(counts) if alive else 0)
        return texts | {1: module.json.dumps(said._asdict())}

    settings = {"seconds": 0.5, "first_seconds": 0.5, "step": 12, "on_timeout": None} | options
    return module.Watchdog(**settings, channel=module.Channel(texts.__setitem__, read), own=0, processes=2), texts


@pytest.mark.parametrize("alive", [True, False])
def test_a_step_that_does_not_end(clock, ended, alive):
    told = []
    watch, _ = watch_of_two(Heartbeat(11, 0), alive, on_timeout=told.append)
    began = clock.monotonic()
    with watch:
        watch(ended[1].wait, 20)
    assert 0.5 < clock.monotonic() - began < 1
    assert told == ended[0]
    assert (told[0].process, told[0].step) == (1, 12)
    assert ("is alive but has not started it" if alive else "no sign of life since it started step 11") in str(told[0])


def test_results_are_watched_after_the_call(ended, monkeypatch):
    monkeypatch.setattr(module, "_is_ready", lambda x: False)
    watch, _ = watch_of_two(Heartbeat(12, 0), True)
    with watch:
        watch(lambda: (jnp.zeros(3), {"loss": jnp.zeros(())}))
        assert [x.shape for x in watch._running[0][1]] == [(3,), ()]
        assert ended[1].wait(20)
        monkeypatch.setattr(module, "_is_ready", lambda x: True)
    assert "in process 0, but all processes have started it" in str(ended[0][0])


def test_the_first_call_of_a_function_may_take_longer(clock, ended):
    watch, _ = watch_of_two(Heartbeat(12, 0), True, first_seconds=20)
    with watch:
        for pause, times in ((0.7, 1), (0.0, 3)):
            for _ in range(times):
                watch(clock.sleep, pause)
        assert not ended[0]
        watch(lambda: clock.sleep(0.7))
    assert not ended[0]


def test_functions_that_are_called_once_do_not_stay(ended):
    def make():
        return lambda: 0

    watch, _ = watch_of_two(Heartbeat(11, 0), True, first_seconds=20)
    first = make()
    alive = weakref.ref(first)
    with watch:
        watch(first)
        del first
        for _ in range(module.KNOWN):
            watch(make())
    assert alive() is None
    assert not ended[0]


def test_a_method_is_the_same_function_each_time(clock, ended):
    class Trainer:
        def step(self, seconds):
            clock.sleep(seconds)

    trainer = Trainer()
    watch, _ = watch_of_two(Heartbeat(11, 0), True, seconds=0.2, first_seconds=20)
    with watch:
        watch(trainer.step, 0.0)
        watch(trainer.step, 0.8)
    assert ended[0]
    with pytest.raises(ValueError, match="inside its context manager"):
        watch(trainer.step, 0.0)


def test_a_job_that_was_stopped_as_a_whole_goes_on(clock, ended):
    # Limits that only the time in which it was stopped exceeds.
    watch, _ = watch_of_two(Heartbeat(11, 0), True, seconds=5, first_seconds=60)

    def step():
        for _ in range(2):
            clock.suspend(1000.0)
            assert not ended[1].wait(0.6)

    with watch:
        watch(step)
    assert not ended[0]


def test_a_step_that_compiles_again_may_take_longer(clock, ended):
    @jax.jit
    def compute(x, count):
        clock.sleep(1.0 if len(x) == 5 else 0.0)  # while it is traced
        return x + count

    def step(x, count):
        # On this clock a result that is not ready is late at once.
        return jax.block_until_ready(compute(x, count))

    watch, _ = watch_of_two(Heartbeat(12, 0), True, first_seconds=20)
    with watch:
        for count, rows in enumerate((8, 8, 5)):  # a short last batch
            watch(step, jnp.ones(rows), count)
        watch(step, jnp.ones(8), 3)
        assert len(watch._known) == 2
    assert not ended[0]


def test_a_step_may_take_longer_once_jax_says_that_it_compiles(ended):
    def step(event, seconds):
        jax.monitoring.record_event_duration_secs(event, 0.1)
        ended[1].wait(seconds)

    # Alone: in a job its own heartbeat excuses it, too.
    with jd.processes.watchdog(0.5, first_timeout_seconds=20) as watch:
        watch(step, "", 0.0)
        watch(step, "/jax/core/compile/jaxpr_to_mlir_module_duration", 0.8)
        assert not ended[0]
        watch(step, "/jax/core/compile/jaxpr_trace_duration", 20.0)  # as `jax.eval_shape` in a step
    assert ended[0]


def test_a_process_that_compiles_is_waited_for(clock, ended):
    """As long as a first call may take."""
    watch, _ = watch_of_two(Heartbeat(11, 0, compiling=True), True, first_seconds=2.0)
    with watch:
        watch(ended[1].wait, 0.0)
        began = clock.monotonic()
        watch(ended[1].wait, 20.0)
    assert clock.monotonic() - began > 1.9
    assert "process 1 is alive but has not started step 12" in str(ended[0][0])


def test_a_process_says_that_it_compiles(clock, ended):
    watch, texts = watch_of_two(Heartbeat(12, 0), True, seconds=20, first_seconds=20)

    def said(wanted):
        clock.sleep(1.0)  # for some heartbeats
        return f'"compiling": {wanted}' in texts[0]

    with watch:
        assert said("false")
        assert watch(said, "true")  # as for all that is new
        assert not watch(clock.sleep, 0.0)
        jax.eval_shape(lambda x: x + 1, 1.0)
        assert not watch._compiling
        for part, wanted in (("jaxpr_to_mlir_module", "true"), ("backend_compile", "false")):  # between two steps
            jax.monitoring.record_event_duration_secs(f"/jax/core/compile/{part}_duration", 0.1)
            assert said(wanted)


def test_a_step_fails_because_another_process_died(ended):
    def fails(kind=jax.errors.JaxRuntimeError):
        raise kind("UNKNOWN: connection reset")

    watch, _ = watch_of_two(Heartbeat(7, 0), False)
    with watch:
        with pytest.raises(
            module.ProcessLostError, match="process 1 shows no sign of life since it started step 7"
        ) as lost:
            watch(fails)
        assert (lost.value.process, lost.value.step) == (1, 7)
        with pytest.raises(module.ProcessLostError):
            watch(fails, ValueError)
        with pytest.raises(ValueError, match="mine"):
            watch(int, "mine")
    watch, _ = watch_of_two(Heartbeat(7, 0), True)
    with watch, pytest.raises(jax.errors.JaxRuntimeError, match="connection reset"):
        watch(fails)


def test_what_is_raised_ends_the_process(ended):
    watch, texts = watch_of_two(Heartbeat(12, 0), True)
    with pytest.raises(KeyError), watch:
        raise KeyError("mine")
    assert isinstance(ended[0][0], KeyError)
    watch, texts = watch_of_two(Heartbeat(12, 0), True)
    with pytest.raises(SystemExit), watch:
        sys.exit(0)
    assert len(ended[0]) == 1
    assert '"done": true' in texts[0]


def test_a_first_call_that_exceeds_its_own_limit_ends(ended):
    """Ten minutes by default, which a large model may need and a small one may not want."""
    with jd.processes.watchdog(0.1, first_timeout_seconds=0.2) as watch:
        watch(ended[1].wait, SOON)
    assert isinstance(ended[0][0], jd.processes.StepTimeoutError)
    assert "timed out after 0.2 s" in str(ended[0][0])


def test_a_state_with_keys_is_watched_to_its_end(clock, ended):
    found, _ = ended
    step = jax.jit(lambda state: ({**state, "w": state["w"] + 1}, state["key"]))
    with jd.processes.watchdog(60) as watch:
        jax.block_until_ready(watch(step, {"w": jnp.zeros(3), "key": jax.random.key(0)}))
        clock.sleep(0.5)
        assert watch._threads[0].is_alive()
        assert not watch._running
    assert found == []


def test_alone():
    step = jax.jit(lambda state, batch: (state + batch, {"loss": batch}), donate_argnums=0)
    with jd.processes.watchdog(60) as watch:
        state = jnp.zeros(4)
        for _ in range(3):
            state, _ = watch(step, state, jnp.ones(4))
    assert state.tolist() == [3.0] * 4
    assert not watch._running
    with pytest.raises(ValueError, match="entered before: make another one"), watch:
        pass
    with pytest.raises(KeyError), jd.processes.watchdog(60):
        raise KeyError
    with pytest.raises(ValueError, match="timeout_seconds must be positive, got 0"):
        make(0)
    with pytest.raises(ValueError, match="timeout_seconds must be positive, got nan"):
        make(float("nan"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_alone(monkeypatch, number):
    # Whoever was asked before in this process may since have lost the signals to another library.
    monkeypatch.setattr(sys.modules["jaxdist.processes.preemption"], "_received", None)
    before = {one: signal.signal(one, signal.SIG_DFL) for one in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        assert not jd.processes.preemption_requested(0)
        signal.raise_signal(number)
        assert jd.processes.preemption_requested(1)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_handler_of_the_script_keeps_its_warning(monkeypatch):
    monkeypatch.setattr(sys.modules["jaxdist.processes.preemption"], "_received", threading.Event())
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert not jd.processes.preemption_requested(0)
        signal.raise_signal(signal.SIGUSR1)
        assert (jd.processes.preemption_requested(1), heard) == (False, [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---- processes


def wait_until_it_happens(started, when):
    while not when.exists():
        assert started.poll() is None
        time.sleep(0.05)


def suspend(launcher):
    """Stops its processes for 8 s, as `scontrol suspend` does."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    theirs = [int(one) for one in children if b"JAX_PROCESS_ID=" in pathlib.Path(f"/proc/{one}/environ").read_bytes()]
    assert len(theirs) == 2
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in theirs:
            os.kill(one, number)
        time.sleep(8)


@pytest.fixture
def job(tmp_path):
    """Two processes that train until something happens; what the launcher said, its code and how long that took."""

    def run(happens, *options):
        command = [sys.executable, "-m", "jaxdist.processes.launch", "-n", "2", "--logs", str(tmp_path)]
        environment = {**os.environ, "XLA_FLAGS": flags_without_devices(), "PYTHONPATH": str(REPOSITORY)}
        script = [str(SUPPORT / "scripts" / "watched.py"), happens, str(tmp_path / "when"), *options]
        with subprocess.Popen([*command, *script], env=environment, stderr=subprocess.PIPE, text=True) as started:
            try:
                if happens == "preempted":
                    wait_until_it_happens(started, tmp_path / "when")
                    started.terminate()
                if happens.startswith("suspended"):
                    wait_until_it_happens(started, tmp_path / "when")
                    suspend(started.pid)
                err = started.communicate(timeout=300)[1]
                now = time.time()
            finally:
                started.kill()  # else a test that fails would wait for it
        return err, started.returncode, now - float((tmp_path / "when").read_text())

    return run


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_dies(job, process):
    err, code, seconds = job(f"killed {process}")
    assert f"ProcessFailedError: process {process} was killed by SIGKILL" in err
    assert code == 128 + signal.SIGKILL
    assert seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize("what", ["asleep 0", "asleep 1", "stopped 0", "stopped 1"])
def test_a_process_is_stuck(job, tmp_path, what):
    process = int(what[-1])
    err, code, seconds = job(what)
    assert "StepTimeoutError: step " in err
    assert f": process {process} " in err
    assert ("step 21" if "asleep" in what else "no sign of life") in err
    assert code == 1
    assert seconds < 3 + SOON
    began, log = float((tmp_path / "when").read_text()), (tmp_path / f"{1 - process}.log").read_text()
    assert 3 < float(log.split("named at ")[1].split()[0]) - began < 3 + SOON


@pytest.mark.slow
def test_a_job_is_stopped_in_a_step_and_goes_on(job, tmp_path):
    """All of it, for longer than a step may take; it ends well, as if it had not been stopped."""
    err, code, _ = job("suspended 1")
    assert (code, err) == (0, "")
    assert all("ended with" in (tmp_path / f"{number}.log").read_text() for number in range(2))


@pytest.mark.slow
def test_a_pause_of_35_seconds_changes_nothing(job, tmp_path):
    last = []
    for what, least in (("nothing", 0), ("pauses 1", 35), ("late 1", 35)):
        err, code, seconds = job(what, "60")
        assert (code, err) == (0, "")
        assert least <= seconds < least + SOON
        last += [(tmp_path / f"{number}.log").read_text().split("ended with ")[1].split()[0] for number in range(2)]
    assert len(set(last)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["preempted", "warned 1"])
def test_all_leave_at_the_same_step(job, tmp_path, what):
    err, code, _ = job(what)
    assert (code, "ProcessFailedError" in err) == (0, False)
    logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    # JAX may log between the two.
    left = [re.findall(r"left after step (\d+)|ended with (\w+)", log) for log in logs]
    assert len(left[0]) == 2
    assert left[0] == left[1]


@pytest.mark.slow
def test_an_error_in_one_process_ends_both(job):
    err, code, seconds = job("raises 1")
    assert "ProcessFailedError: process 1 exited with code 1" in err
    assert "ValueError: bad data" in err
    assert (code, seconds < SOON) == (1, True)

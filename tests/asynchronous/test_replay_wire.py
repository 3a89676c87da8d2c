"""What messages of a replay weigh, with codes too, and states in files."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import topology
from jaxdist.asynchronous import durations, links, replay, rules

SGD = optax.sgd(0.05, momentum=0.5)
GOALS = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
TASK = replay.Task(
    {"w": np.zeros(64, np.float32)}, lambda x, goal: 0.5 * jnp.sum((x["w"] - goal) ** 2), lambda s, i, k: GOALS[i]
)
CLUSTER = {"workers": 3, "durations": durations.exponential(1.0), "links": links.alpha_beta(0.05, 4e3), "seed": 2}

CODES = {"gradient": jd.top_k(0.1), "params": jd.compressors.cast(jnp.float16)}
RULES = {
    "ringleader": rules.ringleader(optax.adam(0.01)),
    "bsp": rules.bsp(SGD),
    "hop": rules.compressed(rules.hop(topology.ring, SGD, tokens=2, staleness=1), {"params": CODES["params"]}),
    "prague": rules.compressed(rules.prague(SGD, group_size=2, groups="random"), {"reduced": CODES["params"]}),
    "variable": rules.compressed(rules.asgd(SGD), {"gradient": jd.qsgd(4, norm="l2", code="elias")}),
    "coded": rules.compressed(rules.ringmaster(2, SGD, stop=True), CODES, feedback=("gradient",)),
}


def test_a_gradient_up_and_a_model_down():
    run = replay.run(rules.asgd(SGD), TASK, steps=30, **CLUSTER)
    up = sum(count for (source, to), count in run.links.items() if to == -1)
    arrived = len(run.trace.gradients) * 256
    assert arrived <= up <= arrived + 3 * 256  # of those in flight
    events = run.trace.events
    assert set(events.bytes[events.what == 1].tolist()) == {256}
    assert run.received[-1] == arrived


@pytest.mark.slow
@pytest.mark.parametrize("timing_only", [False, True])
def test_codes_shrink_the_wire(timing_only):
    run = replay.run(RULES["coded"], TASK, steps=20, timing_only=timing_only, **CLUSTER)
    weights = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(code.compress(jnp.ones(64), jax.random.key(0))))
        for code in CODES.values()
    ]
    events = run.trace.events
    assert set(events.bytes[events.what == 1].tolist()) == set(weights)
    assert max(weights) <= 128


def test_feedback_pays_what_it_owes():
    """A quarter of the entries at a time: with feedback the optimum is reached all the same."""
    plain = rules.asgd(optax.sgd(0.1))
    settings = {"steps": 300, "record_events": False, "durations": durations.constant([1.0, 1.1, 1.2]), "workers": 3}
    task = TASK._replace(batch=lambda seed, worker, job: GOALS[0])
    far = {
        feedback: np.abs(
            replay.run(
                rules.compressed(plain, {"gradient": jd.top_k(0.1)}, feedback=feedback), task, **settings
            ).params["w"]
            - GOALS[0]
        ).max()
        for feedback in ((), ("gradient",))
    }
    assert far["gradient",] < 1e-2
    assert far["gradient",] < far[()]


def test_collectives_travel_coded():
    code = {"reduced": jd.compressors.cast(jnp.float16)}
    run = replay.run(rules.compressed(rules.bsp(SGD), code), TASK, steps=5, **CLUSTER)
    exact = replay.run(rules.bsp(SGD), TASK, steps=5, **CLUSTER)
    assert run.sent[0] == 5 * 2 * 128  # a gather of codes of 128 bytes
    assert exact.sent[0] == 5 * (2 * 2 * 256 // 3)  # a ring of 256 bytes
    np.testing.assert_allclose(run.params["w"], exact.params["w"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [(), ("gradient",)])
def test_codes_of_variable_length_weigh_what_they_are(feedback):
    goals = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    task = TASK._replace(params={"w": np.zeros(1000, np.float32)}, batch=lambda s, i, k: goals[i])
    runs = {
        code: replay.run(
            rules.compressed(rules.asgd(SGD), {"gradient": jd.qsgd(4, norm="l2", code=code)}, feedback=feedback),
            task,
            steps=20,
            **CLUSTER | {"links": links.instant()},
        )
        for code in (None, "elias")
    }
    np.testing.assert_array_equal(runs["elias"].params["w"], runs[None].params["w"])
    weights = {code: run.trace.events.bytes[run.trace.events.what == 1].tolist() for code, run in runs.items()}
    # Models of 4000 bytes, and gradients: payloads of 508 bytes, or codes of many lengths.
    assert {*weights[None]} == {508, 4000}
    gradients = [weight for weight in weights["elias"] if weight != 4000]
    assert len({*gradients}) > 3
    assert max(gradients) < 0.6 * 508


def test_a_gather_of_codes_weighs_their_sum():
    code = {"reduced": jd.qsgd(4, norm="l2", code="elias")}
    run = replay.run(rules.compressed(rules.bsp(SGD), code), TASK, steps=5, **CLUSTER)
    sent, received = run.sent[:3], run.received[:3]
    assert len({*sent.tolist()}) > 1
    assert sum(sent) == sum(received)
    # Of three members each receives what the others send once, and sends its own twice.
    np.testing.assert_array_equal(np.asarray(received), (sum(sent) - np.asarray(sent)) / 2)


def test_feedback_needs_a_code_and_a_contraction():
    with pytest.raises(ValueError, match="needs a compressor for 'params'"):
        rules.compressed(rules.asgd(SGD), {"gradient": jd.top_k(0.1)}, feedback=("params",))
    unknown = jd.top_k(0.1)._replace(contraction=None)
    with pytest.raises(ValueError, match="error feedback needs a contraction"):
        rules.compressed(rules.asgd(SGD), {"gradient": unknown}, feedback=("gradient",))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("timing_only", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_from_a_file(name, timing_only, tmp_path):
    law = durations.failures(
        durations.markov(durations.exponential(1.0), factor=4, slow_down=0.2, speed_up=0.3), up=9, down=1
    )
    settings = CLUSTER | {"durations": law, "timing_only": timing_only}
    settings |= {} if timing_only else {"evaluate_every": 2.0}
    task = TASK._replace(evaluate=lambda x: jnp.sum(x["w"] ** 2))
    clock = replay.simulator(RULES[name], task, **settings)
    half = clock.advance(clock.init(), seconds=11)
    replay.save(tmp_path / "run.npz", clock, half)
    # Another clock, as in another process.
    again = replay.simulator(RULES[name], task, **settings)
    whole = clock.result(clock.advance(half, seconds=25))
    resumed = again.result(again.advance(replay.restore(tmp_path / "run.npz", again), seconds=25))
    for left, right in zip(jax.tree.leaves(whole.trace[:3]), jax.tree.leaves(resumed.trace[:3])):
        np.testing.assert_array_equal(left, right)
    assert len(whole.trace.steps) > 1
    assert "recovered" in whole.trace.words
    if not timing_only:
        np.testing.assert_array_equal(whole.params["w"], resumed.params["w"])
        np.testing.assert_array_equal(whole.losses, resumed.losses)


def test_files_of_others_are_refused(tmp_path):
    clock = replay.simulator(rules.asgd(SGD), workers=2)
    replay.save(tmp_path / "run.npz", clock, clock.init())
    with pytest.raises(ValueError, match=r"is a replay of .*asgd.*not of .*dude"):
        replay.restore(tmp_path / "run.npz", replay.simulator(rules.dude(SGD), workers=2))
    text = np.load(tmp_path / "run.npz")["text"].tobytes().replace(b'"WorkerState"', b'"stepper"')
    arrays: Any = dict(np.load(tmp_path / "run.npz")) | {"text": np.frombuffer(text, np.uint8)}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match="is not an imported NamedTuple"):
        replay.restore(tmp_path / "bad.npz", clock)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_files_that_are_cut_off_are_named(tmp_path, share):
    clock = replay.simulator(rules.asgd(SGD), workers=2)
    path = tmp_path / "run.npz"
    replay.save(str(path), clock, clock.init())
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(ValueError, match=r"run\.npz is damaged, or no file of `replay\.save`"):
        replay.restore(path, clock)

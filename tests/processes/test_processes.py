"""Two real processes, joined by `jax.distributed`, against the simulation in each of them.

By default a few reducers that send every kind of message, since what processes change is the transport; all with
`--slow`.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import LIMIT, flags_without_devices, free_port
from register import CASES


def cover_every_message() -> list[str]:
    """Few cases that together send each kind and dtype of message, on one level of workers and on two."""
    sent = {name: {(case.levels, message) for message in case.wire} for name, case in CASES.items()}
    left, chosen = set().union(*sent.values()), []
    while left:
        chosen.append(max(sent, key=lambda name: len(sent[name] & left)))
        left -= sent[chosen[-1]]
    # Of those that send what only one of the chosen sends, the one with the fewest messages.
    for number, name in enumerate(chosen):
        alone = sent[name].difference(*(sent[other] for other in chosen if other != name))
        chosen[number] = min((each for each in sent if alone <= sent[each]), key=lambda each: len(CASES[each].wire))
    return chosen


COVER = cover_every_message()
# Of the register, those of the cover by default.
NAMES = [name if name in COVER else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def wanted(request):
    """Names of the cases that run: all of them compile for minutes, so with `--slow` those that were selected."""
    if not request.config.getoption("--slow"):
        return COVER
    mine = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    selected = {item.callspec.params["name"] for item in mine}
    return [name for name in CASES if name in COVER or name in selected]


@pytest.fixture(scope="module")
def results(tmp_path_factory, wanted):
    """What each process printed. The first that fails ends both."""
    folder, port = tmp_path_factory.mktemp("processes"), free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags_without_devices(),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{SUPPORT}",
        "http_proxy": "http://127.0.0.1:9",  # where nobody listens: processes find each other without it
    }
    logs = [folder / f"{number}.log" for number in range(2)]
    started = []
    for number, log in enumerate(logs):
        command = [sys.executable, str(SUPPORT / "scripts" / "worker.py"), str(number), port, str(folder), *wanted]
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        # With `--slow` it compiles many more programs, on a machine that may be busy.
        until = time.monotonic() + LIMIT + 30 * len(wanted)
        while any(one.poll() is None for one in started):
            if time.monotonic() > until or any(one.poll() for one in started):
                break
            time.sleep(0.1)
        codes = [one.poll() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    text = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(part[-3000:] for part in text)
    return [json.loads(part.split("RESULT ")[1].splitlines()[0]) for part in text]


@pytest.mark.parametrize("name", [*NAMES, "skip_nonfinite"])
def test_two_processes_give_what_the_simulation_gives(results, name):
    tolerance = CASES[name].tolerance if name in CASES else 0
    assert max(result[name] for result in results) <= max(1e-5, tolerance)


def test_nothing_was_left_out(results, wanted):
    assert all(set(result) == {*wanted, "skip_nonfinite", "uneven", "island", "saves"} for result in results)


# ---- unequal batches and values


@pytest.fixture(scope="module")
def uneven(results):
    return [result["uneven"] for result in results]


def test_the_longer_process_goes_on(uneven):
    """2 and 5 batches of tens and units: two means of both, then three of the second alone, whole or half."""
    for result in uneven:
        np.testing.assert_allclose(result["active"][0], [-6, -7, -13, -14, -15], rtol=1e-6)
        np.testing.assert_allclose(result["workers"][0], [-6, -7, -6.5, -7, -7.5], rtol=1e-6)
        assert result["active"][1] == result["workers"][1] == 0  # no step without any example


@pytest.mark.parametrize("name", ["lengths", "streams", "mixed"])
def test_the_shorter_one_repeats_its_last_batch_and_it_does_not_count(uneven, name):
    short, long = (result[name] for result in uneven)
    assert short == [[[1, [1]], [2, [1]], [2, [0]], [2, [0]], [2, [0]]], "well"]
    assert long == [[[10 + number, [1]] for number in range(1, 6)], "well"]


@pytest.mark.parametrize("name", ["stop", "stop stream", "raise", "raise stream"])
def test_all_stop_at_the_same_step(uneven, name):
    for result in uneven:
        seen, ended = result[name]
        assert len(seen) == 2
        assert ended.startswith(
            "well" if "stop" in name else "process 0 ran out of batches after 2 steps, and process 1"
        )


def test_what_differs_is_named_and_broadcast_makes_it_the_same(uneven):
    for result in uneven:
        assert result["differs"].startswith(
            "leaf `key` of process 1 differs from that of process 0 (and 2 more): use jd.processes.broadcast"
        )
        assert result["shape"].startswith("leaf `w` of process 1 differs from that of process 0 in shape or dtype")
        assert result["structure"].startswith("process 1 has a different tree than process 0, with 1 leaves and 2")
        assert result["agree"].startswith("leaf `w` is float64[4] in process 1 and float64[3] in process 0: all proc")
        assert result["function"] == ""
        assert "`w` is distributed over processes" in result["placed"]
        assert result["from 0"] == [[False, False], False, [0, 0], True]
        assert result["from 1"] == [[True, True], True, [0, 1], True]
        for source in range(2):
            assert result[f"no source {source}"].startswith("source must be one of the 2 processes")


def test_what_is_placed_can_be_taken_apart(uneven):
    for result in uneven:
        assert result["parts"] == [[1, 1, 1], [1, 1, 1], [0, 5], [0, 5]]


def test_a_process_that_does_not_come_to_agree_is_named(uneven):
    assert uneven[0]["late"].startswith("process 1 of 2 did not call check_consistency() within 1 s")


# ---- an island of both processes


@pytest.mark.parametrize("form", ["whole", "in pieces"])
def test_both_processes_of_an_island_meet_and_find_their_run_again(results, form):
    """From 0 each round halves the way to 1."""
    for result in results:
        assert result["island"][form] == [[0.5, "first"], [0.75, "first"], [0.875, "first"], 0.875]


# ---- a checkpoint of both processes, when one cannot do its part


SAVE_SECONDS = 60  # generous: on a busy machine; it was 20 minutes


@pytest.fixture(scope="module")
def saves(results):
    return [result["saves"] for result in results]


def test_a_loop_that_goes_on_after_a_failure_stays_in_step(saves):
    """Process 1 failed in the first `save`, process 0 hears of it in the second, and the third works in both."""
    assert saves[1]["again"] == [["PermissionError", "CheckpointPeerError", ""], 4]
    assert saves[0]["again"] == [["", "CheckpointPeerError", ""], 4]


def test_different_steps_are_refused(saves):
    for result in saves:
        name, _, text, _ = result["different steps"]
        assert name in ("ValueError", "CheckpointPeerError")
        assert "save different steps, [0, 1]" in text


def test_a_leaf_that_was_not_placed_is_named(saves):
    for result in saves:
        for name, _, text, seconds in result["not placed"]:
            assert name in ("ValueError", "CheckpointPeerError")
            assert "leaf `own` is an array of each process" in text
            assert "jd.place(state, mesh)" in text
            assert seconds < SAVE_SECONDS

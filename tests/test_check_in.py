"""Processes that check in, as threads: who is missing, who differs, and what is heard at the port."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from optax import adam

import jaxdist as jd
from jaxdist.parallel.processes import cards
from jaxdist.parallel.processes.agree import exchange
from jaxdist.parallel.processes.check_in import check_in, problem

CARD = {"version of": {"jax": "0.10.2"}, "setting": {"jax_enable_x64": "False"}}
NEWER = {"version of": {"jax": "0.12.0"}, "setting": {"jax_enable_x64": "False"}}


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr("jaxdist.parallel.processes.check_in.LINGER_SECONDS", 0.3)
    monkeypatch.setattr("jaxdist.parallel.processes.check_in.SILENCE_SECONDS", 1.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(processes, *, port=None, seconds=10.0, late=0.0):
    """What each of `(process, processes, card)` raises, and how long it took; process 0 comes late."""
    port = port or free_port()

    def one(said):
        process, count, card = said
        began = time.monotonic()
        time.sleep(0.0 if process else late)
        try:
            check_in(f"127.0.0.1:{port}", count, process, card, timeout_seconds=seconds)
        except jd.parallel.AgreementError as error:
            return error, time.monotonic() - began
        return None, time.monotonic() - began

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_are_well():
    port = free_port()
    for _ in range(2):  # the port is free again at once, as JAX's service needs it
        assert [error for error, _ in together([(i, 3, CARD) for i in range(3)], port=port, late=0.1)] == [None] * 3


@pytest.mark.parametrize(
    ("said", "message", "processes"),
    [
        ([(0, 2, CARD), (1, 2, NEWER)], "version of `jax` is 0.12.0 in process 1 and 0.10.2 in process 0: inst", (1,)),
        ([(0, 2, CARD), (1, 4, CARD)], "process 1 was told of 4 processes, and process 0 of 2", (1,)),
        ([(0, 3, CARD), (1, 3, CARD), (1, 3, CARD)], "two processes call themselves 1", (1,)),
    ],
)
def test_all_hear_what_differs_within_seconds(said, message, processes):
    for error, seconds in together(said):
        assert isinstance(error, jd.parallel.MismatchError)
        assert str(error).startswith(message)
        assert "\n" not in str(error)
        assert error.processes == processes
        assert seconds < 5


def test_who_is_missing_is_named_in_all():
    for error, seconds in together([(0, 4, CARD), (2, 4, CARD)], seconds=0.5):
        assert isinstance(error, jd.parallel.MissingProcessError)
        assert str(error).startswith("processes 1, 3 of 4 did not check in within 0.5 s")
        assert error.processes == (1, 3)
        assert seconds < 5


def test_nobody_waits_for_process_0_longer_than_asked():
    ((error, _),) = together([(1, 2, CARD)], seconds=0.3)
    assert isinstance(error, jd.parallel.MissingProcessError)
    assert str(error).startswith("process 0 did not answer process 1 at 127.0.0.1:")
    assert "within 0.3 s (Connection refused): see" in str(error)


def test_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ((error, _),) = together([(0, 2, CARD)], port=port)
    assert isinstance(error, jd.parallel.PortError)
    assert f"cannot listen at port {port}" in str(error)


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"problem": {}}\n', b'{"wait": "no"}\n'])
def test_another_program_at_the_port_is_told_from_process_0(words):
    def speak(server):
        call, _ = server.accept()
        call.recv(1 << 12)
        call.sendall(words)
        call.close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        speaker = threading.Thread(target=speak, args=(other,))
        speaker.start()
        ((error, _),) = together([(1, 2, CARD)], port=other.getsockname()[1])
        speaker.join()
    assert isinstance(error, jd.parallel.PortError)
    assert "answers another program" in str(error)


def test_a_program_at_the_port_that_says_nothing_is_told_from_process_0():
    with socket.create_server(("127.0.0.1", 0)) as other:
        ((error, seconds),) = together([(1, 2, CARD)], port=other.getsockname()[1], seconds=60)
    assert isinstance(error, jd.parallel.PortError)
    assert "does not answer, another program" in str(error)
    assert seconds < 5


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n\n", b'{"process": 1}\n', b"[" * 70000, b"\xff\n", b"1\n"])
def test_strangers_do_not_disturb(words):
    port = free_port()

    def stranger():
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as call:
                    call.sendall(words)
                    call.settimeout(5)
                    return call.recv(100)
            except ConnectionRefusedError:
                time.sleep(0.01)
            except ConnectionError:
                return b""

    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(stranger)
        run = pool.submit(together, [(0, 2, CARD)], port=port)
        told.result()
        ((error, _),) = together([(1, 2, CARD)], port=port)
        assert error is None
        assert run.result()[0][0] is None


def test_a_process_that_ends_while_it_waits_is_named():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(together, [(0, 3, CARD)], port=port)
        while True:
            try:
                call = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        call.sendall(json.dumps({"process": 2, "processes": 3, "card": CARD}).encode() + b"\n")
        assert b"wait" in call.recv(100)
        call.close()
        error, seconds = run.result()[0]
    assert str(error).startswith("process 2 ended while it waited")
    assert seconds < 5


@pytest.mark.parametrize("address", ["somewhere", "host:", "host:http", ":99999"])
def test_addresses(address):
    with pytest.raises(ValueError, match="must be host:port"):
        check_in(address, 2, 1, CARD, timeout_seconds=1)


def test_settings_and_versions_are_on_the_card():
    card = cards.of_this_process()
    assert {"jax", "jaxlib", "jaxdist"} <= set(card["version of"])
    assert "None" not in card["version of"].values()
    assert problem({0: {"processes": 1, "card": card}}) is None


# ---- what processes build


def state(width=3, dtype=jnp.float32, mark=jd.PerWorker):
    params = {"w": jnp.zeros((width, 2), dtype), "b": np.zeros(2, np.float32)}
    return {"params": params, "opt": adam(0.1).init(params), "residual": mark(jnp.zeros(3))}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"state": state(4)},
            "leaf `opt.0.mu.w` is float32[4,2] in process 1 and float32[3,2] in process 0 (and 2 more)",
        ),
        ({"state": state(dtype=jnp.bfloat16)}, "leaf `opt.0.mu.w` is bfloat16[3,2] in process 1 and float32[3,2]"),
        ({"state": state(mark=lambda x: x)}, "leaf `residual` is float32[3] in process 1 and float32[3] PerWorker"),
        ({"state": {**state(), "more": jnp.ones(1)}}, "process 1 has leaf `more`, which process 0 has not"),
        ({"state": {"params": state()["params"]}}, "process 1 has no leaf `opt.0.count`, which process 0 has"),
        ({"state": {**state(), "opt": list(state()["opt"])}}, "tree `structure` is PyTreeDef({'opt': [Cust"),
        ({"recipe": {"rate": 0.1, "seed": 1}}, "recipe `seed` is 1 in process 1 and 0 in process 0"),
        ({"recipe": "text"}, "process 1 has no recipe `rate`, which process 0 has"),
        ({"mesh": jd.make_mesh({"data": 4, "model": 2})}, "mesh `axes` is {'data': 4, 'model': 2} in process 1 and"),
        ({"mesh": None}, "process 1 has no mesh `axes`, which process 0 has"),
    ],
)
def test_what_differs_is_named(mesh, other, message):
    same = {"state": state(), "mesh": mesh, "recipe": {"rate": 0.1, "seed": 0}}
    card = cards.of_state(**same)
    assert cards.difference(cards.of_state(**same), card, 1) == ""
    assert cards.difference(cards.of_state(**{**same, **other}), card, 1).startswith(message)


def test_recipes_are_plain():
    with pytest.raises(ValueError, match="`tx` is a function"):
        jd.agree({}, recipe={"tx": lambda: None})


class Shared:
    """A dictionary between threads, as JAX's coordination service is one between processes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1e3):
                raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]


def exchanged(given, *, processes=3, seconds=5.0, wrong=None):
    store = Shared()

    def one(process):
        known = (wrong or {}).get(process, "")
        return exchange(store, given[process], process, processes, "here", seconds, do="come", wrong=known)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(one, given))


def test_exchange():
    assert exchanged({0: CARD, 1: CARD, 2: CARD}) == [None] * 3
    for error in exchanged({0: CARD, 1: CARD, 2: NEWER}):
        assert str(error).startswith("version of `jax` is 0.12.0 in process 2 and 0.10.2 in process 0")
        assert error.processes == (2,)
    for error in exchanged({0: CARD, 2: CARD}, seconds=0.2):
        assert isinstance(error, jd.parallel.MissingProcessError)
        assert error.processes == (1,)
    (error,) = exchanged({1: CARD}, seconds=0.1)
    assert error.processes == (0,)


@pytest.mark.parametrize("guilty", [0, 1])
def test_who_knows_that_it_is_wrong_waits_for_nobody(guilty):
    (error,) = exchanged({guilty: CARD}, wrong={guilty: "batch of 3"}, seconds=60.0)
    for found in (error, *exchanged({0: CARD, 1: CARD, 2: CARD}, wrong={guilty: "batch of 3"})):
        assert isinstance(found, jd.parallel.MismatchError)
        assert (str(found), found.processes) == ("batch of 3", (guilty,))

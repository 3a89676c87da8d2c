"""Processes that check in, as threads: who is missing, who differs, and what is heard at the port."""

import collections
import contextlib
import itertools
import os
import re
import resource
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState
from optax import adam

import jaxdist as jd
from jaxdist.processes import consistency
from jaxdist.processes.cluster import VARIABLES, Job, where_to_listen
from jaxdist.processes.consistency import exchange
from jaxdist.processes.rendezvous import check_in

# What comes at once comes before this on a busy machine too; whatever waits has 60 s.
SOON = 30.0
CARD = {"version of": {"jax": "0.10.2"}, "setting": {"jax_enable_x64": "False"}}
NEWER = {"version of": {"jax": "0.12.0"}, "setting": {"jax_enable_x64": "False"}}
module = sys.modules["jaxdist.processes.rendezvous"]


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.5)
    # On a busy machine all threads may stop for longer than they linger.
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.3)


@pytest.fixture
def impatient(monkeypatch):
    """For a program that never answers."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.4)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def comes(process, processes, port, *, seconds=60.0, host="127.0.0.1", **options):
    """What a process raises at the check-in, and how long it took."""
    began = time.monotonic()
    job, options = Job(f"{host}:{port}", processes, process), {"listen_at": f"127.0.0.1:{port}"} | options
    try:
        check_in(job, timeout_seconds=seconds, **options)
    except jd.processes.AgreementError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def together(processes, *, port=None, late=0.0, **options):
    """What each of `(process, processes)` raises, and how long it took; process 0 comes late."""
    port = port or free_port()

    def one(told):
        time.sleep(0.0 if told[0] else late)
        return comes(*told, port, **options)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_are_well():
    port = free_port()
    for _ in range(2):  # the port is free again at once, as JAX's service needs it
        assert [error for error, _ in together([(i, 3) for i in range(3)], port=port, late=0.1)] == [None] * 3


@pytest.mark.parametrize(
    ("said", "message", "processes"),
    [
        ([(0, 2), (1, 4)], "process 1 expects 4 processes, but process 0 expects 2", (1,)),
        ([(0, 2), (7, 2)], "a process has id 7, but the ids of 2 processes are below 2: give each a unique id", (7,)),
        ([(0, 3), (1, 3), (1, 3)], "two processes have id 1; ids must be unique", (1,)),
    ],
)
def test_all_hear_what_differs_within_seconds(said, message, processes):
    for error, seconds in together(said):
        assert isinstance(error, jd.processes.MismatchError)
        assert str(error).startswith(message)
        assert "\n" not in str(error)
        assert error.processes == processes
        assert seconds < SOON


def test_who_is_missing_is_named_in_all():
    for error, seconds in together([(0, 4), (2, 4)], seconds=1, late=0.1):
        assert isinstance(error, jd.processes.MissingProcessError)
        assert str(error).startswith("processes 1, 3 of 4 did not check in within 1 s")
        assert error.processes == (1, 3)
        assert seconds < SOON


def test_nobody_waits_for_process_0_longer_than_asked():
    ((error, _),) = together([(1, 2)], seconds=0.3)
    assert isinstance(error, jd.processes.MissingProcessError)
    assert str(error).startswith("process 0 did not answer process 1 at 127.0.0.1:")
    assert "within 0.3 s (Connection refused): check" in str(error)


def test_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ((error, _),) = together([(0, 2)], port=port)
    assert isinstance(error, jd.processes.PortError)
    assert f"cannot listen at port {port} of 127.0.0.1 (Address already in use)" in str(error)


# ---- what is heard at the port


@contextlib.contextmanager
def program(*, says):
    """Another program at a port, which says the same to all: bytes, or what comes of a question; and None nothing."""

    def speak():
        with contextlib.ExitStack() as calls, contextlib.suppress(OSError):
            while True:
                call = calls.enter_context(server.accept()[0])
                if says is not None:
                    heard = call.recv(1 << 12)
                    call.sendall(says(heard) if callable(says) else says)
                    call.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        speaker = threading.Thread(target=speak)
        speaker.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            speaker.join()


def sealed(text):
    """An answer with a good seal, to any question."""

    def answer(question):
        fresh = question.decode().split(" ")[4]
        return (module._seal(b"", text, fresh) + "\n").encode()

    return answer


STRANGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "wait": b'{"wait": 1e6}\n',
    "huge": b'{"wait": 1' + b"0" * 400 + b"}\n",
    "deep": b"[" * 70000 + b"\n",
    "not text": b"\xff\n",
    "unsealed": b"go\n",
    "kind": sealed("OSError 0 text"),
    "number": sealed(f"PortError {'9' * 5000} text"),
    "empty": sealed(""),
}


@pytest.mark.parametrize("says", STRANGE.values(), ids=STRANGE)
def test_another_program_at_the_port_is_told_from_process_0(says):
    with program(says=says) as port:
        ((error, seconds),) = together([(1, 2)], port=port, seconds=60)
    assert isinstance(error, jd.processes.PortError)
    assert "another program answers" in str(error)
    assert seconds < SOON


@pytest.mark.usefixtures("impatient")
def test_a_program_at_the_port_that_says_nothing_is_told_from_process_0():
    with program(says=None) as port:
        ((error, seconds),) = together([(1, 2)], port=port, seconds=60)
    assert isinstance(error, jd.processes.PortError)
    assert "another program listens but does not answer" in str(error)
    assert seconds < SOON


@pytest.mark.usefixtures("impatient")
def test_a_program_that_never_ends_its_line_is_not_waited_for():
    def drip(question):
        with contextlib.suppress(OSError):
            while True:
                calls[0].sendall(b".")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        run = pool.submit(comes, 1, 2, server.getsockname()[1], seconds=60)
        calls = [server.accept()[0]]
        with calls[0]:
            drip(calls[0].recv(1000))
        error, seconds = run.result()
    assert "another program listens but does not answer" in str(error)
    assert seconds < SOON


def test_whatever_answers_does_not_change_how_long_a_process_waits(monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    with program(says=sealed("wait")) as port:
        error, seconds = comes(1, 2, port, seconds=0.3)
    assert str(error).startswith("process 0 ended, or stopped responding, during the check-in")
    assert seconds < SOON


def send(port, words):
    """What the check-in answers to words, once process 0 listens."""
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as call:
                call.sendall(words)
                return call.recv(1000)
        except ConnectionRefusedError:
            time.sleep(0.01)
        except ConnectionError:
            return b""


QUESTION = b"jaxdist 1 2 " + b"0" * 16 + b" " + b"0" * 16


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n\n",
        b'{"process": 1, "processes": 2, "card": {}}\n',
        b"[" * 70000,
        b"\xff\n",
        b"1\n",
        QUESTION + b" " + b"0" * 64 + b"\n",
        (module._seal(b"a guess", QUESTION.decode()) + "\n").encode(),
    ],
)
def test_strangers_do_not_disturb(words):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(comes, 0, 2, port, secret="theirs")
        assert b"wait" not in send(port, words)
        assert comes(1, 2, port, secret="theirs")[0] is None
        assert run.result()[0] is None


def test_a_process_without_the_secret_is_told_so():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(comes, 0, 2, port, secret="theirs", seconds=1)
        send(port, b"\n")  # process 0 listens
        error, seconds = comes(1, 2, port, secret="another")
        assert "or the job has a different JAXDIST_SECRET" in str(error)
        assert seconds < SOON
        assert run.result()[0].processes == (1,)


def test_an_old_answer_is_no_answer():
    old = []

    def replay(question):
        old.append(sealed("go")(question) if not old else old[0])
        return sealed("wait")(question) if len(old) == 1 else old[0]

    with program(says=replay) as port:
        error, _ = comes(1, 2, port)
    assert isinstance(error, jd.processes.PortError)


def test_silent_connections_hold_up_none():
    port = free_port()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        run = pool.submit(comes, 0, 2, port)
        send(port, b"\n")
        for _ in range(2 * module.MOST_CALLS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert comes(1, 2, port)[0] is None
        assert run.result()[0] is None


def test_one_silence_is_no_other_program(monkeypatch):
    """As where process 0 is suspended for a moment after a question has come."""
    answers = [None, module.WAIT, module.GO]
    monkeypatch.setattr(module, "_ask", lambda own, seconds: answers.pop(0))
    assert comes(1, 2, 9000)[0] is None
    assert not answers


def test_time_in_which_process_0_was_suspended_is_none_in_which_it_answers(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    roster = module._Roster(module._Member("127.0.0.1", 1, 3, 0, "0" * 16, b""), 60.0)

    def hear(owner):
        question = module._seal(b"", f"jaxdist 1 3 {owner * 16} {'0' * 16}")
        return roster.answer(f"{question}\n".encode()).decode()

    assert hear("a").startswith("wait ")
    assert "two processes have id 1" in hear("b")
    assert not roster.over()
    now[0] += 100.0
    assert not roster.over()
    assert "two processes have id 1" in hear("a")
    for _ in range(10):
        now[0] += 0.1
        over = roster.over()
    assert over


def test_a_process_that_ends_while_it_waits_is_named(monkeypatch):
    monkeypatch.setattr(module, "GONE_SECONDS", 0.4)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(comes, 0, 3, port)
        assert send(port, (module._seal(b"", f"jaxdist 2 3 {'0' * 16} {'1' * 16}") + "\n").encode())[:5] == b"wait "
        error, seconds = run.result()
    assert str(error).startswith("process 2 ended while it waited")
    assert seconds < SOON


# ---- large jobs


def counted(processes, port):
    """All processes of a job but the first, in sixteen threads: what process 0 raises, and what they hear last."""

    def those(first):
        rest = {process: secrets.token_hex(8) for process in range(first, processes, 16) if process}
        heard = set()
        while rest:
            for process, owner in list(rest.items()):
                with contextlib.suppress(ConnectionError):
                    said = module._ask(module._Member("127.0.0.1", port, processes, process, owner, b""), 5.0) or "wait"
                    if said != "wait":
                        heard.add(said)
                        del rest[process]
        return heard

    with ThreadPoolExecutor(17) as pool:
        run = pool.submit(comes, 0, processes, port, seconds=60)
        heard = set().union(*pool.map(those, range(16)))
    return run.result()[0], heard


@pytest.fixture
def few_descriptors():
    """Not many more files than are open can be."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("processes", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_process_costs_no_descriptor(few_descriptors, processes):
    assert counted(processes, free_port()) == (None, {"go"})


def test_there_may_be_no_descriptor_left(few_descriptors):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(comes, 0, 2, port)
        send(port, b"\n")
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        time.sleep(0.2)
        for one in taken:
            os.close(one)
        assert comes(1, 2, port)[0] is None
        assert run.result()[0] is None


# ---- addresses


@pytest.mark.parametrize(
    "address", ["somewhere", "host:", "host:http", ":99999", "host:99999", "host:0", "host:²", "::1:9000"]
)
def test_addresses(address):
    with pytest.raises(ValueError, match="must be host:port"):
        check_in(Job(address, 2, 1), listen_at="127.0.0.1:1", timeout_seconds=1)


@pytest.mark.parametrize(
    ("address", "bind", "wanted"),
    [
        ("127.0.0.1:9000", "", "127.0.0.1:9000"),
        ("127.0.0.2:9000", "", "127.0.0.2:9000"),
        ("localhost:9000", "", "127.0.0.1:9000"),
        ("[::1]:9000", "", "[::1]:9000"),
        ("10.0.0.1:9000", "", "[::]:9000"),
        ("node-3:9000", "", "[::]:9000"),
        ("node-3:9000", "10.0.0.1:9001", "10.0.0.1:9001"),
    ],
)
def test_where_process_0_listens(address, bind, wanted):
    assert where_to_listen(address, {"JAX_COORDINATOR_BIND_ADDRESS": bind}) == wanted


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "::", "0.0.0.0"])
def test_it_listens_there_alone(host):
    try:
        listener = module._listen(f"[{host}]:{free_port()}" if ":" in host else f"{host}:{free_port()}")
    except jd.processes.PortError as error:
        pytest.skip(str(error))
    with listener:
        assert listener.getsockname()[0] == host


def unknown(host, *rest, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("process", [0, 1])
def test_a_host_that_has_no_address_is_named_at_once(monkeypatch, process):
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **options: (unknown if "typo" in host else real)(host, *rest, **options),
    )
    error, seconds = comes(process, 2, free_port(), host="node-typo", seconds=60, patience_seconds=0.3)
    assert isinstance(error, jd.processes.PortError)
    assert str(error).startswith("the host 'node-typo' of the coordinator's address node-typo:")
    assert "(Name or service not known)" in str(error)
    assert seconds < SOON


def test_a_host_is_looked_up_once_however_long_the_machine_pauses(monkeypatch):
    """Between any two looks at the clock, for longer than the patience."""
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=itertools.count(0, 100).__next__, sleep=lambda _: None)
    )
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    own = module._Member("node-typo", 9000, 2, 0, "0" * 16, b"")
    roster = module._Roster(own, 60.0)
    module._ask_itself(own, roster, 5.0)
    assert "(Name or service not known)" in str(roster.error)
    assert module._look_up("node-typo", 5.0) == "Name or service not known"


def test_a_look_up_that_does_not_end_is_not_waited_for(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60))
    error, seconds = comes(1, 2, 9000, host="node-3", seconds=60, patience_seconds=0.3)
    ended.set()
    assert "the host 'node-3' of the coordinator's address node-3:9000 was not found" in str(error)
    assert seconds < SOON


def test_another_machines_address_is_named_at_once():
    """As if it were: process 0 listens at another address than it was told of."""
    error, seconds = comes(0, 2, free_port(), host="127.0.0.3", seconds=60, patience_seconds=0.3)
    assert isinstance(error, jd.processes.PortError)
    assert f"process 0 runs on {socket.gethostname()}, but cannot reach itself at 127.0.0.3:" in str(error)
    assert seconds < SOON


@pytest.mark.parametrize("kubernetes", [False, True])
def test_jax_is_told_the_same(monkeypatch, kubernetes):
    """Where to listen; a pod's name may take as long to be known as the pod to start."""
    told = {}
    joining = sys.modules["jaxdist.processes.initialize"]
    monkeypatch.setattr(joining, "has_backend", lambda: False)
    monkeypatch.setattr(joining, "check_in", lambda job, **options: told.update(options))
    monkeypatch.setattr(joining, "coordination_client", lambda: None)
    monkeypatch.setattr(joining, "exchange", lambda *_, **__: None)
    monkeypatch.setattr("jax.distributed.initialize", lambda *job, **options: told.update(options, job=job))
    given = ("[::1]:9000", "2", "1", "theirs", *["10.0.0.1"] * kubernetes)
    for name, value in zip((*VARIABLES, "JAXDIST_SECRET", "KUBERNETES_SERVICE_HOST"), given):
        monkeypatch.setenv(name, value)
    assert jd.initialize(timeout_seconds=60, heartbeat_timeout_seconds=500)
    assert told["listen_at"] == told["coordinator_bind_address"] == "[::1]:9000"
    assert (told["secret"], told["patience_seconds"]) == ("theirs", 60 if kubernetes else 5)
    assert (told["job"], told["heartbeat_timeout_seconds"]) == (("[::1]:9000", 2, 1), 500)


@pytest.mark.parametrize("processes", [1, 2])
def test_who_starts_jax_first_is_told_before_others_wait(monkeypatch, processes):
    assert jax.devices()
    for name, value in zip(VARIABLES, ("127.0.0.1:9000", str(processes), "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.modules["jaxdist.processes.initialize"], "check_in", None)
    if processes == 1:
        assert not jd.initialize()
    else:
        with pytest.raises(ValueError, match=r"several processes: call initialize\(\) first, before JAX computes"):
            jd.initialize()


@pytest.mark.parametrize("name", ["timeout_seconds", "heartbeat_timeout_seconds"])
def test_a_timeout_of_no_second_is_refused_before_anything_is_started(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        jd.initialize(**{name: 0})


# ---- what processes say of themselves


def test_settings_and_versions_are_on_the_card():
    card = consistency.fingerprint_process()
    assert {"jax", "jaxlib", "jaxdist"} <= set(card["version of"])
    assert "None" not in card["version of"].values()
    assert consistency.find_difference(card, card, 1) == ""
    assert consistency.find_difference(NEWER, CARD, 1).startswith(
        "version of `jax` is 0.12.0 in process 1 and 0.10.2 in process 0"
    )


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
        ({"state": {**state(), "more": jnp.ones(1)}}, "process 1 has leaf `more`, which process 0 lacks"),
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
    card = consistency.fingerprint_state(**same)
    assert consistency.find_difference(consistency.fingerprint_state(**same), card, 1) == ""
    assert consistency.find_difference(consistency.fingerprint_state(**{**same, **other}), card, 1).startswith(message)


def test_leaves_of_one_name_are_told_apart():
    """`value` is what marks add to a path, and also the head of an actor and critic."""
    first, second = ({"w": jnp.zeros(3), "value": {"w": jnp.zeros(size)}} for size in (3, 4))
    for fingerprint in (
        lambda x: consistency.fingerprint_state(x, None, None),
        lambda x: consistency.fingerprint_batch(x, 1),
    ):
        cards = [fingerprint(jax.tree.map(np.asarray, x)) for x in (first, second)]
        assert "`['value']['w']` is" in consistency.find_difference(cards[1], cards[0], 1)


def test_fields_in_another_order():
    """As those of a class that is made of a set of names, whose order differs between processes."""
    first, second = (collections.namedtuple("Params", names)(*jnp.zeros((2, 3))) for names in ("a b", "b a"))
    cards = [consistency.fingerprint_state(params, None, None) for params in (first, second)]
    found = consistency.find_difference(cards[1], cards[0], 1)
    assert re.match(r"tree `structure` is .* of \.b, \.a in process 1 and .* of \.a, \.b in process 0: all", found)


def test_trees_with_functions_are_the_same_in_all_processes():
    """Each process makes the functions of Flax's train state anew, at other addresses."""

    def make():
        model = TrainState.create(apply_fn=lambda params, x: x, params={"w": jnp.ones(3)}, tx=adam(0.1))
        return consistency.fingerprint_state(model, None, None)

    first, second = make(), make()
    assert "TrainState" in first["tree"]["structure"]
    assert consistency.find_difference(second, first, 1) == ""


def test_recipes_are_plain():
    with pytest.raises(ValueError, match="`tx` is a function"):
        jd.processes.check_consistency({}, recipe={"tx": lambda: None})


class Shared:
    """A dictionary between threads, as JAX's coordination service is one between processes.

    It waits for what one of the `present` processes sets, however long that takes, and for nothing else.
    """

    def __init__(self, present):
        self.present, self.values, self.changed = present, {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        of = int(key.rpartition("/")[2]) if "/found/" in key else 0
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 60 if of in self.present else 0):
                raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]


def exchanged(given, *, processes=3, wrong=None):
    store = Shared(given)

    def one(process):
        known = (wrong or {}).get(process, "")
        return exchange(store, given[process], process, processes, "here", 60.0, do="come", wrong=known)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(one, given))


def test_exchange():
    assert exchanged({0: CARD, 1: CARD, 2: CARD}) == [None] * 3
    for error in exchanged({0: CARD, 1: CARD, 2: NEWER}):
        assert str(error).startswith("version of `jax` is 0.12.0 in process 2 and 0.10.2 in process 0")
        assert error.processes == (2,)
    for error in exchanged({0: CARD, 2: CARD}):
        assert isinstance(error, jd.processes.MissingProcessError)
        assert error.processes == (1,)
    (error,) = exchanged({1: CARD})
    assert error.processes == (0,)


@pytest.mark.parametrize("guilty", [0, 1])
def test_who_knows_that_it_is_wrong_waits_for_nobody(guilty):
    (error,) = exchanged({guilty: CARD}, wrong={guilty: "batch of 3"})
    for found in (error, *exchanged({0: CARD, 1: CARD, 2: CARD}, wrong={guilty: "batch of 3"})):
        assert isinstance(found, jd.processes.MismatchError)
        assert (str(found), found.processes) == ("batch of 3", (guilty,))

"""What tests of several processes share: the methods, a time limit and free ports."""

import socket

import pytest
from register import CASES

LIMIT = 400  # seconds; a process that waits for a dead one would wait for ever


# The first case of each: levels, and the kinds and dtypes of messages.
WIRES = {(case.levels, frozenset(case.wire)): name for name, case in reversed(CASES.items())}


NAMES = [name if name in WIRES.values() else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

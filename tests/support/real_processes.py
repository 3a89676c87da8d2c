"""What tests of several processes share: a time limit and free ports."""

import socket

LIMIT = 400  # seconds; a process that waits for a dead one would wait for ever


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

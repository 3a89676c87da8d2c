"""What tests of several processes share: a time limit, free ports, and flags of the compiler."""

import os
import socket

LIMIT = 400  # seconds; a process that waits for a dead one would wait for ever


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def flags_without_devices() -> str:
    """`XLA_FLAGS` for another process: the effort is ours, the number of devices its own."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)

"""Two network namespaces of this machine, which play two machines."""

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def two_namespaces(network: str) -> Iterator[list[str]]:
    """The names of two namespaces with the addresses `network.1` and `network.2` on a link between them.

    Skips the test where they cannot be made, as without root.
    """
    names = [f"jaxdist-{uuid.uuid4().hex[:8]}" for _ in range(2)]

    def run(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True)

    try:
        for name in names:
            run("netns", "add", name)
            run("-n", name, "link", "set", "lo", "up")
        run("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            run("-n", name, "addr", "add", f"{network}.{number}/24", "dev", "eth0")
            run("-n", name, "link", "set", "eth0", "up")
    except (OSError, subprocess.CalledProcessError) as refused:
        pytest.skip(f"network namespaces cannot be made here: {refused}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def inside(name: str) -> list[str]:
    """What runs a command in a namespace, in front of it."""
    return ["ip", "netns", "exec", name]

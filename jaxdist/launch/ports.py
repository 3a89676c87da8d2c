"""A port that the launcher keeps for process 0."""

import socket
import sys


def hold_port(port: int = 0) -> socket.socket:
    """Binds a port for process 0 to listen at; 0 takes a free one.

    The socket stays bound while the processes run and never listens: the kernel then gives the port to nobody who asks
    for any port, and Linux lets another socket with `SO_REUSEADDR` (those of Python and of gRPC) listen at it.

    Raises:
      ValueError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("::" if dual else "0.0.0.0", port))
    except (OSError, OverflowError) as problem:
        held.close()
        reason = getattr(problem, "strerror", "it must be from 0 to 65535")
        raise ValueError(f"port {port} cannot be had ({reason}): take another, or leave it out") from None
    return held


def number_of(held: socket.socket) -> int:
    """Its port. Other systems than Linux let nobody listen at a port that is held, so there it is let go."""
    port = held.getsockname()[1]
    if not sys.platform.startswith("linux"):
        held.close()
    return port

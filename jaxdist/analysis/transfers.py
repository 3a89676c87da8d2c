"""What a step moves between the memories of device and host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._core.jaxprs import inner_jaxprs


class Transfers(NamedTuple):
    """Bytes that one step moves on one device: `to_host` and `to_device`."""

    to_host: int
    to_device: int


def transfers(step: Callable[..., Any], *arguments: Any) -> Transfers:
    """Counts the bytes that a step moves between the memories of the device and the host.

    It reads the trace, since on CPU, where both are the same memory, the compiled program contains no transfers. A loop
    of known length counts as often as it runs; of a conditional all branches count. Outside of `distribute` the trace
    does not know how arrays are sharded, and they count whole.

    Args:
      step: a function that can be traced, `distribute(...)` or `jax.jit(tx.update)`.
      *arguments: its arguments, placed arrays or shapes with shardings.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxdist import analysis, offload
      >>> tx = offload.host(optax.sgd(0.1, momentum=0.9))
      >>> analysis.transfers(tx.update, jnp.zeros(64), tx.init(jnp.zeros(64)))
      Transfers(to_host=256, to_device=256)
    """
    closed = jax.make_jaxpr(step)(*arguments)
    return Transfers(*_count(closed.jaxpr))


def _count(jaxpr: Any) -> tuple[int, int]:
    """Returns the bytes to the host and to the device."""
    down = up = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for source, target in zip(equation.invars, equation.outvars, strict=True):
                was, now = (x.aval.memory_space == jax.memory.Space.Host for x in (source, target))
                size = target.aval.size * target.aval.dtype.itemsize
                down += size if now and not was else 0
                up += size if was and not now else 0
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in inner_jaxprs(equation):
            inner_down, inner_up = _count(inner.jaxpr)
            down, up = down + times * inner_down, up + times * inner_up
    return down, up

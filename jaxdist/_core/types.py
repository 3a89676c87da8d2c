"""The type aliases of the public signatures, once."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped, UInt

# Static where the host has chosen the program, else an agreed boolean.
Flag = Array | bool


# What gives a shape and a dtype: a concrete array, a tracer or a `jax.ShapeDtypeStruct`.
Like = Any
# A pytree of arrays with static shapes: what one compressor puts on the wire for one array.
Payload = PyTree[Shaped[Array, "..."]]
# Gradients, drifts, updates: a pytree of floating arrays.
Updates = PyTree
# The state of a reducer or of a transformation: a pytree of arrays and placement marks.
State = PyTree
# A mesh axis, several of them (slow links first), or none (`None`: no other worker).
AxisNames = str | tuple[str, ...] | None
PRNGKeyArray = Key[Array, ""]
Shape = tuple[int, ...]
# Whole numbers too, where a float is meant.
Number = float | int
Metrics = Mapping[str, Any]
Sharding = jax.sharding.Sharding

__all__ = [
    "Array",
    "AxisNames",
    "Bool",
    "Float",
    "Int",
    "Key",
    "Like",
    "Metrics",
    "Number",
    "PRNGKeyArray",
    "Payload",
    "PyTree",
    "Shape",
    "Shaped",
    "Sharding",
    "State",
    "UInt",
    "Updates",
]

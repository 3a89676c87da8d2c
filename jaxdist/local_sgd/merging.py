"""How a round merges the drifts of workers: by their mean, or by direction and length apart.

A drift is split, leaf by leaf, into a direction and a length. Both are linear in the contributions of workers, so that
the usual weighted mean merges them; only what follows from the two means is not.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from .._core.types import Array, Float, PyTree, Updates
from .._core.xla_quirks import largest_entry
from ..reducers.reducer import Law, Reducer

Merge = Literal["mean", "rda"]
# Directions cancel if their mean is no longer than so many units of rounding: it has no direction but that of rounding.
CANCELED = 8


class Polar(NamedTuple):
    """Drifts, leaf by leaf: directions of length 1, or zeros for a drift of zeros, and lengths."""

    directions: Updates
    lengths: PyTree[Float[Array, ""]]


def to_polar(drift: Updates) -> Polar:
    """Splits each leaf into `φ(x) = x/‖x‖`, `φ(0) = 0`, and `‖x‖`. What is not finite gives no finite length."""
    lengths = jax.tree.map(_length, drift)
    return Polar(jax.tree.map(lambda x, length: x / jnp.where(length == 0, 1, length), drift, lengths), lengths)


def from_polar(mean: Polar, whole: Sharding | None = None) -> Updates:
    """Returns `mean(‖x‖) φ(mean(φ(x)))`; where directions cancel, their mean at that length, which is about zero.

    With `whole`, a replicated sharding, each device measures whole directions: a sum over the entries of several
    devices has other bits on another mesh.
    """

    def join_leaf(direction, length):
        norm = _length(direction if whole is None else jax.lax.with_sharding_constraint(direction, whole))
        # Not `norm <= ...`, which NaN would pass.
        is_direction = ~(norm <= CANCELED * jnp.finfo(direction.dtype).eps)
        return length * (direction / jnp.where(is_direction, norm, 1))

    return jax.tree.map(join_leaf, mean.directions, mean.lengths)


def _length(x: Array) -> Float[Array, ""]:
    if not x.size:
        return jnp.zeros((), x.dtype)
    # Squares of entries of 1e-23 or 1e20 are 0 or infinity in float32.
    largest = largest_entry(jnp.abs(x))
    scale = jnp.where(largest == 0, 1, largest)
    return largest * jnp.sqrt(jnp.sum((x / scale) ** 2))


def check_merge(merge: str) -> None:
    """Checks the name of a way to merge."""
    if merge not in ("mean", "rda"):
        raise ValueError(f'merge must be "mean" or "rda", got {merge!r}')


def check_linear(merge: Merge, reducer: Reducer) -> None:
    """Checks that a reducer averages what it is given, as directions and lengths of drifts need it.

    Raises:
      ValueError: it codes, keeps or selects drifts, whose lengths it does not have one by one.
    """
    if merge == "rda" and reducer.law != Law.MEAN:
        raise ValueError(
            f'merge="rda" averages directions and lengths of single drifts, and {reducer} returns one mean of coded '
            'drifts: use exact(), merge="mean", or islands, which decode one drift after the other'
        )

"""Ordering barriers between computations."""

import jax
import jax.numpy as jnp

from .types import Array, Bool, PyTree, Updates


def order_after(updates: Updates, previous: PyTree) -> Updates:
    """Makes `updates` depend on every array of `previous`, without changing a bit.

    Compilers merge independent collectives, and XLA:CPU removes optimization barriers before it does so. This is a real
    dependence: on a comparison that always holds, NaN or not, and that no compiler folds.
    """
    there = is_there(previous)
    return updates if there is None else wait_for(there, updates)


def is_there(previous: PyTree) -> Bool[Array, ""] | None:
    """Returns true once every array of `previous` is computed; `None` if it has no entries."""
    numbers = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(previous) if leaf.size]
    if not numbers:
        return None
    there = jnp.array(True)
    for number in numbers:
        there &= (number <= 0) | (number > 0) | (number != number)
    return there


def wait_for(there: Bool[Array, ""], updates: Updates) -> Updates:
    """Makes `updates` depend on what `is_there` has returned."""
    # Not zeros: a constant zero would not wait, since both would be the same.
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.ones_like(x)), updates)

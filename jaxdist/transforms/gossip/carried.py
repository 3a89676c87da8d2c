"""Links between groups, each member of a group carrying a part of what goes over them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..._typing import Array, PyTree
from ...comm import Comm


def carried(outer: Comm, inner: Comm) -> Comm:
    """`outer`, whose messages the `inner.size` members of each group send in equal parts, and gather after.

    Members hold the same values. Over `outer` each sends `1/inner.size` of the bytes.
    """

    def part(x: Array) -> Array:
        return jnp.pad(x.ravel(), (0, -x.size % inner.size)).reshape(inner.size, -1)[inner.index]

    def whole(part: Array, like: Array) -> Array:
        return inner.all_gather(part).ravel()[: like.size].reshape(like.shape)

    def in_parts(collective: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda tree, *rest: jax.tree.map(lambda x: whole(collective(part(x), *rest), x), tree)

    return outer._replace(
        mean=in_parts(outer.mean),
        ppermute=in_parts(outer.ppermute),
        ledger=None,
        uncounted=None,
        remake=lambda wrap: carried(wrap(outer), wrap(inner)),
    )

"""Checks the arrays of a call that donates a state: none of them may be in two places, or gone."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from .._core.trees import is_key, leaf_name
from .._core.types import PyTree, State


class DonationChecks:
    """The checks before each call of a compiled step that donates its state.

    JAX refuses a buffer that is donated twice, or donated and read, in words that name no leaf; arrays that it does not
    see to be one may end the process. Arrays that the last call returned have buffers of their own, so that only the
    others are looked at closely, which takes some microseconds a leaf.
    """

    def __init__(self) -> None:
        self._returned: set[int] = set()

    def check(self, state: State, batch: PyTree) -> None:
        """Raises ValueError if two leaves are one array or have a common buffer, of which one is in the state."""
        own, given = _arrays(state), _arrays(batch)
        arrays = [*own, *given]
        closely = not self._returned.issuperset(map(id, own))
        if not closely and len(set(map(id, arrays))) == len(arrays):
            return
        first: dict[Any, int] = {}
        for i, leaf in enumerate(arrays):
            for place in (id(leaf), *(_buffers(leaf) if closely else ())):
                j = first.setdefault(place, i)
                # Of two arrays of the batch neither is donated.
                if j < min(i, len(own)):
                    names = [*_names(state, "the state"), *_names(batch, "the batch")]
                    raise ValueError(_explain(names[j], names[i], in_batch=i >= len(own)))

    def remember(self, state: State) -> None:
        """Takes note of the state that a call returned."""
        self._returned = {id(x) for x in jax.tree.leaves(state)}


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _arrays(tree: PyTree) -> list[Any]:
    return list(filter(_is_array, jax.tree.leaves(tree)))


def _names(tree: PyTree, whole: str) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"leaf `{leaf_name(path)}` of {whole}" if path else whole for path, x in leaves if _is_array(x)]


def _buffers(leaf: Any) -> Iterator[tuple[Any, int]]:
    """The addresses of the parts of an array on the devices of this process."""
    # Keys have no addresses that JAX would show, and empty arrays no memory.
    if is_key(leaf) or not leaf.size:
        return
    for shard in leaf.addressable_shards:
        try:
            yield shard.device, shard.data.unsafe_buffer_pointer()
        except (jax.errors.JaxRuntimeError, NotImplementedError):
            # Some backends have no addresses either.
            return


def _explain(first: str, second: str, *, in_batch: bool) -> str:
    if in_batch:
        return (
            f"{first} and {second} have one memory, which distribute() takes for the state that the step returns: copy "
            "the array of the batch, jnp.copy(x), or use distribute(..., donate=False)"
        )
    return (
        f"{first} and {second} have one memory, and distribute() cannot reuse it for both in the state that the step "
        "returns: copy one of them, jax.tree.map(jnp.copy, tree), or use distribute(..., donate=False)"
    )

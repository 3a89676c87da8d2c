"""States that wait to be published: copies of the parameters on the host, or on the devices that have them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .changes import Changes, apply_changes, can_compare, find_changes, find_changes_on_device
from .words import PublishedLeaf, copy_on_device, copy_to_host, to_words


class HostState:
    """A copy in host memory: all words are copied while the caller waits, and a thread compares them."""

    def __init__(self, arrays: Sequence[Any], leaves: Sequence[PublishedLeaf]):
        self._words = copy_to_host(arrays, leaves)

    def find_changes(self, before: "State | None", words: Sequence[np.ndarray]) -> list[Changes]:
        """What has changed since the state `before`, whose words these are."""
        del before
        return [find_changes(old, new) for old, new in zip(words, self._words, strict=True)]

    def words_after(self, words: "list[np.ndarray] | None", changes: Sequence[Changes]) -> list[np.ndarray]:
        """The words, from those of the state before, if there is one, which are no longer needed."""
        del words, changes
        return self._words


class DeviceState:
    """A copy in device memory: the caller waits for nothing, and changed words alone are copied to the host."""

    def __init__(self, arrays: Sequence[Any], leaves: Sequence[PublishedLeaf]):
        self._leaves = leaves
        self._arrays = copy_on_device(arrays, leaves)

    def find_changes(self, before: "State | None", words: Sequence[np.ndarray]) -> list[Changes]:
        """What has changed since the state `before`, whose words these are."""
        arrays = before._arrays if isinstance(before, DeviceState) else [None] * len(words)
        return [self._compare(*found) for found in zip(arrays, words, self._arrays, self._leaves, strict=True)]

    def words_after(self, words: "list[np.ndarray] | None", changes: Sequence[Changes]) -> list[np.ndarray]:
        """The words, from those of the state before, if there is one, which are changed in place."""
        if words is None:
            # Copies, which the next state changes.
            return [np.array(to_words(x, leaf, copy=False)) for x, leaf in zip(self._arrays, self._leaves, strict=True)]
        for old, some in zip(words, changes, strict=True):
            apply_changes(old, some)
        return words

    def _compare(self, before: Any, words: np.ndarray, after: Any, leaf: PublishedLeaf) -> Changes:
        # Another layout than before, as on a new mesh, is compared on the host.
        if isinstance(before, jax.Array) and before.sharding == after.sharding and can_compare(after):
            return find_changes_on_device(before, after)
        return find_changes(words, to_words(after, leaf))


State = HostState | DeviceState

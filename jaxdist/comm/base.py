"""The `Comm`: one group of workers as one of them sees it, a bundle of functions. `comm.py` makes them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._core.types import Array, PyTree


class Comm(NamedTuple):
    """One group of workers. Make one with `over`, `alone`, `nested`, `grouped` or `counted`.

    Attributes:
      size: the number of workers `W`.
      index: this worker's number, `Int[Array, ""]`.
      mean: the mean over workers, agreed. `2(W-1)/W` times the bytes are sent.
      sum: the sum, agreed; the same bytes.
      max: the largest, agreed; the same bytes.
      all_gather: `[*s] -> [W, *s]`, agreed; `W-1` times the bytes. `all_gather(x, agreed=False)` types the result as
        varying and averages its gradient by `reduce_scatter_mean`.
      all_to_all: `[W, *s] -> [W, *s]`, row `j` goes to worker `j`; `(W-1)/W` times the bytes.
      reduce_scatter_mean: `[W, *s] -> [*s]`, the mean of everybody's row for this worker; `(W-1)/W` times the bytes.
      ppermute: `ppermute(x, [(source, destination), ...])`; who is no destination gets zeros. The bytes once for each
        pair that moves.
      varying: types a value as differing between workers; no bytes.
      inner: the group of the last (fast) axis, when there are several.
      outer: the group of the other (slow) axes.
      ledger: where `counted` writes what is sent.
      uncounted: the same group without its ledger.
      remake: for a group composed of others, `remake(wrap)` composes it again of `wrap(other)`.
    """

    size: int
    index: Array
    mean: Callable[[PyTree], PyTree]
    sum: Callable[[PyTree], PyTree]
    max: Callable[[PyTree], PyTree]
    all_gather: Callable[..., PyTree]
    all_to_all: Callable[[PyTree], PyTree]
    reduce_scatter_mean: Callable[[PyTree], PyTree]
    ppermute: Callable[[PyTree, Sequence[tuple[int, int]]], PyTree]
    varying: Callable[[PyTree], PyTree]
    inner: "Comm | None" = None
    outer: "Comm | None" = None
    ledger: "list[Sent] | None" = None
    uncounted: "Comm | None" = None
    remake: "Callable[[Callable[[Comm], Comm]], Comm] | None" = None


class Sent(NamedTuple):
    """One collective: its name and the bytes that this worker sends (ring formulas; an array inside a condition)."""

    collective: str
    bytes: Any


def check_permutation(pairs: Sequence[tuple[int, int]], size: int) -> None:
    """Raises if a worker sends twice or gets two messages."""
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not set(ends) <= set(range(size)):
            raise ValueError(
                f"in a ppermute of {size} workers each sends at most once and gets one message at most, got "
                f"{list(pairs)}"
            )


def completed(pairs: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """A full permutation with these pairs."""
    sources, destinations = ({pair[end] for pair in pairs} for end in (0, 1))
    left = (sorted(set(range(size)) - ends) for ends in (sources, destinations))
    return [*pairs, *zip(*left, strict=True)]

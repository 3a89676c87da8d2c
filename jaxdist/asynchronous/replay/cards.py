"""Network cards that send one message at a time and receive one at a time."""

import heapq
from typing import no_type_check

# When a card is busy: intervals of ticks `(begin, end)` that do not overlap, in order.
Busy = tuple[tuple[int, int], ...]


# Called for every message: the runtime type checks of the tests would take most of the time.
@no_type_check
def first_gap(start: int, length: int, sender: Busy, receiver: Busy) -> int:
    """Returns the first tick from `start` on from which sender and receiver are both free for `length` ticks.

    A message may precede one that was sent before it and still waits for another receiver: otherwise one busy receiver
    would hold up its senders, these their other receivers, and so on around a ring.
    """
    for begin, end in heapq.merge(sender, receiver):
        if begin >= start + length:
            break
        start = max(start, end)
    return start


@no_type_check
def book(busy: Busy, begin: int, end: int, *, now: int) -> Busy:
    """Returns the intervals with one more; what has passed is left out, and intervals that touch become one."""
    kept: list[tuple[int, int]] = []
    for interval in sorted((*busy, (begin, end))):
        if interval[1] <= now:
            continue
        if kept and interval[0] <= kept[-1][1]:
            kept[-1] = kept[-1][0], max(kept[-1][1], interval[1])
        else:
            kept.append(interval)
    return tuple(kept)

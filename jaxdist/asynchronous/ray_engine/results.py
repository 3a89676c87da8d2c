"""What a run on real processes leaves, in the form of a replay."""

from array import array
from typing import Any

import numpy as np

from ..protocol import RECOVERED, SERVER
from ..replay.trace import Result, Trace, columns
from .keeper import Fault, Report
from .state import Books

TICKS = 10**9
ON_FAULT = 0  # of `replay.trace.CLASSES`


def result(
    books: Books,
    faults: list[Fault],
    reports: dict[int, Report],
    *,
    workers: int,
    seconds: float,
    times: list[float],
    losses: list[float],
    params: Any,
) -> Result:
    """Rows of all places in the order of time, and what each place did."""
    end = round(seconds * TICKS)
    down = np.zeros(workers)
    events = list(books.events)
    for place, died, back in faults:
        events.append((died, ON_FAULT, place, place, "failed", 0))
        if back is not None:
            events.append((back, ON_FAULT, place, place, RECOVERED, 0))
        if place != SERVER:
            down[place] += (end if back is None else back) - died
    events.sort(key=lambda row: row[0])
    words: dict[str, int] = {}
    numbered = [(*row[:4], words.setdefault(row[4], len(words)), row[5]) for row in events]
    trace = Trace(
        columns(_flat(numbered), "tick what place sender word bytes"),
        columns(_flat(sorted(books.gradients)), "tick worker read version accepted", "accepted"),
        columns(_flat(sorted(books.steps)), "tick version oldest"),
        tuple(words),
    )
    none = Report()
    places = [reports.get(place, none) for place in [*range(workers), SERVER]]
    return Result(
        trace,
        seconds,
        np.array(times, float),
        np.array(losses, float),
        params,
        np.array([one.computed for one in places[:-1]]) / max(end, 1),
        down / max(end, 1),
        np.array([sum(one.sent.values()) for one in places]),
        np.array([one.received for one in places]),
        {(place, to): sent for place, one in sorted(reports.items()) for to, sent in sorted(one.sent.items()) if sent},
        TICKS,
    )


def _flat(rows: list[tuple]) -> array:
    return array("q", [int(number) for row in rows for number in row])

"""What a comparison prints at its end. Needs rich, of the extra `cli`."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from .plotting.plots import in_bytes
from .results import Result, summarize
from .training.suite import Spread, front
from .training.sweep import Cell

CAPTION = "Bytes: sent by one worker, read from the compiled step. Milliseconds: median on this machine's devices."
SEEDS_CAPTION = (
    """Mean over the seeds and half of their range. *: nothing else has both fewer bytes and a lower loss."""
)
PERIODS_CAPTION = (
    "H: steps between two rounds. Held-out loss of what workers agreed on last.\n"
    "Bytes: sent by one worker in a step, on average."
)


def runs_table(finished: Sequence[Result], baseline: Result | None) -> Table:
    """Single runs, each beside the baseline where there is one."""
    extra = [name for name in finished[0].held_out if name != "loss"]
    versus = [f"against {baseline.name}"] if baseline else []
    fewer = ["fewer bytes"] if baseline else []
    headings = ["bytes a step", *fewer, "train loss", "held-out loss", *versus, *extra, "ms/step"]
    table = _empty(CAPTION, "reducer", headings)
    for result in finished:
        summary = summarize(result, baseline)
        cells = [in_bytes(summary.wire_bytes_per_step)]
        cells += [f"{summary.times_fewer_bytes:,.1f}x"] if baseline else []
        cells += [f"{summary.train_loss:.4f}", f"{summary.held_out_loss:.4f}"]
        cells += [f"{summary.difference:+.4f}"] if baseline else []
        cells += [f"{summary.held_out[name]:.4f}" for name in extra]
        table.add_row(result.name, *cells, f"{summary.step_milliseconds:,.0f}")
    return table


def seeds_table(spreads: Sequence[Spread]) -> Table:
    """Runs of several seeds; the first is the baseline."""
    extra = [name for name in spreads[0].held_out if name != "loss"]
    headings = ["bytes a step", "fewer bytes", "held-out loss", f"against {spreads[0].name}", *extra, "ms/step"]
    table = _empty(SEEDS_CAPTION, "reducer", headings)
    best = front(spreads)
    for one in spreads:
        ratio = spreads[0].wire_bytes / one.wire_bytes if one.wire_bytes else 1.0
        cells = [in_bytes(one.wire_bytes), f"{ratio:,.1f}x", _with_range(one.held_out["loss"])]
        cells += [f"{one.difference.mean():+.4f}", *(_with_range(one.held_out[name]) for name in extra)]
        table.add_row(f"{'*' if one in best else ' '} {one.name}", *cells, f"{one.milliseconds:,.0f}")
    return table


def _empty(caption: str, first: str, numbers: Sequence[str]) -> Table:
    """A table without rows: one column of names, and the others of numbers."""
    table = Table(box=None, caption=caption, caption_justify="left", header_style="bold", padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", vertical="bottom")
    return table


def _with_range(values: np.ndarray) -> str:
    spread = f" ±{(values.max() - values.min()) / 2:.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"


def periods_table(cells: Sequence[Cell]) -> Table:
    """Methods that talk every `H` steps; the first cell is the baseline."""
    headings = ["H", "bytes a step", "fewer bytes", "held-out loss", "against exact", "in %", "ms/step"]
    table = _empty(PERIODS_CAPTION, "method", headings)
    exact = cells[0].spread
    for cell in cells:
        one = cell.spread
        ratio = exact.wire_bytes / one.wire_bytes if one.wire_bytes else 1.0
        percent = 100 * one.difference.mean() / exact.held_out["loss"].mean()
        row = [str(cell.period or ""), in_bytes(one.wire_bytes), f"{ratio:,.1f}x", _with_range(one.held_out["loss"])]
        table.add_row(cell.method, *row, f"{one.difference.mean():+.4f}", f"{percent:+.1f}", f"{one.milliseconds:,.0f}")
    return table

"""The tables that commands print. Needs rich, of the extra `cli`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from .plotting.figures import in_bytes
from .results import RunResult, summarize
from .training.suites import Cell, SeedSpread, pareto_front

CAPTION = "Bytes: sent by one worker, read from the compiled step. Milliseconds: median on this machine's devices."
SEEDS_CAPTION = "Mean over the seeds and half of their range. *: no other has both fewer bytes and a lower loss."
PERIODS_CAPTION = (
    "H: steps between two rounds. Held-out loss of the last global parameters.\n"
    "Bytes: sent by one worker in a step, on average."
)


def new_table(first: str, numbers: Sequence[str], *, caption: str | None = None, **style: Any) -> Table:
    """A table without rows: a column of names, and columns of numbers aligned to the right."""
    style = {"box": None, "header_style": "bold", "padding": (0, 1)} | style
    table = Table(caption=caption, caption_justify="left", **style)
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", vertical="bottom")
    return table


def runs_table(finished: Sequence[RunResult], baseline: RunResult | None) -> Table:
    """Single runs, compared with the baseline if there is one."""
    extra = [name for name in finished[0].held_out if name != "loss"]
    versus = [f"against {baseline.name}"] if baseline else []
    fewer = ["fewer bytes"] if baseline else []
    headings = ["bytes a step", *fewer, "train loss", "held-out loss", *versus, *extra, "ms/step"]
    table = new_table("reducer", headings, caption=CAPTION)
    for result in finished:
        summary = summarize(result, baseline)
        cells = [in_bytes(summary.wire_bytes_per_step)]
        cells += [f"{summary.times_fewer_bytes:,.1f}x"] if baseline else []
        cells += [f"{summary.train_loss:.4f}", f"{summary.held_out_loss:.4f}"]
        cells += [f"{summary.difference:+.4f}"] if baseline else []
        cells += [f"{summary.held_out[name]:.4f}" for name in extra]
        table.add_row(result.name, *cells, f"{summary.step_milliseconds:,.0f}")
    return table


def seeds_table(spreads: Sequence[SeedSpread]) -> Table:
    """Runs of several seeds; the first is the baseline."""
    extra = [name for name in spreads[0].held_out if name != "loss"]
    headings = ["bytes a step", "fewer bytes", "held-out loss", f"against {spreads[0].name}", *extra, "ms/step"]
    table = new_table("reducer", headings, caption=SEEDS_CAPTION)
    best = pareto_front(spreads)
    for spread in spreads:
        more = [_with_range(spread.held_out[name]) for name in extra]
        cells = [*_compare_loss(spread, spreads[0]), *more, f"{spread.milliseconds:,.0f}"]
        table.add_row(f"{'*' if spread in best else ' '} {spread.name}", *cells)
    return table


def periods_table(cells: Sequence[Cell]) -> Table:
    """Methods that synchronize every `H` steps; the first cell is the baseline."""
    headings = ["H", "bytes a step", "fewer bytes", "held-out loss", "against exact", "in %", "ms/step"]
    table = new_table("method", headings, caption=PERIODS_CAPTION)
    exact = cells[0].spread
    for cell in cells:
        percent = 100 * cell.spread.difference.mean() / exact.held_out["loss"].mean()
        row = [str(cell.period or ""), *_compare_loss(cell.spread, exact), f"{percent:+.1f}"]
        table.add_row(cell.method, *row, f"{cell.spread.milliseconds:,.0f}")
    return table


def _compare_loss(spread: SeedSpread, baseline: SeedSpread) -> list[str]:
    """Bytes, how many times fewer than the baseline's, held-out loss, and its difference from the baseline's."""
    ratio = baseline.wire_bytes / spread.wire_bytes if spread.wire_bytes else 1.0
    loss = _with_range(spread.held_out["loss"])
    return [in_bytes(spread.wire_bytes), f"{ratio:,.1f}x", loss, f"{spread.difference.mean():+.4f}"]


def _with_range(values: np.ndarray) -> str:
    spread = f" ±{(values.max() - values.min()) / 2:.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"

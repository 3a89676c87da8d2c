"""The tables of runs: on the terminal, and as CSV, markdown and LaTeX."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from .figures import deviation, in_bytes, new_table
from .models.base import Workload
from .results import RunResult, summarize, times_fewer
from .running import check_folder
from .training.suites import Cell, SeedSpread, pareto_front

CAPTION = "Bytes: sent by one worker, and as many received, read from the compiled step."
# Of the machine, and not of the method: such columns and lines are on the terminal, and in CSV files, alone.
HERE = "ms/step"
HERE_CAPTION = "Milliseconds: median on this machine's devices."
SEEDS_CAPTION = (
    "Mean ± standard deviation over the seeds; differences are taken seed by seed.\n"
    "*: no other has both fewer bytes and a lower loss."
)
PERIODS_CAPTION = (
    "H: steps between two rounds. Rate: the best of those tried. Held-out loss of the last global parameters.\n"
    "Bytes: sent by one worker in a step, on average, the synchronous start included; in rounds: without it."
)
SUFFIXES = (".csv", ".md", ".tex")
_LATEX = str.maketrans({mark: f"\\{mark}" for mark in "_%&#$"} | {"±": r"$\pm$", "∞": r"$\infty$", "*": r"$\ast$"})
Record = Mapping[str, Any]


class Units(NamedTuple):
    """What one worker trains on in a step: so many tokens or images."""

    name: str  # of one of them
    count: float

    def share(self, sent: float) -> str:
        """The bytes for each of them, of those that are sent in a step."""
        each = sent / self.count
        return f"{each:.1f} B" if 0 < each < 10 else in_bytes(each)

    def heading(self) -> str:
        """The heading of a column with the bytes for each of them."""
        return f"bytes {'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def count_units(workload: Workload, batch: int, workers: int) -> Units:
    """Counts what one of the workers trains on in a step, of a batch of all together."""
    return Units(workload.unit.removesuffix("s"), batch * workload.units_per_example / workers)


def runs_table(finished: Sequence[RunResult], baseline: RunResult | None, units: Units | None = None) -> Table:
    """Single runs, compared with the baseline if there is one, and the bytes for each unit if that is known."""
    extra = [name for name in finished[0].held_out if name != "loss"]
    versus = [f"against {baseline.name}"] if baseline else []
    fewer = ["fewer bytes"] if baseline else []
    each = [units.heading()] if units else []
    headings = ["bytes a step", *each, *fewer, "train loss", "held-out loss", *versus, *extra, HERE]
    table = new_table("reducer", headings, caption=f"{CAPTION}\n{HERE_CAPTION}")
    for result in finished:
        summary = summarize(result, baseline)
        cells = [in_bytes(summary.wire_bytes_per_step)]
        cells += [units.share(summary.wire_bytes_per_step)] if units else []
        cells += [] if summary.times_fewer_bytes is None else [_in_times(summary.times_fewer_bytes)]
        cells += [f"{summary.train_loss:.4f}", f"{summary.held_out_loss:.4f}"]
        cells += [f"{summary.difference:+.4f}"] if baseline else []
        cells += [f"{summary.held_out[name]:.4f}" for name in extra]
        table.add_row(result.name, *cells, f"{summary.step_milliseconds:,.0f}")
    return table


def seeds_table(spreads: Sequence[SeedSpread], units: Units | None = None) -> Table:
    """Runs of several seeds; the first is the baseline."""
    extra = [name for name in spreads[0].held_out if name != "loss"]
    each = [units.heading()] if units else []
    versus = ["fewer bytes", "held-out loss", f"against {spreads[0].name}"]
    headings = ["bytes a step", *each, *versus, *extra, HERE]
    table = new_table("reducer", headings, caption=SEEDS_CAPTION)
    best = pareto_front(spreads)
    for spread in spreads:
        more = [with_deviation(spread.held_out[name]) for name in extra]
        sent, *versus = _compare_loss(spread, spreads[0])
        of_unit = [units.share(spread.wire_bytes)] if units else []
        cells = [sent, *of_unit, *versus, *more, f"{spread.milliseconds:,.0f}"]
        table.add_row(f"{'*' if spread in best else ' '} {spread.name}", *cells)
    return table


def periods_table(cells: Sequence[Cell], units: Units) -> Table:
    """Methods that synchronize every `H` steps; the first cell is the baseline."""
    versus = ["held-out loss", "against exact", "in %", HERE]
    headings = ["H", "rate", "bytes a step", units.heading(), "fewer bytes", "in rounds", *versus]
    table = new_table("method", headings, caption=PERIODS_CAPTION)
    exact = cells[0].spread
    for cell in cells:
        percent = 100 * cell.spread.difference.mean() / exact.held_out["loss"].mean()
        sent, ratio, *loss = _compare_loss(cell.spread, exact)
        row = [str(cell.period or ""), f"{cell.rate:g}", sent, units.share(cell.spread.wire_bytes), ratio]
        row += [_in_times(_fewer_in_rounds(cell, cells[0])), *loss]
        table.add_row(cell.method, *row, f"{percent:+.1f}", f"{cell.spread.milliseconds:,.0f}")
    return table


def _compare_loss(spread: SeedSpread, baseline: SeedSpread) -> list[str]:
    """Bytes, how many times fewer than the baseline's, held-out loss, and its difference from the baseline's."""
    ratio, loss = times_fewer(spread.wire_bytes, baseline.wire_bytes), with_deviation(spread.held_out["loss"])
    return [in_bytes(spread.wire_bytes), _in_times(ratio), loss, with_deviation(spread.difference, sign="+")]


def _in_times(ratio: float) -> str:
    return "∞" if ratio == math.inf else f"{ratio:,.1f}x"


def _fewer_in_rounds(cell: Cell, baseline: Cell) -> float:
    """How many times fewer bytes than the baseline a method sends after the synchronous start."""
    return times_fewer(cell.rounds_bytes, baseline.rounds_bytes)


def with_deviation(values: np.ndarray, form: str = ".4f", *, sign: str = "") -> str:
    """The mean over the seeds and their standard deviation."""
    spread = f" ±{deviation(values):{form}}" if len(values) > 1 else ""
    return f"{values.mean():{sign}{form}}{spread}"


def run_records(finished: Sequence[RunResult], baseline: RunResult | None, units: Units | None = None) -> list[Record]:
    """The numbers of `runs_table`, for a program: bytes, seconds and losses as they were measured."""
    summaries = [summarize(result, baseline)._asdict() for result in finished]
    records = [_flatten(summary, summary.pop("held_out")) for summary in summaries]
    return [_add_units(record, units) for record in records]


def _add_units(record: Record, units: Units | None) -> Record:
    return (
        record
        if units is None
        else {**record, f"wire_bytes_per_{units.name}": record["wire_bytes_per_step"] / units.count}
    )


def _flatten(summary: dict[str, Any], held_out: Mapping[str, float]) -> Record:
    # The summary has the loss already.
    return summary | {f"held_out_{key}": value for key, value in held_out.items()}


def seed_records(spreads: Sequence[SeedSpread], baseline: SeedSpread, units: Units | None = None) -> list[Record]:
    """The numbers of `seeds_table`, for a program; every metric has its mean, deviation and range over the seeds."""
    return [_add_units(_record_of(spread, baseline), units) for spread in spreads]


def _record_of(spread: SeedSpread, baseline: SeedSpread) -> Record:
    metrics = {f"held_out_{key}": values for key, values in spread.held_out.items()}
    record: dict[str, Any] = {"name": spread.name, "seeds": len(spread.difference)}
    record["wire_bytes_per_step"] = spread.wire_bytes
    record["times_fewer_bytes"] = times_fewer(spread.wire_bytes, baseline.wire_bytes)
    for key, values in (metrics | {"difference": spread.difference}).items():
        # Of a single seed it is unknown.
        std = deviation(values) if len(values) > 1 else float("nan")
        spans = {"mean": values.mean(), "std": std, "min": values.min(), "max": values.max()}
        record |= {f"{key}_{name}": float(value) for name, value in spans.items()}
    return record | {"step_milliseconds": spread.milliseconds}


def period_records(cells: Sequence[Cell], units: Units) -> list[Record]:
    """The numbers of `periods_table`, for a program."""
    baseline = cells[0]
    return [
        {
            "method": cell.method,
            "H": cell.period,
            "learning_rate": cell.rate,
            "times_fewer_bytes_in_rounds": _fewer_in_rounds(cell, baseline),
            **_add_units(_record_of(cell.spread, baseline.spread), units),
        }
        for cell in cells
    ]


def check_table(path: Path | None) -> None:
    """Raises ValueError, before anything is trained, if no table can be written there or in the form of the suffix."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--table must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    check_folder(f"--table {path}", path.parent)


def make_folder(path: Path | None) -> None:
    """Makes the folder of a table, if there is one to write: before the work, since it may not be possible."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


def write_table(table: Table, records: Sequence[Record], path: Path) -> Path:
    """Writes a table by the suffix of `path`: the numbers as CSV, or the rows as shown in markdown or LaTeX.

    Times of this machine are no property of a method, and in a CSV file alone.
    """
    check_table(path)
    make_folder(path)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
        return path
    # A heading of two lines on the terminal is one here.
    columns = [column for column in table.columns if column.header != HERE]
    headings = [" ".join(str(column.header).split()) for column in columns]
    rows = [[str(cell).strip() for cell in row] for row in zip(*(column.cells for column in columns))]
    aligned_right = [column.justify == "right" for column in columns]
    to_text = _to_markdown if path.suffix == ".md" else _to_latex
    caption = str(table.caption or "").replace(f"\n{HERE_CAPTION}", "")
    path.write_text(to_text(headings, rows, aligned_right, caption))
    return path


def _to_markdown(headings: list[str], rows: list[list[str]], aligned_right: list[bool], caption: str) -> str:
    # A star would begin emphasis, and a bar the next cell.
    escaped = [[cell.replace("|", r"\|").replace("*", r"\*") for cell in row] for row in (headings, *rows)]
    rule = ["---:" if right else "---" for right in aligned_right]
    lines = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
    return "\n".join([*lines, "", caption.replace("*", r"\*"), ""])


def _to_latex(headings: list[str], rows: list[list[str]], aligned_right: list[bool], caption: str) -> str:
    columns = "".join("r" if right else "l" for right in aligned_right)
    comments = [f"% {line}" for line in ["\\usepackage{booktabs}", *caption.splitlines()]]
    lines = [" & ".join(map(_escape_latex, row)) + r" \\" for row in (headings, *rows)]
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
    return "\n".join([*comments, *body, r"\bottomrule", r"\end{tabular}", ""])


def _escape_latex(cell: str) -> str:
    # The formulas of a label are LaTeX already, and so is a text with commands.
    parts = enumerate(re.split(r"(\$[^$]+\$)", cell))
    return "".join(part if number % 2 or "\\" in part else _escape_text(part) for number, part in parts)


def _escape_text(text: str) -> str:
    # Outside of formulas a minus would be a hyphen.
    signed = re.match(r"[+-](?=\d)", text)
    return (f"${signed[0]}$" if signed else "") + text[signed.end() if signed else 0 :].translate(_LATEX)

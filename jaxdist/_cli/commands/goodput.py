"""`jaxdist goodput`: the share of the chips' time that failures leave, and what the tokens cost."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter
from rich.console import Console

from ..._core.checks import check_range
from ...analysis import goodput
from ...analysis.goodput import Bill, Fleet, Goodput, Scheme
from ..figures import COLORS, color_of, label, marker_of, new_figure, new_table, open_axes, print_table, write
from ..running import Integer, Number, Text, check_positive, check_seed, new_console, path_in, print_paths
from ..spellings import parse

# The parts of a bar, with what each is called.
PARTS = {
    "goodput": (COLORS[3], "goodput"),
    "redone": (COLORS[4], "redone after a failure"),
    "saving": (COLORS[6], "checkpoints, exchanges"),
    "stopped": (COLORS[2], "stopped"),
    "waiting": (COLORS[5], "waiting for islands"),
    "absent": ("#B8B8B8", "slices away or spare"),
}
POINTS = 48
# Compared by default.
ISLANDS = (4, 16)


@dataclass(frozen=True)
class GoodputOptions:
    """Predicts the share of the chips' time that failures leave, for data parallelism and islands, and its price.

    Examples:
      jaxdist goodput --chips 16384 --slice 8 --mtbf 5.8y --repair 1h
      jaxdist goodput --chips 512 --slice 64 --preemption 12h --outage 30min --price 0.6 --tokens 2e6
    """

    chips: int = 4096
    """All chips that are paid for."""
    slice: int = 8
    """Chips of a slice or a machine, which fail together."""
    mtbf: str = "5y"
    """Mean time between failures of one chip: 90s, 5min, 2h, 3d or 1y."""
    preemption: Text = None
    """Mean time between the preemptions of one slice. Default: none."""
    outage: str = "0s"
    """For how long a preempted slice is away."""
    repair: str = "0s"
    """Until the slice of a failed chip is back. Default: another takes its place at once."""
    detect: str = "30s"
    """From a failure until the others have stopped."""
    restart: str = "2min"
    """To place, start and compile the program again."""
    reload: str = "1min"
    """To read a checkpoint, or the model of another island."""
    resize: str = "20s"
    """To shrink or grow without a restart."""
    save: str = "10s"
    """For which training pauses to write a checkpoint."""
    interval: Text = None
    """Between checkpoints. Default: the best one."""
    step: str = "1s"
    """A training step."""
    spares: Integer = None
    """Idle slices of synchronous training. Default: three deviations above what is away on average."""
    islands: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT...", help_behavior_hint="")] = ()
    """Numbers of islands to compare. Default: 4 16, at most one a slice."""
    period: int = 50
    """Steps of a round of islands."""
    fragments: int = 1
    """Parts of the model that are exchanged at different steps of a round."""
    overlap: int = 0
    """Steps of computation that hide the exchange of a fragment."""
    quorum: int = 1
    """Islands without which no round ends."""
    grace: str = "0s"
    """For how long an exchange waits for an island that stopped."""
    message: Text = None
    """Bytes that an island sends in a round, as in 4GB. Default: none."""
    link: Text = None
    """Bandwidth of an island, as in 2gbit. Default: exchanges take no time."""
    tokens: Number = None
    """Tokens a second of all chips when nothing fails."""
    price: Number = None
    """Dollars for a chip and an hour."""
    egress: float = 0.0
    """Dollars for a GB that an island sends."""
    seed: int = 0
    """Draws the failures."""
    out: Path = Path("runs/goodput")
    """Folder of goodput.png."""


class Row(NamedTuple):
    """One scheme and what was found."""

    name: str
    scheme: Scheme
    found: Goodput
    estimate: float
    bill: Bill | None


def run_goodput(chosen: GoodputOptions) -> None:
    """Simulates every scheme, prints the table and draws the figure."""
    check_seed(chosen.seed)
    if (chosen.tokens is None) != (chosen.price is None):
        raise ValueError("--tokens and --price need each other: tokens a second, and dollars for a chip and an hour")
    for name, value in (("--tokens", chosen.tokens), ("--price", chosen.price)):
        if value is not None:
            check_positive(name, value)
    check_range("--egress", chosen.egress, 0)
    fleet = _make_fleet(chosen)
    console = new_console()
    path = path_in(chosen.out, "goodput.png")
    with console.status("simulating failures"):
        rows = [_simulate(chosen, fleet, name, scheme) for name, scheme in _list_schemes(chosen, fleet.slices).items()]
    preempted = f", preemptions of a slice every {chosen.preemption}" if chosen.preemption else ""
    title = f"{fleet.chips:,} chips, slices of {fleet.slice_chips}, a failure of a chip every {chosen.mtbf}{preempted}"
    console.print(title, style="bold", highlight=False)
    _print_rows(console, rows)
    every = fleet.slices * fleet.slice_rate
    if every:
        console.print(f"one failure or preemption in {_readable(1 / every)}", highlight=False)
    console.print("available: the share of the time in which any island trains, whatever becomes of it", style="dim")
    draw_goodput(fleet, rows, path, title=title, spares=chosen.spares)
    print_paths(console, figure=path)


def _make_fleet(chosen: GoodputOptions) -> Fleet:
    names = ("detect", "restart", "reload", "repair", "save", "step", "outage")
    times = {name: parse.parse_duration(f"--{name}", getattr(chosen, name)) for name in names}
    for name in ("interval", "preemption"):
        text = getattr(chosen, name)
        if text is not None:
            times[name] = parse.parse_duration(f"--{name}", text)
    mtbf = parse.parse_duration("--mtbf", chosen.mtbf)
    return goodput.fleet(chosen.chips, mtbf=mtbf, slice_chips=chosen.slice, **times)


def _list_schemes(chosen: GoodputOptions, slices: int) -> dict[str, Scheme]:
    """Every scheme by its name, without spare slices, whose number depends on the fleet."""
    shrink = goodput.elastic(resize=parse.parse_duration("--resize", chosen.resize))
    rounds = {
        "period": chosen.period,
        "fragments": chosen.fragments,
        "overlap": chosen.overlap,
        "quorum": chosen.quorum,
        "grace": parse.parse_duration("--grace", chosen.grace),
        "message_bytes": 0.0 if chosen.message is None else parse.parse_bytes("--message", chosen.message),
        "bandwidth": math.inf if chosen.link is None else float(parse.parse_link(chosen.link).bandwidth),
    }
    schemes = {"synchronous": goodput.synchronous(), "elastic, restarts": goodput.elastic()}
    counts = chosen.islands or sorted({min(count, slices) for count in ISLANDS} - {1})
    islands = {f"{count} islands": goodput.islands(count, inner=shrink, **rounds) for count in counts}
    return schemes | {"elastic, shrinks": shrink} | islands


def _add_spares(fleet: Fleet, scheme: Scheme, spares: int | None) -> Scheme:
    """The scheme with its spare slices, if it has any use for them; None chooses their number."""
    if scheme.kind != "fixed":
        return scheme
    if spares is not None:
        return goodput.synchronous(spares=spares)
    # The slices that are away are about Poisson. With few slices a spare one is a large share, and a wait costs less.
    away = fleet.slices * fleet.slice_rate * fleet.mean_absence
    most = min(math.ceil(away + 3 * math.sqrt(away)), fleet.slices - 1)
    schemes = [goodput.synchronous(spares=number) for number in sorted({most * part // 4 for part in range(5)})]
    return max(schemes, key=lambda each: goodput.estimate(fleet, each))


def _simulate(chosen: GoodputOptions, fleet: Fleet, name: str, scheme: Scheme) -> Row:
    scheme = _add_spares(fleet, scheme, chosen.spares)
    found = goodput.simulate(fleet, scheme, seed=chosen.seed)
    spent = None
    if chosen.tokens is not None and chosen.price is not None:
        rates = {"tokens_per_second": chosen.tokens, "price": chosen.price, "egress": chosen.egress}
        spent = goodput.bill(fleet, scheme, found, **rates)
    return Row(name, scheme, found, goodput.estimate(fleet, scheme), spent)


def _print_rows(console: Console, rows: list[Row]) -> None:
    shares = ("goodput", "closed form", "redone", "saving", "stopped", "waiting", "absent", "available")
    costs = ("tokens an hour", "$ an hour", "$ for 1e9 tokens") if any(row.bill for row in rows) else ()
    table = new_table("", (*shares, "stops a day", *costs))
    for name, scheme, found, estimate, spent in rows:
        lost = (found.redone, found.saving, found.stopped, found.waiting, found.absent)
        cells = [f"{share:.1%}" for share in (found.goodput, estimate, *lost, found.availability)]
        cells.append(f"{found.failures:,.1f}")
        if spent:
            cells += [f"{spent.tokens_per_hour:.3g}", f"{spent.dollars_per_hour:,.0f}"]
            cells.append(f"{spent.dollars_per_billion_tokens:,.2f}")
        table.add_row(f"{name}, {scheme.spares} spare" if scheme.spares else name, *cells)
    print_table(console, table)


def _readable(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def draw_goodput(fleet: Fleet, rows: list[Row], path: str | Path, *, title: str, spares: int | None) -> Path:
    """Draws where the time of the chips goes, and the goodput by their number."""
    figure = new_figure(title, 11.5, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_bars(left, rows)
    _draw_sizes(right, fleet, rows, spares)
    return write(figure, path)


def _draw_bars(axes: Axes, rows: list[Row]) -> None:
    ends = np.zeros(len(rows))
    for part, (color, name) in PARTS.items():
        shares = np.array([getattr(row.found, part) for row in rows])
        if shares.max() < 5e-4:
            continue
        axes.barh(range(len(rows)), shares, 0.66, ends, color=color, label=name)
        ends += shares
    for place, row in enumerate(rows):
        text = f"{row.found.goodput:.0%}"
        inside = row.found.goodput > 0.09
        axes.text(
            row.found.goodput - 0.01 if inside else 0.01,
            place,
            text,
            ha="right" if inside else "left",
            va="center",
            color="w",
            fontweight="bold",
        )
    axes.set_yticks(range(len(rows)), [row.name.replace(", ", "\n") for row in rows])
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    label(axes, "where the time of the chips goes", size=10)
    open_axes(axes, left=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False, fontsize=8)


def _draw_sizes(axes: Axes, fleet: Fleet, rows: list[Row], spares: int | None) -> None:
    """Draws closed forms as lines, and the simulated fleet as points."""
    sizes = np.unique(np.geomspace(max(1, fleet.slices / 64), 2 * fleet.slices, POINTS).astype(int)).tolist()
    fleets = [fleet._replace(chips=slices * fleet.slice_chips) for slices in sizes]
    for number, row in enumerate(rows):
        # A smaller fleet may have too few slices for so many islands, or spare ones.
        large = [each for each in fleets if each.slices > max(row.scheme.groups - 1, spares or 0)]
        kept = [goodput.estimate(each, _add_spares(each, row.scheme, spares)) for each in large]
        axes.plot([each.chips for each in large], kept, color=color_of(number), linewidth=1.6)
        axes.plot(fleet.chips, row.found.goodput, marker_of(number), color=color_of(number), label=row.name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    label(axes, "goodput: closed form, and simulated", size=10, xlabel="chips", ylim=(0, 1.02))
    open_axes(axes, grid="y")
    axes.legend(frameon=False, fontsize=8, loc="lower left")

"""`jaxdist islands`: the islands of a run, and what the last rounds took."""

import time
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ... import islands
from ..running import Number


@dataclass(frozen=True)
class IslandsOptions:
    """Shows the rounds, members and bytes of a run whose islands meet over a folder or a bucket."""

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Folder or bucket that the islands join."""
    last: int = 10
    """Rounds to show."""
    watch: Number = None
    """Seconds between updates; without it, show the run once."""


def run_islands(chosen: IslandsOptions) -> None:
    """Prints the table, once or until Ctrl-C."""
    if chosen.watch is None:
        Console().print(make_table(chosen.url, chosen.last))
        return
    with Live(make_table(chosen.url, chosen.last), auto_refresh=False) as live:
        while True:
            time.sleep(chosen.watch)
            live.update(make_table(chosen.url, chosen.last), refresh=True)


def make_table(url: str, last: int) -> Table:
    """One row a round, the newest last; under it, where the run is."""
    found = islands.status(url, last=last)
    restarts = sum(count - 1 for count in found.sessions.values())
    table = Table(
        title=f"{url}: round {found.round}",
        caption=f"in round {found.round}: {', '.join(found.present) or 'no island'}; restarts so far: {restarts}; "
        f"global parameters kept at {', '.join(map(str, found.kept)) or 'none'}",
    )
    table.add_column("round", justify="right")
    table.add_column("members")
    table.add_column("missing")
    table.add_column("kB sent", justify="right")
    for one in found.rounds:
        sent = sum(one.sent_bytes.values()) / 1e3
        table.add_row(str(one.round), ", ".join(one.members), ", ".join(one.missing) or "-", f"{sent:,.1f}")
    return table

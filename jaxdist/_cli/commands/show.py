"""`jaxdist reducers` and `jaxdist islands`: the names that options take, and the islands of a run."""

import time
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.live import Live
from rich.table import Table

from ... import islands
from ..running import Number, new_console
from ..spellings import grammar, parse


@dataclass(frozen=True)
class ReducersOptions:
    """Lists the names that --reducer, --sync and --rule take, one per line.

    Examples:
      jaxdist reducers
      jaxdist reducers power_sgd
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """A name to show with all of its arguments."""


def run_reducers(chosen: ReducersOptions) -> None:
    """Prints the catalogue, or one entry of it with the arguments that are optional."""
    groups = parse.list_spellings()
    if chosen.name is not None:
        # A name may be in two groups: some methods are a sync and a rule.
        found = {option: names[chosen.name] for option, names in groups.items() if chosen.name in names}
        if not found:
            names = [name for entries in groups.values() for name in entries]
            grammar.refuse_name("name", chosen.name, chosen.name, names)
        for option, (spelling, purpose) in found.items():
            print(f"{option.partition(',')[0]} {spelling}\n  {purpose}")
        return
    for option, entries in groups.items():
        print(f"{option}:")
        for spelling, purpose in entries.values():
            print(f"  {spelling.partition('[')[0]:<27} {purpose}")
    print("All arguments of one: jaxdist reducers NAME")
    print("Your own: --reducer MODULE:NAME[:VALUE,KEY=VALUE], a function or a reducer in a module of this folder")


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
        new_console().print(rounds_table(chosen.url, chosen.last))
        return
    with Live(rounds_table(chosen.url, chosen.last), auto_refresh=False) as live:
        while True:
            time.sleep(chosen.watch)
            live.update(rounds_table(chosen.url, chosen.last), refresh=True)


def rounds_table(url: str, last: int) -> Table:
    """One row a round, the newest last; under it, where the run is."""
    found = islands.status(url, last=last)
    restarts = sum(count - 1 for count in found.sessions.values())
    table = Table(
        title=f"{url}: round {found.round}",
        caption=f"in round {found.round}: {', '.join(found.present) or 'no island'}; restarts so far: {restarts}; "
        f"global parameters kept at {', '.join(map(str, found.kept)) or 'none'}",
    )
    # Where a terminal is narrow the names wrap, the numbers do not.
    table.add_column("round", justify="right", no_wrap=True)
    table.add_column("members", overflow="fold")
    table.add_column("missing", overflow="fold")
    table.add_column("kB sent", justify="right", no_wrap=True)
    for one in found.rounds:
        sent = sum(one.sent_bytes.values()) / 1e3
        table.add_row(str(one.round), ", ".join(one.members), ", ".join(one.missing) or "-", f"{sent:,.1f}")
    return table

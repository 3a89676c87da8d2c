"""`jaxdist reducers` and `jaxdist islands`: the names that options take, and the islands of a run."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from ... import islands
from ...analysis import bibtex
from ...islands import store as stores
from ...islands.cleanup import forget_rounds
from ...islands.connection import Connection
from ...islands.protocol import most_rounds
from ..running import Number, Text, check_positive, new_console
from ..spellings import grammar, parse
from ..stores import open_store

# For so long a request that fails is tried again.
CLEANING_SECONDS = 60.0


@dataclass(frozen=True)
class ReducersOptions:
    """Lists the names that --reducer, --sync and --rule take, one per line.

    Examples:
      jaxdist reducers
      jaxdist reducers power_sgd
      jaxdist reducers ef:power_sgd:4 --bibtex
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """A name to show with all of its arguments."""
    bibtex: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print the papers of a name, or of all that a spelling has, as BibTeX."""


def run_reducers(chosen: ReducersOptions) -> None:
    """Prints the catalogue, or one entry of it with the arguments that are optional."""
    if chosen.bibtex:
        if chosen.name is None:
            raise ValueError("--bibtex needs a name, as in jaxdist reducers power_sgd --bibtex")
        print(bibtex(*parse.find_methods(chosen.name)))
        return
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
    """Shows the rounds, members and bytes of a run whose islands meet over a folder or a bucket.

    Examples:
      jaxdist islands s3://bucket/run-7 --watch 10
      jaxdist islands s3://bucket/run-7 --store endpoint=http://10.0.0.7:9000
      jaxdist islands runs/run-7 --clean
    """

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Folder or bucket that the islands join."""
    last: int = 10
    """Rounds to show."""
    watch: Number = None
    """Seconds between updates; without it, show the run once."""
    patience: Number = None
    """With --watch: seconds without an answer until it ends (default: never)."""
    store: Text = None
    """Of a bucket: endpoint, region, profile, credential_provider, allow_http, timeout."""
    clean: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Delete what no island needs any more, beside a running run too."""


def run_islands(chosen: IslandsOptions) -> None:
    """Deletes on request, and prints the table, once or until Ctrl-C."""
    if chosen.watch is not None:
        check_positive("--watch", chosen.watch)
    if chosen.patience is not None:
        if chosen.watch is None:
            raise ValueError("--patience: only with --watch")
        check_positive("--patience", chosen.patience)
    place = open_store(chosen.url, chosen.store)
    if chosen.clean:
        _clean(chosen.url, place)
    if chosen.watch is None:
        new_console().print(rounds_table(chosen.url, chosen.last, place))
    else:
        _watch(chosen, place, chosen.watch)


def _watch(chosen: IslandsOptions, place: "str | islands.SharedStore", pause: float) -> None:
    """Shows the run again and again; what a store does not tell is shown as it was."""
    # A run that was never there is a mistake in the URL.
    found, seen, console = rounds_table(chosen.url, chosen.last, place), time.monotonic(), new_console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def draw(picture: RenderableType) -> None:
        if live is None:
            console.print(picture)
        else:
            live.update(picture, refresh=True)

    with live or nullcontext():
        draw(found)
        while True:
            time.sleep(pause)
            try:
                found, seen = rounds_table(chosen.url, chosen.last, place), time.monotonic()
                draw(found)
            except (OSError, islands.IslandError) as problem:
                seconds = time.monotonic() - seen
                if chosen.patience is not None and seconds > chosen.patience:
                    raise
                draw(Group(found, f"as it was {seconds:.0f} s ago: {problem}"))


def _clean(url: str, place: "str | islands.SharedStore") -> None:
    """Deletes the rounds that are older than the kept parameters, and what they name, as an island does."""
    # Raises ValueError where there is no run: a mistyped URL must not be cleaned.
    found = islands.status(place, last=1)
    store, gone = stores.open_store(place), []

    def delete(name: str) -> None:
        gone.append(name)
        store.delete(name)

    # One by one, so that the names are counted.
    connection = Connection(store._replace(delete=delete, delete_many=None))
    connection.deadline = connection.now() + CLEANING_SECONDS
    forget_rounds(connection, most_rounds(found.keep_every))
    new_console().print(f"{url}: {len(gone)} names deleted", highlight=False)


def rounds_table(url: str, last: int, place: "str | islands.SharedStore | None" = None) -> Table:
    """One row a round of the run at `place`, by default the URL, the newest last; under it, where the run is."""
    found = islands.status(url if place is None else place, last=last)
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

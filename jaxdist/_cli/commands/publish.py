"""`jaxdist publish`: what a trainer has published, and its clean-up."""

import time
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from ... import publish
from ..running import Integer, Number, Text, check_positive, new_console
from ..stores import open_store

DAY = 86_400.0


@dataclass(frozen=True)
class PublishOptions:
    """Shows the weights that a trainer publishes in a folder or a bucket, and what is damaged there.

    Examples:
      jaxdist publish s3://bucket/policy
      jaxdist publish s3://bucket/policy --keep 100 --older 7
    """

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Folder or bucket that the trainer publishes to."""
    last: int = 10
    """States to show."""
    verify: bool = False
    """Read the bytes of these states, too, and compare them with their hashes."""
    store: Text = None
    """Of a bucket: endpoint, region, profile, credential_provider, allow_http, timeout."""
    keep: Integer = None
    """Delete older states than the last KEEP, and the anchor before them."""
    older: Number = None
    """Of these, delete only states that are older than so many days."""


def run_publish(chosen: PublishOptions) -> int:
    """Deletes on request, and prints the table; returns 1 if something is damaged."""
    place = open_store(chosen.url, chosen.store)
    if chosen.older is not None:
        check_positive("--older", chosen.older)
        if chosen.keep is None:
            raise ValueError("--older says which states go; give --keep, the number of those that stay in any case")
    if chosen.keep is not None:
        gone = publish.clean_up(place, keep=chosen.keep, older=DAY * (chosen.older or 0.0))
        new_console().print(f"{chosen.url}: {gone} names deleted", highlight=False)
    found = publish.status(place, last=chosen.last, verify=chosen.verify)
    console = new_console()
    console.print(_make_table(chosen.url, found))
    for problem in found.problems:
        console.print(problem, highlight=False)
    return int(any(not problem.endswith("is foreign") for problem in found.problems))


def _make_table(url: str, found: publish.PublishStatus) -> Table:
    whole = found.whole_bytes
    table = Table(
        title=f"{url}: {found.states} states of {len(found.leaves)} leaves, {whole / 1e3:,.1f} kB each",
        caption=f"publishers so far: {found.publishers}",
    )
    for name in ("state", "step", "age", "kB of the patch", "of a whole copy", "kB of the anchor"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.publications:
        age = f"{max(time.time() - one.time, 0):,.0f} s"
        patch = "-", "-"
        if one.patch_bytes and whole:
            patch = f"{one.patch_bytes / 1e3:,.1f}", f"{one.patch_bytes / whole:.2%}"
        anchor = f"{one.anchor_bytes / 1e3:,.1f}" if one.anchor_bytes else "-"
        table.add_row(str(one.number), str(one.step), age, *patch, anchor)
    return table

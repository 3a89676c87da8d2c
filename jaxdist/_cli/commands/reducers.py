"""`jaxdist reducers`: the names that --reducer, --sync and --rule take."""

from dataclasses import dataclass
from typing import Annotated

import tyro

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

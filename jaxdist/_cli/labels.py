"""Labels of one's own for the methods in figures and tables, in place of their spellings."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import tyro

from .spellings import grammar

Labels = Annotated[
    tuple[tuple[str, ...], ...],
    tyro.conf.arg(metavar="NAME=TEXT...", help_behavior_hint="(repeatable)"),
    tyro.conf.UseAppendAction,
]
NO_LABELS: Mapping[str, str] = MappingProxyType({})
Named = TypeVar("Named", bound=Any)


def parse_labels(given: Sequence[Sequence[str]], names: Sequence[str]) -> dict[str, str]:
    """The label of each name that has one, from `NAME=TEXT`; names may have equals signs themselves.

    Examples:
      >>> parse_labels([["exact=All-reduce", "diloco:H=50=DiLoCo, $H = 50$"]], ["exact", "diloco:H=50"])
      {'exact': 'All-reduce', 'diloco:H=50': 'DiLoCo, $H = 50$'}
    """
    labels: dict[str, str] = {}
    for text in (text for group in given for text in group):
        named = [name for name in names if grammar.check_length(text).startswith(f"{name}=")]
        if not named:
            grammar.refuse_name("method in --label", text, text.rpartition("=")[0] or text, names)
        # `diloco:H` may be a name beside `diloco:H=50`.
        name = max(named, key=len)
        labels[name] = text.removeprefix(f"{name}=").strip()
        if not labels[name]:
            raise ValueError(f"--label {text!r} has no text: write it behind the equals sign, as in {name}=Ours")
    shown = [labels.get(name, name) for name in names]
    twice = [label for label in dict.fromkeys(shown) if shown.count(label) > 1]
    if twice:
        raise ValueError(f"--label gives {twice[0]!r} to {shown.count(twice[0])} methods: give each its own")
    return labels


def relabel(items: Iterable[Named], labels: dict[str, str], field: str = "name") -> list[Named]:
    """The NamedTuples with the labels of their methods in place of their names."""
    names = [(item, getattr(item, field)) for item in items]
    return [item._replace(**{field: labels.get(name, name)}) for item, name in names]

"""`jaxdist topology`: a graph over the workers, in numbers and as a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..plotting.topologies import MAKE, draw, facts


@dataclass(frozen=True)
class ShowTopology:
    """The options of `jaxdist topology`."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=", ".join(MAKE))]
    workers: int = 16
    """How many workers."""
    png: bool = False
    """Draw it, and how the consensus error falls."""
    out: Path = Path("runs/topology")
    """Where NAME-WORKERS.png goes."""


def show(chosen: ShowTopology) -> list[str]:
    """What `jaxdist topology` prints; it draws too, if that was asked for."""
    if chosen.name not in MAKE:
        raise ValueError(f"there is no topology {chosen.name!r}, but: {', '.join(MAKE)}")
    graph = MAKE[chosen.name](chosen.workers)
    lines = [f"{graph.name}, {graph.workers} workers"] + [f"  {what}: {value}" for what, value in facts(graph).items()]
    if chosen.png:
        chosen.out.mkdir(parents=True, exist_ok=True)
        lines.append(f"plot {draw(graph, chosen.out / f'{chosen.name}-{chosen.workers}.png')}")
    return lines

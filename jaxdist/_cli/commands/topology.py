"""`jaxdist topology`: a graph over the workers, in numbers and as a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from ... import topology
from ...topology.base import Topology
from ...wire.mixing import is_mean
from ..plotting.topologies import draw_topology
from ..running import path_in
from ..spellings.tables import GRAPHS


@dataclass(frozen=True)
class TopologyOptions:
    """The options of `jaxdist topology`."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=", ".join(GRAPHS))]
    workers: int = 16
    """Number of workers."""
    png: bool = False
    """Draw the graph, and the decay of the consensus error."""
    out: Path = Path("runs/topology")
    """Folder of NAME-WORKERS.png."""


def run_topology(chosen: TopologyOptions) -> None:
    """Prints the properties of a graph, and draws it with `--png`."""
    if chosen.name not in GRAPHS:
        raise ValueError(f"unknown topology {chosen.name!r}; known: {', '.join(GRAPHS)}")
    graph = GRAPHS[chosen.name](chosen.workers)
    lines = [f"{graph.name}, {graph.workers} workers"]
    lines += [f"  {name}: {value}" for name, value in _list_properties(graph).items()]
    if chosen.png:
        path = path_in(chosen.out, f"{chosen.name}-{chosen.workers}.png")
        lines.append(f"plot {draw_topology(graph, path)}")
    print("\n".join(lines))


def _list_properties(graph: Topology) -> dict[str, str]:
    # A round that averages all workers is one all-reduce, which sends 2(W-1)/W models per worker.
    mean, workers = 2 * (graph.workers - 1), graph.workers
    models = [mean if is_mean(r, workers) else sum(len(m.pairs) for m in r.messages) for r in graph.rounds]
    sent = [models[number] for number in graph.order]
    rate = topology.mixing_rate(graph)
    properties = {
        "rounds": str(len(graph.order)),
        "models sent by a worker in a step": f"{np.mean(sent) / graph.workers:.2f}",
        "consensus error after a step": f"{rate:.4f} of it",
        "spectral gap": f"{1 - rate:.4f}",
    }
    if topology.is_symmetric(graph):
        properties["least eigenvalue"] = f"{topology.smallest_eigenvalue(graph):.4f}"
    return properties

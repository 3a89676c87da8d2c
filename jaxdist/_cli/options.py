"""What the commands take: each attribute is an option, its docstring the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .spellings import parse, replayed, sync
from .training import sweep

DEMO = ("exact", "f16", "qsgd:4", "ef:top_k:0.01", "ef:power_sgd:4", "ef:sign")
REDUCER = "Default: ef:power_sgd:4, or exact with --sync, where it carries what a round sends.\n"
SYNC = "Workers step by themselves and meet every H steps, each with the --optimizer:\n" + sync.describe()
RULE = "How workers learn from each other, as for jaxdist replay:\n"
COMPARED = "The first is what the others are measured against. Also SYNC/REDUCER, as in diloco:H=50/ef:qsgd:4.\n"


@dataclass(frozen=True)
class Options:
    """What both commands take."""

    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9."""
    workload: Literal["text", "digits"] = "text"
    """text: the source of Python's standard library, byte by byte; digits: scikit-learn's handwritten digits."""
    model: str | None = None
    """Default gpt:demo for text (or tiny, small, medium, large; also gpt:demo,layers=4), convnet:32 for digits."""
    steps: int = 200
    """How many steps to train."""
    batch: int = 32
    """Examples in a step, all workers together."""
    seed: int = 0
    """Draws the parameters and the batches: equal seeds see equal data in equal order."""
    devices: int | None = None
    """How many workers. The default is all devices, or four simulated ones where there is only a CPU."""
    text: Path | None = None
    """A file or a folder of your own to train on."""


@dataclass(frozen=True)
class Train(Options):
    """The options of `jaxdist train`."""

    reducer: Annotated[str | None, tyro.conf.arg(help=REDUCER + parse.describe())] = None
    sync: Annotated[str | None, tyro.conf.arg(help=SYNC)] = None
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1 and 2 cut the optimizer's state over the workers, 3 the parameters too. --reducer then averages the
    gradients in its reduce-scatter form: exact unless it is given, or two_shot:qsgd:4."""
    offload: str | None = None
    """Where the optimizer's state lies: host for the host's memory, nvme:FOLDER for a disk. A run that was stopped
    goes on from the folder."""
    baseline: bool = True
    """Train with plain all-reduce too, to compare with; not with --engine ray."""
    save_every: int | None = None
    """Save after so many steps too, beside the training, and not only after the last one."""
    resume: bool = False
    """Go on from the checkpoint in --out, on any number of --devices, until --steps are done in all."""
    engine: Literal["mesh", "ray"] = "mesh"
    """mesh: one program on all devices. ray: a process a worker, by a --rule, on this machine or a Ray cluster; --batch
    is then that of a gradient, --steps are updates of the model, and what follows is for it."""
    rule: Annotated[str | None, tyro.conf.arg(help=RULE + replayed.describe())] = None
    workers: int | None = None
    """How many processes."""
    seconds: float | None = None
    """How long, instead of --steps."""
    slow: str | None = None
    """Worker 0 sleeps until its gradients take so many times longer, as in 5x."""
    gradient: str | None = None
    """A code for gradients on the wire, as in qsgd:4 or ef:top_k:0.01."""
    on_death: Literal["restart", "continue"] | None = None
    """When a worker dies: restart, the default, replaces it; continue goes on without it, for rules with a server."""
    address: str | None = None
    """Of a running Ray cluster, as in auto or 10.0.0.1:6379; the default is to start one here, for this run."""
    out: Path = Path("runs/train")
    """Where log.jsonl, loss.png and checkpoint/ go."""


@dataclass(frozen=True)
class Compare(Options):
    """The options of `jaxdist compare`."""

    reducers: Annotated[tuple[str, ...], tyro.conf.arg(help=COMPARED + parse.describe())] = DEMO
    suite: Literal["compression", "local"] | None = None
    """Instead of --reducers: the whole compression family (try it with --workload digits --seeds 3), or all methods
    that talk every H steps, against bytes and against tokens."""
    workers: tuple[int, ...] = (4, 8)
    """For --suite local, instead of --devices: a comparison with each of these numbers of workers."""
    periods: tuple[int, ...] = sweep.PERIODS
    """For --suite local: the values of H."""
    seeds: int = 1
    """How many seeds to repeat everything with, counted from --seed. From 2 on, or with a suite, the drawing has the
    mean and the range of the held-out loss against the bytes of a step."""
    out: Path = Path("runs/compare")
    """Where log.jsonl and the drawing (compare.png, pareto.png of several seeds, local-WORKERS.png) go."""

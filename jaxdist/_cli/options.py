"""The options of `train` and `compare`: each attribute is an option, its docstring the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .spellings import grammar, parse
from .spellings.tables import RULES
from .training import suites

DEMO = ("exact", "f16", "qsgd:4", "ef:top_k:0.01", "ef:power_sgd:4", "ef:sign")
REDUCER = "Default: ef:power_sgd:4, or exact with --sync, where it encodes what a round sends.\n"
SYNC = "Workers take local steps with the --optimizer and synchronize every H steps:\n" + parse.describe_syncs()
RULE = "How workers exchange gradients or models, as for jaxdist replay:\n"
COMPARED = "The first is the baseline of the others. Also SYNC/REDUCER, as in diloco:H=50/ef:qsgd:4.\n"


@dataclass(frozen=True)
class Options:
    """The options that both commands have."""

    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9."""
    workload: Literal["text", "digits"] = "text"
    """text: the source of Python's standard library, byte by byte; digits: scikit-learn's handwritten digits."""
    model: str | None = None
    """Default gpt:demo for text (or tiny, small, medium, large; also gpt:demo,layers=4), convnet:32 for digits."""
    steps: int = 200
    """Number of training steps."""
    batch: int = 32
    """Examples in a step, all workers together."""
    seed: int = 0
    """Draws the parameters and the batches: equal seeds train on equal data in equal order."""
    devices: int | None = None
    """Number of workers. The default is all devices, or four simulated ones if there is only a CPU."""
    text: Path | None = None
    """A file or a folder of your own to train on."""


@dataclass(frozen=True)
class TrainOptions(Options):
    """The options of `jaxdist train`."""

    reducer: Annotated[str | None, tyro.conf.arg(help=REDUCER + parse.describe_reducers())] = None
    sync: Annotated[str | None, tyro.conf.arg(help=SYNC)] = None
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1 and 2 shard the optimizer state over the workers, 3 the parameters too. --reducer then averages the
    gradients in its reduce-scatter form: exact by default, or two_shot:qsgd:4."""
    offload: str | None = None
    """Where to keep the optimizer state: host for host memory, nvme:FOLDER for a disk. A run that was stopped resumes
    from the folder."""
    baseline: bool = True
    """Train with plain all-reduce too, for comparison; not with --engine ray."""
    save_every: int | None = None
    """Also save every this many steps, in the background, and not only after the last one."""
    resume: bool = False
    """Resume from the checkpoint in --out, on any number of --devices, until --steps are done in total."""
    engine: Literal["mesh", "ray"] = "mesh"
    """mesh: one program on all devices. ray: one process per worker, by a --rule, on this machine or a Ray cluster;
    --batch is then that of a gradient, --steps are updates of the model, and the options below apply."""
    rule: Annotated[str | None, tyro.conf.arg(help=RULE + grammar.describe(RULES))] = None
    workers: int | None = None
    """Number of processes."""
    seconds: float | None = None
    """Duration, instead of --steps."""
    slow: str | None = None
    """Worker 0 sleeps until its gradients take this many times longer, as in 5x."""
    gradient: str | None = None
    """The code of gradients on the wire, as in qsgd:4 or ef:top_k:0.01."""
    on_death: Literal["restart", "continue"] | None = None
    """When a worker dies: restart, the default, replaces it; continue goes on without it, for rules with a server."""
    address: str | None = None
    """Address of a running Ray cluster, as in auto or 10.0.0.1:6379; the default starts one here for this run."""
    out: Path = Path("runs/train")
    """Folder of log.jsonl, loss.png and checkpoint/."""


@dataclass(frozen=True)
class CompareOptions(Options):
    """The options of `jaxdist compare`."""

    reducers: Annotated[tuple[str, ...], tyro.conf.arg(help=COMPARED + parse.describe_reducers())] = DEMO
    suite: Literal["compression", "local"] | None = None
    """Instead of --reducers: the whole compression family (try it with --workload digits --seeds 3), or all methods
    that synchronize every H steps, against bytes and against tokens."""
    workers: tuple[int, ...] = (4, 8)
    """For --suite local, instead of --devices: a comparison with each of these numbers of workers."""
    periods: tuple[int, ...] = suites.PERIODS
    """For --suite local: the values of H."""
    seeds: int = 1
    """How many seeds to repeat everything with, counted from --seed. With 2 or more, or with a suite, the plot shows
    the mean and the range of the held-out loss against the bytes of a step."""
    out: Path = Path("runs/compare")
    """Folder of log.jsonl and the plot (compare.png, pareto.png of several seeds, local-WORKERS.png)."""

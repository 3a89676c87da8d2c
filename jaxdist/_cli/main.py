"""Parses the arguments of `jaxdist` and runs the command that they name."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from ..asynchronous.errors import ActorLost, NonFiniteGradient, Stalled
from ..processes.launch import command as launcher
from .commands.advise import AdviseOptions, run_advise
from .commands.compare import run_compare
from .commands.doctor import DoctorOptions, run_doctor
from .commands.plan import PlanOptions, run_plan
from .commands.replay import ReplayOptions, run_replay
from .commands.topology import TopologyOptions, run_topology
from .commands.train import run_train
from .commands.tune import TuneOptions, run_tune
from .options import CompareOptions, TrainOptions

# name: (options, the function that runs the command and may return an exit code, its purpose)
COMMANDS = {
    "train": (TrainOptions, run_train, "Trains one model on all devices and compares it with plain all-reduce."),
    "compare": (
        CompareOptions,
        run_compare,
        "Trains with several reducers on the same data and plots loss against bytes.",
    ),
    "advise": (
        AdviseOptions,
        run_advise,
        "Recommends a method for given links: bytes, predicted step times, break-even.",
    ),
    "replay": (
        ReplayOptions,
        run_replay,
        "Runs asynchronous methods on a virtual clock: real gradients, simulated time.",
    ),
    "plan": (
        PlanOptions,
        run_plan,
        "Predicts memory, bytes and time of a run on TPUs or GPUs that are not available here.",
    ),
    "tune": (TuneOptions, run_tune, "Finds message sizes for the gradient, for a link that is given or measured."),
    "doctor": (
        DoctorOptions,
        run_doctor,
        "Lists devices and software, and checks that collectives give right numbers.",
    ),
    "topology": (TopologyOptions, run_topology, "Shows a graph over the workers, and how fast it mixes."),
}
EXPECTED = (ValueError, OSError, ModuleNotFoundError, ActorLost, Stalled, NonFiniteGradient)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: the arguments after `jaxdist`; None for those of this process.

    Returns:
      The exit code: 0, 1 for a plan that does not fit or a fault that `doctor` finds, or 2 for arguments that cannot
      work, with one line on stderr that says why. With `JAXDIST_TRACEBACK=1` in the environment they raise instead.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == ["launch"]:
        return launcher.main(given[1:])
    description = "Distributed training, cheap in bytes. `launch` starts processes: see `jaxdist launch --help`."
    chosen = tyro.cli(_subcommands(), prog="jaxdist", description=description, args=given)
    run = next(run for options, run, _ in COMMANDS.values() if isinstance(chosen, options))
    try:
        return run(chosen) or 0
    except EXPECTED as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        print(f"jaxdist: error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2


def _subcommands() -> Any:
    """The union of all options, annotated with the names of their commands."""
    union: Any = None
    for name, (options, _, purpose) in COMMANDS.items():
        command = Annotated[options, tyro.conf.subcommand(name, description=purpose)]
        union = command if union is None else union | command
    return union

"""Parses the arguments of `jaxdist` and runs the command that they name."""

import inspect
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

import tyro

from .. import __version__
from .._core.accelerators import ignore_absent_accelerators
from ..asynchronous.errors import (
    ActorLostError,
    DeadlockError,
    NonFiniteGradientError,
    StalledError,
    TooManyEventsError,
)
from ..checkpoint.errors import CheckpointPeerError
from ..islands.base import IslandError
from ..offload.nvme.files import StoreError
from ..processes.launch import __main__ as launcher
from ..publish.base import PublishError
from .commands.advise import AdviseOptions, run_advise
from .commands.compare import CompareOptions, run_compare
from .commands.doctor import DoctorOptions, run_doctor
from .commands.goodput import GoodputOptions, run_goodput
from .commands.plan import PlanOptions, run_plan
from .commands.publish import PublishOptions, run_publish
from .commands.replay import ReplayOptions, run_replay
from .commands.show import IslandsOptions, ReducersOptions, run_islands, run_reducers
from .commands.topology import TopologyOptions, run_topology
from .commands.train import TrainOptions, run_train
from .commands.tune import TuneOptions, run_tune
from .running import check_folder
from .spellings import grammar

PURPOSE = "Distributed training, cheap in bytes. `jaxdist --version` shows the versions that run."


@dataclass(frozen=True)
class LaunchOptions:
    """Starts several processes of a script on this machine: see jaxdist launch --help."""


# name: (options, whose docstring is the purpose in --help; the function that runs them and may return an exit code)
COMMANDS = {
    "train": (TrainOptions, run_train),
    "compare": (CompareOptions, run_compare),
    "reducers": (ReducersOptions, run_reducers),
    "advise": (AdviseOptions, run_advise),
    "replay": (ReplayOptions, run_replay),
    "plan": (PlanOptions, run_plan),
    "goodput": (GoodputOptions, run_goodput),
    "tune": (TuneOptions, run_tune),
    "doctor": (DoctorOptions, run_doctor),
    "topology": (TopologyOptions, run_topology),
    "islands": (IslandsOptions, run_islands),
    "publish": (PublishOptions, run_publish),
}
EXPECTED = (
    ValueError,
    OSError,
    ModuleNotFoundError,
    ActorLostError,
    CheckpointPeerError,
    DeadlockError,
    IslandError,
    NonFiniteGradientError,
    PublishError,
    StalledError,
    StoreError,
    TooManyEventsError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    That is 0, 1 for a plan that does not fit or a fault that `doctor` finds, or 2 for arguments that cannot work, with
    one line on stderr that says why. With `JAXDIST_TRACEBACK=1` in the environment they raise instead.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # Its arguments include those of a script, which only its own parser can leave alone.
    if list(given[:1]) == ["launch"]:
        return launcher.main(given[1:])
    if list(given) == ["--version"]:
        print(f"jaxdist {__version__}, jax {version('jax')}, Python {platform.python_version()}")
        return 0
    try:
        if given and given[0] in ("compare", "train") and "--step" in given:
            raise ValueError(
                f"--step is for plan and advise: {given[0]} trains, and a step has neither first parameters nor data. "
                "Give the model as --model MODULE:FUNCTION, which returns (loss, params, batch)"
            )
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            grammar.refuse_name("command", given[0], given[0], [*COMMANDS, "launch"])
        settings: dict[str, Any] = {
            "prog": "jaxdist",
            "description": PURPOSE,
            "config": (tyro.conf.FlagCreatePairsOff,),
        }
        chosen = tyro.cli(_subcommands(given), args=given, **settings)
        if getattr(chosen, "out", None) is not None:
            check_folder(f"--out {chosen.out}", chosen.out)
        ignore_absent_accelerators()
        run = next(run for options, run in COMMANDS.values() if isinstance(chosen, options))
        return run(chosen) or 0
    except KeyboardInterrupt:
        # Where nothing is worth saving, as during the baseline.
        print("jaxdist: interrupted", file=sys.stderr)
        return 130
    except EXPECTED as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        # Scripts expect one line: line breaks of the message are folded.
        print(f"jaxdist: error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2


def _subcommands(given: Sequence[str]) -> Any:
    """The union of all options, annotated with the names of their commands.

    The help of a command has its examples, which the list of commands leaves out.
    """
    union: Any = None
    # `launch` has a parser of its own, and is here for the list of commands.
    for name, options in [*((name, options) for name, (options, _) in COMMANDS.items()), ("launch", LaunchOptions)]:
        # Behind an indentation, tyro keeps the line breaks.
        text = inspect.cleandoc(options.__doc__ or "")
        description = text if name in given[:1] else text.partition("\n")[0]
        command = Annotated[options, tyro.conf.subcommand(name, description=description)]
        union = command if union is None else union | command
    return union

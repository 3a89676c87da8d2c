"""From the arguments to the command that they name."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from ..asynchronous.ray_engine.errors import Stalled, WorkerLost
from ..asynchronous.replay.errors import NonFiniteGradient
from ..processes.launch import command as launcher
from .commands.advise import Advise, advise
from .commands.compare import compare, compare_periods
from .commands.doctor import Doctor, doctor
from .commands.plan import Plan, plan
from .commands.processes import refuse_of_processes, train_processes
from .commands.replay import Replay
from .commands.replay import run as run_replay
from .commands.topology import ShowTopology, show
from .commands.train import train
from .commands.tune import Tune, tune
from .options import Compare, Train
from .running import set_up


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: what follows `jaxdist`; None for those of this process.

    Returns:
      The exit code: 0, 1 for a plan that does not fit or a fault that `doctor` finds, or 2 for arguments that cannot
      work, with one line on stderr that says why. With `JAXDIST_TRACEBACK=1` in the environment they raise instead.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == ["launch"]:
        return launcher.main(given[1:])
    description = "Distributed training, cheap in bytes. `launch` starts processes: see `jaxdist launch --help`."
    chosen = tyro.cli(_subcommands(), prog="jaxdist", description=description, args=given)
    try:
        if isinstance(chosen, ShowTopology):
            print("\n".join(show(chosen)))
        elif isinstance(chosen, Advise):
            advise(chosen)
        elif isinstance(chosen, Doctor):
            return doctor(chosen)
        elif isinstance(chosen, Plan):
            return plan(chosen)
        elif isinstance(chosen, Replay):
            run_replay(chosen)
        elif isinstance(chosen, Tune):
            tune(chosen)
        elif isinstance(chosen, Train) and chosen.engine == "ray":
            train_processes(chosen)
        elif isinstance(chosen, Train):
            refuse_of_processes(chosen)
            train(chosen, *set_up(chosen))
        elif chosen.suite == "local":
            compare_periods(chosen)
        else:
            compare(chosen, *set_up(chosen))
    except (ValueError, OSError, ModuleNotFoundError, WorkerLost, Stalled, NonFiniteGradient) as problem:
        if os.environ.get("JAXDIST_TRACEBACK"):
            raise
        print(f"jaxdist: error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    return 0


def _subcommands() -> Any:
    def command(options: type, name: str, purpose: str) -> Any:
        return Annotated[options, tyro.conf.subcommand(name, description=purpose)]

    train = command(Train, "train", "Trains one model on all devices and compares it with plain all-reduce.")
    compare = command(Compare, "compare", "Trains with several reducers on the same data and draws loss against bytes.")
    advised = command(Advise, "advise", "What to send over given links: bytes, predicted step times, break-even.")
    planned = command(Plan, "plan", "What a run would take on TPUs or GPUs that are not here: memory, bytes, time.")
    replayed = command(Replay, "replay", "Asynchronous methods on a virtual clock: real gradients, simulated time.")
    tuned = command(Tune, "tune", "In what messages to send the gradient: for a link that is told, or measured.")
    health = command(Doctor, "doctor", "What there is to run on, and whether its collectives give right numbers.")
    graph = command(ShowTopology, "topology", "A graph over the workers, and how fast it mixes.")
    return train | compare | advised | replayed | planned | tuned | graph | health

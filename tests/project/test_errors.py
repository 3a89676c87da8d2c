"""Every exception of the library can go to another process, and comes back with all that it said."""

import copy
import errno
import importlib
import pathlib
import pickle
import pkgutil

import pytest

import jaxdist
from jaxdist import compressors, islands, publish, transforms
from jaxdist._core.checks import Portable
from jaxdist.asynchronous import ray_engine, replay
from jaxdist.checkpoint import errors as checkpoint_errors
from jaxdist.offload.nvme import files as store_errors
from jaxdist.processes import CollectiveError, ProcessLostError, StepTimeoutError, cluster
from jaxdist.processes.launch import NodeLostError, ProcessFailedError

FILE = pathlib.Path("run", "5", "state")
RAISED = [
    compressors.DamagedCodeError("cut"),
    islands.AnchorDiffersError("odd"),
    islands.DamagedError("cut"),
    islands.IslandError("no"),
    islands.NameTakenError("a"),
    islands.OfflineError("away"),
    islands.RunMismatchError("other"),
    islands.RunMissingError("none"),
    islands.StoreUnusableError("no"),
    islands.TooFewIslandsError("one"),
    publish.NothingPublishedError("none"),
    publish.PublishDamagedError("cut"),
    publish.PublishError("no"),
    publish.PublishMismatchError("other"),
    publish.PublishOfflineError("away"),
    publish.SecondPublisherError("newer"),
    CollectiveError("data", ("sum", "max")),
    NodeLostError(1),
    ProcessFailedError(1, -9, FILE, ["the last line"]),
    ProcessFailedError(1, -9, FILE, ["the last line"], 1),
    checkpoint_errors.CheckpointDamagedError(FILE, 5, "is missing"),
    checkpoint_errors.CheckpointFullError(FILE, 5, errno.ENOSPC),
    checkpoint_errors.CheckpointPeerError("process 1 could not save step 5", 1),
    checkpoint_errors.CheckpointStoreError("s3://bucket/run", "403", "check the credentials"),
    checkpoint_errors.CheckpointUnreadableError(FILE, 5, errno.EIO),
    checkpoint_errors.NoCheckpointLeftError(FILE, 5, "is missing"),
    cluster.AgreementError("no", (1, 2)),
    cluster.MismatchError("no", (1,)),
    cluster.MissingProcessError("no", (1,)),
    cluster.PortError("no"),
    StepTimeoutError("late", 1, 7),
    ProcessLostError("gone", 1, 7),
    ray_engine.StalledError({-1: (0, 1)}, (2,), 3.0),
    ray_engine.ActorLostError(-1, "is gone"),
    replay.DeadlockError({-1: (0, 1)}, 3.0, (2,)),
    replay.NonFiniteGradientError(1, 7),
    replay.TooManyEventsError("at 3 s"),
    store_errors.StoreDamagedError("short", FILE, 5),
    store_errors.StoreError("refused", FILE, 5),
    store_errors.StoreFullError("no room", FILE, 5),
    transforms.TooManySkipsError(4),
]


def found():
    """The exception classes that the modules of the package define; the command line catches its own."""
    kinds = set()
    for module in pkgutil.walk_packages(jaxdist.__path__, "jaxdist."):
        if not module.name.startswith("jaxdist._cli.") and not module.name.endswith("__main__"):
            for one in vars(importlib.import_module(module.name)).values():
                if not (isinstance(one, type) and issubclass(one, BaseException)) or one.__name__.startswith("_"):
                    continue
                if one.__module__.startswith("jaxdist."):
                    kinds.add(one)
    return kinds


def test_each_kind_is_tried_here_and_has_the_base():
    kinds = found()
    tried = {type(error) for error in RAISED}
    assert kinds == tried, f"add one of each of these to RAISED, or leave it out: {kinds ^ tried}"
    others = {kind for kind in kinds if not issubclass(kind, Portable)}
    assert not others, f"make jaxdist._core.checks.Portable a base of {others}"


@pytest.mark.parametrize("error", RAISED, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_message_and_attributes_come_back(error, through):
    error.add_note("seen on host 3")
    again = through(error)
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert getattr(again, "errno", None) == getattr(error, "errno", None)

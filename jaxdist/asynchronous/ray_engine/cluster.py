"""Ray itself: here or at an address, and the processes of a run."""

import contextlib
import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ..protocol import SERVER
from .actor import Actor, Setup
from .errors import WorkerLost
from .keeper import Keeper

# Processes that start import JAX and compile, on cores that they may have to share.
STARTING = 5.0


def import_ray() -> Any:
    """The package, or what to install."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns of what it will do
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("the engine needs Ray: pip install 'jaxdist[ray]'") from None
    return ray


@contextlib.contextmanager
def connected(address: str | None, places: int) -> Iterator[Any]:
    """Ray as it is if it was started already, at an address, or here until the end of the block."""
    ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray was started already: leave out address={address!r}, or call ray.shutdown() before")
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, anything else that runs here starves them
        quiet |= {"address": "local", "num_cpus": max(places, os.cpu_count() or 1), "include_dashboard": False}
    else:
        quiet |= {"address": address}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**quiet)
    except ConnectionError as problem:
        raise ValueError(f"no Ray cluster answers at address={address!r}: {problem}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


class Crew:
    """The processes of a run, from the driver's side.

    Args:
      ray: the package, connected.
      setup: for all of them.
      restarts: how often each is started again.
      server_restarts: the same for the server.
      timeout: seconds to wait for anything.
      resources: of each worker: arguments of `Actor.options` such as `num_gpus`.
    """

    def __init__(
        self,
        ray: Any,
        setup: Setup,
        *,
        restarts: int,
        server_restarts: int,
        timeout: float,
        resources: Mapping[str, Any],
    ):
        self.ray, self.timeout = ray, timeout
        name = f"jaxdist-{uuid.uuid4().hex}"  # not a handle, which a process that starts again might find outdated
        self.keeper = ray.remote(Keeper).options(name=name, num_cpus=0).remote(ray.cloudpickle.dumps(setup))
        self.actors: dict[int, Any] = {}
        for place in ([SERVER] if setup.rule.server else []) + list(range(setup.workers)):
            wants = {"num_cpus": 0} if place == SERVER else {"num_cpus": 1, **resources}
            platform = None if wants.get("num_gpus") or wants.get("resources") else "cpu"
            options = wants | {"max_restarts": server_restarts if place == SERVER else restarts, "max_concurrency": 8}
            made = ray.remote(Actor).options(**options)
            self.actors[place] = made.remote(place, name, timeout, platform)
        self.watched: dict[Any, int] = {}

    def final(self, problem: Exception) -> bool:
        """Whether Ray will not start the process again."""
        return isinstance(problem, self.ray.exceptions.ActorDiedError)

    def begin(self) -> dict[int, int]:
        """Waits until all are ready, and starts them; the number of each process."""
        calls = {place: actor.ready.remote() for place, actor in self.actors.items()}
        pids = {}
        seconds = STARTING * self.timeout
        end = time.monotonic() + seconds
        for place, call in calls.items():
            try:
                pids[place] = self.ray.get(call, timeout=max(0.0, end - time.monotonic()))
            except self.ray.exceptions.GetTimeoutError:
                have = self.ray.cluster_resources()
                raise WorkerLost(
                    place,
                    f"was not started within {seconds:g} s. It may be waiting for resources: the cluster has "
                    f"{ {name: have[name] for name in ('CPU', 'GPU') if name in have} } for all",
                ) from None
            except self.ray.exceptions.RayActorError as problem:
                raise WorkerLost(place, f"could not be started: {problem}") from None
        begun = time.time_ns()
        self.ask("open", self.actors, begun)
        for place, actor in self.actors.items():
            actor.begin.remote(self.actors, begun)
            self.watched[actor.watch.remote()] = place
        return pids

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Calls the keeper."""
        try:
            return self.ray.get(getattr(self.keeper, what).remote(*arguments, **named), timeout=self.timeout)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError) as problem:
            raise RuntimeError(f"the keeper of the run, which has all states, is gone: {problem}") from None

    def dead(self, wait: float) -> list[tuple[int, Exception]]:
        """Those that died within so many seconds, and how; what a rule or a task raised is raised here."""
        done, _ = self.ray.wait(list(self.watched), num_returns=1, timeout=wait)
        found = []
        for call in done:
            place = self.watched.pop(call)
            try:
                self.ray.get(call)
            except self.ray.exceptions.RayActorError as problem:
                found.append((place, problem))
        return found

    def watch(self, place: int) -> None:
        """Watches a place again whose process was replaced."""
        self.watched[self.actors[place].watch.remote()] = place

    def kill(self, place: int, *, for_good: bool) -> None:
        """Ends the process of a place."""
        self.ray.kill(self.actors[place], no_restart=for_good)

    def dismiss(self, place: int) -> None:
        """Goes on without a place."""
        self.kill(place, for_good=True)
        self.ask("died", place, replaced=False)
        del self.actors[place]
        for actor in self.actors.values():
            actor.without.remote(place)

    def stop(self) -> None:
        """Lets all finish what has arrived."""
        calls = [actor.stop.remote() for actor in self.actors.values()]
        self.ray.wait(calls, num_returns=len(calls), timeout=self.timeout)

    def close(self) -> None:
        """Ends all processes."""
        for actor in [*self.actors.values(), self.keeper]:
            self.ray.kill(actor, no_restart=True)

"""Connects to Ray, and manages the processes of a run."""

import contextlib
import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ActorLost
from ..protocol import SERVER
from .actor import Actor, RunConfig
from .state_store import StateStore

# The start may take this many timeouts: processes import JAX and compile, on cores that they may share.
START_FACTOR = 5.0


def import_ray() -> Any:
    """Imports Ray, or raises ValueError with the command that installs it."""
    # Otherwise Ray warns about its next version.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("ray_engine needs Ray: pip install 'jaxdist[ray]'") from None
    return ray


@contextlib.contextmanager
def connect(address: str | None, places: int) -> Iterator[Any]:
    """Uses Ray as it is, connects to an address, or starts Ray on this machine until the end of the block."""
    ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray is initialized already: omit address={address!r}, or call ray.shutdown() first")
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # At Ray's default niceness of 15 other programs on this machine would starve the workers.
        os.environ.setdefault("RAY_worker_niceness", "0")
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


class WorkerPool:
    """The processes of a run, as seen by the driver.

    Args:
      ray: the package, connected.
      config: the constants of the run.
      restarts: the number of restarts of each worker.
      server_restarts: the number of restarts of the server.
      timeout: seconds to wait for an answer.
      resources: of each worker: arguments of `Actor.options` such as `num_gpus`.
    """

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        *,
        restarts: int,
        server_restarts: int,
        timeout: float,
        resources: Mapping[str, Any],
    ):
        self.ray, self.timeout = ray, timeout
        # Actors get the name of the store: a handle might be outdated when an actor is restarted.
        name = f"jaxdist-{uuid.uuid4().hex}"
        self.store = ray.remote(StateStore).options(name=name, num_cpus=0).remote(ray.cloudpickle.dumps(config))
        self.actors: dict[int, Any] = {}
        for place in ([SERVER] if config.rule.server else []) + list(range(config.workers)):
            requested = {"num_cpus": 0} if place == SERVER else {"num_cpus": 1, **resources}
            platform = None if requested.get("num_gpus") or requested.get("resources") else "cpu"
            max_restarts = server_restarts if place == SERVER else restarts
            options = requested | {"max_restarts": max_restarts, "max_concurrency": 8}
            self.actors[place] = ray.remote(Actor).options(**options).remote(place, name, timeout, platform)
        # The running call of `Actor.watch` of each place, which fails when its process dies.
        self.watched: dict[Any, int] = {}

    def is_final(self, problem: Exception) -> bool:
        """Checks whether Ray will not restart the process."""
        return isinstance(problem, self.ray.exceptions.ActorDiedError)

    def begin(self) -> dict[int, int]:
        """Waits until all processes are ready, and starts them; returns their process ids."""
        calls = {place: actor.ready.remote() for place, actor in self.actors.items()}
        pids = {}
        seconds = START_FACTOR * self.timeout
        end = time.monotonic() + seconds
        for place, call in calls.items():
            try:
                pids[place] = self.ray.get(call, timeout=max(0.0, end - time.monotonic()))
            except self.ray.exceptions.GetTimeoutError:
                available = self.ray.cluster_resources()
                raise ActorLost(
                    place,
                    f"was not started within {seconds:g} s. It may be waiting for resources: the cluster has "
                    f"{ {name: available[name] for name in ('CPU', 'GPU') if name in available} } in total",
                ) from None
            except self.ray.exceptions.RayActorError as problem:
                raise ActorLost(place, f"could not be started: {problem}") from None
        begun = time.time_ns()
        self.call_store("open", self.actors, begun)
        for place, actor in self.actors.items():
            actor.begin.remote(self.actors, begun)
            self.watched[actor.watch.remote()] = place
        return pids

    def call_store(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls the state store."""
        try:
            return self.ray.get(getattr(self.store, method).remote(*arguments, **named), timeout=self.timeout)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError) as problem:
            raise RuntimeError(f"the state store of the run died, and with it all states: {problem}") from None

    def find_dead(self, wait: float) -> list[tuple[int, Exception]]:
        """Returns the places that died within `wait` seconds, and how; raises the exception of a rule or a task."""
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
        """Watches the new process of a place."""
        self.watched[self.actors[place].watch.remote()] = place

    def kill(self, place: int, *, for_good: bool) -> None:
        """Kills the process of a place."""
        self.ray.kill(self.actors[place], no_restart=for_good)

    def dismiss(self, place: int) -> None:
        """Continues without a place."""
        self.kill(place, for_good=True)
        self.call_store("record_death", place, replaced=False)
        del self.actors[place]
        for actor in self.actors.values():
            actor.on_gone.remote(place)

    def stop(self) -> None:
        """Lets all processes handle the messages that have arrived."""
        calls = [actor.stop.remote() for actor in self.actors.values()]
        self.ray.wait(calls, num_returns=len(calls), timeout=self.timeout)

    def close(self) -> None:
        """Kills all processes."""
        for actor in [*self.actors.values(), self.store]:
            self.ray.kill(actor, no_restart=True)

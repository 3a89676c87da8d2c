"""`join`: from a store and a transformation to an `Island`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import optax

from .._core.checks import check_count, check_range
from .._stores.base import SharedStore, place_of
from ..local_sgd.local_steps import method_of
from .base import IslandError, JoinOptions, Moments
from .connection import Connection
from .identity import find_run, is_on_disk
from .island import Island
from .store import check_usable, open_store


@contextmanager
def join(
    url: "str | os.PathLike[str] | SharedStore",
    tx: optax.GradientTransformation,
    *,
    name: str,
    round_timeout: float | int = 120.0,
    begin_with: int = 1,
    quorum: int = 1,
    patience: float | int = 3600.0,
    overlap: bool = False,
    eager: bool = False,
    keep_every: int = 20,
    begin: bool = True,
    moments: Moments = "own",
) -> Iterator["Island"]:
    """Joins a run of several training jobs that meet every `H` steps over a shared folder or a bucket.

    Each job is an *island*: a JAX world with its own fast mesh. Islands may be killed, late, new or slow; the others
    never restart and never wait beyond `round_timeout`. In a round every island puts its drift `Δ_w = a - p_w`, coded
    by the reducer, into the store, and all take the same outer step from the same bytes,
    `a += outer(Σ n_w D(C(Δ_w)) / Σ n_w)`. There is no server, no open port and no leader. With `fragments` of
    `local_steps` each round is of one of them, in turn.

    *Over the network*, an island and round of `K` members with payload `P`, of a fragment: `P` and about 1 KiB up,
    `(K-1) P` and about 1 KiB `K` down. An island that joins reads the kept global parameters and the rounds since.

    Every writer of the store is trusted.

    Args:
      url: a folder that all islands see, a bucket (`s3://bucket/run`, extra `jaxdist[islands]`), or a `SharedStore`.
      tx: what `local_steps(..., axis=None)` or a recipe returned: the island is one worker. Without delay and warm-up,
        with a reducer of one message: `exact()`, `compressed(code)` or error feedback around that.
      name: of this island. A new job under an old name takes its place.
      round_timeout: seconds to wait for the drifts of others: somewhat more than the usual difference between islands,
        which `report.wait_seconds` shows. No call waits more than a second longer.
      begin_with: how many islands to wait for before the first round ends.
      quorum: the fewest drifts that make a round.
      patience: seconds after which too few islands, or a store that is away, are an error.
      overlap: send and read while the island trains, and merge at the next meeting; own progress is kept.
      eager: with `overlap`, train on from `a + outer(Δ_w / K)`, one's own share, while the drift is under way.
      keep_every: rounds between kept global parameters. The island that opens the run decides for all.
      begin: open the run if there is none. `False` for one that restarts, whose disk may not be mounted yet.
      moments: of the inner optimizer: "own" keeps those of the state that enters, "fresh" takes those of `init`, for a
        checkpoint that is old or of another run. Schedules go on in both cases.

    Yields:
      The `Island`.

    Raises:
      ValueError: `tx` is not such a transformation, or an argument is out of range.
      StoreUnusableError: the store cannot create a name if absent, has no rights, or does not answer for `patience`.
      RunMissingError: there is no run, and `begin=False`.
      DamagedError: of `enter` and `meet`, in the `with` block: bytes of the run are missing or not whole, and stay so.
      ImportError: a bucket without obstore.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)
      >>> def step(state, target):
      ...     updates, opt = tx.update(state["params"] - target, state["opt"], state["params"], sync=())
      ...     return {"params": state["params"] + updates, "opt": opt}
      >>> with jd.islands.join(jd.islands.memory(), tx, name="here") as island:
      ...     state = island.enter({"params": jnp.zeros(2), "opt": tx.init(jnp.zeros(2))})
      ...     for number in range(4):
      ...         state = jax.jit(step)(state, jnp.ones(2))
      ...         if island.due(number):
      ...             state, report = island.meet(state)
      >>> report.round, report.members, [round(x, 3) for x in state["params"].tolist()]
      (2, ('here',), [0.344, 0.344])

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105, 2023.
    """
    place = place_of(url)
    times = float(round_timeout), begin_with, quorum, float(patience)
    options = JoinOptions(name, *times, overlap, keep_every, begin, moments, place, is_on_disk(url), eager)
    _check(options)
    config = method_of(tx)
    problems = {
        "axis=None": config.axis is None,
        "delay=0 (overlap=True of join hides the exchange)": not config.delay,
        "warmup_steps=0": not config.warmup_steps,
        "merge_alpha=0": not config.merge_alpha,
        'buffers="maintain"': config.buffers == "maintain",
        "a number as sync_period": not callable(config.sync_period),
    }
    if not all(problems.values()):
        needed = ", ".join(need for need, kept in problems.items() if not kept)
        raise ValueError(f"islands need local_steps with {needed}")
    store = open_store(url)
    connection = Connection(store)
    connection.call_within(options.patience, _check_store, store, options)
    island = Island(connection, config, options)
    try:
        yield island
    except BaseException:
        island.abandon()
        raise
    island.leave()


def _check_store(store: SharedStore, options: JoinOptions) -> None:
    if not options.begin:
        # Before the probe, which would create the folder of a disk that is not mounted.
        _check_begun(store, options.place)
    check_usable(store)


def _check_begun(store: SharedStore, place: str) -> None:
    try:
        find_run(store.get, place)
    except IslandError:
        raise
    # A store that cannot be read is told so by the probe.
    except Exception:
        return


def _check(options: JoinOptions) -> None:
    # Files whose names begin with a dot are hidden: stores in folders use them for what is not complete yet.
    if not re.fullmatch(r"[\w-][\w.-]{0,63}", options.name):
        raise ValueError(
            f"the name of an island is 1 to 64 letters, digits, '_', '-' and '.', not '.' first, got {options.name!r}"
        )
    for name in ("begin_with", "quorum", "keep_every"):
        check_count(name, getattr(options, name), 1)
    for name in ("round_timeout", "patience"):
        check_range(name, getattr(options, name), 0, ends="(]")
    if options.eager and not options.overlap:
        raise ValueError("eager=True is for the time in which a drift is under way: join with overlap=True too")
    if options.moments not in ("own", "fresh"):
        raise ValueError(f'moments must be "own" or "fresh", got {options.moments!r}')

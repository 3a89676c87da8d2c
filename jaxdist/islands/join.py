"""`join`: from a store and a transformation to an `Island`."""

import math
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
    grace: float | int | None = None,
    patience: float | int = 3600.0,
    overlap: bool = False,
    eager: bool = False,
    keep_every: int = 20,
    owners: int = 0,
    begin: bool = True,
    moments: Moments = "own",
) -> Iterator["Island"]:
    """Joins a run of training jobs that meet every `H` steps over a shared folder or bucket.

    Each is an *island*. In a round it puts its coded drift `Δ_w = a - p_w` into the store, and all take the same outer
    step, `a += outer(Σ n_w D(C(Δ_w)) / Σ n_w)`. One that is killed, late or new restarts no other.

    *Over the network*, in a round of `K` islands: a payload `P` and ~1 KiB up, `(K-1) P` and ~`K` KiB down; with
    `owners` `(1 + 1/K) P` up, `2 P` down; on joining, kept parameters and the rounds since.

    Args:
      url: a shared folder, a bucket (`s3://bucket/run`, extra `jaxdist[islands]`), or a `SharedStore`.
      tx: of `local_steps(..., axis=None)` or a recipe; its reducer is `exact()`, `compressed(code)`, `power_sgd(rank)`,
        or error feedback or `compute_visible` around these.
      name: of this island; a new job of the name takes its place.
      round_timeout: seconds to wait for others; no call takes more than a second longer.
      begin_with: how many begin the first round.
      quorum: the fewest drifts that make a round.
      grace: seconds for more of them; `None`: until `round_timeout`.
      patience: seconds until too few or a lost store are an error.
      overlap: exchange during training, and merge at the next meeting.
      eager: with `overlap`, train from `a + outer(Δ_w / K)` meanwhile.
      keep_every: rounds between kept parameters; the opener decides.
      owners: pieces of a mean, each averaged by one island for all, as about `K`; the opener decides.
      begin: `False` if the run must exist already.
      moments: of the inner optimizer: "own", as they enter, or "fresh".

    Yields:
      The `Island`.

    Raises:
      ValueError: a bad `tx`, or argument out of range.
      StoreUnusableError: the store cannot create if absent, refuses, or is silent for `patience`.
      RunMissingError: no run, and `begin=False`.
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
    options = JoinOptions(
        name=name,
        place=place,
        on_disk=is_on_disk(url),
        round_timeout=float(round_timeout),
        begin_with=begin_with,
        quorum=quorum,
        grace=math.inf if grace is None else float(grace),
        patience=float(patience),
        overlap=overlap,
        eager=eager,
        keep_every=keep_every,
        owners=owners,
        begin=begin,
        moments=moments,
    )
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
    check_count("owners", options.owners, 0)
    for name in ("round_timeout", "patience"):
        check_range(name, getattr(options, name), 0, ends="(]")
    if options.grace != math.inf:
        hint = "no island waits longer than round_timeout"
        check_range("grace", options.grace, 0, options.round_timeout, ends="[]", hint=hint)
    if options.eager and not options.overlap:
        raise ValueError("eager=True is for the time in which a drift is under way: join with overlap=True too")
    if options.moments not in ("own", "fresh"):
        raise ValueError(f'moments must be "own" or "fresh", got {options.moments!r}')

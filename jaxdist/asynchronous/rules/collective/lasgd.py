"""LASGD: local steps continue while an average of earlier snapshots is computed."""

import optax

from ...._core.checks import check_range
from ...._core.types import Number
from ...protocol import Rule
from .local_rule import local_rule


def lasgd(optimizer: optax.GradientTransformation, *, sync_period: int = 1, interval: Number = 0.0) -> Rule:
    """Local SGD that never waits: snapshots are averaged in the background, and then `x_i <- x_i + (mean(s) - s_i)`.

    A worker takes a snapshot as soon as the previous average has arrived and it has taken H steps since the last
    snapshot, and continues; with an interval, not before so many seconds have passed since the last one, as in the
    asynchronous averages of BAGUA, whose clock has 0.5 s. A gradient that is running when the average arrives is
    applied to the merged model. An all-reduce begins when the slowest worker joins, so that a straggler makes averages
    rare but slows no worker down. On data that differ between workers fast ones count more.

    *On the wire* and *State*: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H, the least number of local steps between two snapshots. 1 averages as often as the network allows.
      interval: the least time between two snapshots of a worker, in seconds, by its own clock.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.lasgd(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 6]), workers=3, seconds=600)
      >>> run.computing.round(3).tolist(), len(run.trace.steps)
      ([1.0, 1.0, 1.0], 100)

    References:
      Avidor, Tal Israel, "Locally Asynchronous Stochastic Gradient Descent for Decentralized Deep Learning",
      arXiv:2203.13085, 2022. The interval: Gan et al., "BAGUA: Scaling up Distributed Learning with System
      Relaxations", arXiv:2107.01499, 2021.
    """
    check_range("interval", interval, 0)
    return local_rule("lasgd", optimizer, optax.sgd(1.0), sync_period=sync_period, delay=None, interval=interval)

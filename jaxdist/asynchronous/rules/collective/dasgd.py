"""DaSGD: the average of the models is merged some local steps after it began."""

import optax

from ...protocol import Rule
from .local_rule import local_rule


def dasgd(optimizer: optax.GradientTransformation, *, sync_period: int, delay: int) -> Rule:
    """Local SGD whose averages overlap the next d local steps, which are kept: `x_i <- a' + (x_i - s_i)`.

    All workers merge the average of the snapshots `s_i` of local step t after local step t + d; faster workers wait.
    An average that takes no longer than d steps costs no time.

    *On the wire* and *State*: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H.
      delay: d, less than H: the duration of an all-reduce in steps. 0 is `local_sgd`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import links, replay, rules
      >>> slow = links.alpha_beta(0.5)  # an all-reduce of 2 workers: 1 s
      >>> for delay in (0, 1):
      ...     rule = rules.dasgd(optax.sgd(0.1), sync_period=4, delay=delay)
      ...     print(len(replay.run(rule, workers=2, seconds=1001, links=slow).trace.steps))
      200
      250

    References:
      Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
      arXiv:2006.00441, 2020. Its coefficient that mixes own and average model is 1 here.
    """
    return local_rule("dasgd", optimizer, optax.sgd(1.0), sync_period=sync_period, delay=delay)

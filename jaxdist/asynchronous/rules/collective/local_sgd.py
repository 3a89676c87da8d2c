"""Local SGD and variants that hide or reduce its waiting: DaSGD, LASGD, PALSGD."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...._core.dtypes import working_dtype
from ...._core.types import Number, PyTree
from ...protocol import Rule
from .local import LocalStep, local_rule, plain_step


def local_sgd(
    optimizer: optax.GradientTransformation, *, sync_period: int, outer: optax.GradientTransformation | None = None
) -> Rule:
    """Averages after every H local steps, `a <- a - mean(a - x_i)`, `x_i <- a`, and waits for the slowest only then.

    The counterpart of `jd.local_steps`. A round takes the longest of n sums of H computations, which for times that
    vary is less than H times the longest, and one all-reduce.

    On the wire: an all-reduce of the drift `a - x_i`, in float32, per round, kind `"reduced"`.

    State: each worker's model and optimizer; the global parameters a and the outer optimizer, replicated. The final
    model is a; a step in the trace is an average.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H. A larger value sends and waits less, but lets workers drift further apart; start at 8.
      outer: the optimizer of the global parameters, whose gradient is the mean drift. Default: `optax.sgd(1.0)`, which
        averages; `optax.sgd(0.7, momentum=0.9, nesterov=True)` is DiLoCo.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `sync_period` is below 1.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.local_sgd(optax.sgd(0.1), sync_period=4)
      >>> run = replay.run(rule, durations=durations.exponential(1.0), workers=8, seconds=1000)
      >>> len(run.trace.steps) * 4 > 1.3 * 1000 / 2.717857  # bsp: the longest of 8, each time
      True

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019.
    """
    # a <- a - mean(a - x_i) is the mean of the models.
    averages = optax.sgd(1.0) if outer is None else outer
    return local_rule("local_sgd", optimizer.init, plain_step(optimizer), averages, sync_period=sync_period, delay=0)


def dasgd(optimizer: optax.GradientTransformation, *, sync_period: int, delay: int) -> Rule:
    """Local SGD whose averages overlap the next d local steps, which are kept: `x_i <- a' + (x_i - s_i)`.

    All workers merge the average of the snapshots `s_i` of local step t after local step t + d; faster workers wait.
    An average that takes no longer than d steps costs no time.

    On the wire: as `local_sgd`.

    State: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H.
      delay: d, less than H: the duration of an all-reduce in steps. 0 is `local_sgd`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `sync_period` is below 1, or `delay` not in `[0, sync_period)`.

    Example:
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
    return local_rule(
        "dasgd", optimizer.init, plain_step(optimizer), optax.sgd(1.0), sync_period=sync_period, delay=delay
    )


def lasgd(optimizer: optax.GradientTransformation, *, sync_period: int = 1) -> Rule:
    """Local SGD that never waits: snapshots are averaged in the background, and then `x_i <- x_i + (mean(s) - s_i)`.

    A worker takes a snapshot as soon as the previous average has arrived and it has taken H steps since the last
    snapshot, and continues. A gradient that is running when the average arrives is applied to the merged model. An
    all-reduce begins when the slowest worker joins, so that a straggler makes averages rare but slows no worker down.
    On data that differ between workers fast ones count more.

    On the wire: as `local_sgd`.

    State: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H, the least number of local steps between two snapshots. 1 averages as often as the network allows.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: `sync_period` is below 1.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.lasgd(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 6]), workers=3, seconds=600)
      >>> run.computing.round(3).tolist(), len(run.trace.steps)
      ([1.0, 1.0, 1.0], 100)

    References:
      Avidor, Tal Israel, "Locally Asynchronous Stochastic Gradient Descent for Decentralized Deep Learning",
      arXiv:2203.13085, 2022.
    """
    return local_rule(
        "lasgd", optimizer.init, plain_step(optimizer), optax.sgd(1.0), sync_period=sync_period, delay=None
    )


def palsgd(
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Number | Callable[[Any], Any],
    sync_period: int = 100,
    probability: Number = 0.2,
    pull: Number = 0.5,
    outer: optax.GradientTransformation | None = None,
) -> Rule:
    """DiLoCo whose workers, with probability p, move towards the anchor instead of stepping: `x -= (γ η / p) (x - a)`.

    Otherwise they step with `γ / (1 - p)`. A pull needs no communication and keeps workers closer together, so that
    rounds can be longer. The gradient of a pull step is computed but not used, as in the paper's code. The counterpart
    of `jd.local_sgd.palsgd`, with the same random decisions for equal seeds and no warm-up.

    On the wire: as `local_sgd`.

    State: as `local_sgd`.

    Args:
      optimizer: the local optimizer of each worker; its whole update is scaled by `1 / (1 - p)`.
      learning_rate: γ, the rate of that optimizer, a number or a schedule of local steps; used by the pull.
      sync_period: H; the paper's code uses 100.
      probability: p, in [0, 1); the paper's code uses 0.2. 0 is DiLoCo.
      pull: η, at least 0; the paper's code uses 0.5. `γ η / p` must stay well below 1.
      outer: the optimizer of the anchor, the global parameters. Default: `optax.sgd(0.7, momentum=0.9,
        nesterov=True)`.

    Returns:
      The rule; it has no server.

    Raises:
      ValueError: an argument is out of its range.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> rule = rules.palsgd(optax.sgd(0.1), learning_rate=0.1, sync_period=10)
      >>> len(replay.run(rule, workers=4, seconds=100).trace.steps)
      10

    References:
      Naganuma, Zhang, Yue, Mitliagkas, Witte, Hewett, Lee, "Pseudo-Asynchronous Local SGD: Robust and Efficient
      Data-Parallel Training", arXiv:2504.18454, 2025.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be in [0, 1), got {probability}")
    if pull < 0:
        raise ValueError(f"pull must be at least 0, got {pull}")
    averages = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    step = plain_step(optimizer)
    if probability:
        step = partial(_step_or_pull, step, learning_rate, float(probability), float(pull))
    return local_rule("palsgd", optimizer.init, step, averages, sync_period=sync_period, delay=0)


def _step_or_pull(
    step: LocalStep,
    learning_rate: Any,
    probability: float,
    pull: float,
    params: PyTree,
    opt_state: PyTree,
    gradient: PyTree,
    anchor: PyTree,
    words: Any,
) -> tuple[PyTree, PyTree]:
    seed, worker, count = words
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), worker)
    pulls = jax.random.bernoulli(key, probability)
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    # x -= (γ η / p) (x - a)
    strength = jnp.asarray(rate, jnp.float32) * (pull / probability)
    stepped, new_opt_state = step(params, opt_state, gradient, anchor, words)

    def move_leaf(x: Any, y: Any, a: Any) -> Any:
        wide = working_dtype(x.dtype)
        old = x.astype(wide)
        towards_anchor = strength.astype(wide) * (a.astype(wide) - old)
        # Steps are rarer by 1 - p and larger by its inverse: the expected update stays.
        own_step = (y.astype(wide) - old) / (1 - probability)
        return (old + jnp.where(pulls, towards_anchor, own_step)).astype(x.dtype)

    # A pull leaves the local optimizer as it was.
    opt_state = jax.tree.map(lambda old, new: jnp.where(pulls, old, new), opt_state, new_opt_state)
    return jax.tree.map(move_leaf, params, stepped, anchor), opt_state

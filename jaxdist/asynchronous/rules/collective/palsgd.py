"""PALSGD: random pulls toward the last average between two averages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_range
from ...._core.dtypes import widest_float, working_dtype
from ...._core.types import Number, PyTree
from ...protocol import Rule
from ..base import apply_gradient
from .local_rule import local_rule, plain_step


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

    *On the wire* and *State*: as `local_sgd`.

    Args:
      optimizer: the local optimizer of each worker; its whole update is scaled by `1 / (1 - p)`.
      learning_rate: γ, the rate of that optimizer, a number or a schedule of local steps; used by the pull.
      sync_period: H; the paper's code uses 100.
      probability: p, in [0, 1); the paper's code uses 0.2. 0 is DiLoCo.
      pull: η, at least 0; the paper's code uses 0.5. `γ η / p` must stay well below 1.
      outer: the optimizer of the anchor, the global parameters. Default: `optax.sgd(0.7, momentum=0.9,
        nesterov=True)`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> rule = rules.palsgd(optax.sgd(0.1), learning_rate=0.1, sync_period=10)
      >>> len(replay.run(rule, workers=4, seconds=100).trace.steps)
      10

    References:
      Naganuma et al., "Pseudo-Asynchronous Local SGD: Robust and Efficient Data-Parallel Training", arXiv:2504.18454,
      2025.
    """
    check_range("probability", probability, 0, 1)
    check_range("pull", pull, 0, ends="[]")
    step = plain_step
    if probability:
        step = _StepOrPull(learning_rate, float(probability), float(pull)).step
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    return local_rule("palsgd", optimizer, outer, sync_period=sync_period, delay=0, step=step)


class _StepOrPull(NamedTuple):
    learning_rate: Any
    probability: float
    pull: float

    def step(
        self,
        optimizer: optax.GradientTransformation,
        params: PyTree,
        opt_state: PyTree,
        gradient: PyTree,
        anchor: PyTree,
        words: Any,
    ) -> tuple[PyTree, PyTree]:
        seed, worker, count = words
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), worker)
        pulls = jax.random.bernoulli(key, self.probability)
        rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        # x -= (γ η / p) (x - a)
        strength = jnp.asarray(rate, widest_float()) * (self.pull / self.probability)
        stepped, new_opt_state = apply_gradient(optimizer, params, opt_state, gradient)

        def move_leaf(x: Any, y: Any, a: Any) -> Any:
            wide = working_dtype(x.dtype)
            old = x.astype(wide)
            towards_anchor = strength.astype(wide) * (a.astype(wide) - old)
            # Steps are rarer by 1 - p and larger by its inverse: the expected update stays.
            own_step = (y.astype(wide) - old) / (1 - self.probability)
            return (old + jnp.where(pulls, towards_anchor, own_step)).astype(x.dtype)

        # A pull leaves the local optimizer as it was.
        opt_state = jax.tree.map(lambda old, new: jnp.where(pulls, old, new), opt_state, new_opt_state)
        return jax.tree.map(move_leaf, params, stepped, anchor), opt_state

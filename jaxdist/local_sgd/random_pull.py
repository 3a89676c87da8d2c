"""Local steps, some of which are replaced at random by a pull toward the last global parameters."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import NO_PARAMS, check_count, check_range
from .._core.dtypes import widest_float, working_dtype
from .._core.trees import next_count, tree_where
from .._core.types import Array, AxisNames, Int, Key, State, Updates
from ..comm.over import over
from ..transforms.extra_args import with_extra_args
from ..wire.codec import step_key
from .buffers import find_buffers


class RandomPullState(NamedTuple):
    """The state of `random_pull`, all of it per worker inside `local_steps`; a pull changes no buffer of `inner`."""

    count: Int[Array, ""]
    key: Key[Array, ""]
    inner: State


def random_pull(
    inner: optax.GradientTransformation,
    *,
    probability: float | int,
    pull: float | int,
    start_step: int = 0,
    seed: int = 0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """With probability `p`, `x -= (γ η / p) (x - a)` in place of a step; otherwise the step of `inner`, over `1 - p`.

    `a` is the anchor, the last global parameters, and `γ` the learning rate: without any communication workers stay
    closer together, and rounds can be longer. The expected step is the gradient's `γ g` plus the pull `γ η (x - a)`.
    Workers draw independently. A pull step ignores the gradient, so its batch is discarded and the momentum of `inner`
    is unchanged.

    It is the `inner` of `local_steps`, which passes it `anchor=`; the step passes `learning_rate=`.

    *On the wire*: nothing.

    Args:
      inner: any optimizer; its whole update is scaled, as if its learning rate were `γ / (1 - p)`.
      probability: `p`, in [0, 1); the paper's code has 0.2. At 0 this is `inner`.
      pull: `η`, at least 0; the code has 0.5. Higher keeps workers closer and slows them down; `γ η / p` must stay well
        below 1.
      start_step: the first step that may pull or scale. Give `local_steps(warmup_steps=)` the same number; otherwise
        workers would diverge in the warm-up.
      seed: draws the pulls.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_sgd.random_pull(optax.sgd(0.1), probability=0.5, pull=0.5, axis=None)
      >>> x, state, seen, pull = jnp.array(3.0), tx.init(jnp.array(3.0)), set(), jax.jit(tx.update)
      >>> for _ in range(20):  # a pull is 0.1 · 0.5 / 0.5 · (1 - 3), a step -0.1 · 4 / 0.5
      ...     update, state = pull(jnp.array(4.0), state, x, anchor=jnp.array(1.0), learning_rate=0.1)
      ...     seen.add(round(float(update), 3))
      >>> sorted(seen)
      [-0.8, -0.2]

    References:
      Naganuma et al., "Pseudo-Asynchronous Local SGD: Robust and Efficient Data-Parallel Training", arXiv:2504.18454,
      2025 (`palsgd`).
    """
    check_range("probability", probability, 0, 1)
    check_range("pull", pull, 0)
    check_count("start_step", start_step, 0)
    inner = with_extra_args(inner)

    def init_fn(params) -> State:
        return RandomPullState(jnp.zeros((), jnp.int32), jax.random.key(seed), inner.init(params))

    def update_fn(
        updates, state, params=None, *, anchor=None, learning_rate=None, **extra_args
    ) -> tuple[Updates, RandomPullState]:
        if params is None:
            raise ValueError(NO_PARAMS)
        passed = extra_args if learning_rate is None else {"learning_rate": learning_rate, **extra_args}
        steps, inner_state = inner.update(updates, state.inner, params, anchor=anchor, **passed)
        count = next_count(state.count)
        # Without pulls this is `inner`, which needs neither anchor nor learning rate.
        if not probability:
            return steps, RandomPullState(count, state.key, inner_state)
        if anchor is None:
            raise ValueError(
                "random_pull needs anchor=, which local_steps passes; use local_steps(random_pull(inner), outer)"
            )
        if learning_rate is None:
            raise ValueError("random_pull scales its pulls by the learning rate; pass learning_rate= to the update")
        # Not shared: each worker draws for itself.
        key = step_key(state.key, state.count, over(axis), shared=False)
        started = state.count >= start_step
        pulls = started & jax.random.bernoulli(key, probability)
        # γ η / p for a pull, 1 / (1 - p) for a step: the expectation is that of both together.
        strength = jnp.asarray(learning_rate, widest_float()) * (pull / probability)
        scale = jnp.where(started, 1 / (1 - probability), 1.0)

        steps = jax.tree.map(partial(_pull_or_scale, pulls, strength, scale), steps, params, anchor)
        # Schedules count pulls too: they are steps.
        inner_state = jax.tree.map(
            lambda buffer, old, new: tree_where(pulls, old, new) if buffer else new,
            find_buffers(inner, state.inner, params),
            state.inner,
            inner_state,
        )
        return steps, RandomPullState(count, state.key, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _pull_or_scale(pulls: Array, strength: Array, scale: Array, step: Array, param: Array, anchor: Array) -> Array:
    wide = working_dtype(step.dtype)
    # -(γ η / p) (x - a)
    toward_anchor = strength.astype(wide) * (anchor.astype(wide) - param.astype(wide))
    return jnp.where(pulls, toward_anchor, scale.astype(wide) * step.astype(wide)).astype(step.dtype)

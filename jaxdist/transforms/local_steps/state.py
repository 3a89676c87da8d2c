"""What `local_steps` keeps, and the model in it that all workers agree on."""

from typing import NamedTuple

import jax

from ..._marks import PerWorker
from ..._typing import Array, Float, Int, PyTree, State, UInt, Updates


class LocalStepsState(NamedTuple):
    """What has been agreed on, and what this worker keeps. A *round* ends when the workers of a fragment meet.

    Agreed: `count` of steps; of each fragment the steps `since` its last round, its `rounds`, the sum of the learning
    `rates` since then; the bytes `sent` by one worker, as (high, low) words; the `anchor`, the model that all workers
    started the round from, in float32 or better; the state of the `outer` optimizer for each fragment.
    Per worker: the state of the `inner` optimizer; `examples` since the last round of each fragment; with
    `keep_progress`, the parameters that were `sent_from`. `reducer`: as the reducer defines it, for each fragment.
    """

    count: Int[Array, ""]
    since: Int[Array, " fragments"]
    rounds: Int[Array, " fragments"]
    rates: Float[Array, " fragments"]
    sent: UInt[Array, "2"]
    anchor: Updates
    outer: tuple[State, ...]
    inner: PerWorker
    examples: PerWorker
    reducer: tuple[State, ...]
    sent_from: PerWorker

    communicates = True


def anchor(opt_state: State) -> PyTree:
    """The model that the workers of `local_steps` agree on: the one to evaluate and to keep.

    Args:
      opt_state: an optimizer state with `local_steps` anywhere inside, placed or as a worker sees it.

    Returns:
      The anchor: a tree like the parameters, in float32 or better.

    Raises:
      ValueError: there is no `local_steps` inside.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=8)
      >>> jd.anchor(tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, 2023.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LocalStepsState)):
        if isinstance(node, LocalStepsState):
            return node.anchor
    raise ValueError("this optimizer state has no local_steps inside, and so no anchor: evaluate the parameters")

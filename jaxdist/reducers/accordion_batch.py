"""Accordion's batches: small in the first critical regime, large afterwards."""

from collections.abc import Callable

import jax

from .._core.types import PyTree
from .critical_regime import CriticalRegimeState


def accordion_batch(small: int, large: int) -> Callable[[int, PyTree], int]:
    """Grows the batch once the training has left its first critical regime: `next_size(size, state) -> size`.

    A decision of the host, between two epochs. `state` is that of the optimizer, or any other that contains one
    detector, of `with_regime(reducer)` or of a `critical_regime` in the step; its verdict is replicated, so all workers
    decide alike. The batch never shrinks again. Another batch is another program, and an epoch has fewer steps: give
    the learning rate as an argument of the step, and multiply it by `large / small` when the batch grows.

    Args:
      small: the examples in a batch, of all workers together, in the first critical regime.
      large: those of the batches after it; 8 times as many in the paper.

    Returns:
      The function. It raises `ValueError` for a state with no detector or with several.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import accordion_batch, critical_regime
      >>> detector, next_size = critical_regime(epoch_steps=1, interval_steps=1), accordion_batch(512, 4096)
      >>> size, state, sizes = 512, detector.init(jnp.zeros(1)), []
      >>> for norm in (10.0, 4.0, 3.0, 9.0):
      ...     state = detector.after(state, jnp.full(1, norm))
      ...     size = next_size(size, state)
      ...     sizes.append(size)
      >>> sizes
      [512, 512, 4096, 4096]

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv:2010.16248, 2021.
    """
    if small < 1 or large < small:
        raise ValueError(f"small must be at least 1 and large no smaller, got {small} and {large}")

    def next_size(size, state):
        return small if size < large and bool(_verdict(state)) else large

    return next_size


def _verdict(state: PyTree) -> jax.Array:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, CriticalRegimeState))
    found = [node.critical for node in nodes if isinstance(node, CriticalRegimeState)]
    if len(found) != 1:
        raise ValueError(
            f"accordion_batch needs one detector in the state, got {len(found)}: put with_regime(reducer) into the "
            "optimizer and pass its state, or pass the state of the detector itself"
        )
    return found[0]

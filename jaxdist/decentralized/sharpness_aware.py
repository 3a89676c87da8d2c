"""Sharpness-aware gradients that are taken where a step uphill leads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.dtypes import widen
from .._core.trees import wide
from .._core.types import PyTree, Updates


def sharpness_aware(
    value_and_grad: Callable[..., tuple[Any, Updates]], *, radius: float | int = 0.05
) -> Callable[..., tuple[Any, Updates]]:
    """The gradient where the loss is highest nearby: `∇F(x + ρ g / |g|)` with `g = ∇F(x)`, on each worker separately.

    Flat minima suffer less from the perturbations of gossip and compression. With
    `gossip(method=quasi_global_momentum(...))` this is Q-SADDLe; N-SADDLe is `neighborhood_value_and_grad(radius=)`,
    since around that one models would travel twice.

    The arguments and results are those of `value_and_grad`, with the value of the parameters themselves.

    *On the wire*: what `value_and_grad` sends, twice; it also takes two gradients.

    Args:
      value_and_grad: of the first argument, as `local_value_and_grad(loss)` returns it.
      radius: `ρ` > 0. Too large smooths the loss too much. 0.05 is that of Foret et al., and of our comparison on
        digits that differ between workers (`benchmarks/reports/2026-11-claims`).

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> plain = jd.local_value_and_grad(lambda x: x**2, axis=None)
      >>> value, gradient = jd.decentralized.sharpness_aware(plain, radius=0.5)(jnp.array(1.0))
      >>> float(value), float(gradient)
      (1.0, 3.0)

    References:
      Choudhary, Aketi, Roy, "SADDLe: Sharpness-Aware Decentralized Deep Learning with Heterogeneous Data",
      arXiv:2405.13961, 2024. Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving
      Generalization", arXiv:2010.01412, 2021.
    """
    check_range("radius", radius, 0, ends="(]")

    def value_and_grad_nearby(params: PyTree, *data: Any) -> tuple[Any, Updates]:
        value, gradient = value_and_grad(params, *data)
        # x + ρ g / |g|, and x where g is zero.
        norm = optax.tree.norm(wide(gradient))
        scale = jnp.where(norm > 0, radius / jnp.where(norm > 0, norm, 1), 0).astype(norm.dtype)
        nearby = jax.tree.map(lambda p, g: p + (scale * widen(g)).astype(p.dtype), params, gradient)
        return value, value_and_grad(nearby, *data)[1]

    return value_and_grad_nearby

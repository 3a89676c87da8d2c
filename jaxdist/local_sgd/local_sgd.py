"""Local SGD: models are averaged every few steps."""

from typing import Any

import optax

from .._core.options import takes_options_of
from .fragments import SyncPeriod
from .local_steps import local_steps


@takes_options_of(local_steps)
def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: `H` local steps, then the mean of the models.

    *On the wire*: every `H` steps the reducer's collectives for the model, with `exact()` `2(W-1)/W · 4n` bytes; on all
    other steps nothing. *State*: as `local_steps`.

    Args:
      sync_period: `H`. Start at 8; longer rounds lose more, which `diloco` loses less of.
      **options: other arguments: those of `local_steps`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.local_sgd(optax.sgd(0.1, momentum=0.9), sync_period=8)

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019.
    """
    # An outer step of -Δ leads from the anchor to the mean of the models.
    return local_steps(inner, optax.sgd(1.0), sync_period=sync_period, **options)

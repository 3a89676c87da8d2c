"""Post-local SGD: synchronous steps first, local ones from a step on."""

from typing import Any

import optax

from .._core.options import takes_options_of
from .fragments import SyncPeriod
from .local_steps import local_steps


@takes_options_of(local_steps, fixed=["warmup_steps"])
def post_local_sgd(
    inner: optax.GradientTransformation,
    *,
    switch_step: int,
    sync_period: SyncPeriod,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Post-local SGD: data parallel until `switch_step`, Local SGD afterwards.

    *On the wire*: until the switch one exact all-reduce of the gradients a step, `2(W-1)/W · 4n` bytes, and the model
    once; then a round every `H` steps. *State*: as `local_steps`.

    Args:
      switch_step: the number of steps that average gradients; the first drop of the learning rate is a good choice.
      sync_period: `H` after the switch; the paper has 16.
      **options: other arguments: those of `local_steps`. `offset=1` is PyTorch's `PeriodicModelAverager`,
        which averages when `(step - warmup_steps) mod period == 0` and so first after a single step.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.post_local_sgd(optax.sgd(0.1, momentum=0.9), switch_step=1000, sync_period=16)

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020.
    """
    return local_steps(inner, optax.sgd(1.0), sync_period=sync_period, warmup_steps=switch_step, **options)

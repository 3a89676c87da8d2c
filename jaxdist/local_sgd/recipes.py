"""`local_steps` as in the papers, with their outer optimizers: from Local SGD to DiLoCo, SparseLoCo and MuLoCo.

The state of each recipe is that of `local_steps`, parameters are `PerWorker`, and arguments that a docstring does not
list are those of `local_steps`.
"""

import math
import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import muon

from .._core.checks import check_range
from .._core.dtypes import working_dtype
from .._core.types import AxisNames, Like, Updates
from ..compressors.block_top_k import block_top_k
from ..compressors.chained import chained
from ..compressors.two_means import two_means
from ..reducers.compressed import compressed
from ..reducers.error_feedback import error_feedback
from ..reducers.reducer import Reducer
from ..state.marks import name_leaf
from ..transforms.common import LearningRate
from .base import local_steps, with_rate
from .fragments import Fragments, SyncPeriod
from .state import Buffers

# Parts of the names of embeddings and heads; `wte`, `wpe` and `lm_head` are GPT-2's. Not those of an ensemble, an
# assembler, or attention with several heads.
_ENDS = re.compile(r"emb(?!l|er)|(?<!multi)(?<!multi[_-])head|logits|vocab|wte|wpe", re.IGNORECASE)


def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    buffers: Buffers = "maintain",
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: `H` local steps, then the mean of the models.

    *On the wire*: every `H` steps the reducer's collectives for the model, with `exact()` `2(W-1)/W · 4n` bytes; on all
    other steps nothing. *State* and other arguments: as `local_steps`.

    Args:
      sync_period: `H`. Start at 8; longer rounds lose more, which `diloco` loses less of.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.local_sgd(optax.sgd(0.1, momentum=0.9), sync_period=8)

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019.
    """
    # An outer step of -Δ leads from the anchor to the mean of the models.
    return local_steps(inner, optax.sgd(1.0), sync_period=sync_period, buffers=buffers, reducer=reducer, axis=axis)


def post_local_sgd(
    inner: optax.GradientTransformation,
    *,
    switch_step: int,
    sync_period: SyncPeriod,
    offset: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Post-local SGD: data parallel until `switch_step`, Local SGD afterwards.

    *On the wire*: until the switch one exact all-reduce of the gradients a step, `2(W-1)/W · 4n` bytes, and the model
    once; then a round every `H` steps. *State* and other arguments: as `local_steps`.

    Args:
      switch_step: the number of steps that average gradients; the first drop of the learning rate is a good choice.
      sync_period: `H` after the switch; the paper has 16.
      offset: the length of the first round, if not `H`. 1 is PyTorch's `PeriodicModelAverager`, which
        averages when `(step - warmup_steps) mod period == 0` and so first after a single step.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.post_local_sgd(optax.sgd(0.1, momentum=0.9), switch_step=1000, sync_period=16)

    References:
      Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217, 2020.
    """
    outer, warmup_steps = optax.sgd(1.0), switch_step
    return local_steps(
        inner, outer, sync_period=sync_period, offset=offset, warmup_steps=warmup_steps, reducer=reducer, axis=axis
    )


class SlowMomentumState(NamedTuple):
    """`momentum` is `u`, shaped like the anchor, in float32 or better (replicated)."""

    momentum: Updates


def slow_momentum(
    *, learning_rate: float | int = 1.0, momentum: float | int = 0.5
) -> optax.GradientTransformationExtraArgs:
    """The outer step of SlowMo: `u = β u + Δ/γ`, `x -= α γ u`, with the drift `Δ` and the inner rate `γ` of the round.

    Dividing by `γ` keeps `u` in units of the inner direction: when the inner rate drops, the stored momentum drops
    with it. With a constant rate this is heavy-ball SGD on the drift. `update` needs `learning_rate=`, the inner rate
    `γ`; where that is 0 nothing moves. The state is `u`, replicated, in float32.

    `β = 0, α = 1` is Local SGD; `β > 0, α = 1` BMUF; one worker with `β = 0, α < 1` Lookahead.

    Args:
      learning_rate: `α`. The paper always has 1.
      momentum: `β`. More helps when there are many workers; too much diverges when rounds are long. FairScale's
        documentation has 0.2 with 4 nodes, 0.5 with 8 and 0.6 with 16 for a translation model.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.local_sgd import slow_momentum
      >>> outer = slow_momentum(momentum=0.5)
      >>> state = outer.init(jnp.ones(1))
      >>> updates, state = outer.update(jnp.array([0.1]), state, learning_rate=0.1)
      >>> round(float(updates[0]), 6), round(float(state.momentum[0]), 6)
      (-0.1, 1.0)
    """
    check_range("momentum", momentum, 0, 1)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")

    def init_fn(params):
        return SlowMomentumState(jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params))

    def update_fn(updates, state, params=None, **extra_args):
        del params
        if extra_args.get("learning_rate") is None:
            raise ValueError(
                "slow_momentum divides the drift by the rate of the inner steps, and none was passed; pass "
                "learning_rate= to the update, or use slowmo(..., learning_rate=)"
            )
        rate = jnp.asarray(extra_args["learning_rate"], jnp.float32)
        # u = β u + Δ/γ, unchanged where γ is 0.
        divisor = jnp.where(rate > 0, rate, 1)
        u = jax.tree.map(
            lambda u, drift: jnp.where(rate > 0, momentum * u + drift.astype(u.dtype) / divisor.astype(u.dtype), u),
            state.momentum,
            updates,
        )
        # x -= α γ u
        steps = jax.tree.map(lambda x, u: (-learning_rate * rate.astype(u.dtype) * u).astype(x.dtype), updates, u)
        return steps, SlowMomentumState(u)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def slowmo(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: LearningRate,
    slow_learning_rate: float | int = 1.0,
    momentum: float | int = 0.5,
    buffers: Buffers = "reset",
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """SlowMo: Local SGD whose drifts, divided by the learning rate, accumulate in a slow momentum.

    BMUF is `slow_learning_rate=1`; Lookahead is one worker with `momentum=0` and `slow_learning_rate < 1`.

    *On the wire*: as `local_sgd`. *State* and other arguments: as `local_steps`, with a momentum in float32.

    Args:
      inner: the optimizer of each worker; with `gossip` and `sgp()` this is SGP-SlowMo, with `osgp()` OSGP-SlowMo.
      sync_period: `τ`, the steps of a round; the paper has 12, and 48 around gossip.
      learning_rate: that of `inner`, a number or a schedule. `update(..., learning_rate=)` overrides it.
      slow_learning_rate: `α`; leave it at 1.
      momentum: `β`, 0.4 to 0.8; more for more workers.
      buffers: as in `local_steps`; the paper resets those of SGD and maintains those of Adam.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.slowmo(optax.sgd(0.1, momentum=0.9), sync_period=12, learning_rate=0.1, momentum=0.6)

    References:
      Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
      arXiv:1910.00643, 2019.
    """
    outer = slow_momentum(learning_rate=slow_learning_rate, momentum=momentum)
    tx = local_steps(inner, outer, sync_period=sync_period, buffers=buffers, reducer=reducer, axis=axis)
    # The rate of each inner step, whose mean over the round is γ.
    return with_rate(tx, learning_rate)


def diloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: LearningRate = 0.7,
    momentum: float | int | None = None,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: `H` local steps of AdamW, then one step of Nesterov momentum along the mean drift.

    The papers' momentum of 0.9 needs a model that is past its first, large steps: train a fifth of the run
    synchronously, `warmup_steps=`, or start from a trained model. For a byte-level GPT of 30 thousand parameters, 4
    workers, `H = 32` and a cosine over 2,560 steps, the held-out loss exceeds that of synchronous training at the same
    inner rate by

    | `warmup_steps` | 0 | 64 | 128 | 256 | 512 | 1024 |
    |---|--:|--:|--:|--:|--:|--:|
    | `momentum=0.9` | 21 % | 4.4 % | 2.0 % | 0.2 % | -1.1 % | -1.3 % |
    | `momentum=0.5` | 5.0 % | 5.0 % | 5.7 % | 4.9 % | 2.9 % | 1.4 % |

    A GPT of 10.8 million parameters with momentum 0.9 loses 21 % without a start, 6.1 % after 256 and 1.3 % after 512.

    *On the wire*: as `local_sgd`; warm-up steps as `local_steps`, all of them together as many bytes as `warmup_steps`
    rounds. *State* and other arguments: as `local_steps`, with a momentum in float32.

    Args:
      inner: the optimizer of each worker; the papers have AdamW with clipping at 1.
      sync_period: `H`, 30 to 500.
      learning_rate: the outer `η`, 0.4 to 0.8, more for more workers and longer rounds; constant. A schedule counts
        rounds.
      momentum: the outer `μ`. By default 0.9 with `warmup_steps`, and 0.5 without; pass 0.9 if the model is trained
        already.
      warmup_steps: the number of first steps that average gradients exactly, a fifth of the run; 0 loses most.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.diloco(optax.adamw(4e-4), sync_period=100, warmup_steps=1000)

    References:
      Douillard et al., arXiv:2311.08105. Charles et al., "Communication-Efficient Language Model Training Scales
      Reliably and Robustly: Scaling Laws for DiLoCo", arXiv:2503.09799, 2025 (which rates).
    """
    if momentum is None:
        # From random parameters the first drifts are large and soon outdated, and 0.9 adds up ten of them.
        momentum = 0.9 if warmup_steps else 0.5
    outer = optax.sgd(learning_rate, momentum=momentum, nesterov=True)
    return local_steps(inner, outer, sync_period=sync_period, warmup_steps=warmup_steps, reducer=reducer, axis=axis)


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: int,
    fragments: Fragments | int,
    delay: int = 1,
    merge_alpha: float | int = 0.5,
    learning_rate: LearningRate = 0.4,
    momentum: float | int = 0.9,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Streaming DiLoCo: fragments are synchronized in turn, and their result is merged into the local model later.

    *On the wire*: over `H` steps as much as `diloco`, but never more than the largest fragment in one step. The paper
    sends 4 bits an entry: `reducer=jd.compressed(jd.compressors.e3m0())`.

    *State* and other arguments: as `local_steps`, with one outer state and one state of the reducer for each fragment.

    Args:
      sync_period: `H` of each fragment; the paper has 100.
      fragments: `strided(P)` where layers are numbered, else a number of groups of about equal bytes.
      delay: `τ`, the number of steps until the result is merged: 1 to 5.
      merge_alpha: `α`, the weight of a worker's own parameters.
      learning_rate: the outer `η`; the paper has 0.4.
      momentum: the outer `μ`; 0.9 needs a synchronous start, as in `diloco`.
      warmup_steps: the number of first steps that average gradients exactly; a fifth of the run is a good start.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.streaming_diloco(optax.adamw(4e-4), sync_period=100, fragments=3)

    References:
      Douillard et al., arXiv:2501.18512.
    """
    outer = optax.sgd(learning_rate, momentum=momentum, nesterov=True)
    return local_steps(
        inner,
        outer,
        sync_period=sync_period,
        fragments=fragments,
        delay=delay,
        merge_alpha=merge_alpha,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )


def sparse_loco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod = 30,
    density: float = 64 / 4096,
    block: int = 4096,
    values_block: int = 256,
    decay: float | int = 0.95,
    learning_rate: LearningRate = 1.0,
    warmup_steps: int = 0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """SparseLoCo: every `H` steps each worker sends the largest 1 to 3 % of entries, with error feedback for the rest.

    With the drift `Δ_w`: `a_w = β e_w + Δ_w`, `s_w = two_means(block_top_k(a_w))`, `e_w = a_w - s_w`, and the global
    parameters move by `-α mean(s_w)`. There is no outer momentum: error feedback takes its place.

    *On the wire*: every `H` steps one all-gather. For each whole block of 4096 entries 64 positions of 8 bits and 64
    values of 2 bits, and 8 bytes of means for each 256 values: 10.25 bits for an entry sent, 200 times less than
    float32, where indices of 12 bits within a block make it 14 (146 times less). Every worker receives `W-1` of these.

    *State* and other arguments: as `local_steps`; per worker `e_w`, float32, of the size of the model.

    Args:
      inner: the optimizer of each worker; the paper has AdamW.
      sync_period: `H`, 15 to 250.
      density: the fraction that is sent, 64 of 4096. Up to 0.03 the loss is that of DiLoCo or better.
      block: the number of entries, in the order of the leaf, among which the largest are selected. The paper has 64 by
        64 tiles of matrices.
      values_block: the number of values that share two means.
      decay: `β`; a lower one forgets unsent drift sooner.
      learning_rate: `α`; constant, or a schedule that counts rounds. A run of 72 billion parameters ended with 0.65.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.sparse_loco(optax.adamw(4e-4), sync_period=30)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706,
      2025 (with another code of two bits and another unit of positions).
    """
    # The two-bit code is applied to the values that top-k selects.
    code = chained(block_top_k(density, block=block), two_means(block=values_block))
    outer, reducer = optax.sgd(learning_rate), error_feedback(compressed(code), decay=decay)
    return local_steps(inner, outer, sync_period=sync_period, warmup_steps=warmup_steps, reducer=reducer, axis=axis)


def hidden_matrix(path: tuple[Any, ...], leaf: Like) -> bool:
    """Selects matrices for Muon: true for a matrix unless its path contains the name of an embedding or a head.

    `path` is that of `jax.tree_util.tree_map_with_path`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"embed": jnp.zeros((9, 4)), "layer": {"b": jnp.zeros(4), "w": jnp.zeros((4, 4))}}
      >>> jax.tree_util.tree_map_with_path(jd.local_sgd.hidden_matrix, params)
      {'embed': False, 'layer': {'b': False, 'w': True}}

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    return len(leaf.shape) == 2 and not _ENDS.search(jax.tree_util.keystr(path))


def muloco(
    learning_rate: LearningRate,
    *,
    adam_learning_rate: LearningRate,
    sync_period: SyncPeriod = 30,
    outer_learning_rate: LearningRate = 0.9,
    momentum: float | int = 0.8,
    weight_decay: float | int = 0.0,
    matrices: Callable[[tuple[Any, ...], Like], bool] = hidden_matrix,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo whose inner optimizer is Muon for matrices, and AdamW for all other leaves.

    In the paper it reaches lower losses than DiLoCo with any number of workers, and compressing its drift to two bits,
    with feedback, costs almost no loss.

    *On the wire*: as `diloco`. The paper sends two bits an entry with feedback:
    `reducer=jd.error_feedback(jd.compressed(jd.compressors.two_means()), decay=0.9)`.

    *State* and other arguments: as `diloco`; per worker one momentum for matrices and two moments for the rest.

    Args:
      learning_rate: the rate of Muon, whose steps have the spectral norm `sqrt(max(1, columns / rows))`; the paper has
        0.044.
      adam_learning_rate: the rate of AdamW for embeddings, head, vectors and scalars: as for AdamW alone, about 4e-4.
      sync_period: `H`; the paper has 30.
      outer_learning_rate: `η`, constant, or a schedule that counts rounds; 0.8 in streaming.
      momentum: `μ`; 0.9 in streaming.
      weight_decay: of Muon and AdamW, decoupled.
      matrices: `matrices(path, leaf)` selects the leaves that Muon updates, of two dimensions. Layers that are stacked
        into one leaf of three are not matrices: AdamW updates them, unless they are given to Muon through `diloco` and
        `optax.contrib.muon(muon_weight_dimension_numbers=...)`. AdamW also gets matrices without entries.

    Examples:
      >>> import jaxdist as jd
      >>> tx = jd.local_sgd.muloco(0.02, adam_learning_rate=4e-4)

    References:
      Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", arXiv:2505.23725, 2025.
    """

    def label(path, leaf):
        selected = matrices(path, leaf)
        if selected and len(leaf.shape) != 2:
            raise ValueError(
                f"Muon updates matrices, and {name_leaf('the parameter', path)} has the shape {leaf.shape}"
            )
        # Orthogonalizing a matrix without entries would divide by zero.
        return "muon" if selected and math.prod(leaf.shape) else "adam"

    # Not muon's own Adam for the rest, which uses Nesterov momentum wherever Muon does.
    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": muon(learning_rate, weight_decay=weight_decay),
        "adam": optax.adamw(adam_learning_rate, weight_decay=weight_decay),
    }
    return diloco(
        optax.partition(rules, partial(jax.tree_util.tree_map_with_path, label)),
        sync_period=sync_period,
        learning_rate=outer_learning_rate,
        momentum=momentum,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )

"""MuLoCo: DiLoCo around Muon."""

import math
import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import optax
from optax.contrib import muon

from .._core.options import takes_options_of
from .._core.types import Like
from ..state.marks import name_leaf
from ..transforms.common import LearningRate
from .diloco import diloco
from .fragments import SyncPeriod

# Parts of the names of embeddings and heads; `wte`, `wpe` and `lm_head` are GPT-2's. Not those of an ensemble, an
# assembler, or attention with several heads.
_ENDS = re.compile(r"emb(?!l|er)|(?<!multi)(?<!multi[_-])head|logits|vocab|wte|wpe", re.IGNORECASE)


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


@takes_options_of(diloco)
def muloco(
    learning_rate: LearningRate,
    *,
    adam_learning_rate: LearningRate,
    sync_period: SyncPeriod = 30,
    outer_learning_rate: LearningRate = 0.9,
    momentum: float | int = 0.8,
    weight_decay: float | int = 0.0,
    matrices: Callable[[tuple[Any, ...], Like], bool] = hidden_matrix,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo whose inner optimizer is Muon for matrices, and AdamW for all other leaves.

    In the paper it reaches lower losses than DiLoCo with any number of workers, and compressing its drift to two bits,
    with feedback, costs almost no loss.

    *On the wire*: as `diloco`. The paper sends two bits an entry with feedback:
    `reducer=jd.error_feedback(jd.compressed(jd.compressors.two_means()), decay=0.9)`.

    *State*: as `diloco`; per worker one momentum for matrices and two moments for the rest.

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
      **options: other arguments: those of `diloco`.

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
        **options,
    )

"""Waves of data that follow each other through the stages of a model, forward beside backward on every stage.

Stage `s` of `S` takes wave `w` forward in step `w + s` and back in step `w + 2S - 1 - s`: beside the backward pass of
one wave runs the forward pass of the wave `2S - 1 - 2s` later. A stage keeps at most that number of waves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._core.compat import shard_map
from .._core.dtypes import working_dtype
from .._core.trees import tree_where
from .._core.types import Array, AxisNames, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import axis_tuple
from ..transforms.local_value_and_grad import to_varying
from .layer_passes import floating, known_after, pull_back, row, set_row
from .wave_model import Layered, WaveModel, embed_gradient, loss_and_gradients


def value_and_grad_in_stages(
    model: WaveModel, stages: str, axis: AxisNames, params: Layered, waves: Sequence[PyTree]
) -> tuple[Array, Layered]:
    """The loss and the gradient of the mean over all waves, computed by devices that have some of the layers each.

    Args:
      model: the functions; `embed` is computed on the first stage and `head` on the last.
      stages: the mesh axis of the stages.
      axis: the mesh axis of the workers.
      params: the parameters, `layers` cut over the stages.
      waves: the batches.

    Returns:
      The loss, and gradients with the placement of the parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if stages not in mesh.shape or stages in mesh.manual_axes:
        raise ValueError(
            f"stages={stages!r} must be an axis of the mesh besides that of the workers, and run under "
            f"distribute(step, mesh), got the axes {dict(mesh.shape)}"
        )
    count = jax.tree.leaves(params.layers)[0].shape[0]
    if count % mesh.shape[stages]:
        raise ValueError(f"{count} layers do not divide among the {mesh.shape[stages]} stages of axis {stages!r}")
    params, waves = to_varying((params, jax.tree.map(lambda *x: jnp.stack(x), *waves)), axis)
    specs = Layered(PartitionSpec(), PartitionSpec(stages), PartitionSpec())
    mapped = shard_map(
        partial(_run_stage, model, (*axis_tuple(axis), stages)),
        mesh=None,
        in_specs=(specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
        axis_names={stages},
        check_vma=True,
    )
    return mapped(params, waves)


class _Stage(NamedTuple):
    """The constants of one stage's loop.

    Attributes:
      model: the functions.
      params: the parameters, of the layers those of this stage.
      waves: all batches, stacked.
      axes: the mesh axes of the workers and of the stages.
      comm: the stages.
      num_waves: the number of waves.
      num_layers: the number of this stage's layers.
    """

    model: WaveModel
    params: Layered
    waves: PyTree
    axes: tuple[str, ...]
    comm: Comm
    num_waves: int
    num_layers: int


class _Carry(NamedTuple):
    """The values that a stage takes from step to step.

    Attributes:
      x: the activation that arrived from the stage before.
      g: the gradient that arrived from the stage after, a list of its floating leaves.
      slots: the inputs of this stage's layers, for `2S - 1` waves.
      sums: the sums of gradients.
      loss: the sum of losses.
    """

    x: PyTree
    g: list[Array]
    slots: PyTree
    sums: Layered
    loss: Array


def _run_stage(model: WaveModel, axes: tuple[str, ...], params: Layered, waves: PyTree) -> tuple[Array, Layered]:
    params, waves = to_varying((params, waves), axes)
    num_waves, num_layers = (jax.tree.leaves(tree)[0].shape[0] for tree in (waves, params.layers))
    stage = _Stage(model, params, waves, axes, over(axes[-1]), num_waves, num_layers)
    # The last wave comes back to the first stage 2S - 1 steps after it set off.
    steps = jnp.arange(num_waves + 2 * stage.comm.size - 1)
    carry, _ = lax.scan(partial(_step, stage), _first_carry(stage), steps)
    # Each of these was computed on one stage, and is zero on the others.
    embed, head, loss = stage.comm.sum((carry.sums.embed, carry.sums.head, carry.loss))
    sums = Layered(embed, carry.sums.layers, head)
    return loss / num_waves, jax.tree.map(lambda s, x: (s / num_waves).astype(x.dtype), sums, params)


def _first_carry(stage: _Stage) -> _Carry:
    like = jax.eval_shape(stage.model.embed, stage.params.embed, row(stage.waves, 0))
    slots = (2 * stage.comm.size - 1) * stage.num_layers
    return _Carry(
        x=_zeros(like, stage.axes),
        g=_zeros(floating(like), stage.axes),
        slots=_zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape), x.dtype), like), stage.axes),
        sums=_zeros(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, working_dtype(x.dtype)), stage.params), stage.axes
        ),
        loss=_zeros(jax.ShapeDtypeStruct((), jnp.float32), stage.axes),
    )


def _step(stage: _Stage, carry: _Carry, t: Array) -> tuple[_Carry, None]:
    """Takes one wave forward through the layers of this stage and another one backward, and sends both on."""
    model, params, comm, index = stage.model, stage.params, stage.comm, stage.comm.index
    is_first, is_last = index == 0, index == comm.size - 1
    leaving, returning = t - index, t - (2 * comm.size - 1 - index)
    is_leaving, is_returning = (_exists(stage, wave) for wave in (leaving, returning))
    leaving_batch, returning_batch = (_batch(stage, wave) for wave in (leaving, returning))
    x = lax.cond(is_first, lambda x: model.embed(params.embed, leaving_batch), lambda x: x, carry.x)
    x, g, slots, of_layers = _pass_layers(stage, carry._replace(x=x), leaving, returning, is_returning)
    of_embed = _compute_if(is_first, lambda g: embed_gradient(model, params.embed, returning_batch, g), g, stage.axes)
    loss, of_head, g_of_loss = _compute_if(
        is_last, lambda x: loss_and_gradients(model, params.head, x, leaving_batch), x, stage.axes
    )
    sums = Layered(
        _add_if(is_returning & is_first, carry.sums.embed, of_embed),
        of_layers,
        _add_if(is_leaving & is_last, carry.sums.head, of_head),
    )
    loss = _add_if(is_leaving & is_last, carry.loss, loss)
    # Activations go to the next stage and gradients to the one before; the last stage turns its wave around.
    x = comm.ppermute(x, [(s, s + 1) for s in range(comm.size - 1)])
    g = comm.ppermute(g, [(s + 1, s) for s in range(comm.size - 1)])
    return _Carry(x, tree_where(is_last, g_of_loss, g), slots, sums, loss), None


def _pass_layers(
    stage: _Stage, carry: _Carry, leaving: Array, returning: Array, is_returning: Array
) -> tuple[PyTree, list[Array], PyTree, PyTree]:
    """Takes layer `L-1-i` backward and layer `i` forward, in a loop; returns `x`, `g`, the slots and the sums."""
    layer, params = stage.model.layer, stage.params.layers

    def body(carry, i):
        x, g, slots, sums = carry
        j = stage.num_layers - 1 - i
        gradient, g = pull_back(layer, row(params, j), row(slots, _slot(stage, returning, j)), g)
        sums = set_row(sums, j, _add_if(is_returning, row(sums, j), gradient))
        slots = set_row(slots, known_after(_slot(stage, leaving, i), (gradient, g)), x)
        return (layer(row(params, i), x), g, slots, sums), None

    start = (carry.x, carry.g, carry.slots, carry.sums.layers)
    return lax.scan(body, start, jnp.arange(stage.num_layers))[0]


def _slot(stage: _Stage, wave: Array, layer: Array) -> Array:
    """The slot of a layer's input. A wave that reuses the slots of another fills them in the opposite order."""
    capacity = 2 * stage.comm.size - 1
    layer = jnp.where((wave // capacity) % 2 == 1, stage.num_layers - 1 - layer, layer)
    return (wave % capacity) * stage.num_layers + layer


def _exists(stage: _Stage, wave: Array) -> Array:
    return (wave >= 0) & (wave < stage.num_waves)


def _batch(stage: _Stage, wave: Array) -> PyTree:
    return row(stage.waves, jnp.clip(wave, 0, stage.num_waves - 1))


def _compute_if(condition: Array, f: Callable[[Any], PyTree], operand: Any, axes: tuple[str, ...]) -> PyTree:
    """`f(operand)` on the stages where the condition holds, and zeros on the others."""

    def compute(operand):
        return to_varying(f(operand), axes)

    return lax.cond(condition, compute, lambda operand: _zeros(jax.eval_shape(compute, operand), axes), operand)


def _add_if(condition: Array, sums: PyTree, gradients: PyTree) -> PyTree:
    """Adds gradients where the condition holds: steps without a wave compute on leftovers, which must not count."""
    return jax.tree.map(lambda s, g: jnp.where(condition, s + g.astype(s.dtype), s), sums, gradients)


def _zeros(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    return to_varying(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), axes)

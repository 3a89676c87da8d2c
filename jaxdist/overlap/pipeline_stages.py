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
from .layer_passes import Gradient, Layered, WaveModel, floating, hide_until, pull_back, row, set_row


def value_and_grad_in_stages(
    model: WaveModel, stages: str, axis: AxisNames, params: Layered, waves: Sequence[PyTree]
) -> tuple[Array, Layered]:
    """Returns the mean loss over all waves and its gradient, with the placement of the parameters.

    Each device along the axis `stages` has some of the layers; the first computes `embed` and the last `head`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if stages not in mesh.shape or stages in mesh.manual_axes:
        raise ValueError(
            f"stages={stages!r} must be an axis of the mesh besides that of the workers, and run under "
            f"distribute(step, mesh), got the axes {dict(mesh.shape)}"
        )
    count = jax.tree.leaves(params.layers)[0].shape[0]
    if count % mesh.shape[stages]:
        raise ValueError(
            f"{count} layers do not divide among the {mesh.shape[stages]} stages of axis {stages!r}: use a multiple of "
            "layers, or a mesh with a number of stages that divides them"
        )
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
    """The constants of one stage's loop: `params` with this stage's layers alone, all batches stacked in `waves`.

    `axes` are the mesh axes of the workers and of the stages, `comm` communicates between stages, and `num_layers` is
    the number of this stage's layers.
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

    `x` arrived from the stage before and `g` from the stage after; `slots` are the inputs of this stage's layers, for
    `2S - 1` waves. `sums` and `loss` add up gradients and losses.
    """

    x: PyTree
    g: Gradient
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
    x = jax.eval_shape(stage.model.embed, stage.params.embed, row(stage.waves, 0))
    number = (2 * stage.comm.size - 1) * stage.num_layers
    slots = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), x)
    # Sums are in float32 or better.
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, working_dtype(leaf.dtype)), stage.params)
    value = jax.eval_shape(stage.model.head, stage.params.head, x, row(stage.waves, 0))
    loss = jax.ShapeDtypeStruct((), working_dtype(value.dtype))
    return _Carry(*_zeros((x, floating(x), slots, sums, loss), stage.axes))


def _step(stage: _Stage, carry: _Carry, t: Array) -> tuple[_Carry, None]:
    """Takes one wave forward through the layers of this stage and another one backward, and sends both on."""
    model, params, comm, index = stage.model, stage.params, stage.comm, stage.comm.index
    # Stage s takes wave t - s forward, and wave t - (2S - 1 - s) back.
    is_first, is_last = index == 0, index == comm.size - 1
    leaving, returning = t - index, t - (2 * comm.size - 1 - index)
    is_leaving, is_returning = ((wave >= 0) & (wave < stage.num_waves) for wave in (leaving, returning))
    # Steps without a wave compute on that of another step, which `_add_if` leaves out.
    numbers = (jnp.clip(wave, 0, stage.num_waves - 1) for wave in (leaving, returning))
    leaving_batch, returning_batch = (row(stage.waves, number) for number in numbers)
    x = lax.cond(
        is_first, lambda x: to_varying(model.embed(params.embed, leaving_batch), stage.axes), lambda x: x, carry.x
    )
    x, g, slots, of_layers = _pass_layers(stage, carry._replace(x=x), leaving, returning, is_returning)
    of_embed = _compute_if(is_first, lambda g: model.embed_gradient(params.embed, returning_batch, g), g, stage.axes)
    loss, of_head, g_of_loss = _compute_if(
        is_last, lambda x: model.loss_and_gradients(params.head, x, leaving_batch), x, stage.axes
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
) -> tuple[PyTree, Gradient, PyTree, PyTree]:
    """Takes layer `L-1-i` backward and layer `i` forward, in a loop; returns `x`, `g`, the slots and the sums."""
    layer, params = stage.model.layer, stage.params.layers

    def body(carry, i):
        x, g, slots, sums = carry
        j = stage.num_layers - 1 - i
        gradient, g = pull_back(layer, row(params, j), row(slots, _slot(stage, returning, j)), g)
        sums = set_row(sums, j, _add_if(is_returning, row(sums, j), gradient))
        slots = set_row(slots, hide_until(_slot(stage, leaving, i), (gradient, g)), x)
        return (layer(row(params, i), x), g, slots, sums), None

    start = (carry.x, carry.g, carry.slots, carry.sums.layers)
    return lax.scan(body, start, jnp.arange(stage.num_layers))[0]


def _slot(stage: _Stage, wave: Array, layer: Array) -> Array:
    """Returns the slot of a layer's input. A wave that reuses the slots of another fills them in the opposite order."""
    capacity = 2 * stage.comm.size - 1
    layer = jnp.where((wave // capacity) % 2 == 1, stage.num_layers - 1 - layer, layer)
    return (wave % capacity) * stage.num_layers + layer


def _compute_if(condition: Array, f: Callable[[Any], PyTree], operand: Any, axes: tuple[str, ...]) -> PyTree:
    """Computes `f(operand)` on the stages where the condition holds, and zeros on the others."""

    def compute(operand):
        return to_varying(f(operand), axes)

    return lax.cond(condition, compute, lambda operand: _zeros(jax.eval_shape(compute, operand), axes), operand)


def _add_if(condition: Array, sums: PyTree, gradients: PyTree) -> PyTree:
    """Adds gradients where the condition holds: steps without a wave compute on leftovers, which must not count."""
    return jax.tree.map(lambda s, g: jnp.where(condition, s + g.astype(s.dtype), s), sums, gradients)


def _zeros(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    return to_varying(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), axes)

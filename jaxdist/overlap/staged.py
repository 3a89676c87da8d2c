"""Waves of data that follow each other through the stages of a model, forward beside backward on every stage.

Stage `s` of `S` takes wave `w` forward in step `w + s` and back in step `w + 2S - 1 - s`: beside the backward pass of
one wave, the forward pass of the wave `2S - 1 - 2s` later. So many waves at most are under way on a stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._core.compat import shard_map
from .._core.dtypes import working_dtype
from .._core.types import AxisNames, PyTree
from ..comm.over import over
from ..state.marks import axis_tuple
from ..transforms.local_value_and_grad import to_varying
from .waves import at, floating, known_after, pull_back, put, select


def staged(
    layer: Callable[[PyTree, PyTree], PyTree], ends: Any, stages: str, axis: AxisNames
) -> Callable[[PyTree, Sequence[PyTree]], tuple[Any, PyTree]]:
    """The gradient of the mean over all waves, by devices that have some of the layers each.

    Args:
      layer: the function of a layer.
      ends: the two ends of the model, computed on the first and on the last stage.
      stages: the mesh axis of the stages.
      axis: that of the workers.

    Returns:
      `(params, waves) -> (loss, gradients)`, the gradients where the parameters are.
    """

    def value_and_grad(params, waves):
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
        specs = type(params)(PartitionSpec(), PartitionSpec(stages), PartitionSpec())
        mapped = shard_map(
            lambda params, waves: _on_a_stage(layer, ends, (*axis_tuple(axis), stages), params, waves),
            mesh=None,
            in_specs=(specs, PartitionSpec()),
            out_specs=(PartitionSpec(), specs),
            axis_names={stages},
            check_vma=True,
        )
        return mapped(params, waves)

    return value_and_grad


def _on_a_stage(layer, ends, axes, params, waves):
    params, waves = to_varying((params, waves), axes)
    comm = over(axes[-1])
    stages, stage, count = comm.size, comm.index, jax.tree.leaves(waves)[0].shape[0]
    layers = jax.tree.leaves(params.layers)[0].shape[0]
    ring = 2 * stages - 1  # waves under way

    def zeros(tree):
        return to_varying(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), axes)

    like = jax.eval_shape(ends.start, params.embed, at(waves, 0))
    x, g = zeros(like), zeros(floating(like))
    slots = zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct((ring * layers, *x.shape), x.dtype), like))
    sums = zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, working_dtype(x.dtype)), params))

    def slot_of(wave, number):
        """Every time that a wave comes to slots which another has left, it fills them in the opposite order."""
        number = jnp.where((wave // ring) % 2 == 1, layers - 1 - number, number)
        return (wave % ring) * layers + number

    def step(carry, t):
        x, g, slots, sums, total = carry
        setting_off, returning = t - stage, t - (2 * stages - 1 - stage)
        fresh, due = (_within(wave, count) for wave in (setting_off, returning))
        ahead, behind = (at(waves, jnp.clip(wave, 0, count - 1)) for wave in (setting_off, returning))
        x = lax.cond(stage == 0, lambda x: ends.start(params.embed, ahead), lambda x: x, x)

        def body(carry, i):
            x, g, slots, sums = carry
            j = layers - 1 - i
            one, g = pull_back(layer, at(params.layers, j), at(slots, slot_of(returning, j)), g)
            sums = put(sums, j, _added(due, at(sums, j), one))
            slots = put(slots, known_after(slot_of(setting_off, i), (one, g)), x)
            return (layer(at(params.layers, i), x), g, slots, sums), None

        (x, g, slots, of_layers), _ = lax.scan(body, (x, g, slots, sums.layers), jnp.arange(layers))

        def first(g):
            return to_varying(ends.pull_start(params.embed, behind, g), axes)

        def last(x):
            return to_varying(ends.finish(params.head, x, ahead), axes)

        of_embed = lax.cond(stage == 0, first, lambda g: zeros(jax.eval_shape(first, g)), g)
        at_end = stage == stages - 1
        loss, of_head, top = lax.cond(at_end, last, lambda x: zeros(jax.eval_shape(last, x)), x)
        sums = type(params)(
            _added(due & (stage == 0), sums.embed, of_embed), of_layers, _added(fresh & at_end, sums.head, of_head)
        )
        total = _added(fresh & at_end, total, loss)
        x = comm.ppermute(x, [(s, s + 1) for s in range(stages - 1)])
        g = comm.ppermute(g, [(s + 1, s) for s in range(stages - 1)])
        return (x, select(at_end, top, g), slots, sums, total), None

    total = zeros(jax.ShapeDtypeStruct((), jnp.float32))
    carry, _ = lax.scan(step, (x, g, slots, sums, total), jnp.arange(count + 2 * stages - 1))
    _, _, _, sums, total = carry
    embed, head, total = comm.sum((sums.embed, sums.head, total))  # of one stage each
    mean = jax.tree.map(lambda s, x: (s / count).astype(x.dtype), type(params)(embed, sums.layers, head), params)
    return total / count, mean


def _within(wave, count):
    return (wave >= 0) & (wave < count)


def _added(some, sums, gradients):
    """Steps without a wave compute on what is there, and leave no trace."""
    return jax.tree.map(lambda s, g: jnp.where(some, s + g.astype(s.dtype), s), sums, gradients)

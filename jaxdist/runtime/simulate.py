"""The same step for any number of workers on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, PyTree, State
from ..state.marks import axis_tuple, bind
from ..transforms.optax_wrappers import explain_wrapped_communication
from ..transforms.skip_nonfinite import with_skip_checks
from .worker_view import as_weak_as, check_same, close_state, manual_specs, open_state, run_step


def simulate(
    step: Callable[..., tuple[State, Any]],
    workers: int | Mapping[str, int],
    *,
    axis: AxisNames = "data",
    batch_specs: PyTree | None = None,
    static_argnames: Sequence[str] = (),
) -> Callable[..., tuple[State, Any]]:
    """`jit(vmap(step))`: runs a step written as one worker sees it for many workers on one device.

    State and batch have the same global shapes as for `distribute` on a mesh of as many devices, and the numbers are
    the same up to the order of sums. There is no network, and no bytes can be read from the program.

    Args:
      step: `step(state, batch, **static) -> (state, metrics)`.
      workers: how many along `axis`, or a mapping from axis name to number, slow links first.
      axis: the axis name when `workers` is a number.
      batch_specs: as for `distribute`.
      static_argnames: as for `distribute`.

    Returns:
      The compiled step. It does not donate: the state passed in stays usable.

    Raises:
      ValueError: a batch that does not divide, a leaf or a metric that differs between workers without a mark.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> def step(state, batch):
      ...     return state, jax.lax.pmean(batch.sum(), "data")
      >>> float(jd.simulate(step, workers=4)(None, jnp.arange(8.0))[1])
      7.0
    """
    sizes = dict(workers) if isinstance(workers, Mapping) else {name: workers for name in axis_tuple(axis)}
    if not sizes or any(size < 1 for size in sizes.values()):
        raise ValueError(f"workers must be positive, got {workers}")
    if len(sizes) > 1 and not isinstance(workers, Mapping):
        raise ValueError(f"for the axes {axis!r} give the number of workers of each, workers={{name: number}}")
    axes = tuple(sizes)

    def run(state, batch, **static):
        reason = explain_wrapped_communication(state)
        if reason:
            raise ValueError(reason)
        state = bind(state, axes if isinstance(workers, Mapping) else axis)
        batch_tree = jax.tree.structure(batch)
        state_specs = jax.tree.leaves(manual_specs(state, axes))
        specs = [*state_specs, *_batch_specs(batch, batch_specs, axes)]
        leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
        blocks = [_to_blocks(leaf, spec, sizes) for leaf, spec in zip(leaves, specs, strict=True)]
        structure = jax.tree.structure(state)
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]

        def one_worker(*local):
            mine = structure.unflatten(local[: len(state_specs)])
            part = batch_tree.unflatten(local[len(state_specs) :])
            new, metrics = run_step(step, open_state(mine, axes), part, **static)
            new = close_state(new, mine, axes)
            check_same(new, mine)
            return jax.tree.leaves(new), metrics

        def mapped(out_specs, agreed_metrics):
            """The nested vmaps, whose unmapped outputs must be equal on all workers."""
            f = one_worker
            for name in reversed(axes):
                in_axes = [0 if name in _names(spec) else None for spec in specs]
                out_axes = [0 if name in _names(spec) else None for spec in out_specs]
                f = jax.vmap(
                    f,
                    in_axes=in_axes,
                    out_axes=(out_axes, None if agreed_metrics else 0),
                    axis_name=name,
                    axis_size=sizes[name],
                )
            return f

        try:
            new, metrics = mapped(state_specs, True)(*blocks)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ValueError(_what_differs(mapped, blocks, state_specs, names, axes)) from error
        new = [_from_blocks(leaf, spec, sizes) for leaf, spec in zip(new, state_specs, strict=True)]
        return as_weak_as(structure.unflatten(new), state), metrics

    return with_skip_checks(jax.jit(run, static_argnames=tuple(static_argnames)))


def _what_differs(mapped, blocks, specs, names, axes) -> str:
    """Only after a failure: asks for each agreed leaf by itself whether it is the one."""
    everywhere = PartitionSpec(axes)
    for i, spec in enumerate(specs):
        try:
            jax.eval_shape(mapped([spec if j == i else everywhere for j in range(len(specs))], False), *blocks)
        except ValueError:
            return (
                f"leaf `{names[i]}` differs between workers: mark it PerWorker, or reduce it before it enters the state"
            )
    return (
        f"a metric differs between workers: average it with jax.lax.pmean(x, {axes[0] if len(axes) == 1 else axes!r})"
    )


def _batch_specs(batch: PyTree, given: PyTree | None, axes: tuple[str, ...]) -> list[PartitionSpec]:
    prefix = PartitionSpec(axes) if given is None else given
    spread = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        prefix,
        batch,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.tree.leaves(spread)


def _names(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(name for part in spec for name in axis_tuple(part))


def _to_blocks(x: Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """Global array -> `[*worker dimensions in the order of the axes, *a worker's block]`."""
    x = jnp.asarray(x)
    shape: list[int] = []
    place: dict[str, int] = {}
    for dimension, length in enumerate(x.shape):
        for name in axis_tuple(spec[dimension]) if dimension < len(spec) else ():
            if length % sizes[name]:
                raise ValueError(
                    f"an array of shape {x.shape} does not divide among {sizes[name]} workers along dimension "
                    f"{dimension}: "
                    "pad the batch, or place the state for this number of workers"
                )
            place[name] = len(shape)
            shape.append(sizes[name])
            length //= sizes[name]
        shape.append(length)
    return jnp.moveaxis(_reshaped(x, shape), [place[name] for name in sizes if name in place], range(len(place)))


def _from_blocks(x: Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """The inverse of `_to_blocks`."""
    mapped = [name for name in sizes if name in _names(spec)]
    local = x.shape[len(mapped) :]
    place: dict[str, int] = {}
    shape, position = [], 0
    for dimension, length in enumerate(local):
        for name in axis_tuple(spec[dimension]) if dimension < len(spec) else ():
            place[name] = position
            position += 1
            length *= sizes[name]
        position += 1
        shape.append(length)
    return _reshaped(jnp.moveaxis(x, range(len(mapped)), [place[name] for name in mapped]), shape)


def _reshaped(x: Array, shape: Sequence[int]) -> Array:
    """Reshaping a single number, even to the shape that it has, would bring it from host memory to the device."""
    return x if x.shape == tuple(shape) else x.reshape(shape)

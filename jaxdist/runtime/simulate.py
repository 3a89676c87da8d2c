"""Runs a step for any number of workers on one device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, PyTree, State
from ..state.marks import axis_tuple, bind
from ..transforms.optax_wrappers import explain_wrapped_communication
from ..transforms.skip_nonfinite import with_skip_checks
from .worker_view import as_weak_as, check_same, close_state, is_spec, manual_specs, open_state, run_step


def simulate(
    step: Callable[..., tuple[State, Any]],
    workers: int | Mapping[str, int],
    *,
    axis: AxisNames = "data",
    batch_specs: PyTree | None = None,
    static_argnames: Sequence[str] = (),
) -> Callable[..., tuple[State, Any]]:
    """`jit(vmap(step))`: runs a step that is written for one worker for many workers on one device.

    State and batch have the same global shapes as for `distribute` on a mesh with that number of devices, and the
    results are the same up to the order of sums. The program contains no collectives, so that no bytes can be counted.

    Args:
      step: `step(state, batch, **static) -> (state, metrics)`.
      workers: the number along `axis`, or a mapping from axis name to number, slow links first.
      axis: the axis name when `workers` is a number.
      batch_specs: as for `distribute`.
      static_argnames: as for `distribute`.

    Returns:
      The compiled step. It does not donate: the state that was passed in stays usable.

    Raises:
      ValueError: the batch does not divide, or an unmarked leaf or a metric differs between workers.

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
        raise ValueError(
            f"axis {axis!r} has several names: give the number of workers of each, workers={{name: number}}"
        )
    cfg = _Config(step, sizes, tuple(sizes) if isinstance(workers, Mapping) else axis, batch_specs)

    def run(state, batch, **static):
        return _run(cfg, state, batch, static)

    return with_skip_checks(jax.jit(run, static_argnames=tuple(static_argnames)))


class _Config(NamedTuple):
    step: Callable[..., tuple[State, Any]]
    sizes: dict[str, int]
    axis: AxisNames
    batch_specs: PyTree | None


class _Worker(NamedTuple):
    """The step of one worker over flat leaves: those of the state, with their specs and names, then the batch."""

    cfg: _Config
    static: dict[str, Any]
    state_tree: Any
    batch_tree: Any
    state_specs: list[PartitionSpec]
    names: list[str]


def _run(cfg: _Config, state: State, batch: PyTree, static: dict[str, Any]) -> tuple[State, Any]:
    """Splits state and batch into the blocks of the workers, runs all workers, and joins the blocks."""
    reason = explain_wrapped_communication(state)
    if reason:
        raise ValueError(reason)
    state, axes = bind(state, cfg.axis), tuple(cfg.sizes)
    state_specs = jax.tree.leaves(manual_specs(state, axes))
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    worker = _Worker(cfg, static, jax.tree.structure(state), jax.tree.structure(batch), state_specs, names)
    specs = [*state_specs, *_batch_specs(batch, cfg.batch_specs, axes)]
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    blocks = [_to_blocks(leaf, spec, cfg.sizes) for leaf, spec in zip(leaves, specs, strict=True)]
    # Unmapped outputs must be equal on all workers: `vmap` refuses those that it cannot prove to be.
    try:
        new, metrics = _map_workers(worker, specs, state_specs, None)(*blocks)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise ValueError(_find_difference(worker, specs, blocks)) from error
    new = [_from_blocks(leaf, spec, cfg.sizes) for leaf, spec in zip(new, state_specs, strict=True)]
    return as_weak_as(worker.state_tree.unflatten(new), state), metrics


def _run_worker(worker: _Worker, *leaves: Any) -> tuple[list[Any], Any]:
    """Runs the step of one worker on its blocks."""
    axes, count = tuple(worker.cfg.sizes), len(worker.state_specs)
    state, batch = worker.state_tree.unflatten(leaves[:count]), worker.batch_tree.unflatten(leaves[count:])
    new, metrics = run_step(worker.cfg.step, open_state(state, axes), batch, **worker.static)
    new = close_state(new, state, axes)
    check_same(new, state)
    return jax.tree.leaves(new), metrics


def _map_workers(
    worker: _Worker, specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], metrics_axis: int | None
) -> Callable[..., Any]:
    """Nests one `vmap` per axis; `vmap` checks that outputs which are not mapped over it are equal on all workers."""
    f: Callable[..., Any] = partial(_run_worker, worker)
    for name, size in reversed(worker.cfg.sizes.items()):
        in_axes = [0 if name in _names(spec) else None for spec in specs]
        out_axes = [0 if name in _names(spec) else None for spec in out_specs]
        f = jax.vmap(f, in_axes=in_axes, out_axes=(out_axes, metrics_axis), axis_name=name, axis_size=size)
    return f


def _find_difference(worker: _Worker, specs: Sequence[PartitionSpec], blocks: Sequence[Any]) -> str:
    """Finds out, after a failure, which replicated leaf differs: maps all outputs but one."""
    axes = tuple(worker.cfg.sizes)
    mapped = PartitionSpec(axes)
    for i, spec in enumerate(worker.state_specs):
        out_specs = [spec if j == i else mapped for j in range(len(worker.state_specs))]
        try:
            jax.eval_shape(_map_workers(worker, specs, out_specs, 0), *blocks)
        except ValueError:
            advice = "mark it PerWorker, or reduce it before it enters the state"
            return f"leaf `{worker.names[i]}` differs between workers: {advice}"
    axis = axes[0] if len(axes) == 1 else axes
    return f"a metric differs between workers: average it with jax.lax.pmean(x, {axis!r})"


def _batch_specs(batch: PyTree, given: PyTree | None, axes: tuple[str, ...]) -> list[PartitionSpec]:
    """Returns one spec for each leaf of the batch."""
    prefix = PartitionSpec(axes) if given is None else given
    full = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, batch, is_leaf=is_spec)
    return jax.tree.leaves(full)


def _names(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(name for part in spec for name in axis_tuple(part))


def _to_blocks(x: Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """Splits a global array into `[*worker dimensions in the order of the axes, *a worker's block]`."""
    x = jnp.asarray(x)
    shape: list[int] = []
    # The dimension of each axis in the split array.
    place: dict[str, int] = {}
    # Dimension `(a·b·n)` sharded over axes a and b becomes `a, b, n`; then the axes move to the front.
    for dimension, length in enumerate(x.shape):
        for name in axis_tuple(spec[dimension]) if dimension < len(spec) else ():
            if length % sizes[name]:
                raise ValueError(
                    f"an array of shape {x.shape} does not divide among {sizes[name]} workers along dimension "
                    f"{dimension}: pad the batch, or place the state for this number of workers"
                )
            place[name] = len(shape)
            shape.append(sizes[name])
            length //= sizes[name]
        shape.append(length)
    return jnp.moveaxis(_reshape(x, shape), [place[name] for name in sizes if name in place], range(len(place)))


def _from_blocks(x: Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """Joins what `_to_blocks` has split."""
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
    return _reshape(jnp.moveaxis(x, range(len(mapped)), [place[name] for name in mapped]), shape)


def _reshape(x: Array, shape: Sequence[int]) -> Array:
    # Reshaping a scalar, even to its own shape, would move it from host memory to the device.
    return x if x.shape == tuple(shape) else x.reshape(shape)

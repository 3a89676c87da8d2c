"""Runs a step for any number of workers on one device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count
from .._core.compat import with_weak_types
from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, PyTree, State
from ..state.marks import WorkerView, axis_tuple, bind, expand_specs, run_in_view, split_axes, view_of
from ..transforms.mistakes import explain_difference, explain_metric, explain_wrapped_communication
from ..transforms.skip_nonfinite import with_skip_checks
from .distribute import check_batch_specs

# For each dimension of a global array, the mesh axes that split it.
Cut = list[tuple[str, ...]]


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
    It does not donate: the state that was passed in stays usable.

    Args:
      workers: the number along `axis`, or a mapping from axis name to number, slow links first.
      axis: the axis name when `workers` is a number; `None` for a single worker without one. With a mapping, its names
        in another order.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> def step(state, batch):
      ...     return state, jax.lax.pmean(batch.sum(), "data")
      >>> float(jd.simulate(step, workers=4)(None, jnp.arange(8.0))[1])
      7.0
    """
    names = axis_tuple(axis)
    if isinstance(workers, Mapping):
        # In the order of `axis` where that names them all, as on a mesh.
        sizes = {name: workers[name] for name in (names if set(names) == set(workers) else workers)}
        axis = tuple(sizes)
    elif len(names) > 1:
        raise ValueError(
            f"axis {axis!r} has several names: give the number of workers of each, workers={{name: number}}"
        )
    else:
        sizes = dict.fromkeys(names, workers)
    if not sizes and workers != 1:
        raise ValueError(f"axis=None is a single worker without an axis, got workers={workers!r}")
    for size in sizes.values():
        check_count("workers", size, 1)
    method = _Simulated(step, sizes, axis, batch_specs)

    def run(state, batch, **static):
        return method.run(state, batch, static)

    return with_skip_checks(jax.jit(run, static_argnames=tuple(static_argnames)))


class _Worker(NamedTuple):
    """The step of one worker over flat leaves: those of the state, then those of the batch; `cuts` are of both."""

    run: "_Simulated"
    static: dict[str, Any]
    state_tree: Any
    batch_tree: Any
    view: WorkerView
    cuts: list[Cut]


class _Simulated(NamedTuple):
    step: Callable[..., tuple[State, Any]]
    sizes: dict[str, int]
    axis: AxisNames
    batch_specs: PyTree | None

    def run(self, state: State, batch: PyTree, static: dict[str, Any]) -> tuple[State, Any]:
        """Splits state and batch into the blocks of the workers, runs all workers, and joins the blocks."""
        reason = explain_wrapped_communication(state)
        if reason:
            raise ValueError(reason)
        # Marks without an axis get the one of this simulation.
        state, axes = bind(state, self.axis), tuple(self.sizes)
        view = view_of(state, axes)
        batch_specs = expand_specs(check_batch_specs(batch, self.batch_specs, self.sizes, axes), batch)
        cuts = split_axes([*view.specs, *jax.tree.leaves(batch_specs)])
        worker = _Worker(self, static, jax.tree.structure(state), jax.tree.structure(batch), view, cuts)
        leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
        blocks = [_to_blocks(leaf, cut, self.sizes) for leaf, cut in zip(leaves, cuts, strict=True)]
        out_cuts = cuts[: len(view.specs)]
        # Unmapped outputs must be equal on all workers: `vmap` refuses those that it cannot prove to be.
        try:
            new, metrics = _map_workers(worker, out_cuts, None)(*blocks)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ValueError(_find_difference(worker, state, blocks)) from error
        new = [_from_blocks(leaf, cut, self.sizes) for leaf, cut in zip(new, out_cuts, strict=True)]
        return with_weak_types(worker.state_tree.unflatten(new), state), metrics


def _run_worker(worker: _Worker, *leaves: Any) -> tuple[list[Any], Any]:
    count = len(worker.view.specs)
    state, batch = worker.state_tree.unflatten(leaves[:count]), worker.batch_tree.unflatten(leaves[count:])
    new, metrics = run_in_view(worker.run.step, worker.view, state, batch, **worker.static)
    return jax.tree.leaves(new), metrics


def _map_workers(worker: _Worker, out_cuts: Sequence[Cut], metrics_axis: int | None) -> Callable[..., Any]:
    """Nests one `vmap` per axis; `vmap` checks that outputs which are not mapped over it are equal on all workers."""
    f: Callable[..., Any] = partial(_run_worker, worker)
    # The first axis is the outermost: its dimension is the first of each block.
    for name, size in reversed(worker.run.sizes.items()):
        in_axes, out_axes = ([0 if name in sum(cut, ()) else None for cut in cuts] for cuts in (worker.cuts, out_cuts))
        f = jax.vmap(f, in_axes=in_axes, out_axes=(out_axes, metrics_axis), axis_name=name, axis_size=size)
    return f


def _find_difference(worker: _Worker, state: State, blocks: Sequence[Any]) -> str:
    """Finds out, after a failure, which replicated leaf differs: maps all outputs but one."""
    axes = tuple(worker.run.sizes)
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        out_cuts = [worker.cuts[i] if j == i else [axes] for j in range(len(worker.view.specs))]
        try:
            # Traced only, since the answer depends on no values.
            jax.eval_shape(_map_workers(worker, out_cuts, 0), *blocks)
        except ValueError:
            return f"leaf `{leaf_name(path)}` differs between workers: {explain_difference(state, path)}"
    axis = axes[0] if len(axes) == 1 else axes
    return f"a metric differs between workers: {explain_metric(state, axis)}"


def _to_blocks(x: Array, cut: Cut, sizes: Mapping[str, int]) -> Array:
    """Splits a global array into `[*worker dimensions in the order of the axes, *a worker's block]`."""
    x = jnp.asarray(x)
    shape: list[int] = []
    # The dimension of each axis in the split array.
    place: dict[str, int] = {}
    # Dimension `(a·b·n)` sharded over axes a and b becomes `a, b, n`; then the axes move to the front.
    for dimension, length in enumerate(x.shape):
        for name in cut[dimension] if dimension < len(cut) else ():
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


def _from_blocks(x: Array, cut: Cut, sizes: Mapping[str, int]) -> Array:
    """Joins what `_to_blocks` has split."""
    mapped = [name for name in sizes if name in sum(cut, ())]
    local = x.shape[len(mapped) :]
    place: dict[str, int] = {}
    shape, position = [], 0
    for dimension, length in enumerate(local):
        for name in cut[dimension] if dimension < len(cut) else ():
            place[name] = position
            position += 1
            length *= sizes[name]
        position += 1
        shape.append(length)
    return _reshape(jnp.moveaxis(x, range(len(mapped)), [place[name] for name in mapped]), shape)


def _reshape(x: Array, shape: Sequence[int]) -> Array:
    # Reshaping a scalar, even to its own shape, would move it from host memory to the device.
    return x if x.shape == tuple(shape) else x.reshape(shape)

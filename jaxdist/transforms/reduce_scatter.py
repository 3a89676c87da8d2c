"""The mean of gradients whose parameters are sharded over the workers' own axis: each worker gets its shard."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.reducer import Extras, Reduced, Reducer, shards_of
from ..reducers.trees import is_map_params_placeholder
from ..state.marks import axis_tuple, is_spec, name_leaf, spec_entry
from ..state.parameter_specs import spec_axes, without_axes
from ..wire.buffers import MULTIPLE


def scattered_dimensions(specs: PyTree, names: Sequence[str], *, caller: str = "all_reduce(specs=)") -> PyTree:
    """For each spec the dimension that the workers' axis shards, or -1.

    Raises:
      ValueError: a dimension is sharded over the workers and another axis, or over some of their axes.
    """

    def find(path: Any, spec: PartitionSpec) -> int:
        found = [i for i, part in enumerate(spec) if set(axis_tuple(part)) & set(names)]
        if found and (len(found) > 1 or axis_tuple(spec[found[0]]) != tuple(names)):
            raise ValueError(
                f"{caller} has {spec} for {name_leaf('the parameter', path)}: axis "
                f"{spec_entry(tuple(names))!r} of the workers must shard a dimension by itself; shard another "
                f"dimension over the other axes, such as P({names[0]!r}, 'model')"
            )
        return found[0] if found else -1

    return jax.tree_util.tree_map_with_path(find, specs, is_leaf=is_spec)


def check_scattering(reducer: Reducer, specs: PyTree, names: Sequence[str]) -> bool:
    """Returns whether any spec names the workers' axis, which the reducer must support then."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        if set(spec_axes(spec)) & set(names):
            advice = (
                f"leave axis {spec_entry(tuple(names))!r} of the workers, over which specs scatter the mean, out of "
                f"all_reduce(specs=): {without_axes(spec, names)} for {name_leaf('the parameter', path)} in place of "
                f"{spec}"
            )
            shards_of(reducer, advice=advice)
            return True
    return False


def scattering(reducer: Reducer, dimensions: PyTree, workers: int) -> Reducer:
    """A reducer of leaves `[*s]` whose mean has this worker's part of the dimension of each leaf."""
    method = _Scattering(shards_of(reducer), dimensions, workers)
    return Reducer(method.init, method.reduce, method.form.law, description=reducer.description)


class _Scattering(NamedTuple):
    form: Reducer
    dimensions: PyTree
    workers: int

    def init(self, like: PyTree[Like]) -> State:
        # From optax.tree.map_params.
        if is_map_params_placeholder(like):
            return self.form.init(like)
        return self.form.init(jax.eval_shape(self._rows, like))

    def reduce(self, updates: Updates, state: State, comm: Comm, extras: Extras) -> tuple[Reduced, State]:
        reduced, state = self.form.reduce(self._rows(updates), state, comm, extras)
        mean = jax.tree.map(self._unfold, reduced.mean, updates, self.dimensions)
        return Reduced(mean, mean), state

    def _rows(self, tree: PyTree) -> PyTree:
        """`[*s] -> [W, n]`: row `w` is worker `w`'s part of the dimension, padded as shards are."""

        def fold(x: Array, dimension: int) -> Array:
            rows = jnp.moveaxis(x, dimension, 0).reshape(self.workers, -1)
            return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % MULTIPLE)))

        return jax.tree.map(fold, tree, self.dimensions)

    def _unfold(self, row: Array, like: Array, dimension: int) -> Array:
        """`[n] -> [*s]` with the part of the dimension."""
        length = like.shape[dimension] // self.workers
        rest = like.shape[:dimension] + like.shape[dimension + 1 :]
        return jnp.moveaxis(row[: like.size // self.workers].reshape(length, *rest), 0, dimension)

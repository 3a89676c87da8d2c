"""The user's own PartitionSpecs of parameters."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._core.types import PyTree, State
from .marks import MarkedLeaf, axis_tuple, cutting_marks, flatten_marks, is_spec, name_leaf


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The names of mesh axes in a partition spec."""
    return tuple(name for part in spec for name in axis_tuple(part))


def axes_of_specs(specs: PyTree) -> set[str]:
    """The names of mesh axes in a tree of partition specs."""
    return {name for spec in jax.tree.leaves(specs) for name in spec_axes(spec)}


def join_specs(first: Iterable[Any], second: Iterable[Any]) -> PartitionSpec:
    """The spec of the dimensions of one spec, and then of those of another."""
    parts = [*first, *second]
    # As XLA writes those of its results: a step would be compiled again for a state with other words for the same.
    while parts and parts[-1] is None:
        del parts[-1]
    return PartitionSpec(*parts)


def check_specs(specs: PyTree, *, caller: str) -> None:
    """Checks that `specs` are PartitionSpecs."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        if not is_spec(spec):
            cure = "its spec, sharding.spec" if hasattr(spec, "spec") else "a PartitionSpec"
            raise ValueError(f"{caller} has {spec!r} for {name_leaf('the parameter', path)}: pass {cure}")


def without_axes(spec: PartitionSpec, names: Iterable[str]) -> PartitionSpec:
    """The spec over all other axes."""
    left = [tuple(name for name in axis_tuple(part) if name not in set(names)) for part in spec]
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in left))


def specs_of_leaves(state: State, specs: PyTree | None) -> list[PartitionSpec]:
    """For each leaf of a state with bound marks, the spec of the dimensions that no mark added.

    It is that of the parameter in whose path the leaf's path ends and whose shape it has, or `P()`.
    """
    leaves = flatten_marks(state)
    if specs is None:
        return [PartitionSpec()] * len(leaves)
    check_specs(specs, caller="specs")
    given = {tuple(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)}
    found = [_parameter_of(leaf, given) for leaf in leaves]
    sizes = [leaf.value.shape[len(cutting_marks(leaf.marks)) :] for leaf in leaves]
    if not any(sizes):
        # Numbers and flat shards, as in the state of `optax.sgd` alone, have no dimensions for the specs.
        return [PartitionSpec()] * len(leaves)
    # The parameter itself has the shortest path. Factored moments, and what reducers keep, have other shapes.
    shapes: dict[Any, Any] = {}
    for i in sorted(range(len(leaves)), key=lambda i: len(leaves[i].path)):
        shapes.setdefault(found[i], sizes[i])
    for path, spec in given.items():
        if path not in shapes:
            raise ValueError(
                f"specs have {spec} for {name_leaf('the parameter', path)}, but no array of the state has this path: "
                "pass a tree of PartitionSpecs like the parameters"
            )

    def spec_of_leaf(leaf: MarkedLeaf, path: Any, size: tuple[int, ...]) -> PartitionSpec:
        if path is None or size != shapes[path]:
            return PartitionSpec()
        # What a reducer keeps of single shards is cut by its own marks.
        taken = {name for mark in cutting_marks(leaf.marks) for name in axis_tuple(mark.axis)}
        return PartitionSpec() if taken & set(spec_axes(given[path])) else given[path]

    return [spec_of_leaf(*parts) for parts in zip(leaves, found, sizes, strict=True)]


def _parameter_of(leaf: MarkedLeaf, given: dict[Any, PartitionSpec]) -> Any:
    """The path of the parameter in which the path of a leaf ends, or `None`."""
    # The longest one: `['a']['w']` ends in `['w']` too.
    ends = (leaf.path[start:] for start in range(len(leaf.path) + 1))
    return next((end for end in ends if end in given), None)

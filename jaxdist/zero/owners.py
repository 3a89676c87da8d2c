"""Divides operations on whole arrays among the workers: each array has one owner, which alone computes them.

Muon multiplies matrices. Gathered, each would be multiplied by every worker. Here such operations are deferred until a
result is needed. By then the same operations of other arrays are known too, and of `k` arrays each of `W` workers
computes those of `⌊k/W⌋`; what is left over, fewer than `W`, is gathered and computed by all.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.compat import assume_replicated, varying_axes
from .._core.jaxprs import WHOLE, apply_primitive, describe_equation, inner_jaxprs
from .._core.types import Array, Shape
from ..comm.base import Comm
from ..wire.buffers import fuse, group_alike, map_stack, rows_of_workers
from .values import Part, Uniform, all_gather_shards, is_part

# What is worth sending an array to its owner for: it takes more than a few operations for each entry.
PRODUCTS = frozenset(
    """
    cholesky conv_general_dilated custom_linear_solve dot_general eig eigh geqrf hessenberg householder_product lu qr
    ragged_dot ragged_dot_general schur svd triangular_solve tridiagonal
    """.split()  # noqa: SIM905
)


class Node:
    """A deferred equation, and the results that have been computed already, by their positions.

    Nodes of equal `kind` compute the same function of the shards in their graphs, `inputs`. `number` is their order.
    """

    __slots__ = ("computed", "equation", "found", "has_products", "inputs", "kind", "number", "operands")

    def __init__(self, equation: Any, operands: Sequence[Any], *, kind: int, number: int, has_products: bool):
        later = [x for x in operands if isinstance(x, Later)]
        self.equation, self.operands, self.kind, self.number = equation, operands, kind, number
        self.has_products = has_products or any(x.node.has_products for x in later)
        self.inputs = frozenset(id(x.value) for x in operands if is_part(x)).union(*(x.node.inputs for x in later))
        self.found: dict[int, Any] = {}
        self.computed: list[Array] | None = None


class Later:
    """A result of a deferred equation, an array of this shape."""

    __slots__ = ("node", "position", "shape")

    def __init__(self, node: Node, position: int, shape: Shape):
        self.node, self.position, self.shape = node, position, shape


# A bound method of C, as `is_part`.
is_later = Later.__instancecheck__


class Deferred:
    """The deferred equations of one evaluation."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.kinds: dict[Any, int] = {}
        self.results: list[Later] = []
        self.wholes: dict[int, Array] = {}
        self.stacks: dict[tuple[int, ...], Array] = {}

    def can_defer(self, equation: Any, operands: Sequence[Any]) -> bool:
        """Whether the results may be computed later, by one worker."""
        later = [x.node.inputs for x in operands if is_later(x)]
        known = max(later, key=len, default=frozenset())
        # What combines results of several arrays, as the sum of their norms, is no operation on one of them.
        return self.comm.size > 1 and _is_local(equation) and all(inputs <= known for inputs in later)

    def defer(self, equation: Any, operands: Sequence[Any]) -> list[Later]:
        """The results of an equation, to be computed when one is needed."""
        operands = [x.full if is_part(x) and x.full is not None else x for x in operands]
        key = describe_equation(equation), tuple(map(_describe_operand, operands))
        kind = self.kinds.setdefault(key, len(self.kinds))
        has_products = not PRODUCTS.isdisjoint(_primitives(equation))
        node = Node(equation, operands, kind=kind, number=len(self.results), has_products=has_products)
        made = [Later(node, i, atom.aval.shape) for i, atom in enumerate(equation.outvars)]
        self.results += made
        return made

    def settle_alike(self, wanted: Later, *, whole: bool) -> None:
        """Computes a result and those of the same operations on other arrays: shards of them, or whole arrays."""
        position, kind = wanted.position, wanted.node.kind
        alike = [x for x in self.results if (x.position, x.node.kind) == (position, kind)]
        self.settle(alike if wanted.node.has_products else [wanted], [whole] * len(alike))

    def settle(self, wanted: Sequence[Later], whole: Sequence[bool]) -> None:
        """Computes results; where `whole` is False, shards are enough."""
        size = self.comm.size
        flags = {(x.node.number, x.position): flag for x, flag in zip(wanted, whole, strict=True)}
        missing = list({(x.node.number, x.position): x for x in wanted if is_later(settled(x))}.values())
        owned = []
        for members in group_alike(missing, lambda x: (x.node.kind, x.position)):
            alike = [missing[i] for i in members]
            divides = alike[0].node.has_products and _find_needed([[x.node for x in alike]]) is not None
            count = len(alike) // size * size if divides else 0
            owned += [alike[:count]] if count else []
            for x in alike[count:]:
                x.node.found[x.position] = self._compute_on_all(x)
        for members in group_alike(owned, len):
            families = [owned[i] for i in members]
            results = list(zip(families, self._compute_on_owners(families), strict=True))
            for flag in (True, False):
                self._send([x for x in results if flags[x[0][0].node.number, x[0][0].position] is flag], whole=flag)

    def _compute_on_all(self, wanted: Later) -> Array:
        for (node,) in _find_needed([[wanted.node]]) or ():
            if node.computed is None:
                node.computed = apply_primitive(node.equation, [self._whole(x) for x in node.operands])
        computed = wanted.node.computed
        assert computed is not None
        return computed[wanted.position]

    def _whole(self, x: Any) -> Any:
        x = settled(x)
        if is_later(x):
            return x.node.computed[x.position]
        if is_part(x):
            if id(x) not in self.wholes:
                self.wholes[id(x)] = all_gather_shards(x.value, x.shape, self.comm)
            return self.wholes[id(x)]
        return jnp.broadcast_to(x.value, x.shape) if isinstance(x, Uniform) else x

    def _compute_on_owners(self, families: Sequence[Sequence[Later]]) -> list[Array]:
        """`[q, *s]` for each family of `q·W` results: those that this worker owns."""
        program = _Program([([x.node for x in family], family[0].position) for family in families])
        count = len(families[0]) // self.comm.size
        self._move_to_owners([x for x in program.columns if is_part(x[0])], count)
        own = [self._own_rows(column, count) for column in program.columns]
        stacks = jax.tree.map(self._as_agreed, own)
        return [self.comm.varying(x) for x in map_stack(program.run, stacks)]

    def _move_to_owners(self, columns: Sequence[Sequence[Part]], count: int) -> None:
        """Sends the shards `[n]` of each array to its owner, which gets `[q, W·n]`: one exchange for each dtype."""
        size = self.comm.size
        columns = [column for column in columns if _key_of_shards(column) not in self.stacks]
        columns = list({_key_of_shards(column): column for column in columns}.values())
        rows = [jnp.stack([x.value for x in column]).reshape(size, count, -1) for column in columns]
        for column, moved in zip(columns, fuse(self.comm, self.comm.all_to_all, rows, rows=True), strict=True):
            self.stacks[_key_of_shards(column)] = jnp.moveaxis(moved, 0, 1).reshape(count, -1)

    def _own_rows(self, column: Sequence[Any], count: int) -> Array:
        """`[q, ...]`: the values of a column that belong to this worker's arrays."""
        if is_part(column[0]):
            shape = column[0].shape
            return self.stacks[_key_of_shards(column)][:, : math.prod(shape)].reshape(count, *shape)
        values = [x.value if isinstance(x, Uniform) else x for x in column]
        if _are_same(values):
            return jnp.broadcast_to(values[0], (count, *jnp.shape(values[0])))
        rows = jnp.stack(values)
        rows = rows.reshape(self.comm.size, count, *rows.shape[1:])
        return lax.dynamic_index_in_dim(self.comm.varying(rows), self.comm.index, keepdims=False)

    def _as_agreed(self, x: Array) -> Array:
        # Equations are bound as they were traced, for values that are equal on all workers.
        names = varying_axes(self.comm.index)
        return assume_replicated(x, names) if names else x

    def _send(self, results: Sequence[tuple[Sequence[Later], Array]], *, whole: bool) -> None:
        """Sends what owners computed: to all workers, or shards of it to the workers that own these."""
        size = self.comm.size
        if whole:
            sent = fuse(self.comm, self.comm.all_gather, [stack for _, stack in results])
            all_rows = [x.reshape(-1, *stack.shape[1:]) for x, (_, stack) in zip(sent, results, strict=True)]
        else:
            cut = [jax.vmap(lambda x: rows_of_workers(x, size), out_axes=1)(stack) for _, stack in results]
            sent = fuse(self.comm, self.comm.all_to_all, cut, rows=True)
            all_rows = [x.reshape(-1, x.shape[-1]) for x in sent]
        for (family, _), rows in zip(results, all_rows, strict=True):
            for x, row in zip(family, rows, strict=True):
                x.node.found[x.position] = row if whole else Part(row, x.shape)


class _Program:
    """The equations that compute one result of each family, and their operands: a column has one for each array."""

    def __init__(self, families: Sequence[tuple[Sequence[Node], int]]):
        self.families = families
        self.needed = _find_needed([nodes for nodes, _ in families]) or []
        columns = [column for nodes in self.needed for column in _columns(nodes) if not is_later(column[0])]
        self.columns = list({_key(column): column for column in columns}.values())

    def run(self, values: Sequence[Any]) -> list[Array]:
        """The results for one array, from one value of each column."""
        given = dict(zip(map(_key, self.columns), values, strict=True))
        known: dict[tuple[int, ...], list[Array]] = {}

        def read(column: Sequence[Any]) -> Any:
            first = column[0]
            if is_later(first):
                return known[_key([x.node for x in column])][first.position]
            value = given[_key(column)]
            return jnp.broadcast_to(value, first.shape) if isinstance(first, Uniform) else value

        for nodes in self.needed:
            known[_key(nodes)] = apply_primitive(nodes[0].equation, list(map(read, _columns(nodes))))
        return [known[_key(nodes)][position] for nodes, position in self.families]


def settled(x: Any) -> Any:
    """What has been computed of a deferred result; other values as they are."""
    return x.node.found.get(x.position, x) if is_later(x) else x


def _columns(nodes: Sequence[Node]) -> Iterator[list[Any]]:
    return (list(map(settled, column)) for column in zip(*(node.operands for node in nodes), strict=True))


def _find_needed(families: Sequence[Sequence[Node]]) -> list[Sequence[Node]] | None:
    """The nodes of several arrays beside each other that compute these, in order.

    `None` if the graphs are not the same any more, because only some of their results have been computed already.
    """
    found: dict[tuple[int, ...], Sequence[Node]] = {}
    rest = list(families)
    while rest:
        nodes = rest.pop()
        if _key(nodes) in found:
            continue
        found[_key(nodes)] = nodes
        for column in _columns(nodes):
            kinds = {next((k for k in (Later, Part, Uniform) if isinstance(x, k)), None) for x in column}
            if len(kinds) > 1:
                return None
            if is_later(column[0]):
                rest.append([x.node for x in column])
    return sorted(found.values(), key=lambda nodes: nodes[0].number)


def _key(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _key_of_shards(column: Sequence[Part]) -> tuple[int, ...]:
    # Reshaped, they are still the same.
    return tuple(id(x.value) for x in column)


def _are_same(values: Sequence[Any]) -> bool:
    """Whether these are one value, or equal numbers."""
    first = values[0]
    if all(x is first for x in values):
        return True
    return all(isinstance(x, np.generic | float | int) and type(x) is type(first) and x == first for x in values)


def _describe_operand(x: Any) -> Any:
    if is_later(x):
        return "later", x.node.kind, x.position
    kind = "part" if is_part(x) else "uniform" if isinstance(x, Uniform) else "array"
    value = x.value if kind != "array" else x
    return kind, x.shape if kind != "array" else jnp.shape(x), jnp.result_type(value)


def _is_local(equation: Any) -> bool:
    """Whether one worker can compute it alone: without collectives, callbacks and other effects."""
    calls_back = any(name == WHOLE or "callback" in name for name in _primitives(equation))
    return not equation.effects and not calls_back


def _primitives(equation: Any) -> Iterator[str]:
    """The names of the primitive of an equation, and of those in its bodies; of a call, also its name."""
    yield equation.primitive.name
    yield str(equation.params.get("name"))
    for closed in inner_jaxprs(equation):
        for inside in closed.jaxpr.eqns:
            yield from _primitives(inside)

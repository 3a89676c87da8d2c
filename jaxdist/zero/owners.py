"""Divides operations on whole arrays among the workers: each array has one owner, which alone computes them.

Muon multiplies matrices. Gathered, each would be multiplied by every worker. Here such operations are deferred until a
result is needed. By then the same operations of other arrays are known too, and of `k` arrays each of `W` workers
computes those of `⌊k/W⌋`. Of what is left over some workers own one each if it is worth the bytes; otherwise it is
gathered and computed by all.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.compat import assume_replicated, varying_axes
from .._core.jaxprs import WHOLE, apply_primitive, describe_equation, inner_jaxprs
from .._core.types import Array, Shape
from ..comm.base import Comm
from ..wire.buffers import fuse, group_alike, map_stack, rows_of_workers
from .shards import gather
from .values import Part, Uniform, all_gather_shards, is_part

# What is worth sending an array to its owner for: it takes more than a few operations for each entry.
PRODUCTS = frozenset(
    """
    cholesky conv_general_dilated custom_linear_solve dot_general eig eigh geqrf hessenberg householder_product lu qr
    ragged_dot ragged_dot_general schur svd triangular_solve tridiagonal
    """.split()  # noqa: SIM905
)


# Of how many arrays left over each gets an owner. An exchange is of equal rows: those of workers without an array are
# sent in vain, there and back two arrays' bytes. Without owners all `r` are sent twice, so that this adds `1/r`.
FEWEST = 4


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
        # Without products there is nothing to divide, and others may never be needed.
        chosen = alike if wanted.node.has_products else [wanted]
        self.settle(chosen, [whole] * len(chosen))

    def settle(self, wanted: Sequence[Later], whole: Sequence[bool]) -> None:
        """Computes results; where `whole` is False, shards are enough."""
        flags = {(x.node.number, x.position): flag for x, flag in zip(wanted, whole, strict=True)}
        missing = list({(x.node.number, x.position): x for x in wanted if is_later(settled(x))}.values())
        families, left = [], []
        for members in group_alike(missing, lambda x: (x.node.kind, x.position)):
            alike = [missing[i] for i in members]
            divided, rest = self._divide(alike, whole=any(flags[x.node.number, x.position] for x in alike))
            families += divided
            left += rest
        self._compute_on_owners(families)
        # At last: graphs of which some results are known already are no longer the same.
        for x in left:
            x.node.found[x.position] = self._compute_on_all(x)

    def _divide(self, alike: Sequence[Later], *, whole: bool) -> tuple[list["_Family"], Sequence[Later]]:
        """The results that owners compute, the same number of each, and those that all workers compute."""
        size = self.comm.size
        if not alike[0].node.has_products:
            return [], alike
        count = len(alike) // size * size
        even, rest = alike[:count], alike[count:]
        families, left = [], []
        if even and _find_needed([[x.node for x in even]]) is not None:
            families.append(_Family(even, count, whole))
        else:
            left += even
        if len(rest) >= FEWEST and _find_needed([[x.node for x in rest]]) is not None:
            # Workers without one of the rest repeat the first, and their results are not sent whole.
            families.append(_Family([*rest, *[rest[0]] * (size - len(rest))], len(rest), whole))
        else:
            left += rest
        return families, left

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

    def _compute_on_owners(self, families: Sequence["_Family"]) -> None:
        """Moves what the families need to its owners, computes them there, and sends the results."""
        groups = [[families[i] for i in members] for members in group_alike(families, lambda x: len(x.members))]
        programs = [_Program(group) for group in groups]
        self._move_to_owners([x for program in programs for x in program.columns if is_part(x[0])])
        stacks = []
        for program in programs:
            values = jax.tree.map(self._as_agreed, list(map(self._own_rows, program.columns)))
            stacks += [self.comm.varying(x) for x in map_stack(program.run, values)]
        results = list(zip([family for group in groups for family in group], stacks, strict=True))
        self._send_whole([(x, stack) for x, stack in results if x.whole and not x.is_padded])
        self._send_shards([(x, stack) for x, stack in results if not x.whole or x.is_padded])
        self._gather([later for x in families if x.whole and x.is_padded for later in x.members[: x.count]])

    def _move_to_owners(self, columns: Sequence[Sequence[Part]]) -> None:
        """Sends the shards `[n]` of each array to its owner, which gets `[q, W·n]`: one exchange for each dtype."""
        size = self.comm.size
        missing = {_key_of_shards(column): column for column in columns if _key_of_shards(column) not in self.stacks}
        rows = [jnp.stack([x.value for x in x]).reshape(size, len(x) // size, -1) for x in missing.values()]
        for key, moved in zip(missing, fuse(self.comm, self.comm.all_to_all, rows, rows=True), strict=True):
            self.stacks[key] = jnp.moveaxis(moved, 0, 1).reshape(moved.shape[1], -1)

    def _own_rows(self, column: Sequence[Any]) -> Array:
        """`[q, ...]`: the values of a column that belong to this worker's arrays."""
        count = len(column) // self.comm.size
        if is_part(column[0]):
            shape = column[0].shape
            return self.stacks[_key_of_shards(column)][:, : math.prod(shape)].reshape(count, *shape)
        rows = jnp.stack(list(map(_value, column)))
        rows = rows.reshape(self.comm.size, count, *rows.shape[1:])
        return lax.dynamic_index_in_dim(self.comm.varying(rows), self.comm.index, keepdims=False)

    def _as_agreed(self, x: Array) -> Array:
        # Equations are bound as they were traced, for values that are equal on all workers.
        names = varying_axes(self.comm.index)
        return assume_replicated(x, names) if names else x

    def _send_whole(self, results: Sequence[tuple["_Family", Array]]) -> None:
        """Sends what owners computed, `[q, *s]` each, to all workers."""
        sent = fuse(self.comm, self.comm.all_gather, [stack for _, stack in results])
        for (family, stack), rows in zip(results, sent, strict=True):
            family.store(list(rows.reshape(-1, *stack.shape[1:])))

    def _send_shards(self, results: Sequence[tuple["_Family", Array]]) -> None:
        """Sends the shards of what owners computed to the workers that keep these."""
        size = self.comm.size
        rows = [jax.vmap(lambda x: rows_of_workers(x, size), out_axes=1)(stack) for _, stack in results]
        sent = fuse(self.comm, self.comm.all_to_all, rows, rows=True)
        for (family, _), rows in zip(results, sent, strict=True):
            shards = rows.reshape(-1, rows.shape[-1])
            family.store([Part(x, later.shape) for x, later in zip(list(shards), family.members, strict=True)])

    def _gather(self, wanted: Sequence[Later]) -> None:
        """Whole arrays in place of shards."""
        parts = [settled(x) for x in wanted]
        likes = [jax.ShapeDtypeStruct(x.shape, x.value.dtype) for x in parts]
        for x, found in zip(wanted, gather([x.value for x in parts], likes, self.comm), strict=True):
            x.node.found[x.position] = found


class _Family(NamedTuple):
    """The same result of `q·W` arrays, of which worker `j` computes those from `q·j` on; repeated after `count`."""

    members: Sequence[Later]
    count: int
    whole: bool

    @property
    def nodes(self) -> list[Node]:
        return [x.node for x in self.members]

    @property
    def is_padded(self) -> bool:
        return self.count < len(self.members)

    def store(self, found: Sequence[Any]) -> None:
        """Stores what has been computed; results that are repeated are equal."""
        for x, value in zip(self.members, found, strict=True):
            x.node.found[x.position] = value


class _Program:
    """The equations that compute one result of each family, and their operands: a column has one for each array."""

    def __init__(self, families: Sequence[_Family]):
        self.families = families
        self.needed = _find_needed([family.nodes for family in families]) or []
        columns = [column for nodes in self.needed for column in _columns(nodes) if not is_later(column[0])]
        # Equal numbers are not mapped over the arrays: a condition on them remains one.
        self.shared = {_key(column): _value(column[0]) for column in columns if _are_same(column)}
        self.columns = list({_key(column): column for column in columns if not _are_same(column)}.values())

    def run(self, values: Sequence[Any]) -> list[Array]:
        """The results for one array, from one value of each column."""
        given = self.shared | dict(zip(map(_key, self.columns), values, strict=True))
        known: dict[tuple[int, ...], list[Array]] = {}

        def read(column: Sequence[Any]) -> Any:
            first = column[0]
            if is_later(first):
                return known[_key([x.node for x in column])][first.position]
            value = given[_key(column)]
            return jnp.broadcast_to(value, first.shape) if isinstance(first, Uniform) else value

        for nodes in self.needed:
            known[_key(nodes)] = apply_primitive(nodes[0].equation, list(map(read, _columns(nodes))))
        return [known[_key(family.nodes)][family.members[0].position] for family in self.families]


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


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Uniform) else x


def _are_same(column: Sequence[Any]) -> bool:
    """Whether all workers have these values, and they are one value, or equal numbers."""
    if is_part(column[0]):
        return False
    values = list(map(_value, column))
    first = values[0]
    if all(x is first for x in values):
        return True
    return all(isinstance(x, np.generic | float | int) and type(x) is type(first) and x == first for x in values)


def _describe_operand(x: Any) -> Any:
    if is_later(x):
        return "later", x.node.kind, x.position
    if is_part(x) or isinstance(x, Uniform):
        return type(x), x.shape, str(jax.typeof(x.value))
    return "array", str(jax.typeof(x))


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

"""What an optimizer looks at: proven from its trace, before its state is cut."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.extend import core

from ..._typing import PyTree

Reach = Literal["entry", "leaf", "tree"]

# Entry `i` of the result depends on entry `i` of the operands, whose shapes are equal or ().
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt
    max min mul ne neg nextafter not optimization_barrier or pow pvary real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh xor
    """.split()  # noqa: SIM905
)


class _Seen(NamedTuple):
    """The leaves that a value depends on, and whether entry by entry (or it is one number for all)."""

    leaves: frozenset[int]
    aligned: bool


NOTHING = _Seen(frozenset(), True)


def reach(inner: optax.GradientTransformation, params: PyTree) -> Reach:
    """How far an optimizer looks: what an entry of an update depends on.

    `"entry"`: that entry alone; `"leaf"`: its leaf (norms, factors, orthogonalisation); `"tree"`: other leaves too (a
    global norm).

    Nothing is computed: the update is traced, and each operation followed. What is not known to be entry by entry
    counts as looking at the whole of its operands. Decisions that Python takes on shapes (masks by `ndim`) show in that
    flat parameters give another trace.

    Args:
      inner: the optimizer.
      params: the parameters, or their shapes and dtypes.

    Returns:
      How far it looks.
    """
    inner = optax.with_extra_args_support(inner)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    traced = _trace(inner, params)
    found = _follow(traced)
    if found != "entry":
        return found
    flat = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.size,) if x.ndim else (), x.dtype), params)
    alike = _trace(inner, flat)
    same = alike.names == traced.names and alike.structure == traced.structure
    return "entry" if same else "leaf"


class _Trace(NamedTuple):
    jaxpr: Any
    inputs: list[_Seen]
    outputs: list[frozenset[int]]
    structure: Any
    names: list[str]


def _trace(inner: optax.GradientTransformationExtraArgs, params: PyTree) -> _Trace:
    state = jax.eval_shape(inner.init, params)
    owners = owner_of(inner, state, params)
    leaves, tree = jax.tree.flatten(params)
    numbered = tree.unflatten(range(len(leaves)))
    shapes = [leaf.shape for leaf in leaves]

    def update(updates, state, params):
        return inner.update(updates, state, params)

    closed = jax.make_jaxpr(update)(params, state, params)
    own = [_Seen(frozenset({i}), True) for i in range(len(leaves))]
    of_state = [
        NOTHING if owner < 0 else _Seen(frozenset({owner}), leaf.shape == shapes[owner])
        for owner, leaf in zip(jax.tree.leaves(owners), jax.tree.leaves(state), strict=True)
    ]
    allowed = [frozenset({i}) for i in jax.tree.leaves(numbered)]
    allowed += [frozenset() if owner < 0 else frozenset({owner}) for owner in jax.tree.leaves(owners)]
    return _Trace(closed, own + of_state + own, allowed, jax.tree.structure(state), list(_names(closed.jaxpr)))


def owner_of(inner: optax.GradientTransformation, state: PyTree, params: PyTree) -> PyTree:
    """For each leaf of a state the number of the parameter that it stands beside, or -1."""
    numbers = jax.tree.structure(params).unflatten(range(len(jax.tree.leaves(params))))

    def masked(x):
        return isinstance(x, optax.MaskedNode)

    return optax.tree.map_params(
        inner,
        lambda leaf, number: leaf if masked(leaf) else number,
        state,
        numbers,
        transform_non_params=lambda x: jax.tree.map(lambda _: -1, x),
        is_leaf=masked,
    )


def _follow(trace: _Trace) -> Reach:
    found = _run(trace.jaxpr.jaxpr, trace.inputs)
    if any(seen.leaves - allowed for seen, allowed in zip(found, trace.outputs, strict=True)):
        return "tree"
    return "entry" if all(seen.aligned for seen in found) else "leaf"


def _run(jaxpr: Any, inputs: Sequence[_Seen]) -> list[_Seen]:
    seen: dict[Any, _Seen] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom):
        return NOTHING if isinstance(atom, core.Literal) else seen.get(atom, NOTHING)

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        for variable, found in zip(equation.outvars, _apply(equation, operands), strict=True):
            seen[variable] = found
    return [of(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: Sequence[_Seen]) -> list[_Seen]:
    inside = list(_jaxprs(equation.params.values()))
    name = equation.primitive.name
    if len(inside) == 1 and len(inside[0].invars) == len(operands) and name not in ("scan", "while"):
        return _run(inside[0], operands)  # a call
    if name == "cond":
        branches = zip(*(_run(branch, operands[1:]) for branch in inside), strict=True)
        return [_join([operands[0], *results]) for results in branches]
    leaves = frozenset().union(*(seen.leaves for seen in operands))
    touched = [(seen, atom.aval.shape) for seen, atom in zip(operands, equation.invars, strict=True) if seen.leaves]
    out = []
    for variable in equation.outvars:
        in_place = name in ELEMENTWISE and all(seen.aligned and shape == variable.aval.shape for seen, shape in touched)
        out.append(_Seen(leaves, not leaves or in_place))
    return out


def _join(found: Sequence[_Seen]) -> _Seen:
    """Of a choice between values by the first, a scalar."""
    leaves = frozenset().union(*(seen.leaves for seen in found))
    return _Seen(leaves, not found[0].leaves and all(seen.aligned for seen in found[1:]))


def _jaxprs(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _jaxprs(value)


def _names(jaxpr: Any) -> Iterable[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inside in _jaxprs(equation.params.values()):
            yield from _names(inside)

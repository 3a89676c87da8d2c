"""Which parameters a loss does not reach."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.compat import Jaxpr, Literal, scan_sizes
from .._core.jaxprs import inner_jaxprs
from .._core.types import AxisNames, PyTree
from ..state.marks import axis_tuple


def find_unused_parameters(
    loss: Callable[..., Any], params: PyTree, *args: Any, has_aux: bool = False, axis: AxisNames = "data"
) -> PyTree:
    """The parameters whose gradients are zero whatever the batch: an idle head, what lies behind `stop_gradient`.

    The gradient is traced, not computed, and followed from the loss to each leaf. It is a static answer for static
    programs: both branches of a `lax.cond` count as used, and so does a leaf that is multiplied by 0.

    *On the wire*: nothing.

    Args:
      loss: `loss(params, *args) -> scalar`, as for `local_value_and_grad`.
      params: the parameters, or their shapes.
      *args: the batch and the rest, or their shapes.
      has_aux: whether the loss returns something besides.
      axis: the mesh axis, or axes, over which the loss may communicate.

    Returns:
      A tree of booleans like the parameters, for `recipes.ddp(unused=)`: `True` where no gradient can arrive.

    Raises:
      ValueError: the loss is not one number.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"body": jnp.ones(3), "head": jnp.ones(2)}
      >>> jd.transforms.find_unused_parameters(lambda p, x: jnp.sum(p["body"] * x), params, jnp.ones(3))
      {'body': False, 'head': True}

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020
      (`find_unused_parameters`).
    """
    leaves, structure = jax.tree.flatten(params)

    def gradient(cotangent, leaves, args):
        value, pull, *_ = jax.vjp(lambda p: loss(structure.unflatten(p), *args), leaves, has_aux=has_aux)
        if value.shape != ():
            raise ValueError(f"loss must return one number, got shape {value.shape}")
        return pull(cotangent.astype(value.dtype))[0]  # what is zero by structure does not depend on the cotangent

    for name in axis_tuple(axis):  # collectives of the loss, over an axis of no mesh
        gradient = jax.vmap(gradient, in_axes=None, axis_name=name, axis_size=2)
    traced = jax.make_jaxpr(gradient)(jnp.ones(()), _shapes(leaves), _shapes(args))
    inputs = [True] + [False] * (len(traced.jaxpr.invars) - 1)
    return structure.unflatten([not found for found in _reached(traced.jaxpr, inputs)])


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree)


def _reached(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which results depend on the inputs that are marked; what is not known counts as depending."""
    known = {var for var, marked in zip(jaxpr.invars, inputs, strict=True) if marked}

    def depends(var):
        return not isinstance(var, Literal) and var in known

    for equation in jaxpr.eqns:
        operands = [depends(var) for var in equation.invars]
        if not any(operands):
            continue
        rule = _RULES.get(equation.primitive.name, _call)
        known |= {var for var, marked in zip(equation.outvars, rule(equation, operands), strict=True) if marked}
        if equation.effects:  # it may have written into a reference
            known |= {var for var in equation.invars if not isinstance(var, Literal)}
    return [depends(var) for var in jaxpr.outvars]


def _call(equation: Any, operands: list[bool]) -> list[bool]:
    """Of a call, what its program says; of a primitive, everything depends on everything."""
    inside = [closed.jaxpr for closed in inner_jaxprs(equation.params.values())]
    if len(inside) == 1 and not equation.effects:
        sizes = (len(inside[0].invars), len(inside[0].outvars))
        if sizes == (len(equation.invars), len(equation.outvars)):
            return _reached(inside[0], operands)
    return [True] * len(equation.outvars)


def _scan(equation: Any, operands: list[bool]) -> list[bool]:
    consts, carried = scan_sizes(equation.params)
    body = equation.params["jaxpr"].jaxpr
    carry, xs = operands[consts : consts + carried], operands[consts + carried :]
    carry = _fixed_point(lambda carry: _reached(body, [*operands[:consts], *carry, *xs])[:carried], carry)
    return [*carry, *_reached(body, [*operands[:consts], *carry, *xs])[carried:]]


def _while(equation: Any, operands: list[bool]) -> list[bool]:
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body, condition = equation.params["body_jaxpr"].jaxpr, equation.params["cond_jaxpr"].jaxpr
    consts, carry = operands[first : first + second], operands[first + second :]
    carry = _fixed_point(lambda carry: _reached(body, [*consts, *carry]), carry)
    return [True] * len(carry) if any(_reached(condition, [*operands[:first], *carry])) else carry


def _cond(equation: Any, operands: list[bool]) -> list[bool]:
    if operands[0]:
        return [True] * len(equation.outvars)
    branches = [_reached(branch.jaxpr, operands[1:]) for branch in equation.params["branches"]]
    return [any(marks) for marks in zip(*branches, strict=True)]


_RULES = {"scan": _scan, "while": _while, "cond": _cond}


def _fixed_point(body: Callable[[list[bool]], list[bool]], carry: list[bool]) -> list[bool]:
    """What a loop carries depends on what any round of it has put there."""
    while True:
        after = [was or now for was, now in zip(carry, body(carry), strict=True)]
        if after == carry:
            return carry
        carry = after

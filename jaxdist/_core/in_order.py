"""Runs the collectives of a program in one order on all workers, where a compiler keeps none."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .compat import (
    Literal,
    assume_replicated,
    evaluate_jaxpr,
    is_on_host,
    mesh_axes_left_over,
    scan_sizes,
    unreduced_axes,
    varying_axes,
)
from .jaxprs import COLLECTIVES, INDIVISIBLE, apply_primitive, find_called_jaxpr, inner_jaxprs
from .order import is_there, wait_for
from .types import Array

# Operands of a loop up to this size wait for what is before it, or the smallest.
SMALL = 1024


def in_order(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, which communicates: what is traced behind a loop or branch with collectives begins after the last of them.

    XLA:CPU starts collectives in the order of the program, but goes on once a loop or a branch has begun: from then on
    its collectives and those behind it are started in an order that differs between processes. Here a loop or branch
    depends on all collectives before it, and those behind it on its results. Collectives that the compiler adds, over
    mesh axes that it shards by itself, have no order.
    """

    def run(*args: Any) -> Any:
        if mesh_axes_left_over():
            return f(*args)
        closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
        evaluate = _Ordered().evaluate if _needs_order(closed.jaxpr) else evaluate_jaxpr
        return jax.tree.structure(like).unflatten(evaluate(closed, jax.tree.leaves(args)))

    return run


class _Ordered:
    """The evaluation of one body: `there` once its last loop or branch is done, `since` its collectives since then."""

    def __init__(self) -> None:
        self.there: Any = None
        self.since: list[Array] = []
        # Numbers of platforms, which must stay the constants that they are.
        self.fixed: list[Any] = []

    def evaluate(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr."""
        jaxpr = closed.jaxpr
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]

        for equation in jaxpr.eqns:
            run = self._run if _communicates(equation) else apply_primitive
            results = run(equation, read(equation.invars))
            self.fixed += results if equation.primitive.name == "platform_index" else []
            known.update(zip(equation.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _run(self, equation: Any, operands: list[Any]) -> list[Any]:
        if body := find_called_jaxpr(equation, opaque=(*INDIVISIBLE, "shard_map")):
            return self.evaluate(body, _behind_barrier(equation, operands))
        if not _is_nested(equation):
            results = apply_primitive(equation, self._wait(equation, operands))
            self.since += results
            return results
        before = _is_there([*self.since, *([] if self.there is None else [self.there])])
        self.there = before
        results = _apply_nested(equation, self._wait(equation, operands))
        self.there, self.since = _is_there(results), []
        return results

    def _wait(self, equation: Any, operands: list[Any]) -> list[Any]:
        if self.there is None:
            return operands
        free = [i for i, x in enumerate(operands) if _can_wait(x) and not any(x is fixed for fixed in self.fixed)]
        which = _choose_waiting(equation, free)
        return [wait_for(self.there, x) if i in which else x for i, x in enumerate(operands)]


def _communicates(equation: Any) -> bool:
    name = equation.primitive.name
    return name.removesuffix("_start") in COLLECTIVES or any(
        any(map(_communicates, body.jaxpr.eqns)) for body in inner_jaxprs(equation)
    )


def _is_nested(equation: Any) -> bool:
    """Whether an equation is, or has in it, a loop or branch with collectives."""
    if not _communicates(equation):
        return False
    return _is_loop_or_branch(equation) or any(_needs_order(body.jaxpr) for body in inner_jaxprs(equation))


def _is_loop_or_branch(equation: Any) -> bool:
    # A choice by the platform is made when the program is lowered.
    return equation.primitive.name in INDIVISIBLE and equation.params.get("branches_platforms") is None


def _needs_order(jaxpr: Any) -> bool:
    return any(map(_is_nested, jaxpr.eqns))


def _choose_waiting(equation: Any, free: Sequence[int]) -> Sequence[int]:
    """Those of the operands that wait: the index of a branch; of a loop all that are small, or the smallest."""
    if not _is_loop_or_branch(equation):
        return free
    if equation.primitive.name == "cond":
        return (0,)
    sizes = {i: equation.invars[i].aval.size for i in free}
    return [i for i, size in sizes.items() if size <= max(SMALL, min(sizes.values()))]


def _behind_barrier(equation: Any, operands: list[Any]) -> list[Any]:
    # As `checkpoint` is lowered: what is computed again is not merged with what was computed before.
    if not equation.params.get("differentiated"):
        return operands
    kept = equation.params["prevent_cse"]
    kept = [kept] * len(operands) if isinstance(kept, bool) else kept
    behind = iter(lax.optimization_barrier([x for x, is_kept in zip(operands, kept, strict=True) if is_kept]))
    return [next(behind) if is_kept else x for x, is_kept in zip(operands, kept, strict=True)]


def _apply_nested(equation: Any, operands: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if not _is_loop_or_branch(equation) or not any(_needs_order(body.jaxpr) for body in inner_jaxprs(equation)):
        return apply_primitive(equation, operands)
    if name == "cond":
        branches = [_body(branch) for branch in params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    if name == "scan":
        consts, carried = scan_sizes(params)
        body = _body(params["jaxpr"])

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body(*operands[:consts], *carry, *xs)
            return results[:carried], results[carried:]

        start, xs = operands[consts : consts + carried], operands[consts + carried :]
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, start, xs, **options)
        return [*carry, *ys]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    goes_on, body = _body(params["cond_jaxpr"]), _body(params["body_jaxpr"])
    return lax.while_loop(
        lambda carry: goes_on(*operands[:first], *carry)[0],
        lambda carry: body(*operands[first:second], *carry),
        operands[second:],
    )


def _body(closed: Any) -> Callable[..., list[Any]]:
    return lambda *operands: _Ordered().evaluate(closed, operands)


def _can_wait(x: Any) -> bool:
    is_number = hasattr(x, "dtype") and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool)
    return is_number and not is_on_host(x) and not unreduced_axes(x)


def _is_there(results: Sequence[Any]) -> Any:
    # What is compared is a float: of an integer compilers know that it is at most 0 or more.
    there = is_there([jnp.real(x[(0,) * x.ndim]).astype(jnp.float32) for x in results if _can_wait(x) and x.size])
    # Equal on all workers whatever the values were.
    return None if there is None else assume_replicated(there, varying_axes(there))

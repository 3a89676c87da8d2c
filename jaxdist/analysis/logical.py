"""The collectives of a function as written, read from its jaxpr without a device or a compiler."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._core.compat import ClosedJaxpr
from .._core.jaxprs import inner_jaxprs
from .base import Collective, Collectives, check_branch, choose_branch, make_collective, mesh_groups, repeat, summarize
from .hlo.reader import bits_of

# Primitives under their names in JAX 0.10 to 0.12; a suffix `_start` is stripped first.
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "unreduced_psum": "all-reduce",
    "unreduced_pmax": "all-reduce",
    "unreduced_pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "psend": "collective-permute",
    "pbroadcast": "collective-broadcast",
    "pbroadcast_dynamic": "collective-broadcast",
}


def logical_collectives(
    fn: Callable[..., Any] | ClosedJaxpr,
    *args: Any,
    axis_sizes: Mapping[str, int] | None = None,
    branch: str = "max",
    platform: str | None = None,
) -> Collectives:
    """Returns every collective that a function asks for, with the bytes as written, before compilation.

    Nothing is compiled and no device is needed: axes may have any size. Changes by the compiler (upcasts of bfloat16 on
    CPU, the collectives of automatic sharding) are not included; `collectives` includes them, and `upcast_collectives`
    compares the two.

    Args:
      fn: a function (the result of `shard_map` or `distribute`, or a function of one worker together with
        `axis_sizes`), or a closed jaxpr. `simulate` turns collectives into local arithmetic: pass the step itself.
      *args: its arguments; `jax.ShapeDtypeStruct`s are enough.
      axis_sizes: sizes of the axes that no `shard_map` in the function binds, outermost first. Any size is cheap: 1024
        workers take no longer than 2.
      branch: which branch of a conditional counts, as in `collectives`.
      platform: `"cpu"`, `"tpu"`, `"cuda"`: which branch of `lax.platform_dependent` counts. `None` takes the branch
        that `branch` selects.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> mean = lambda x: jax.lax.pmean(x, "data")
      >>> found = logical_collectives(mean, jax.ShapeDtypeStruct((256,), jnp.bfloat16), axis_sizes={"data": 4})
      >>> found.ops[0].dtype, found.ops[0].bytes, found.wire_bytes
      ('bfloat16', 512, 768.0)
    """
    check_branch(branch)
    sizes = dict(axis_sizes or {})
    closed = fn if isinstance(fn, ClosedJaxpr) else jax.make_jaxpr(fn, axis_env=list(sizes.items()))(*args)
    warnings: list[str] = []

    def walk(closed: ClosedJaxpr, sizes: dict[str, int], where: str) -> list[Collective]:
        return [op for equation in closed.jaxpr.eqns for op in visit(equation, sizes, where)]

    def visit(equation: Any, sizes: dict[str, int], where: str) -> list[Collective]:
        name, params = equation.primitive.name, equation.params
        kind = _KINDS.get(name.removesuffix("_start"))
        if kind:
            return _record(kind, equation, sizes, where, warnings)
        inside = "/".join(filter(None, (where, params["name"] if name in ("jit", "pjit") else name)))
        if name == "cond":
            branches = params["branches"]
            platforms = params.get("branches_platforms")
            if platforms and platform:
                return walk(branches[_branch_of(platforms, platform)], sizes, inside)
            return choose_branch([walk(part, sizes, inside) for part in branches], branch, inside, warnings)
        if name == "while":
            found = walk(params["cond_jaxpr"], sizes, inside) + walk(params["body_jaxpr"], sizes, inside)
            if found:
                warnings.append(f"the loop {inside} runs an unknown number of times; counted once")
            return found
        # The axes of a mesh have their sizes inside its shard_map only.
        if name == "shard_map":
            sizes = {**sizes, **dict(params["mesh"].shape)}
        found = [op for part in inner_jaxprs(equation) for op in walk(part, sizes, inside)]
        return repeat(found, params["length"]) if name == "scan" else found

    return summarize(walk(closed, sizes, ""), warnings)


def _record(kind: str, equation: Any, sizes: Mapping[str, int], where: str, warnings: list[str]) -> list[Collective]:
    params = equation.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    # Integers are axes that a vmap has already turned into array dimensions: those reduce locally.
    names = [axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str)]
    if not names:
        return []
    unknown = [axis for axis in names if axis not in sizes]
    if unknown:
        raise ValueError(f"the size of axis {unknown[0]!r} is unknown; pass axis_sizes={{{unknown[0]!r}: workers}}")
    operands = [_operand(variable.aval) for variable in equation.invars]
    if kind == "ragged-all-to-all":
        operands = operands[:1]
        warnings.append(f"a ragged all-to-all in {where} sends as many rows as its sizes say; counted all of them")
    order = list(sizes)
    # `axis_index_groups` selects parts of each group, by position within it.
    groups = mesh_groups(list(sizes.values()), [order.index(axis) for axis in names])
    if params.get("axis_index_groups"):
        groups = tuple(
            tuple(group[index] for index in subset) for group in groups for subset in params["axis_index_groups"]
        )
    pairs = tuple((group[source], group[target]) for group in groups for source, target in params.get("perm", ()))
    devices = math.prod(sizes.values())
    return [make_collective(kind, operands, groups=groups, pairs=pairs, devices=devices, where=where)]


def _operand(aval: Any) -> tuple[str, int]:
    # NumPy stores 4-bit types in a byte: take their width from the name. The names of random keys contain none.
    name, width = str(aval.dtype), aval.dtype.itemsize
    bits = bits_of(name) if width == 1 else width * 8
    return name, -(-math.prod(aval.shape) * bits // 8)


def _branch_of(platforms: Sequence[tuple[str, ...] | None], platform: str) -> int:
    # The default branch names no platform.
    for index, names in enumerate(platforms):
        if names is None or platform in names:
            return index
    raise ValueError(f"no branch of this platform_dependent is for {platform!r}; its branches are for {platforms}")

"""The collectives of a program: compiled, after all optimizations, or as written, in its jaxpr."""

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from .._core.compat import ClosedJaxpr
from .._core.jaxprs import COLLECTIVES, inner_jaxprs
from .base import (
    Collective,
    Collectives,
    check_branch,
    cost_of,
    in_loop,
    make_collective,
    mesh_groups,
    summarize,
    take_branch,
)
from .branches import BRANCHES_OF, choose_in_computation, choose_in_jaxpr
from .hlo_reader import (
    Computation,
    Instruction,
    Module,
    Program,
    between_slices,
    bits_of,
    callees_of,
    pairs,
    parse,
    program_text,
    replica_groups,
    shapes,
)
from .hlo_work import trip_count

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
CALLERS = ("async", "call", "custom-call", "fusion", "map")


def collectives(program: Program, *, branch: str = "max") -> Collectives:
    """Returns every collective of a compiled program, with its dtype, bytes, groups and count.

    The bytes are those of the optimized program: XLA upcasts bfloat16 in every collective on CPU, merges and splits
    operations, and adds those that automatic sharding needs. `logical_collectives` counts the operations as written
    instead; `upcast_collectives` compares the two.

    On TPU the tiles of a layout pad a buffer, and collectives send it as it is: `padded_bytes` and `padded_wire_bytes`
    count it, `bytes` and `wire_bytes` its entries alone.

    `wire_bytes` assumes ring algorithms: with `n` workers in a group and `b` bytes of operand, each worker sends
    `2b(n-1)/n` for an all-reduce, `b(n-1)` for an all-gather, `b(n-1)/n` for reduce-scatter, all-to-all and
    broadcast, and `b` for a permutation (times the fraction of workers that send at all).

    Args:
      program: a compiled program, its HLO text, or a lowered one (`step.lower(state, batch)`), which is compiled.
      branch: which branches of conditionals count: those of the step that sends `"max"` (the worst, the default) or
        `"min"` (a step of local SGD that does not synchronize), or `"all"` (to see every operation of a program).
        Branches whose conditions exclude each other, as far as the program shows it, are not counted together.
        Conditions on different counters, such as those of the fragments of a model, exclude nothing: `"max"` is then an
        upper bound, and `transforms.stats` has the bytes that were sent.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
      >>> mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> [op.bytes for op in collectives(jax.jit(mean).lower(jnp.ones(256))).ops]
      [1024]
    """
    check_branch(branch)
    module = parse(program_text(program))
    # XLA:TPU repeats a collective in every fusion that it runs underneath; only its start counts.
    started = chains(module)
    warnings: list[str] = []

    # Several instructions may call the same computation.
    @functools.cache
    def walk(name: str) -> list[Collective]:
        inside = module.computations.get(name, Computation({}, "")).instructions.values()
        return [op for instruction in inside for op in visit(name, instruction)]

    @functools.cache
    def choose(name: str) -> dict[str, int]:
        costs = {
            instruction.name: [cost_of(walk(callee)) for callee in callees_of(instruction, *BRANCHES_OF)]
            for instruction in module.computations[name].instructions.values()
            if instruction.opcode == "conditional"
        }
        return choose_in_computation(module, name, costs, branch)

    def walk_called(instruction: Instruction, *keys: str) -> list[Collective]:
        return [op for callee in callees_of(instruction, *keys) for op in walk(callee)]

    def visit(name: str, instruction: Instruction) -> list[Collective]:
        if kind_of(instruction) is not None:
            continues = is_continuation(module, started, name, instruction)
            return [] if continues else [record(module, name, instruction, warnings)]
        if instruction.opcode == "while":
            inside, tested = walk_called(instruction, "body"), walk_called(instruction, "condition")
            times = trip_count(module, name, instruction) if inside or tested else 0
            if times is None:
                warnings.append(f"the loop {instruction.name} in {name} runs an unknown number of times; counted once")
                return in_loop(inside + tested, None)
            return in_loop(inside, times) + in_loop(tested, times + 1)  # the test that ends the loop runs too
        if instruction.opcode == "conditional":
            branches = [walk(callee) for callee in callees_of(instruction, *BRANCHES_OF)]
            where = f"{instruction.name} in {name}"
            return take_branch(branches, choose(name)[instruction.name], branch, where, warnings)
        if instruction.opcode.removesuffix("-start") in CALLERS:
            return walk_called(instruction, "calls", "to_apply", "called_computations")
        return []

    return summarize(walk(module.entry), warnings)


def kind_of(instruction: Instruction) -> str | None:
    """Returns the kind of collective that an instruction is or starts, or `None`."""
    if instruction.opcode == "send":
        between = between_slices(instruction, 1)
        return between.kind if between else "collective-permute" if pairs(instruction) else None
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else None


def record(module: Module, name: str, instruction: Instruction, warnings: list[str]) -> Collective:
    """Makes the record of one execution of a collective in the computation `name`."""
    symbols, kind = module.computations[name].instructions, kind_of(instruction) or ""
    # The type of a result may be wider than what is sent: bytes are those of the operands.
    operands = [shape for operand in instruction.operands for shape in shapes(symbols[operand].result)]
    if kind == "ragged-all-to-all":
        # The others are the sizes and offsets of rows, and the array to write into.
        operands = operands[:1]
        warnings.append(f"{instruction.name} in {name} sends data-dependent numbers of rows; counted all rows")
    if instruction.opcode == "send":
        operands = operands[:1]  # the second operand is a token
    padded = sum(shape.padded_nbytes for shape in operands)
    make = functools.partial(make_collective, kind, [shape.named for shape in operands], padded=padded, where=name)
    if between := between_slices(instruction, module.devices):
        return make(groups=between.groups, pairs=between.pairs, devices=between.slices * module.devices)
    groups = None if kind == "collective-permute" else replica_groups(instruction.attributes, module.devices)
    if groups is None and re.search(r"\breplica_groups=", instruction.attributes):
        warnings.append(f"the groups of {instruction.name} in {name} cannot be read; counted as one group")
    return make(groups=groups, pairs=pairs(instruction), devices=module.devices)


def chains(module: Module) -> set[str | None]:
    """Returns the names of the collectives that XLA:TPU splits over several fusions."""
    return {
        chain_of(instruction)
        for computation in module.computations.values()
        if calls_target(computation, "AsyncCollectiveStart")
        for instruction in computation.instructions.values()
    }


def is_continuation(module: Module, started: set[str | None], name: str, instruction: Instruction) -> bool:
    """Returns whether this is a later part of such a collective; every part repeats the same operation."""
    chain = chain_of(instruction)
    first = calls_target(module.computations[name], "AsyncCollectiveStart")
    return chain is not None and chain in started and not first


def chain_of(instruction: Instruction) -> str | None:
    """Returns the name that the parts of one collective share when it runs underneath several fusions, on TPU."""
    found = re.search(r"\bchain_id=\"?(\w+)", instruction.attributes)
    return found.group(1) if found else None


def calls_target(computation: Computation, target: str) -> bool:
    """Returns whether a custom call in this computation is to `target`."""
    return any(target in instruction.attributes for instruction in computation.instructions.values())


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

    With `axis_sizes`, `Comm` is that of a simulation, which adds narrow floats in float32: `compressed(cast(bfloat16))`
    shows `float32` there, and `bfloat16`, which a mesh sends, in the step of `distribute` or `shard_map`.

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
        branches = {
            i: [walk(part, sizes, _path(equation, where)) for part in equation.params["branches"]]
            for i, equation in enumerate(closed.jaxpr.eqns)
            if equation.primitive.name == "cond" and not (platform and equation.params.get("branches_platforms"))
        }
        costs = {i: [cost_of(ops) for ops in parts] for i, parts in branches.items()}
        taken = choose_in_jaxpr(closed, costs, branch)
        found = []
        for i, equation in enumerate(closed.jaxpr.eqns):
            if i in branches:
                found += take_branch(branches[i], taken[i], branch, _path(equation, where), warnings)
            else:
                found += visit(equation, sizes, where)
        return found

    def visit(equation: Any, sizes: dict[str, int], where: str) -> list[Collective]:
        name, params = equation.primitive.name, equation.params
        kind = COLLECTIVES.get(name.removesuffix("_start"))
        if kind:
            return _record_equation(kind, equation, sizes, where, warnings)
        inside = _path(equation, where)
        if name == "cond" and platform:
            return walk(params["branches"][_branch_of(params["branches_platforms"], platform)], sizes, inside)
        if name == "while":
            found = walk(params["cond_jaxpr"], sizes, inside) + walk(params["body_jaxpr"], sizes, inside)
            if found:
                warnings.append(f"the loop {inside} runs an unknown number of times; counted once")
            return in_loop(found, None)
        # The axes of a mesh have their sizes inside its shard_map only.
        if name == "shard_map":
            sizes = {**sizes, **dict(params["mesh"].shape)}
        found = [op for part in inner_jaxprs(equation) for op in walk(part, sizes, inside)]
        return in_loop(found, params["length"]) if name == "scan" else found

    return summarize(walk(closed, sizes, ""), warnings)


def _path(equation: Any, where: str) -> str:
    name = equation.primitive.name
    return "/".join(filter(None, (where, equation.params["name"] if name in ("jit", "pjit") else name)))


def _record_equation(
    kind: str, equation: Any, sizes: Mapping[str, int], where: str, warnings: list[str]
) -> list[Collective]:
    params = equation.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    # Integers are axes that a vmap has already turned into array dimensions: those reduce locally.
    axes = axes if isinstance(axes, tuple) else (axes,)
    names = [axis for axis in axes if isinstance(axis, str)]
    if not names:
        return []
    unknown = [axis for axis in names if axis not in sizes]
    if unknown:
        raise ValueError(f"the size of axis {unknown[0]!r} is unknown; pass axis_sizes={{{unknown[0]!r}: workers}}")
    operands = [_operand(variable.aval, axes) for variable in equation.invars]
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


def _operand(aval: Any, axes: Collection[Any]) -> tuple[str, int]:
    # Dimensions that are reduced locally are gone before anything is sent.
    entries = math.prod(length for dimension, length in enumerate(aval.shape) if dimension not in axes)
    # NumPy stores 4-bit types in a byte: take their width from the name. The names of random keys contain none.
    name, width = str(aval.dtype), aval.dtype.itemsize
    bits = bits_of(name) if width == 1 else width * 8
    return name, -(-entries * bits // 8)


def _branch_of(platforms: Sequence[tuple[str, ...] | None], platform: str) -> int:
    # The default branch names no platform.
    for index, names in enumerate(platforms):
        if names is None or platform in names:
            return index
    raise ValueError(f"no branch of this platform_dependent is for {platform!r}; its branches are for {platforms}")

"""The collectives of a compiled program, after all optimizations."""

import functools
import re

from .base import Collective, Collectives, check_branch, choose_branch, make_collective, repeat, summarize
from .hlo.loops import trip_count
from .hlo.reader import (
    Computation,
    Instruction,
    Module,
    Program,
    arrays,
    between_slices,
    callees_of,
    pairs,
    parse,
    program_text,
    replica_groups,
)

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# The attributes that name the computations of a conditional.
BRANCHES_OF = ("branch_computations", "true_computation", "false_computation")
CALLERS = ("async", "call", "custom-call", "fusion", "map")


def collectives(program: Program, *, branch: str = "max") -> Collectives:
    """Returns every collective of a compiled program, with its dtype, bytes, groups and count.

    The bytes are those of the optimized program: XLA upcasts bfloat16 in every collective on CPU, merges and splits
    operations, and adds those that automatic sharding needs. `logical_collectives` counts the operations as written
    instead; `upcast_collectives` compares the two.

    `wire_bytes` assumes ring algorithms: with `n` workers in a group and `b` bytes of operand, each worker sends
    `2b(n-1)/n` for an all-reduce, `b(n-1)` for an all-gather, `b(n-1)/n` for reduce-scatter, all-to-all and
    broadcast, and `b` for a permutation (times the fraction of workers that send at all).

    Args:
      program: a compiled program, its HLO text, or a lowered one (`step.lower(state, batch)`), which is compiled.
      branch: which branch of a conditional counts: the one that sends `"max"` (the worst step, the default), `"min"` (a
        step of local SGD that does not synchronize), or `"all"` (both; to see every operation of a program).

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
                return inside + tested
            return repeat(inside, times) + repeat(tested, times + 1)  # the test that ends the loop runs too
        if instruction.opcode == "conditional":
            branches = [walk(callee) for callee in callees_of(instruction, *BRANCHES_OF)]
            return choose_branch(branches, branch, f"{instruction.name} in {name}", warnings)
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
    operands = [array for operand in instruction.operands for array in arrays(symbols[operand].result)]
    if kind == "ragged-all-to-all":
        # The others are the sizes and offsets of rows, and the array to write into.
        operands = operands[:1]
        warnings.append(f"{instruction.name} in {name} sends data-dependent numbers of rows; counted all rows")
    if instruction.opcode == "send":
        operands = operands[:1]  # the second operand is a token
        if between := between_slices(instruction, module.devices):
            ends = {"groups": between.groups, "pairs": between.pairs}
            return make_collective(kind, operands, **ends, devices=between.slices * module.devices, where=name)
    groups = None if kind == "collective-permute" else replica_groups(instruction.attributes, module.devices)
    if groups is None and re.search(r"\breplica_groups=", instruction.attributes):
        warnings.append(f"the groups of {instruction.name} in {name} cannot be read; counted as one group")
    return make_collective(kind, operands, groups=groups, pairs=pairs(instruction), devices=module.devices, where=name)


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

"""The collectives of a compiled program: what really crosses the network."""

import re

from .base import Collective, Collectives, check_branch, choose, make_collective, repeat, summarise
from .hlo import Computation, Instruction, Program, arrays, called, pairs, parse, program_text, replica_groups
from .loops import trip_count

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_CALLERS = ("async-start", "call", "custom-call", "fusion", "map")


def collectives(program: Program, *, branch: str = "max") -> Collectives:
    """Return every collective of a compiled program, with its dtype, bytes, groups and how often it runs.

    The bytes are those of the optimised program, after the compiler's own changes: XLA widens bfloat16 in every
    collective on CPU, merges and splits operations, and adds those that automatic sharding needs.
    `logical_collectives` counts what was written instead; `widened` compares the two.

    `wire_bytes` assumes ring algorithms: with `n` workers in a group and `b` bytes of operand, each worker sends
    `2b(n-1)/n` for an all-reduce, `b(n-1)` for an all-gather, `b(n-1)/n` for reduce-scatter, all-to-all and
    broadcast, and `b` for a permutation (times the share of workers that send at all).

    Args:
      program: a compiled or lowered program (`step.lower(state, batch)`, `.compile()`), or its HLO text. A lowered
        program is compiled, since sharding and widening happen there.
      branch: what counts for a conditional: the branch that sends `"max"` (the worst step, the default), `"min"` (a
        step of local SGD that does not synchronise), or `"all"` (both; to see every operation of a program).

    Returns:
      The operations, one worker's `wire_bytes` for one call, and warnings about what the program does not tell.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
      >>> mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> [op.bytes for op in collectives(jax.jit(mean).lower(jnp.ones(256))).ops]
      [1024]
    """
    check_branch(branch)
    module = parse(program_text(program))
    started = {
        _chain_of(instruction)
        for computation in module.computations.values()
        if _starts_chain(computation)
        for instruction in computation.instructions.values()
    }
    warnings: list[str] = []
    walked: dict[str, list[Collective]] = {}

    def walk(name: str) -> list[Collective]:
        if name not in walked:
            walked[name] = []
            if name in module.computations:
                for instruction in module.computations[name].instructions.values():
                    walked[name] += visit(name, instruction)
        return walked[name]

    def visit(name: str, instruction: Instruction) -> list[Collective]:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in _KINDS or (opcode == "send" and pairs(instruction)):
            return [] if goes_on(name, instruction) else [record(name, instruction, kind)]
        if opcode == "while":
            inside = [op for callee in called(instruction, "body") for op in walk(callee)]
            tested = [op for callee in called(instruction, "condition") for op in walk(callee)]
            times = trip_count(module, name, instruction) if inside or tested else 0
            if times is None:
                warnings.append(f"the loop {instruction.name} in {name} runs an unknown number of times; counted once")
                return inside + tested
            return repeat(inside, times) + repeat(tested, times + 1)  # the test that ends the loop runs too
        if opcode == "conditional":
            callees = called(instruction, "branch_computations", "true_computation", "false_computation")
            return choose([walk(callee) for callee in callees], branch, f"{instruction.name} in {name}", warnings)
        if opcode in _CALLERS:
            callees = called(instruction, "calls", "to_apply", "called_computations")
            return [op for callee in callees for op in walk(callee)]
        return []

    def goes_on(name: str, instruction: Instruction) -> bool:
        """Whether this is a later piece of a collective that the TPU compiler spread over several fusions."""
        chain = _chain_of(instruction)
        return chain is not None and chain in started and not _starts_chain(module.computations[name])

    def record(name: str, instruction: Instruction, kind: str) -> Collective:
        symbols = module.computations[name].instructions
        operands = [array for operand in instruction.operands for array in arrays(symbols[operand].result)]
        if kind == "ragged-all-to-all":
            operands = operands[:1]  # the others say where the rows go and hold what they overwrite
            warnings.append(f"{instruction.name} in {name} sends as many rows as its sizes say; counted all of them")
        if kind == "send":
            kind, operands = "collective-permute", operands[:1]  # the second operand is a token
        groups = None if kind == "collective-permute" else replica_groups(instruction.attributes, module.devices)
        if groups is None and re.search(r"\breplica_groups=", instruction.attributes):
            warnings.append(f"the groups of {instruction.name} in {name} cannot be read; counted as one group")
        return make_collective(
            kind, operands, groups=groups, pairs=pairs(instruction), devices=module.devices, where=name
        )

    return summarise(walk(module.entry), warnings)


def _chain_of(instruction: Instruction) -> str | None:
    """Return what names the pieces of one collective that runs underneath several fusions, on TPU."""
    found = re.search(r"\bchain_id=\"?(\w+)", instruction.attributes)
    return found.group(1) if found else None


def _starts_chain(computation: Computation) -> bool:
    """Return whether the first piece of such a collective lies here; the others repeat the same operation."""
    return any("AsyncCollectiveStart" in instruction.attributes for instruction in computation.instructions.values())

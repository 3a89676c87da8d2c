"""What a code costs in the programs of TPUs and GPUs that are not attached, and what each dtype costs on their wires.

    python benchmarks/compiled.py codes --targets v5e:2x4 v6e:2x4 tpu7x:2x2x1 --out benchmarks/reports/NAME
    python benchmarks/compiled.py wires --targets cpu v5e:2x4 v6e:2x4 tpu7x:2x2x1 --out benchmarks/reports/NAME

TPUs need `libtpu` (`pip install 'jaxdist[tpu-plan]'`), GPUs (`h100:1x8`) JAX's CUDA plugin (`jaxdist[gpu-plan]`).

- `codes` compiles `all_reduce(compressed(code))` of one leaf, flat and as a matrix, and reads processor seconds of
  compilation, bytes of generated code (which compilers for GPUs do not tell) and of temporary memory.
- `wires` compiles one collective of `Comm` for each dtype, and reads from the program the type that is sent, the bytes
  of an entry, with the padding of the buffers, and the type in which a sum is added.
"""

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import write_record

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.analysis import hlo_reader, pods
from jaxdist.analysis.collectives import collectives, kind_of

DTYPES = (
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.int32,
    jnp.int16,
    jnp.int8,
    jnp.uint8,
)


# With the blocks that users have. `int8` is first: the others are compared with it.
DENSE: dict[str, Callable[[], jc.Compressor]] = {
    "int8()": jc.int8,
    "identity()": jc.identity,
    "cast(bfloat16)": lambda: jc.cast(jnp.bfloat16),
    "cast(bfloat16, stochastic)": lambda: jc.cast(jnp.bfloat16, rounding="stochastic"),
    "cast(float8_e4m3fn)": lambda: jc.cast(jnp.float8_e4m3fn),
    "int8(stochastic)": lambda: jc.int8(rounding="stochastic"),
    "fp8()": jc.fp8,
    "mxfp8()": jc.mxfp8,
    "dynamic_fp8()": jc.dynamic_fp8,
    "min_max_uint8()": jc.min_max_uint8,
    "natural()": jc.natural,
    "qsgd(8)": lambda: jc.qsgd(8),
    "qsgd(8, l2)": lambda: jc.qsgd(8, norm="l2"),
    "int4()": jc.int4,
    "mxfp4()": jc.mxfp4,
    "e3m0()": jc.e3m0,
    "qsgd(4)": lambda: jc.qsgd(4),
    "qsgd(3)": lambda: jc.qsgd(3),
    "qsgd(2)": lambda: jc.qsgd(2),
    "nuqsgd(4)": lambda: jc.nuqsgd(4),
    "nuqsgd(3)": lambda: jc.nuqsgd(3),
    "with_levels(8)": lambda: jc.with_levels(jnp.linspace(-1, 1, 8), bits=3, norm="max", zero_level=False),
    "scaled(qsgd(2))": lambda: jc.scaled(jc.qsgd(2)),
    "terngrad()": jc.terngrad,
    "two_means()": jc.two_means,
    "sign()": jc.sign,
    "scaled_sign()": jc.scaled_sign,
    "scaled_sign(bucket=1024)": lambda: jc.scaled_sign(bucket=1024),
    "one_bit()": jc.one_bit,
    "drive()": jc.drive,
}
SPARSE: dict[str, Callable[[], jc.Compressor]] = {
    "top_k(0.01)": lambda: jc.top_k(0.01),
    "top_k(0.1)": lambda: jc.top_k(0.1),
    "block_top_k(64 / 4096)": lambda: jc.block_top_k(64 / 4096),
    "random_k(0.1)": lambda: jc.random_k(0.1),
    "gspar(0.05)": lambda: jc.gspar(0.05),
    "gspar(variance=3)": lambda: jc.gspar(variance=3.0, code="two_part"),
    "chained(top_k, two_means)": lambda: jc.chained(jc.block_top_k(64 / 4096), jc.two_means()),
    "chained(gspar, qsgd(4))": lambda: jc.chained(jc.gspar(0.05), jc.qsgd(4)),
}
# Codes that are reducers: those that only add or count, and those that search for levels or code twice.
PLAIN: dict[str, Callable[[], jd.reducers.Reducer]] = {
    "integer_sum()": jd.reducers.integer_sum,
    "intsgd()": jd.reducers.intsgd,
    "majority_vote()": jd.reducers.majority_vote,
}
ADAPTIVE: dict[str, Callable[[], jd.reducers.Reducer]] = {
    "alq(3)": lambda: jd.reducers.alq(3),
    "alq(3, coordinate)": lambda: jd.reducers.alq(3, solver="coordinate"),
    "amq(3)": lambda: jd.reducers.amq(3),
    "dgc(0.01)": lambda: jd.reducers.dgc(0.01),
    "two_shot(int8())": lambda: jd.two_shot(jc.int8()),
    "two_shot(int4())": lambda: jd.two_shot(jc.int4()),
}
# One of each kind, which compile in a few minutes for a further chip or size.
SAMPLE = (
    "int8()",
    "cast(bfloat16)",
    "dynamic_fp8()",
    "int4()",
    "qsgd(3)",
    "two_means()",
    "scaled_sign()",
    "drive()",
    "top_k(0.01)",
    "top_k(0.1)",
    "gspar(0.05)",
    "gspar(variance=3)",
    "alq(3)",
    "dgc(0.01)",
    "two_shot(int8())",
)


def reducers() -> dict[str, Callable[[], jd.reducers.Reducer]]:
    """All of them in the form in which they are used."""
    coded = {name: lambda make=make: jd.compressed(make()) for name, make in (DENSE | SPARSE).items()}
    return coded | PLAIN | ADAPTIVE


def mesh_of(target: str) -> jax.sharding.Mesh:
    if target == "cpu":
        return jd.make_mesh({"data": 8})
    return (pods.gpu if target.split(":")[0] in pods.GPUS else pods.tpu)(target)


def lower_mean(reducer: jd.reducers.Reducer, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """One step that averages a gradient of this shape over all devices."""
    tx = jd.all_reduce(reducer)

    def step(state, gradient):
        mean, state = tx.update(gradient, state)
        return state, mean

    rows = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), jnp.float32)
    return jd.distribute(step, mesh).lower(*pods.abstract(lambda: tx.init(jnp.zeros(shape)), rows, mesh))


def measure_code(reducer: jd.reducers.Reducer, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    lowered = lower_mean(reducer, shape, mesh)
    # Of the processor, since other work on the machine would count on a clock.
    start = time.process_time()
    program = lowered.compile()
    seconds = round(time.process_time() - start, 2)
    memory, found = program.memory_analysis(), collectives(program)
    return {
        "seconds": seconds,
        # Compilers for GPUs say nothing.
        "code": memory.generated_code_size_in_bytes or None,
        "temporary": memory.temp_size_in_bytes,
        "wire": found.wire_bytes,
        "padded_wire": found.padded_wire_bytes,
    }


def codes(given: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for target in given.targets:
        mesh = mesh_of(target)
        for shape in ((given.entries,), (1024, given.entries // 1024)):
            for name, make in reducers().items():
                if given.only and name not in ("int8()", *given.only):
                    continue
                if given.sample and name not in SAMPLE:
                    continue
                found = measure_code(make(), shape, mesh)
                rows.append({"target": target, "shape": shape, "code name": name, **found})
                print(target, shape, name, found, flush=True)
                write_record(given.out, "codes", rows, table_of_codes(rows))
    return 0


def table_of_codes(rows: list[dict[str, Any]]) -> str:
    """Megabytes of code, where the compiler tells, and of temporary memory."""
    kinds = dict.fromkeys((row["target"], tuple(row["shape"])) for row in rows)
    lines = ["| | " + " | ".join(f"{target}, {'x'.join(map(str, shape))}" for target, shape in kinds) + " |"]
    lines.append("|---" + "|--:" * len(kinds) + "|")
    found = {(row["code name"], row["target"], tuple(row["shape"])): row for row in rows}
    for name in dict.fromkeys(row["code name"] for row in rows):
        cells = []
        for kind in kinds:
            row = found.get((name, *kind), {})
            sizes = [row[key] for key in ("code", "temporary") if row.get(key) is not None]
            cells.append(" · ".join(f"{size / 1e6:.2f}" for size in sizes))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure_wire(kind: str, dtype: Any, mesh: jax.sharding.Mesh, entries: int) -> dict[str, Any]:
    """The collectives that one of `Comm` becomes."""

    def send(x):
        comm = jd.comm.over("data")
        if kind in ("all_to_all", "reduce_scatter_mean"):
            x = x.reshape(comm.size, -1)
        return getattr(comm, kind)(x) if kind != "ppermute" else comm.ppermute(x, ring(comm.size))

    whole = jax.ShapeDtypeStruct((mesh.size * entries,), dtype, sharding=jax.NamedSharding(mesh, jax.P("data")))
    agreed = kind in ("sum", "mean", "all_gather")
    out = jax.P() if agreed else jax.P("data")
    mapped = jax.shard_map(send, mesh=mesh, in_specs=jax.P("data"), out_specs=out)
    program = jax.jit(mapped).lower(whole).compile()
    text = program.as_text()
    return {
        "sent": [[op.kind, op.dtype, op.bytes / entries, op.padded_bytes / entries] for op in collectives(text).ops],
        "added": added_types(text),
    }


def ring(workers: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % workers) for i in range(workers)]


def added_types(text: str) -> list[str]:
    """The types in which the computations of reductions over workers add."""
    module = hlo_reader.parse(text)
    found: list[str] = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if kind_of(instruction) in ("all-reduce", "reduce-scatter"):
                for callee in hlo_reader.callees_of(instruction, "to_apply"):
                    inside = module.computations[callee].instructions.values()
                    found += [re.sub(r"\[.*", "", x.result) for x in inside if x.opcode in ("add", "maximum")]
    return list(dict.fromkeys(found))


def wires(given: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for target in given.targets:
        mesh = mesh_of(target)
        for kind in ("sum", "mean", "all_gather", "reduce_scatter_mean", "all_to_all", "ppermute"):
            for dtype in DTYPES:
                name = jnp.dtype(dtype).name
                try:
                    found = measure_wire(kind, dtype, mesh, 2**16)
                except (TypeError, ValueError) as error:
                    found = {"refused": str(error).splitlines()[0]}
                rows.append({"target": target, "collective": kind, "dtype": name, **found})
                print(rows[-1], flush=True)
        write_record(given.out, "wires", rows, table_of_wires(rows))
    return 0


def table_of_wires(rows: list[dict[str, Any]]) -> str:
    targets = dict.fromkeys(row["target"] for row in rows)
    lines = ["| `Comm` | dtype | " + " | ".join(targets) + " |", "|---|---" + "|---" * len(targets) + "|"]
    for kind, name in dict.fromkeys((row["collective"], row["dtype"]) for row in rows):
        cells = []
        for target in targets:
            row = next((r for r in rows if (r["target"], r["collective"], r["dtype"]) == (target, kind, name)), None)
            cells.append(describe(row) if row else "")
        lines.append(f"| `{kind}` | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "refused"
    parts = [f"{kind} {dtype} {padded:.3g}" for kind, dtype, _, padded in row["sent"]]
    return ", ".join(parts) + (f"; adds {', '.join(row['added'])}" if row["added"] else "")


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("subcommand", choices=("codes", "wires"))
    parser.add_argument("--targets", nargs="+", default=["v5e:2x4"], help="as of jaxdist plan; for wires also cpu")
    parser.add_argument("--entries", type=int, default=2**20, help="of the leaf, a multiple of 1024")
    parser.add_argument("--sample", action="store_true", help="one code of each kind")
    parser.add_argument("--only", nargs="+", default=[], help="names of codes, beside int8()")
    parser.add_argument("--out", type=Path, help="folder for the records and the table")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # Error feedback would be a part of what is measured.
    warnings.filterwarnings("ignore", message=".*is biased")
    if "cpu" in given.targets:
        jd.runtime.use_cpu_devices(8)
    return {"codes": codes, "wires": wires}[given.subcommand](given)


if __name__ == "__main__":
    sys.exit(main())

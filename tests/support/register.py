"""The register: one line for each compressor and each reducer, with the bytes that its docstring promises.

`test_laws.py` runs every law on every line. Formulas take the shapes of the leaves and the number of workers, and give
the bytes that one worker sends in one step.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.testing.compressor_laws import MAGNITUDES

# Of float16, which has few exponents: its smallest normal number and its largest.
FLOAT16 = (2.0**-14, 65504.0)
# What one worker reduces: a matrix, a vector and a scalar.
SHAPES = {"b": (5,), "s": (), "w": (12, 8)}
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}


class Code(NamedTuple):
    """A compressor, the bytes of its payload for so many float32 entries, and the magnitudes that it is made for."""

    make: Callable[[], jd.compressors.Compressor]
    bytes: Callable[[int], int]
    magnitudes: tuple[float, float] = MAGNITUDES
    loses_nan: bool = False


class Case(NamedTuple):
    """A reducer and what it must send.

    Attributes:
      make: gives the reducer.
      bytes: `bytes(W)`, sent by one worker for `SHAPES`.
      wire: kind and dtype of every message in the compiled program.
      tolerance: between mesh and simulation, relative to the largest update; 0: the same bits.
      levels: of the group of workers.
      unused: `unused(W)`, bytes of what is asked for and then dropped by the compiler: the gather of an `own` that
        nothing reads.
      loses_nan: says that NaN and infinity of one worker may not be in the mean.
    """

    make: Callable[[], jd.reducers.Reducer]
    bytes: Callable[[int], float]
    wire: list[tuple[str, str]]
    tolerance: float = 1e-6
    levels: int = 1
    unused: Callable[[int], float] = lambda w: 0.0
    loses_nan: bool = False


def turn(name: str, count: int) -> int:
    """Which of `count` variants a line gets by default: from its name, so that a new line changes no other."""
    return zlib.crc32(name.encode()) % count


def kept(density: float, size: int) -> int:
    return min(size, max(1, round(density * size)))


def words(bits: int) -> int:
    return -(-bits // 8)


def position_bytes(k: int, d: int) -> int:
    """Positions of k of d entries: low bits and a bitmap, or plain words."""
    coded = min(words(k * low) + words(k + ((d - k) >> low)) for low in range(32))
    return min(coded, k * (2 if d <= 2**16 else 4))


def sparse_bytes(density: float) -> Callable[[int], int]:
    return lambda n: 4 * kept(density, n) + position_bytes(kept(density, n), n)


def blocks_kept(density: float, block: int, size: int) -> tuple[int, int]:
    """How many entries of all blocks are sent, and of how many, the padding of the last block included."""
    width = min(block, size)
    rows = -(-size // width)
    return rows * kept(density, width), rows * width


def block_bytes(density: float, block: int) -> Callable[[int], int]:
    def size(n):
        k, d = blocks_kept(density, block, n)
        return 4 * k + position_bytes(k, d)

    return size


def sparse_loco_bytes(n: int) -> int:
    k, d = blocks_kept(0.25, 16, n)
    return words(2 * k) + 8 * -(-k // min(8, k)) + position_bytes(k, d)


def qsgd_bytes(bits: int, bucket: int) -> Callable[[int], int]:
    def size(n):
        buckets = -(-n // bucket)
        # Up to whole 32-bit words, as far as the zeros that fill the last bucket go.
        filled = n if buckets <= 1 else buckets * bucket
        whole = 32 // math.gcd(32, bits)  # codes that fill 32-bit words
        return words(min(-(-n // whole) * whole, filled) * bits) + 4 * buckets

    return size


def mx_bytes(bits: int) -> Callable[[int], int]:
    """A byte of scale per block, not four."""
    return lambda n: qsgd_bytes(bits, 32)(n) - 3 * -(-n // 32)


def rotated_bytes(block: int) -> Callable[[int], int]:
    def size(n):
        width = min(block, max(8, 2 ** math.ceil(math.log2(n))))
        return -(-n // width) * (width // 8 + 4) + 4

    return size


CODES = {
    "identity": Code(jc.identity, lambda n: 4 * n),
    "bfloat16": Code(lambda: jc.cast(jnp.bfloat16), lambda n: 2 * n),
    "bfloat16 at random": Code(lambda: jc.cast(jnp.bfloat16, rounding="stochastic"), lambda n: 2 * n),
    "float16": Code(lambda: jc.cast(jnp.float16), lambda n: 2 * n, FLOAT16),
    "e4m3": Code(lambda: jc.cast(jnp.float8_e4m3fn), lambda n: n + 4),
    "e5m2": Code(lambda: jc.cast(jnp.float8_e5m2), lambda n: n + 4),
    "top_k": Code(lambda: jc.top_k(0.1), sparse_bytes(0.1)),
    "top_k exact": Code(lambda: jc.top_k(0.5, method="exact"), sparse_bytes(0.5)),
    "block_top_k": Code(lambda: jc.block_top_k(0.2, block=16), block_bytes(0.2, 16)),
    "gspar": Code(lambda: jc.gspar(0.3), sparse_bytes(0.3)),
    "gspar by variance": Code(lambda: jc.gspar(variance=3.0), lambda n: 4 * -(-n // 4) + position_bytes(-(-n // 4), n)),
    "gspar in two parts": Code(
        lambda: jc.gspar(variance=3.0, code="two_part"), lambda n: 4 * -(-n // 4) + position_bytes(-(-n // 4), n)
    ),
    "two_means": Code(lambda: jc.two_means(block=16), lambda n: words(2 * n) + 8 * -(-n // min(16, n))),
    "top_k of bfloat16": Code(
        lambda: jc.chained(jc.top_k(0.2), jc.cast(jnp.bfloat16)),
        lambda n: 2 * kept(0.2, n) + position_bytes(kept(0.2, n), n),
    ),
    "block_top_k of two_means": Code(
        lambda: jc.chained(jc.block_top_k(0.25, block=16), jc.two_means(block=8)), sparse_loco_bytes
    ),
    "top_k of qsgd 2": Code(
        lambda: jc.chained(jc.top_k(0.5), jc.qsgd(2, bucket=32)),
        lambda n: qsgd_bytes(2, 32)(kept(0.5, n)) + position_bytes(kept(0.5, n), n),
    ),
    "gspar of qsgd 4": Code(
        lambda: jc.chained(jc.gspar(0.5), jc.qsgd(4)),
        lambda n: qsgd_bytes(4, 512)(kept(0.5, n)) + position_bytes(kept(0.5, n), n),
    ),
    "random_k of float16": Code(
        lambda: jc.chained(jc.random_k(0.3), jc.cast(jnp.float16)),
        lambda n: 2 * kept(0.3, n) + 16,
        FLOAT16,
        loses_nan=True,
    ),
    "random_k": Code(lambda: jc.random_k(0.3), lambda n: 4 * kept(0.3, n) + 16, loses_nan=True),
    "random_k unbiased": Code(lambda: jc.random_k(0.3, unbiased=True), lambda n: 4 * kept(0.3, n) + 16, loses_nan=True),
    "qsgd 2": Code(lambda: jc.qsgd(2, bucket=8), qsgd_bytes(2, 8)),
    "qsgd 3": Code(lambda: jc.qsgd(3, bucket=16), qsgd_bytes(3, 16)),
    "qsgd 4": Code(lambda: jc.qsgd(4), qsgd_bytes(4, 512)),
    "qsgd 4 threefry": Code(
        lambda: jc.qsgd(4, noise=partial(jax.random.uniform, dtype=jnp.float32)), qsgd_bytes(4, 512)
    ),
    "qsgd 8 l2": Code(lambda: jc.qsgd(8, norm="l2"), qsgd_bytes(8, 512)),
    "nuqsgd": Code(lambda: jc.nuqsgd(4), qsgd_bytes(4, 8192)),
    "nuqsgd without zero": Code(lambda: jc.nuqsgd(3, bucket=16, zero_level=False), qsgd_bytes(3, 16)),
    "levels that are not mirrored": Code(
        lambda: jc.with_levels(np.array([-1, -0.1, 0.02, 1]), bits=2, bucket=32, norm="max", zero_level=False),
        qsgd_bytes(2, 32),
    ),
    "scaled_sign": Code(jc.scaled_sign, lambda n: words(n) + 4),
    "scaled_sign in buckets": Code(lambda: jc.scaled_sign(bucket=16), lambda n: words(n) + 4 * -(-n // 16)),
    "sign": Code(jc.sign, words, loses_nan=True),
    "one_bit": Code(jc.one_bit, lambda n: words(n) + 4),
    "drive": Code(lambda: jc.drive(block=64), rotated_bytes(64)),
    "terngrad": Code(jc.terngrad, lambda n: words(2 * n) + 4),
    "terngrad without clipping": Code(lambda: jc.terngrad(clip=None, bucket=16), qsgd_bytes(2, 16)),
    "natural": Code(jc.natural, lambda n: 9 * -(-n // 8)),
    "int8": Code(jc.int8, qsgd_bytes(8, 256)),
    "int8 at random": Code(lambda: jc.int8(rounding="stochastic"), qsgd_bytes(8, 256)),
    "int4": Code(jc.int4, qsgd_bytes(4, 32)),
    "int4 at random": Code(lambda: jc.int4(rounding="stochastic"), qsgd_bytes(4, 32)),
    "fp8": Code(lambda: jc.fp8(block=16), qsgd_bytes(8, 16)),
    "fp8 e5m2 at random": Code(lambda: jc.fp8(format="e5m2", rounding="stochastic"), qsgd_bytes(8, 128)),
    "mxfp8": Code(jc.mxfp8, mx_bytes(8)),
    "mxfp8 e5m2 at random": Code(lambda: jc.mxfp8(format="e5m2", rounding="stochastic"), mx_bytes(8)),
    "mxfp4": Code(jc.mxfp4, mx_bytes(4)),
    "mxfp4 at random": Code(lambda: jc.mxfp4(rounding="stochastic"), mx_bytes(4)),
    "dynamic_fp8": Code(jc.dynamic_fp8, mx_bytes(8)),
    "dynamic_fp8 to nearest": Code(lambda: jc.dynamic_fp8(rounding="nearest"), mx_bytes(8)),
    "e3m0": Code(lambda: jc.e3m0(block=16), qsgd_bytes(4, 16)),
    "e3m0 at random": Code(lambda: jc.e3m0(rounding="stochastic"), qsgd_bytes(4, 256)),
    "min_max_uint8": Code(jc.min_max_uint8, lambda n: n + 8),
    "scaled": Code(lambda: jc.scaled(jc.qsgd(2, bucket=8)), qsgd_bytes(2, 8)),
    "scaled l2": Code(lambda: jc.scaled(jc.qsgd(2, norm="l2")), qsgd_bytes(2, 512)),
}


def all_reduced(size: float) -> Callable[[int], float]:
    return lambda w: 2 * (w - 1) / w * size


def gathered(size: float) -> Callable[[int], float]:
    return lambda w: (w - 1) * size


def code_bytes(name: str) -> int:
    return sum(CODES[name].bytes(size) for size in SIZES.values())


def low_rank_floats(rank: int) -> int:
    n, m = SHAPES["w"]
    return rank * (n + m) + SIZES["b"] + SIZES["s"]


def by_code(name: str) -> jd.reducers.Reducer:
    return jd.compressed(CODES[name].make())


def two_shots(name: str, **options) -> jd.reducers.Reducer:
    return jd.two_shot(CODES[name].make(), **options)


def matrices_and_vectors(path, leaf) -> str:
    del path
    return "matrix" if len(leaf.shape) > 1 else "vector"


def shots(name: str, back: str | None = None) -> Callable[[int], float]:
    """Both directions, in chunks of a multiple of eight."""
    return lambda w: (w - 1) * sum(CODES[code].bytes(-(-TOTAL // (8 * w)) * 8) for code in (name, back or name))


REDUCE, GATHER = ("all-reduce", "float32"), ("all-gather", "uint8")
# A maximum travels as bits that keep their order, so that NaN is the largest.
MAX = ("all-reduce", "int32")
SHOTS = [("all-gather", "uint8"), ("all-to-all", "uint8")]
TOTAL = sum(SIZES.values())
HALVES = {"bfloat16": 2 * -(-TOTAL // 8) * 8, "float16": 2 * TOTAL}  # bfloat16 on CPU: one part for each worker

# The cheapest is first: tests of a sample run the first case, and those that its name draws.
CASES = {
    "exact": Case(jd.exact, all_reduced(4 * TOTAL), [REDUCE]),
    "accordion": Case(
        lambda: jd.error_feedback(
            jd.reducers.accordion(jd.power_sgd(2), jd.power_sgd(1), epoch_steps=1, interval_steps=1)
        ),
        all_reduced(4 * low_rank_floats(2) + 4),
        [REDUCE] * 3,
    ),
    "accordion by kind of leaf": Case(
        lambda: jd.reducers.accordion(
            jd.exact(), by_code("float16"), epoch_steps=1, interval_steps=1, groups=matrices_and_vectors
        ),
        all_reduced(4 * TOTAL + 2 * 4),
        [REDUCE] * 4,
        tolerance=2**-8,
    ),
    "exact with a regime": Case(
        lambda: jd.reducers.with_regime(jd.exact(), epoch_steps=1, interval_steps=1),
        all_reduced(4 * TOTAL + 4),
        [REDUCE] * 2,
    ),
    "float16": Case(
        lambda: by_code("float16"), all_reduced(HALVES["float16"]), [("all-reduce", "float16")], tolerance=2**-8
    ),
    "bfloat16": Case(
        lambda: by_code("bfloat16"),
        all_reduced(HALVES["bfloat16"]),
        [("all-gather", "uint16"), ("all-to-all", "uint16")],
        tolerance=2**-8,
    ),
    "e4m3": Case(lambda: by_code("e4m3"), gathered(code_bytes("e4m3")), [GATHER]),
    "natural": Case(lambda: by_code("natural"), gathered(code_bytes("natural")), [GATHER]),
    "feedback of mxfp4": Case(lambda: jd.error_feedback(by_code("mxfp4")), gathered(code_bytes("mxfp4")), [GATHER]),
    "feedback of two_shot of int4": Case(lambda: jd.error_feedback(two_shots("int4")), shots("int4"), SHOTS),
    "feedback of two_shot of drive": Case(lambda: jd.error_feedback(two_shots("drive")), shots("drive"), SHOTS),
    "top_k": Case(lambda: by_code("top_k"), gathered(code_bytes("top_k")), [GATHER], tolerance=0),
    "feedback of block_top_k of two_means": Case(
        lambda: jd.error_feedback(by_code("block_top_k of two_means")),
        gathered(code_bytes("block_top_k of two_means")),
        [GATHER],
    ),
    "gspar": Case(lambda: by_code("gspar"), gathered(code_bytes("gspar")), [GATHER]),
    "dgc": Case(lambda: jd.reducers.dgc(0.1, nesterov=True, clip_norm=3), gathered(code_bytes("top_k")), [GATHER]),
    "dgc after its warm-up": Case(
        lambda: jd.reducers.dgc(0.1, warmup_densities=(0.5, 0.25), warmup_steps=4),
        gathered(code_bytes("top_k exact")),
        [GATHER],
    ),
    "random_k unbiased": Case(
        lambda: by_code("random_k unbiased"), all_reduced(code_bytes("random_k unbiased")), [REDUCE], loses_nan=True
    ),
    "qsgd 4": Case(lambda: by_code("qsgd 4"), gathered(code_bytes("qsgd 4")), [GATHER]),
    "feedback of top_k": Case(
        lambda: jd.error_feedback(by_code("top_k")), gathered(code_bytes("top_k")), [GATHER], tolerance=0
    ),
    "feedback of scaled_sign": Case(
        lambda: jd.error_feedback(by_code("scaled_sign")), gathered(code_bytes("scaled_sign")), [GATHER]
    ),
    "feedback of qsgd 2": Case(lambda: jd.error_feedback(by_code("qsgd 2")), gathered(code_bytes("qsgd 2")), [GATHER]),
    "feedback of compute_visible": Case(
        lambda: jd.error_feedback(jd.reducers.compute_visible(by_code("top_k"))),
        gathered(code_bytes("top_k")),
        [GATHER],
        tolerance=0,
    ),
    "compute_visible": Case(
        lambda: jd.reducers.compute_visible(jd.exact(), scale=0.5), all_reduced(4 * TOTAL), [REDUCE]
    ),
    "ef21": Case(lambda: jd.reducers.ef21(by_code("top_k"), eta=0.5), gathered(code_bytes("top_k")), [GATHER]),
    "power_sgd": Case(lambda: jd.power_sgd(2), all_reduced(4 * low_rank_floats(2)), [REDUCE] * 2),
    "feedback of power_sgd": Case(
        lambda: jd.error_feedback(jd.power_sgd(1)), all_reduced(4 * low_rank_floats(1)), [REDUCE] * 2
    ),
    "power_sgd one-sided": Case(
        lambda: jd.error_feedback(jd.power_sgd(1, one_sided=True)),
        all_reduced(4 * (max(SHAPES["w"]) + SIZES["b"] + SIZES["s"])),
        [REDUCE],
    ),
    "power_sgd in the paper's form, started later": Case(
        lambda: jd.error_feedback(jd.power_sgd(1, own="paper", start_step=1)), all_reduced(4 * TOTAL), [REDUCE]
    ),
    "per_leaf": Case(
        lambda: jd.reducers.per_leaf(
            matrices_and_vectors, {"matrix": jd.error_feedback(by_code("top_k")), "vector": jd.exact()}
        ),
        lambda w: gathered(CODES["top_k"].bytes(SIZES["w"]))(w) + all_reduced(4 * (SIZES["b"] + SIZES["s"]))(w),
        [GATHER, REDUCE],
    ),
    "bucketed": Case(
        lambda: jd.reducers.bucketed(by_code("qsgd 4"), bucket_bytes=64, first_bucket_bytes=None),
        gathered(sum(CODES["qsgd 4"].bytes(n) for n in (SIZES["w"] + SIZES["b"] + SIZES["s"],))),
        [GATHER],
    ),
    "scheduled": Case(
        lambda: jd.reducers.partitioned(jd.exact(), partition_bytes=128, credit_bytes=256),
        all_reduced(4 * TOTAL),
        [REDUCE] * 5,
    ),
    "scheduled codes": Case(
        lambda: jd.error_feedback(
            jd.reducers.partitioned(
                by_code("scaled_sign"), partition_bytes=256, order="priority", layer_fn=lambda path, leaf: 0
            )
        ),
        gathered(sum(CODES["scaled_sign"].bytes(n) for n in (64, TOTAL - 64))),
        [GATHER] * 2,
    ),
    "tracked": Case(
        lambda: jd.error_feedback(jd.reducers.with_stats(by_code("top_k"))),
        gathered(code_bytes("top_k")),
        [GATHER],
    ),
    "two_shot": Case(lambda: two_shots("qsgd 4"), shots("qsgd 4"), SHOTS),
    "two_shot with a server residual": Case(
        lambda: two_shots("scaled_sign", second=CODES["top_k"].make()), shots("scaled_sign", "top_k"), SHOTS
    ),
    "feedback of two_shot": Case(lambda: jd.error_feedback(two_shots("scaled_sign")), shots("scaled_sign"), SHOTS),
    "majority_vote": Case(
        jd.reducers.majority_vote, lambda w: 2 * (w - 1) * -(-TOTAL // (8 * w)), SHOTS, tolerance=0, loses_nan=True
    ),
    # Entries of the laws are rarely zero: the branch that all-reduces, the question whether the rows fit, and the other
    # leaves by themselves.
    "row_sparse": Case(lambda: jd.reducers.row_sparse(1), all_reduced(4 * TOTAL + 4), [REDUCE, REDUCE, MAX]),
    "median": Case(jd.reducers.median, gathered(4 * TOTAL), [("all-gather", "float32")], loses_nan=True),
    "trimmed_mean": Case(
        lambda: jd.reducers.trimmed_mean(1), gathered(4 * TOTAL), [("all-gather", "float32")], loses_nan=True
    ),
    "ring": Case(
        lambda: jd.reducers.ring(CODES["qsgd 8 l2"].make()),
        lambda w: 2 * (w - 1) * CODES["qsgd 8 l2"].bytes(-(-TOTAL // w)),
        [GATHER, *[("collective-permute", "uint8")] * 7],
    ),
    "loco": Case(lambda: jd.reducers.loco(two_shots("qsgd 4"), block=32), shots("qsgd 4"), SHOTS),
    # The first step is dense; `test_integers.py` has the others.
    "intsgd": Case(jd.reducers.intsgd, all_reduced(4 * TOTAL), [REDUCE], loses_nan=True),
    "integer_sum": Case(jd.reducers.integer_sum, all_reduced(4 * len(SIZES) + TOTAL), [("all-reduce", "int8"), MAX]),
    "reducer_schedule": Case(
        lambda: jd.reducers.reducer_schedule(jd.exact(), jd.error_feedback(by_code("top_k")), 1),
        all_reduced(4 * TOTAL),
        [REDUCE],
    ),
    "hierarchical two_shot": Case(
        lambda: jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(two_shots("e4m3"))),
        lambda w: 2 * 3 / 4 * 4 * -(-TOTAL // 4) * 4 + 2 * CODES["e4m3"].bytes(-(-TOTAL // 64) * 8),
        [("all-gather", "float32"), ("all-to-all", "float32"), *SHOTS],
        levels=2,
        unused=lambda w: 3 * 4 * -(-TOTAL // 4),
    ),
    # Levels are a fit to sums, which processes may add up in another order.
    "alq": Case(
        lambda: jd.reducers.alq(3, bucket=32, norm="l2", solver="coordinate", block=16, every=2),
        lambda w: gathered(qsgd_bytes(3, 32)(TOTAL))(w) + all_reduced(240 + 4)(w),
        [GATHER, REDUCE, MAX],
        tolerance=1e-3,
    ),
    "alq exact": Case(
        lambda: jd.reducers.alq(4, symmetric=True, update_steps=(1,)),
        lambda w: gathered(qsgd_bytes(4, 8192)(TOTAL))(w) + all_reduced(4 * 257 + 4)(w),
        [GATHER, REDUCE, MAX],
        tolerance=1e-3,
    ),
    "amq": Case(
        lambda: jd.reducers.amq(2),
        lambda w: gathered(qsgd_bytes(2, 8192)(TOTAL))(w) + all_reduced(240 + 4)(w),
        [GATHER, REDUCE, MAX],
        tolerance=1e-3,
    ),
    "hierarchical": Case(
        lambda: jd.hierarchical(inner=jd.exact(), outer=jd.error_feedback(by_code("qsgd 4"))),
        # Two pods of four: a reduce-scatter (on CPU an all-to-all) and a gather of float32, and a code of a quarter.
        lambda w: 2 * 3 / 4 * 4 * -(-TOTAL // 4) * 4 + CODES["qsgd 4"].bytes(-(-TOTAL // 4)),
        [("all-gather", "float32"), GATHER, ("all-to-all", "float32")],
        levels=2,
        unused=lambda w: 3 * 4 * -(-TOTAL // 4),
    ),
}

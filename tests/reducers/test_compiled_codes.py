"""What the compilers of TPUs and GPUs make of every code: seconds, size of the program and memory, beside `int8`.

Nothing is attached: the programs are compiled, and not run. A code that XLA unrolls makes a program of many bytes for
each entry, which takes minutes to compile and does not fit.
"""

import functools
import math
import time
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from register import CODES

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.analysis import pods

# Without error feedback, which would be a part of what is measured.
pytestmark = pytest.mark.filterwarnings("ignore:.*is biased")
ENTRIES = 2**20
SHAPES = [(ENTRIES,), (1024, ENTRIES // 1024)]
TPUS = ("v5e:2x4", "v6e:2x4", "tpu7x:2x2x1")


class Cost(NamedTuple):
    """Of one program: processor seconds of its compilation, bytes of its code and of its temporary memory."""

    seconds: float
    code: int
    temporary: int


# At most so many times what `int8` takes in the same reducer: codes of a fixed number of bits, and those that search
# for entries or levels.
DENSE, SEARCHING = Cost(2.5, 1.5, 1.5), Cost(4.0, 4.0, 4.0)
# What misses that, with what it may take at most: 1.1 times the program and memory, and 1.5 times the seconds, that
# were measured on v5e, for the larger of both shapes. `int8` takes a third of the program that it had when the aims
# were set.
MISSED = {
    "mxfp8()": Cost(4.4, 3.1, 1.5),
    "dynamic_fp8()": Cost(9.4, 6.6, 1.5),
    "natural()": Cost(3.5, 2.3, 1.5),
    "qsgd(8, l2)": Cost(4.4, 1.9, 1.5),
    "int4()": Cost(3.2, 2.6, 1.5),
    "mxfp4()": Cost(3.6, 2.8, 1.5),
    "e3m0()": Cost(4.0, 1.6, 1.5),
    "qsgd(3)": Cost(10.1, 4.2, 1.5),
    "qsgd(2)": Cost(3.9, 1.9, 1.5),
    "nuqsgd(4)": Cost(3.7, 1.9, 1.5),
    "nuqsgd(3)": Cost(11.2, 4.5, 1.5),
    "with_levels(8)": Cost(11.6, 4.7, 1.5),
    "scaled(qsgd(2))": Cost(3.9, 2.1, 1.5),
    "terngrad()": Cost(4.4, 2.2, 1.5),
    "two_means()": Cost(11.3, 5.0, 5.1),
    "drive()": Cost(15.9, 5.0, 1.5),
    "top_k(0.01)": Cost(9.1, 4.9, 4.0),
    "top_k(0.1)": Cost(19.5, 11.9, 7.4),
    "block_top_k(64 / 4096)": Cost(7.6, 5.2, 4.0),
    "gspar(0.05)": Cost(12.1, 6.5, 4.0),
    "gspar(variance=3, two_part)": Cost(20.3, 9.9, 23.0),
    "chained(block_top_k, two_means)": Cost(13.1, 6.0, 4.0),
    "chained(gspar, qsgd(4))": Cost(8.6, 5.9, 4.0),
    "alq(3)": Cost(13.9, 5.7, 4.0),
    "alq(3, coordinate)": Cost(19.6, 6.0, 4.0),
    "amq(3)": Cost(20.0, 6.1, 4.0),
    "dgc(0.01)": Cost(9.3, 6.1, 4.0),
}
# With the blocks that users have: those of the register are short, to be tested on short arrays.
DENSE_CODES = {
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
    "terngrad()": jc.terngrad,
    "two_means()": jc.two_means,
    "sign()": jc.sign,
    "scaled_sign()": jc.scaled_sign,
    "scaled_sign(bucket=1024)": lambda: jc.scaled_sign(bucket=1024),
    "one_bit()": jc.one_bit,
    "drive()": jc.drive,
    "scaled(qsgd(2))": lambda: jc.scaled(jc.qsgd(2)),
}
SPARSE_CODES = {
    "top_k(0.01)": lambda: jc.top_k(0.01),
    "top_k(0.1)": lambda: jc.top_k(0.1),
    "block_top_k(64 / 4096)": lambda: jc.block_top_k(64 / 4096),
    "random_k(0.1)": lambda: jc.random_k(0.1),
    "gspar(0.05)": lambda: jc.gspar(0.05),
    "gspar(variance=3, two_part)": lambda: jc.gspar(variance=3.0, code="two_part"),
    "chained(block_top_k, two_means)": lambda: jc.chained(jc.block_top_k(64 / 4096), jc.two_means()),
    "chained(gspar, qsgd(4))": lambda: jc.chained(jc.gspar(0.05), jc.qsgd(4)),
}
ADAPTIVE = {
    "alq(3)": lambda: jd.reducers.alq(3),
    "alq(3, coordinate)": lambda: jd.reducers.alq(3, solver="coordinate"),
    "amq(3)": lambda: jd.reducers.amq(3),
    "dgc(0.01)": lambda: jd.reducers.dgc(0.01),
}


def coded(codes):
    return {name: lambda make=make: jd.compressed(make()) for name, make in codes.items()}


LIMITS = {name: (make, DENSE) for name, make in coded(DENSE_CODES).items()}
LIMITS |= {name: (make, SEARCHING) for name, make in (coded(SPARSE_CODES) | ADAPTIVE).items()}
LIMITS |= {name: (LIMITS[name][0], cost) for name, cost in MISSED.items()}
# A few of each kind, for the other chips.
SAMPLE = ("int4()", "qsgd(3)", "scaled_sign()", "top_k(0.01)", "gspar(0.05)", "alq(3)")


def measure(reducer, shape, mesh):
    """The cost of a step that averages a gradient of this shape."""
    tx = jd.all_reduce(reducer)

    def step(state, gradient):
        mean, state = tx.update(gradient, state)
        return state, mean

    rows = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), jnp.float32)
    lowered = jd.distribute(step, mesh).lower(*pods.abstract(lambda: tx.init(jnp.zeros(shape)), rows, mesh))
    # Of the processor, since other work on the machine would count on a clock.
    start = time.process_time()
    program = lowered.compile()
    seconds = time.process_time() - start
    memory = program.memory_analysis()
    return Cost(seconds, memory.generated_code_size_in_bytes, memory.temp_size_in_bytes)


@functools.cache
def measure_int8(target, shape):
    reducer, mesh = jd.compressed(jc.int8()), mesh_of(target)
    # The first compilation of a process also starts the compiler.
    measure(reducer, (1024,), mesh)
    return measure(reducer, shape, mesh)


@functools.cache
def mesh_of(target):
    return (pods.tpu if target in TPUS else pods.gpu)(target)


def check(target, name, shape):
    make, limits = LIMITS[name]
    base, found = measure_int8(target, shape), measure(make(), shape, mesh_of(target))
    # XLA:TPU may put what is short into a memory that is not counted: a byte for each entry is always allowed.
    allowed = base._replace(temporary=max(base.temporary, math.prod(shape)))
    over = {
        kind: f"{value:.3g}, int8 {least:.3g}"
        for kind, value, least, limit in zip(Cost._fields, found, allowed, limits)
        if value > limit * least
    }
    assert not over, f"{name} of {shape} on {target}: {over}"


def test_every_code_of_the_register_is_here():
    """By the factory that its description names."""
    known = {name.partition("(")[0] for name in LIMITS} | {"int8", "chained"}
    missing = {str(code.make()).partition("(")[0] for code in CODES.values()} - known
    assert not missing


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jaxdist[tpu-plan]'")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LIMITS)
def test_for_tpu_v5e(name, shape):
    check(TPUS[0], name, shape)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jaxdist[tpu-plan]'")
@pytest.mark.parametrize("target", TPUS[1:])
@pytest.mark.parametrize("name", SAMPLE)
def test_for_later_tpus(name, target):
    check(target, name, SHAPES[1])


def has_cuda():
    try:
        return find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda(), reason="needs the CUDA plugin: pip install 'jaxdist[gpu-plan]'")
@pytest.mark.parametrize("name", LIMITS)
def test_for_gpu(name):
    check("h100:1x8", name, SHAPES[0])

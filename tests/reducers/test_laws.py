"""Every law on every line of the register."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import assert_close
from register import CASES, CODES, SHAPES, turn
from register_run import STEPS, ran

from jaxdist._cli import results
from jaxdist.testing import assert_compressor_laws, assert_reducer_laws

SAMPLE = 30  # the same for all, so that they share what a line compiles
each_case = pytest.mark.parametrize("name", CASES)
each_code = pytest.mark.parametrize("name", CODES)
sampled = pytest.mark.sampled(SAMPLE)
few_codes = pytest.mark.sampled(26)


@few_codes
@each_code
def test_compressors_keep_their_laws(name):
    code = CODES[name]
    like = {"shapes": [(37,)], "dtypes": [jnp.float32, jnp.float16]}
    assert_compressor_laws(code.make(), **like, magnitudes=code.magnitudes, loses_nan=code.loses_nan)


@pytest.mark.sampled(3)
@each_code
@pytest.mark.parametrize("size", [0, 1, 37, 600])
def test_compressors_send_what_they_say(name, size):
    code = CODES[name]
    payload = jax.eval_shape(code.make().compress, jax.ShapeDtypeStruct((size,), jnp.float32), jax.random.key(0))
    sent = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))
    if size:
        assert sent == code.bytes(size)
    assert sent <= code.bytes(max(size, 1))


@few_codes
@each_code
def test_compressors_keep_their_types(name, mesh, request):
    """Strict promotion, shapes of every kind, float64, and keys that are agreed or differ under `shard_map`.

    By default every shape with one dtype, from another start for each code; all pairs with `--slow`.
    """
    code = CODES[name].make()
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float64)

    def round_trip(x, key):
        return code.decompress(code.compress(x, key), x)

    def one_worker(x, key):
        return [round_trip(x, k) for k in (key, jax.random.fold_in(key, jax.lax.axis_index("data")))]

    key = jax.random.key(0)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for number, shape in enumerate(((), (1,), (0,), (0, 4), (2, 1, 3, 2, 2))):
            for dtype in dtypes if request.config.getoption("--slow") else [dtypes[(turn(name, 3) + number) % 3]]:
                out = jax.eval_shape(round_trip, jax.ShapeDtypeStruct(shape, dtype), key)
                assert (out.shape, out.dtype) == (shape, dtype)
    mapped = jax.shard_map(one_worker, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    for out in jax.eval_shape(mapped, jax.ShapeDtypeStruct((40,), jnp.float32), key):
        assert out.shape == (40,)


@sampled
@each_case
def test_reducers_keep_their_laws(name, request):
    """Those on dtypes for one half precision, those on values in float32; all with `--slow`."""
    case, half = CASES[name], (jnp.bfloat16, jnp.float16)
    dtypes = (jnp.float32, *half) if request.config.getoption("--slow") else (half[turn(name, 2)],)
    like = {"e": jax.ShapeDtypeStruct((0, 4), jnp.float32), "n": None}
    like |= {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    assert_reducer_laws(
        case.make(),
        workers=4 if case.levels == 1 else {"pod": 2, "chip": 2},
        like=like,
        tolerance=max(case.tolerance, 1e-5),
        dtypes=dtypes,
        loses_nan=case.loses_nan,
    )


@sampled
@each_case
def test_the_wire_carries_what_the_docstring_says(name):
    case, found = CASES[name], ran(name)
    assert found.collectives.wire_bytes == case.bytes(8)
    kinds = [(op.kind, op.dtype) for op in found.collectives.ops for _ in range(op.messages)]
    assert sorted(kinds) == sorted(case.wire)
    assert found.logical.wire_bytes == found.collectives.wire_bytes + case.unused(8)


@sampled
@each_case
def test_mesh_and_simulation_agree(name):
    case, found = CASES[name], ran(name)
    largest = 4.0
    for number in range(1, STEPS + 1):
        assert_close(found.mesh[number].params, found.simulated[number].params, tolerance=case.tolerance * largest)
        assert_close(found.mesh[number].opt, found.simulated[number].opt, tolerance=case.tolerance * largest)


@sampled
@each_case
def test_traced_once_and_the_state_stays_as_it_is(name):
    found = ran(name)
    assert found.traces == 1
    for states in (found.mesh, found.simulated):
        assert len({str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)) for state in states}) == 1
    shardings = [jax.tree.map(lambda x: x.sharding, state) for state in found.mesh]
    assert all(
        a.is_equivalent_to(b, x.ndim)
        for a, b, x in zip(
            jax.tree.leaves(shardings[0]), jax.tree.leaves(shardings[-1]), jax.tree.leaves(found.mesh[0]), strict=True
        )
    )


def test_a_checkpoint_gives_every_state_back(tmp_path, request):
    """By orbax; bit for bit, typed keys too, and in its place on the mesh."""
    names = [name for name in CASES if request.config.getoption("--slow") or not turn(name, SAMPLE)]
    states = {name: ran(name).mesh[-1] for name in names}
    results.save(tmp_path / "states", states)
    restored = results.restore(tmp_path / "states", states)
    assert_close(restored, states, tolerance=0)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, states))

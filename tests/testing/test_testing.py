"""The public law checks find what is broken."""

import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist.comm import over
from jaxdist.compressors import Codec, Compressor, DamagedCodeError
from jaxdist.reducers import Forms, Law, Reduced, Reducer
from jaxdist.testing import assert_codec_laws, assert_compressor_laws, assert_geometry_laws, assert_reducer_laws

LIKE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}


def averaging(change=lambda x: x):
    """The mean of `change(x)`, which claims to be that of `x`."""

    def reduce(updates, state, comm, extras=None):
        del extras
        return Reduced(comm.mean(jax.tree.map(change, updates)), comm.varying(updates)), state

    return Reducer(lambda like: (), reduce)


def local(updates, state, comm, extras=None):
    return Reduced(updates, updates), state


def counting(updates, state, comm, extras=None):
    return averaging().reduce(updates, state, comm)[0], state + 0.5


def strict(updates, state, comm):
    return averaging().reduce(updates, state, comm, None)


def mean_of_zeros(x):
    return x / jnp.max(jnp.abs(x))


def own_is_twice(updates, state, comm, extras=None):
    reduced, state = averaging().reduce(updates, state, comm)
    return Reduced(reduced.mean, jax.tree.map(lambda x: 2 * x, reduced.own)), state


def forgetting():
    """Says inside feedback that all was sent, while half was."""
    half = averaging(lambda x: x / 2)
    return averaging()._replace(forms=Forms(contraction=half))


def holding(deliver=0.5, kept=1.0, mark=jd.Sharded):
    """Delivers a part of what the servers owe, and keeps a part of the rest in a server residual."""

    def init(like):
        return jax.tree.map(lambda x: mark(jnp.zeros(x.shape, x.dtype)), like)

    def reduce(updates, state, comm, extras):
        del extras
        residuals = jax.tree.leaves(state)  # one chunk of the leaf for each worker
        chunks = [comm.reduce_scatter_mean(x.reshape(comm.size, -1)) for x in jax.tree.leaves(updates)]
        owed = [chunk + residual for chunk, residual in zip(chunks, residuals, strict=True)]
        mean = jax.tree.structure(updates).unflatten([deliver * comm.all_gather(x).ravel() for x in owed])
        new = [kept * (1 - deliver) * x for x in owed]
        return Reduced(mean, comm.varying(updates)), jax.tree.structure(state).unflatten(new)

    return Reducer(init, reduce, law=Law.TELESCOPING)


def holding_elsewhere():
    """Adds each server residual to another entry than the one that lost it: totals are right, entries are not."""
    sound = holding()

    def reduce(updates, state, comm, extras):
        reduced, state = sound.reduce(updates, jax.tree.map(lambda x: jnp.roll(x, 1), state), comm, extras)
        return reduced, jax.tree.map(lambda x: jnp.roll(x, 1), state)

    return sound._replace(reduce=reduce)


BROKEN = {
    "the mean and unmarked state are agreed": Reducer(lambda like: (), local),
    "init needs shapes only": Reducer(lambda like: over("data").size, averaging().reduce),
    "state keeps its tree": Reducer(lambda like: jnp.zeros((), jnp.int32), counting),
    "zeros give finite means": averaging(mean_of_zeros),
    "the mean is like the updates": averaging(lambda x: x.astype(jnp.float32)),
    "exact: mean": Reducer(lambda like: (), own_is_twice),
    "feedback telescopes": forgetting(),
    "mean: no state": Reducer(lambda like: jnp.zeros(()), averaging().reduce, Law.MEAN),
    "mean: mean": averaging(lambda x: 2 * x)._replace(law=Law.MEAN),
    "telescoping: server residuals": holding(kept=0.9),
    "unbiased": averaging(lambda x: 0.99 * x)._replace(law=Law.UNBIASED),
    "what is not finite": averaging(lambda x: jnp.where(jnp.isinf(x), 0, x)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_reducer_is_told_its_law(law):
    with pytest.raises(AssertionError, match=f"law '{law}"):
        assert_reducer_laws(BROKEN[law], like=LIKE, steps=2)


def test_a_payload_whose_shape_depends_on_values_is_told_its_law():
    for pick in (lambda x, key: x[x > 0], lambda x, key: x if x.sum() > 0 else 2 * x):
        code = Compressor(pick, lambda payload, like: jnp.zeros(like.shape, like.dtype))
        with pytest.raises(AssertionError, match=r"law 'static shapes' broken for shape \(\), .*depends on values"):
            assert_compressor_laws(code)


def refuse(message):
    raise IndexError(message)


RAISING = {
    "round trip keeps shape and dtype": Compressor(lambda x, key: x.ravel()[:1].reshape(()), lambda p, like: p + 0),
    "decompress follows `like`": Compressor(
        lambda x, key: x, lambda p, like: p if p.dtype == like.dtype else refuse("no cast")
    ),
    "jit equals eager": Compressor(
        lambda x, key: x if isinstance(x, jax.core.Tracer) else refuse("not traced"),
        lambda p, like: p.astype(like.dtype),
    ),
    "add is decompress, added": Compressor(
        lambda x, key: x, lambda p, like: p.astype(like.dtype), add=lambda p, total: refuse("no sum")
    ),
}


@pytest.mark.parametrize("law", RAISING)
def test_a_compressor_that_raises_is_told_the_law(law):
    shapes = [(0,)] if law.startswith("round") else [(3,)]
    with pytest.raises(AssertionError, match=rf"law '{law}' broken.*: it raises \w+: ") as caught:
        assert_compressor_laws(RAISING[law], shapes=shapes)
    assert caught.value.__cause__ is not None


def test_a_code_that_loses_extreme_entries_is_told_their_magnitude():
    squares = Compressor(
        lambda x, key: x * jnp.abs(x),
        lambda p, like: (jnp.sign(p) * jnp.sqrt(jnp.abs(p))).astype(like.dtype),
        contraction=lambda shape: 0.9,
    )
    with pytest.raises(
        AssertionError, match=r"law 'contraction' broken .*, entries from 4.6e-21 to .*: before you .* jnp.frexp"
    ):
        assert_compressor_laws(squares, shapes=[(3,)], dtypes=[jnp.float32])


def test_extras_must_be_accepted():
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given") as caught:
        assert_reducer_laws(Reducer(lambda like: (), strict), like=LIKE)
    assert caught.value.__notes__[-1] == "law 'the mean is like the updates' broken: the reducer raises this"


def test_server_residuals_that_are_delivered_to_the_wrong_entries_are_found():
    with pytest.raises(AssertionError, match="an entry lacks"):
        assert_reducer_laws(holding_elsewhere(), like={"w": jax.ShapeDtypeStruct((32,), jnp.float32)}, steps=100)


@pytest.mark.slow
def test_a_sound_reducer_passes_with_the_standard_leaves():
    assert_reducer_laws(averaging())
    assert_reducer_laws(averaging(lambda x: x / 2)._replace(law=Law.NONE), like=LIKE)
    assert_reducer_laws(jd.exact(), workers={"pod": 2, "chip": 2}, like=LIKE)
    assert_reducer_laws(holding(), like=LIKE)


def encode_rounded(payload, like):
    body = zlib.compress(payload.tobytes())
    return zlib.crc32(body).to_bytes(4, "little") + body


def decode_rounded(body, like):
    if zlib.crc32(body[4:]).to_bytes(4, "little") != body[:4]:
        raise DamagedCodeError("cut or altered")
    return np.frombuffer(zlib.decompress(body[4:]), np.int8).reshape(like.shape)


def rounded(**changes):
    """Rounds to integers, with a codec of which some functions are replaced."""
    codec = Codec(encode_rounded, decode_rounded, lambda payload, like: jnp.float32(8.0 * payload.size), "rounded")
    return Compressor(
        lambda x, key: jnp.nan_to_num(jnp.clip(jnp.round(x), -9, 9)).astype(jnp.int8),
        lambda payload, like: payload.astype(like.dtype),
        codec=codec._replace(**changes),
    )


COUNTER = itertools.count()
BROKEN_CODECS = {
    "encode returns bytes": {"encode": lambda payload, like: bytearray(encode_rounded(payload, like))},
    "one payload, one code": {"encode": lambda payload, like: str(next(COUNTER)).encode()},
    "decode returns a payload": {"decode": lambda body, like: decode_rounded(body, like).astype(np.int32)},
    "decoded payloads decompress alike": {"decode": lambda body, like: -decode_rounded(body, like)},
    "expected_bits is f32[]": {"expected_bits": lambda payload, like: jnp.sum(payload, dtype=jnp.int32)},
    "expected_bits": {"expected_bits": lambda payload, like: jnp.zeros(())},
    "other bytes are refused": {"decode": lambda body, like: decode_rounded(body.removesuffix(b"\0"), like)},
}


@pytest.mark.parametrize("law", BROKEN_CODECS)
def test_a_broken_codec_is_told_its_law(law):
    with pytest.raises(AssertionError, match=f"law '{re.escape(law)}' broken"):
        assert_codec_laws(rounded(**BROKEN_CODECS[law]), shapes=[(1000,)], dtypes=[jnp.float32])


def test_damage_must_be_named():
    def decode(body, like):
        try:
            return decode_rounded(body, like)
        except DamagedCodeError as error:
            raise EOFError from error

    with pytest.raises(EOFError) as caught:
        assert_codec_laws(rounded(decode=decode), shapes=[(100,)], dtypes=[jnp.float32])
    assert caught.value.__notes__ == ["law 'other bytes are refused' broken: this is no DamagedCodeError"]


def test_a_sound_codec_passes():
    assert_codec_laws(rounded(), shapes=[(), (0,), (3, 40)])


def test_a_compressor_without_a_codec_is_told_so():
    with pytest.raises(AssertionError, match=r"qsgd\(4\) has none"):
        assert_codec_laws(jd.qsgd(4))


def test_laws_need_something_to_check():
    with pytest.raises(ValueError, match="models must be two or more different ones, got 1"):
        assert_geometry_laws(jd.online.euclidean(), [jnp.zeros(2)])
    with pytest.raises(ValueError, match="shapes and dtypes must not be empty"):
        assert_compressor_laws(jd.qsgd(4), shapes=[])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        assert_reducer_laws(jd.exact(), steps=0)

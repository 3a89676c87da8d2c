"""The code of patches: exact for all bits, equal to its reference, and as small as it says."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import weight_patches

from jaxdist.compressors import DamagedCodeError
from jaxdist.publish import patches
from jaxdist.publish.changes import find_changes
from jaxdist.publish.patches import Reader, apply_patch, decode_vectors, encode_vectors
from jaxdist.publish.words import PublishedLeaf

DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int8",
    "int32",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
)


@st.composite
def states(draw, largest=3000):
    """Leaves, and two states of them: random bits, steps of the last bits, or numbers like weights."""
    shapes = draw(st.lists(st.sampled_from([(), (0,), (1,), (3, 5), (1000,), (largest,)]), min_size=1, max_size=4))
    leaves = [PublishedLeaf(f"w{n}", shape, draw(st.sampled_from(DTYPES))) for n, shape in enumerate(shapes)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density, step = draw(st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0])), draw(st.sampled_from([0, 1, 100]))
    old, new = [], []
    for leaf in leaves:
        weights = rng.normal(scale=0.02, size=leaf.size).astype(jnp.dtype(leaf.dtype))
        words = np.resize(weights.view(leaf.bits), leaf.size) if step else random_words(rng, leaf)
        moved = words + rng.integers(-step, step + 1, leaf.size).astype(leaf.bits) if step else random_words(rng, leaf)
        old.append(words.copy())
        new.append(np.where(rng.random(leaf.size) < density, moved, words))
    return leaves, old, new


def encode_patch(old, new, leaves):
    return patches.encode_patch([find_changes(*pair) for pair in zip(old, new, strict=True)], old, leaves)


def random_words(rng, leaf):
    return rng.integers(0, 2 ** (8 * leaf.bits.itemsize), leaf.size, dtype=np.uint64).astype(leaf.bits)


def assert_equal(found, wanted):
    assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(found, wanted, strict=True))


@given(states())
@settings(max_examples=20)
def test_every_bit_comes_back_and_the_reference_reads_the_same(case):
    leaves, old, new = case
    body = encode_patch(old, new, leaves)
    assert_equal(weight_patches.apply(body, old, leaves), new)
    apply_patch(body, old, leaves)
    assert_equal(old, new)


@pytest.mark.parametrize("part", [7, 64])
def test_parts_that_cut_leaves(part, monkeypatch):
    monkeypatch.setattr(patches, "PART", part)
    leaves = [PublishedLeaf(name, (size,), "bfloat16") for name, size in (("a", 5), ("b", 0), ("c", 150))]
    rng = np.random.default_rng(0)
    old = [random_words(rng, leaf) for leaf in leaves]
    new = [x + (rng.random(x.size) < 0.3).astype(x.dtype) for x in old]
    for some in (leaves, leaves[::-1]):
        words = [x.copy() for x in (old if some is leaves else old[::-1])]
        wanted = new if some is leaves else new[::-1]
        apply_patch(encode_patch(words, wanted, some), words, some)
        assert_equal(words, wanted)


numbers = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), min_size=1, max_size=200)


@given(st.lists(numbers, max_size=70), st.integers(1, 3))
@settings(max_examples=30)
def test_numbers_of_any_size(vectors, copies):
    vectors = [x * 10**copies for x in vectors[:3]] + vectors[3:]
    reader = Reader(encode_vectors([np.array(x, np.uint64) for x in vectors]))
    assert [x.tolist() for x in decode_vectors(reader, [*map(len, vectors)])] == vectors
    reader.finish()


def test_a_step_of_the_last_bit_takes_hardly_more_than_its_entropy():
    """Positions of 1 % of 400,000 words, and a sign each: 0.0808 + 0.01 bits a word."""
    rng, size = np.random.default_rng(0), 400_000
    leaf, old = PublishedLeaf("w", (size,), "bfloat16"), np.full(size, 0x3C00, np.uint16)
    changed = rng.random(size) < 0.01
    new = old + np.where(changed, rng.choice(np.array([1, 0xFFFF], np.uint16), size), 0).astype(np.uint16)
    entropy = size * (0.0808 + 0.01) / 8
    assert len(encode_patch([old], [new], [leaf])) < 1.08 * entropy


def test_classes_of_the_old_exponent_pay_where_small_weights_change(monkeypatch):
    """A step of one size changes small weights more often than large ones, which have longer last bits."""
    monkeypatch.setattr(patches, "BLOCK", 2**14)
    rng = np.random.default_rng(0)
    leaf, master = PublishedLeaf("w", (100_000,), "bfloat16"), rng.normal(scale=0.02, size=100_000).astype(np.float32)
    step = rng.choice([-2e-6, 2e-6], 100_000).astype(np.float32)
    old, new = (x.astype(jnp.bfloat16).view(np.uint16) for x in (master, master + step))
    with_classes = encode_patch([old], [new], [leaf])
    assert with_classes[9] == patches.CLASSES
    where = np.flatnonzero(old != new)
    alone = patches._plan_simple(patches._Part(where, old[where], new[where], len(old)))
    assert len(with_classes) < 0.9 * len(encode_vectors(alone.vectors))
    assert_equal(weight_patches.apply(with_classes, [old], [leaf]), [new])
    apply_patch(with_classes, [old], [leaf])
    assert_equal([old], [new])


def test_bytes_that_are_no_patch():
    leaf, old = PublishedLeaf("w", (1000,), "int8"), np.zeros(1000, np.uint8)
    body = encode_patch([old], [np.ones_like(old)], [leaf])
    for damaged in (b"", b"jdpatch1" + body[8:], body[:-1], body + b"0", body[:9] + b"\3" + body[10:]):
        with pytest.raises((DamagedCodeError, ValueError)):
            apply_patch(damaged, [old.copy()], [leaf])

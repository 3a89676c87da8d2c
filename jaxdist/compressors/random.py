"""Cheap uniform noise for stochastic rounding: a counter-based hash that XLA fuses into the codec.

Threefry at one draw per element costs about ten times what the rest of a codec does. Stochastic rounding needs
unbiased and uncorrelated noise but no secrecy, so the position of an element and the key, mixed by two rounds of an
integer finalizer, are enough: nothing is stored and the noise never reaches memory.

References:
  Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC, 2011.
  Wellons, "Prospecting for hash functions", 2018 (the constants of the finalizer).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Float, PRNGKeyArray, Shape, UInt

# `noise(key, shape)`: independent float32 uniforms in [0, 1).
Noise = Callable[[Any, Shape], Float[Array, "..."]]

SHUFFLE_ROUNDS = 64


class Stream(NamedTuple):
    """The words of a key (`key_words`), and the position of the first number that is drawn: a part of its stream."""

    left: UInt[Array, ""]
    right: UInt[Array, ""]
    first: UInt[Array, ""]


# What noise is drawn with.
KeyOrStream = PRNGKeyArray | Stream


def uniform_hash(key: KeyOrStream, shape: Shape) -> Float[Array, "..."]:
    """Uniforms in [0, 1) with 24 bits each, from a keyed hash of the element's position.

    `u_i = (h(h(i ^ left) ^ right) >> 8) / 2**24`, where `left, right` are two words that depend on the whole key.

    One key, of any implementation, gives one stream of at most 2**32 float32, and neighboring keys unrelated streams.

    Examples:
      >>> import jax
      >>> noise = uniform_hash(jax.random.key(0), (2, 50_000))
      >>> abs(float(noise.mean()) - 0.5) < 0.005, bool((noise >= 0).all() & (noise < 1).all())
      (True, True)
    """
    # Through int32: CPUs convert signed integers to floats in one instruction, unsigned ones in many.
    return (hash_words(key, shape) >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def hash_words(key: KeyOrStream, shape: Shape) -> UInt[Array, "..."]:
    """32 random bits for each position: a keyed hash of it."""
    left, right, *first = key if isinstance(key, Stream) else key_words(key)
    counter = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return mix(mix(sum(first, counter) ^ left) ^ right)


def mix(word: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """One round of a 32-bit finalizer: a bijection in which each input bit flips each output bit half of the time."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def key_words(key: PRNGKeyArray) -> tuple[UInt[Array, ""], UInt[Array, ""]]:
    """Two words that both depend on every bit of the key, without loss for a key of 64 bits.

    A Feistel network over the key's words. It separates keys that differ in one bit, such as `key(0)` and `key(1)`;
    with the raw words, such streams would be permutations of each other.
    """
    words = jax.random.key_data(key)
    # Any two different words: the digits of the golden ratio, and the same doubled.
    left, right = jnp.uint32(0x9E3779B9), jnp.uint32(0x3C6EF372)
    for i in range(words.shape[0]):
        left, right = right, left ^ mix(right ^ words[i])
    return right, left ^ mix(right)


def random_subset(seed: UInt[Array, ""], count: int, size: int) -> UInt[Array, " count"]:
    """`count` different positions out of `range(size)`, each subset (nearly) equally likely, without a sort.

    The first `count` values of a keyed permutation of `range(size)`. A round pairs every position `i` with `K - i`
    (mod size) for a random K and swaps both or neither, by a bit hashed from the pair; the cost is `count` times the
    number of rounds, whatever `size` is.

    Equal seeds give equal subsets on all workers; positions are in random order, and `size` is below 2**32.

    Examples:
      >>> import jax.numpy as jnp
      >>> sorted(random_subset(jnp.uint32(7), 5, 5).tolist())
      [0, 1, 2, 3, 4]

    References:
      Hoang et al., "An enciphering scheme based on a card shuffle", arXiv:1208.1176, 2012.
    """
    # The seed enters the first carry so that its type (per-worker or not) is that of the later carries.
    # A multiple of 8 positions, since XLA:CPU is ten times slower for odd lengths.
    positions = jax.lax.iota(jnp.uint32, count + -count % 8) + (seed & 0)
    rounds = jax.lax.iota(jnp.uint32, SHUFFLE_ROUNDS)
    pairings = mix(mix(2 * rounds) ^ seed) % jnp.uint32(max(size, 1))
    salts = mix(mix(2 * rounds + 1) ^ seed)

    def swap_or_not(positions: Array, constants: tuple[Array, Array]) -> tuple[Array, None]:
        pairing, salt = constants
        # u32 arithmetic wraps, so the difference modulo `size` needs one correction and no wider type.
        partners = pairing - positions + jnp.where(positions > pairing, jnp.uint32(size), jnp.uint32(0))
        swap = mix(jnp.maximum(positions, partners) ^ salt) >> 31
        return jnp.where(swap == 1, partners, positions), None

    return jax.lax.scan(swap_or_not, positions, (pairings, salts))[0][:count]

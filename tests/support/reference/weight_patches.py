"""A reader of patches that takes one word after another, after the page of the format; positions of few words aside."""

import jax.numpy as jnp
import numpy as np

from jaxdist.compressors.positions import decode_host_positions, positions_bytes


class Patch:
    """The bytes of a patch, taken from the front."""

    def __init__(self, body):
        assert body[:8] == b"jdpatch1"
        self.rest = body[8:]

    def take(self, count):
        taken, self.rest = self.rest[:count], self.rest[count:]
        assert len(taken) == count
        return taken

    def number(self, size):
        return int.from_bytes(self.take(size), "little")

    def numbers(self, count):
        kind = self.number(1)
        if kind == 255:
            length = self.number(1)
            return self.bits(count, length)
        symbols = self.symbols(count, kind + 1)
        lengths = [0 if s < 8 else (s - 8) // 4 + 1 for s in symbols]
        values = [s if s < 8 else (4 + (s - 8) % 4) << length for s, length in zip(symbols, lengths)]
        for length in sorted(set(lengths) - {0}):
            where = [n for n, other in enumerate(lengths) if other == length]
            for n, rest in zip(where, self.bits(len(where), length)):
                values[n] += rest
        return values

    def bits(self, count, length):
        """Numbers of so many bits, the lowest first."""
        bits = "".join(f"{byte:08b}" for byte in self.take(-(-count * length // 8)))
        return [int(bits[n * length : (n + 1) * length][::-1] or "0", 2) for n in range(count)]

    def symbols(self, count, alphabet):
        if count == 0:
            return []
        lanes, length = self.number(4), self.number(4)
        shares = [self.number(2) for _ in range(alphabet)]
        before = [sum(shares[:s]) for s in range(alphabet)]
        states, found = [self.number(4) for _ in range(lanes)], []
        words = [self.number(2) for _ in range(length)]
        for _ in range(-(-count // lanes)):
            for lane, state in enumerate(states):
                slot = state % 2**14
                s = max(s for s in range(alphabet) if before[s] <= slot and shares[s])
                found.append(s)
                states[lane] = shares[s] * (state // 2**14) + slot - before[s]
            states = [state if state >= 2**16 else state * 2**16 + words.pop(0) for state in states]
        assert not words
        return found[:count]


def apply(body, old, leaves):
    """The state after a patch, of the words before it."""
    patch, new = Patch(body), [x.tolist() for x in old]
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
    for dtype in dtypes:
        where = [(n, i) for n, leaf in enumerate(leaves) if leaf.dtype == dtype for i in range(leaf.size)]
        bits = 8 * next(leaf.bits.itemsize for leaf in leaves if leaf.dtype == dtype)
        if patch.number(1) == 0:
            parts = [[place for place in where if place[0] == n] for n in range(len(leaves))]
        else:
            parts = [where]
        for part in filter(None, parts):
            form = patch.number(1)
            if form != 3:
                apply_form(patch, form, new, part, bits)
                continue
            info = jnp.finfo(dtype)
            exponents = [new[n][i] >> info.nmant & (2**info.nexp - 1) for n, i in part]
            largest = max(exponents)
            classes = [min(largest - e, 23) for e in exponents]
            for kind in range(24):
                apply_form(patch, patch.number(1), new, [p for p, c in zip(part, classes) if c == kind], bits)
    assert not patch.rest
    return [np.array(x, y.dtype) for x, y in zip(new, old)]


def apply_form(patch, form, new, part, bits):
    if form == 0:
        return
    count = patch.number(4)
    if form == 1:
        taken = positions_bytes(count, len(part))
        plain = np.dtype(np.uint16 if len(part) <= 2**16 else np.uint32)
        dtype = plain if taken == count * plain.itemsize else np.dtype(np.uint8)
        places = decode_host_positions(np.frombuffer(patch.take(taken), dtype), count, len(part)).tolist()
        values = [patch.number(bits // 8) for _ in range(count)]
    else:
        assert form == 2
        places, at = [], -1
        for gap in patch.numbers(count):
            at += gap + 1
            places.append(at)
        steps = [code + 1 for code in patch.numbers(count)]
        steps = [code // 2 if code % 2 == 0 else -(code // 2) - 1 for code in steps]
        values = [(new[part[p][0]][part[p][1]] + step) % 2**bits for p, step in zip(places, steps)]
    for place, value in zip(places, values):
        n, i = part[place]
        new[n][i] = value

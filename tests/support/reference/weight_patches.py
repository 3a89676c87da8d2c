"""A reader of patches that takes one word after another, after the page of the format."""

import jax.numpy as jnp
import numpy as np


class Patch:
    """The bytes of a patch, taken from the front."""

    def __init__(self, body):
        assert body[:8] == b"jdpatch2"
        self.rest = body[8:]

    def take(self, count):
        taken, self.rest = self.rest[:count], self.rest[count:]
        assert len(taken) == count
        return taken

    def number(self, size):
        return int.from_bytes(self.take(size), "little")

    def vectors(self, counts):
        found = []
        for start in range(0, len(counts), 64):
            some, kinds, streams = counts[start : start + 64], [], []
            for _ in some:
                kind = self.number(1)
                kinds.append((kind, self.number(1) if kind == 255 else None))
            for count, (kind, _) in zip(some, kinds):
                if kind != 255:
                    lanes = self.number(4)
                    shares = [self.number(2) for _ in range(kind + 1)]
                    streams.append((count, shares, [self.number(4) for _ in range(lanes)]))
            symbols = iter(self.symbols(streams))
            for count, (kind, width) in zip(some, kinds):
                found.append(self.bits(count, width) if kind == 255 else self.join(next(symbols)))
        return found

    def join(self, symbols):
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

    def symbols(self, streams):
        if not streams:
            return []
        words, found = [self.number(2) for _ in range(self.number(4))], [[] for _ in streams]
        while any(len(some) < count for some, (count, _, _) in zip(found, streams)):
            for some, (count, shares, states) in zip(found, streams):
                if len(some) >= count:
                    continue
                for lane, state in enumerate(states):
                    slot = state % 2**14
                    s = max(s for s in range(len(shares)) if sum(shares[:s]) <= slot and shares[s])
                    some.append(s)
                    state = shares[s] * (state // 2**14) + slot - sum(shares[:s])
                    states[lane] = state if state >= 2**16 else state * 2**16 + words.pop(0)
        assert not words
        return [some[:count] for some, (count, _, _) in zip(found, streams)]


def apply(body, old, leaves):
    """The state after a patch, of the words before it."""
    patch, new, parts = Patch(body), [x.tolist() for x in old], []
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        where = [(n, i) for n, leaf in enumerate(leaves) if leaf.dtype == dtype for i in range(leaf.size)]
        if patch.number(1) == 0:
            cut = [[place for place in where if place[0] == n] for n in range(len(leaves))]
        else:
            cut = [where]
        for part in filter(None, cut):
            length = patch.number(1)
            assert length in (0, 1, 24)
            parts.append((dtype, part, [patch.number(4) for _ in range(length)]))
    vectors = iter(patch.vectors([count for *_, counts in parts for count in counts if count for _ in range(2)]))
    for dtype, part, counts in parts:
        members = [part]
        if len(counts) == 24:
            info = jnp.finfo(dtype)
            exponents = [new[n][i] >> info.nmant & (2**info.nexp - 1) for n, i in part]
            largest = max(exponents)
            classes = [min(largest - e, 23) for e in exponents]
            members = [[p for p, c in zip(part, classes) if c == kind] for kind in range(24)]
        bits = 8 * next(leaf.bits.itemsize for leaf in leaves if leaf.dtype == dtype)
        for some, count in zip(members, counts):
            at = -1
            for gap, code in zip(next(vectors), next(vectors)) if count else ():
                at, code = at + gap + 1, code + 1
                n, i = some[at]
                new[n][i] = (new[n][i] + (code // 2 if code % 2 == 0 else -(code // 2) - 1)) % 2**bits
    assert not patch.rest
    return [np.array(x, y.dtype) for x, y in zip(new, old)]

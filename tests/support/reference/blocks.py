"""Block codes and their kin in float64, nothing packed: OCP MX (arXiv 2310.10537), BAGUA, TernGrad, natural, DRIVE."""

import numpy as np


def grid(mantissa, emin, largest):
    """The magnitudes of a small float: the unit doubles with each power of two from `2**(emin + 1)` on."""
    values = [0.0]
    while values[-1] < largest:
        unit = 2.0 ** (max(np.floor(np.log2(max(values[-1], 1e-30))), emin) - mantissa)
        values.append(values[-1] + unit)
    return np.array(values)


GRIDS = {"e4m3": grid(3, -6, 448.0), "e5m2": grid(2, -14, 57344.0), "e2m1": grid(1, 0, 6.0)}
GRIDS["e3m0"] = np.array([0.0, *2.0 ** np.arange(-2, 5)])
GRIDS |= {"int8": np.arange(128.0), "int4": np.arange(8.0)}


def nearest(x, values):
    """Ties to the even code; saturating."""
    size = np.minimum(np.abs(x), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def in_blocks(x, block, values, scale_of):
    """`scale_of(largest)`; all of the last block counts, however short."""
    parts = [x[i : i + block] for i in range(0, x.size, block)]
    scales = [scale_of(np.abs(part).max()) for part in parts]
    return np.concatenate([s * nearest(part / s, values) if s else 0 * part for part, s in zip(parts, scales)])


def mx_scale(emax):
    return lambda largest: 2.0 ** (np.floor(np.log2(largest)) - emax) if largest else 0.0


def min_max(x):
    """BAGUA's, with its 1e-7: codes and values."""
    scale = 255 / (x.max() - x.min() + 1e-7)
    upper = np.rint(x.max() * scale)
    codes = np.minimum(np.rint(x * scale), upper) - (upper - 255)
    return codes, (codes + upper - 255) / scale


def ternary_variance(x):
    return np.abs(x).max() * np.abs(x).sum() - (x**2).sum()


def natural_variance(x):
    low = 2.0 ** np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x))))
    return float(np.where(x == 0, 0.0, (2 * low - np.abs(x)) * (np.abs(x) - low)).sum())


def drive(x, signs):
    """One block, of the length of `signs`."""
    i = np.arange(len(signs))
    bits = np.array([[bin(a & b).count("1") % 2 for b in i] for a in i])
    rotation = (1.0 - 2.0 * bits) / np.sqrt(len(signs)) * signs
    rotated = rotation @ x
    return np.abs(rotated).mean() * rotation.T @ np.where(rotated >= 0, 1.0, -1.0)

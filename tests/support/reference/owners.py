"""Reduction by owners in float64: what one island after another reads, sends and gets."""

import numpy as np


def reduce_by_owners(drifts, weights, pieces):
    """`drifts` has a vector for each island: the mean that all get, and the entries that each one sends and receives.

    Island `i` owns the pieces `p` with `p % K == i`.
    """
    islands, size = drifts.shape
    length = -(-size // pieces)
    padded = np.zeros((islands, pieces * length))
    padded[:, :size] = drifts
    rows = padded.reshape(islands, pieces, length)
    means, sent, received = np.zeros((pieces, length)), np.full(islands, pieces * length), np.zeros(islands, int)
    for piece in range(pieces):
        owner = piece % islands
        # It has its own already.
        received[owner] += (islands - 1) * length
        means[piece] = np.average(rows[:, piece], axis=0, weights=weights)
        sent[owner] += length
        received[np.arange(islands) != owner] += length
    return means.ravel()[:size], sent, received

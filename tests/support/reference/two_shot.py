"""Two shots with worker and server errors (arXiv 2102.02888, DeepSpeed's `compressed_allreduce`) in float64."""

import numpy as np


def scaled_sign(x):
    return np.abs(x).mean() * np.where(x >= 0, 1.0, -1.0)


def two_shot(updates, code, back):
    """`[steps, W, n]`, n a multiple of W: means `[steps, n]`, worker errors `[steps, W, n]`, server errors."""
    _, workers, n = updates.shape
    mine, server = np.zeros((workers, n)), np.zeros((workers, n // workers))
    means, mines, servers = [], [], []
    for x in updates:
        chunks = (x + mine).reshape(workers, workers, -1)
        sent = np.array([[code(chunk) for chunk in row] for row in chunks])
        mine = (chunks - sent).reshape(workers, n)
        whole = sent.mean(0) + server
        returned = np.array([back(chunk) for chunk in whole])
        server = whole - returned
        means.append(returned.ravel())
        mines.append(mine)
        servers.append(server.ravel())
    return np.array(means), np.array(mines), np.array(servers)

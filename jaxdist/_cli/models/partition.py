"""Divides examples among workers whose data differ."""

from collections.abc import Callable

import numpy as np


def dirichlet_partition(labels: np.ndarray, workers: int, *, concentration: float, seed: int = 0) -> list[np.ndarray]:
    """Divides examples equally among workers, with a different mixture of labels for each.

    Each worker draws its mixture from a Dirichlet distribution around the labels' frequencies and then draws examples
    from it until it has its share; labels that are used up are skipped.

    Args:
      labels: `[n]` integers.
      workers: number of workers; each gets `n // workers` examples.
      concentration: smaller values make workers more different: 0.1 leaves one to three labels each, 100 gives nearly
        the same mixture to all.
      seed: draws the mixtures and the examples.

    Returns:
      For each worker the indices of its examples, without repetition.

    Raises:
      ValueError: `concentration` is not positive, or there are fewer examples than workers.

    Example:
      >>> import numpy as np
      >>> from jaxdist._cli.models.partition import dirichlet_partition
      >>> [len(part) for part in dirichlet_partition(np.arange(100) % 10, 8, concentration=0.1)]
      [12, 12, 12, 12, 12, 12, 12, 12]

    References:
      Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
      arXiv 1909.06335, 2019.
    """
    if not concentration > 0:
        raise ValueError(f"concentration must be positive, got {concentration}")
    if not 1 <= workers <= len(labels):
        raise ValueError(f"workers must be between 1 and the {len(labels)} examples, got {workers}")
    rng = np.random.default_rng(seed)
    names, counts = np.unique(labels, return_counts=True)
    stock = [list(rng.permutation(np.flatnonzero(labels == name))) for name in names]
    parts = []
    for _ in range(workers):
        # No label at zero, since the last workers get the labels that are left.
        mixture = rng.dirichlet(concentration * len(names) * counts / len(labels)) + 1e-12
        own = []
        for _ in range(len(labels) // workers):
            chances = mixture * np.array([len(left) > 0 for left in stock])
            own.append(stock[rng.choice(len(names), p=chances / chances.sum())].pop())
        parts.append(np.array(own))
    return parts


def own_batches(parts: list[np.ndarray]) -> Callable[[int, int, int], np.ndarray]:
    """Makes batches in which each worker's rows come from its own examples.

    Args:
      parts: the indices of each worker's examples.

    Returns:
      `rows(seed, step, size)`: `[size]` indices, drawn with replacement; the first `size / workers` of them belong to
      worker 0, and so on, as `distribute` and `simulate` divide them.

    Example:
      >>> import numpy as np
      >>> from jaxdist._cli.models.partition import own_batches
      >>> own_batches([np.array([7]), np.array([9])])(0, 0, 4).tolist()
      [7, 7, 9, 9]
    """

    def rows(seed: int, step: int, size: int) -> np.ndarray:
        if size % len(parts):
            raise ValueError(f"a batch must be a multiple of the {len(parts)} workers, got {size}")
        rng = np.random.default_rng((seed, step))
        return np.concatenate([rng.choice(part, size // len(parts)) for part in parts])

    return rows

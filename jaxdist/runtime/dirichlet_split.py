"""A split of data among workers with unequal shares of the labels."""

import numpy as np
from jaxtyping import Int, Shaped

from .._core.checks import check_range


def dirichlet_split(
    labels: Shaped[np.ndarray, " n"], workers: int, *, concentration: float | int, seed: int = 0
) -> list[Int[np.ndarray, " _"]]:
    """Divides examples equally among workers, with a different mixture of labels for each.

    Each worker draws its mixture from a Dirichlet distribution around the frequencies `p` of the `K` labels,

        q_w ~ Dirichlet(α K p)

    and then draws examples from it without replacement until it has its share; labels that are used up are skipped, so
    that the last workers get what is left. The result depends on the arguments alone.

    Args:
      labels: `[n]` values of any dtype; a share is `n // workers` examples, and the first `n % workers` workers have
        one more, so that each example belongs to exactly one worker.
      workers: their number, at most `n`.
      concentration: `α`, the similarity of the workers: 0.1 leaves one to three labels each, 100 gives nearly the same
        mixture to all.
      seed: of all draws.

    Returns:
      For each worker the positions of its examples in `labels`.

    Raises:
      ValueError: `concentration` is not positive, or there are fewer examples than workers.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> parts = jd.runtime.dirichlet_split(np.arange(100) % 10, 8, concentration=0.1)
      >>> [len(part) for part in parts]
      [13, 13, 13, 13, 12, 12, 12, 12]

    References:
      Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
      arXiv:1909.06335, 2019. With `K` the concentration does not depend on the number of labels.
    """
    check_range("concentration", concentration, 0, ends="(]")
    if not 1 <= workers <= len(labels):
        raise ValueError(f"workers must be between 1 and the {len(labels)} examples, got {workers}")
    rng = np.random.default_rng(seed)
    names, counts = np.unique(labels, return_counts=True)
    stock = [list(rng.permutation(np.flatnonzero(labels == name))) for name in names]
    parts = []
    for _ in range(workers):
        # Dirichlet(α K p) has mean p, whatever the concentration α.
        # No label at zero, since the last workers get the labels that are left.
        mixture = rng.dirichlet(concentration * len(names) * counts / len(labels)) + 1e-12
        own = []
        for _ in range(len(labels) // workers):
            # A label that is used up has no chance; the others keep their proportions.
            chances = mixture * np.array([len(left) > 0 for left in stock])
            own.append(stock[rng.choice(len(names), p=chances / chances.sum())].pop())
        parts.append(own)
    # One more for the first workers, until nothing is left.
    for own, example in zip(parts, [example for left in stock for example in left], strict=False):
        own.append(example)
    return [np.array(own) for own in parts]

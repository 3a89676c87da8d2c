"""Models of slow workers, and what they compute in a fixed time."""

import numpy as np
from jaxtyping import Float, Int, Shaped

from .._core.checks import check_range


def count_processed(
    seconds: Shaped[np.ndarray, "*workers most"], window: float | int, *, last: str = "drop"
) -> Int[np.ndarray, "*workers"]:
    """The number of examples that each worker processes in a fixed time: `b`, for `examples=` of an update.

    The round takes `window` and the communication on every worker, however slow some are.

    Args:
      seconds: the time of each of a worker's examples, one after the other, for the largest batch.
      window: the time of a round.
      last: the treatment of the example under way at the end: `"drop"`, or `"finish"` (the round then takes longer).
        Dropping favors cheap examples, since costly ones are more often the last.

    Examples:
      >>> import numpy as np
      >>> from jaxdist.schedule import count_processed
      >>> count_processed(np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), 2.5).tolist()
      [2, 1]

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv:2006.05752, 2019.
    """
    check_range("window", window, 0, ends="[]")
    if last not in ("drop", "finish"):
        raise ValueError(f'last must be "drop" or "finish", got {last!r}')
    each = np.asarray(seconds, np.float64)
    ends = np.cumsum(each, axis=-1)
    # Times that fill the window exactly count, although sums of seconds such as 0.1 are rounded.
    done = ends <= window * (1 + 1e-9)
    # What was begun before the end is finished.
    begun = ends - each < window * (1 - 1e-9)
    return (done | begun if last == "finish" else done).sum(-1)


def anytime_window(seconds: float | int, *, workers: int, batch: int) -> float:
    """A time in which workers together process `batch` examples or more, on average: `(1 + W/batch) μ`.

    `μ = seconds` is the mean time that a worker takes for its share, `batch / workers` examples.

    Examples:
      >>> from jaxdist.schedule import anytime_window
      >>> anytime_window(2.5, workers=10, batch=1000)
      2.525
    """
    check_range("seconds", seconds, 0, ends="(]")
    check_range("workers", workers, 0, ends="(]")
    check_range("batch", batch, 0, ends="(]")
    return float((1 + workers / batch) * seconds)


def shifted_exponential(
    rng: np.random.Generator, shape: tuple[int, ...], *, least: float | int, excess: float | int
) -> Float[np.ndarray, "..."]:
    """Draws times that are `least` plus an exponential excess: the usual model of stragglers.

    Their mean is `least + excess`; the largest of `n` has mean `least + excess (1 + 1/2 + ... + 1/n)`.

    Examples:
      >>> import numpy as np
      >>> from jaxdist.schedule import shifted_exponential
      >>> times = shifted_exponential(np.random.default_rng(0), (1000, 10), least=1.0, excess=1.5)
      >>> bool(abs(times.max(1).mean() - 5.39) < 0.2)
      True

    References:
      Lee et al., "Speeding Up Distributed Machine Learning Using Codes", arXiv:1512.02673, 2018.
    """
    return least + excess * rng.exponential(size=shape)

"""Examples of a fixed time: masks, windows, the clock of stragglers, regret."""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist.online import dynamic_regret, path_length, static_regret
from jaxdist.schedule import anytime_window, count_processed, shifted_exponential


def losses(w, batch):
    return jnp.sqrt(batch["x"] @ w) + batch["y"]


def test_the_first_examples_count_and_no_others():
    rng = np.random.default_rng(0)
    batch = {"x": rng.uniform(1, 2, (6, 3)).astype(np.float32), "y": np.arange(6, dtype=np.float32)}
    w = jnp.ones(3)
    batch["x"][4:] = np.nan  # never reached
    compiled = jax.jit(jd.online.any_batch(losses))
    for b in (1, 4):
        value, gradient = compiled(w, batch, b)
        first = {key: x[:b] for key, x in batch.items()}
        expected = jax.value_and_grad(lambda w, first=first: jnp.mean(losses(w, first)))(w)
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-6)
    value, gradient = compiled(w, {key: np.full_like(x, np.nan) for key, x in batch.items()}, 0)
    assert (float(value), gradient.tolist()) == (0.0, [0.0] * 3)
    with pytest.raises(ValueError, match="the loss of each of the 6 examples, got shape"):
        jd.online.any_batch(lambda w, batch: jnp.mean(losses(w, batch)))(w, batch, 1)


def test_a_window_fits_whole_examples():
    seconds = np.repeat([[0.1], [0.25], [3.0]], 50, axis=1)  # constant: floor(window / τ)
    assert count_processed(seconds, 2.0).tolist() == [20, 8, 0]
    assert count_processed(seconds, 2.0, last="finish").tolist() == [20, 8, 1]
    assert count_processed(seconds, 1e9, last="finish").tolist() == [50, 50, 50]
    with pytest.raises(ValueError, match="window must be at least 0, got -1"):
        count_processed(seconds, -1)
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        anytime_window(1.0, workers=0, batch=1)


def test_dropping_the_last_example_favors_cheap_ones():
    """Half of the examples take ten times as long: of those done in time they are fewer than half."""
    rng = np.random.default_rng(0)
    dear = rng.random((4000, 20)) < 0.5
    seconds = np.where(dear, 10.0, 1.0)
    share = []
    for last in ("drop", "finish"):
        done = np.arange(20) < count_processed(seconds, 15.0, last=last)[:, None]
        share.append((dear & done).sum() / done.sum())
    assert share[0] < 0.35
    assert abs(share[1] - 0.5) < 0.02  # a stopping rule that looks at what is past only


@pytest.mark.parametrize(("workers", "epoch"), [(10, 5.3935), (20, 6.3966), (50, 7.7488)])
def test_the_clock_of_stragglers(workers, epoch):
    """Waiting for the slowest costs `ζ + excess H_n`; in a window of the mean time workers get through more."""
    rng = np.random.default_rng(0)
    times = shifted_exponential(rng, (20_000, workers), least=1.0, excess=1.5)
    assert abs(times.max(1).mean() - epoch) < 0.05
    assert epoch / anytime_window(2.5, workers=workers, batch=10**6) < 1 + 1.5 / 2.5 * np.sqrt(workers - 1)
    assert abs((2.5 / times).mean() - 1.293) < 0.01
    # Linear progress, shares of 100 examples: the window gives the batch at least, on average.
    window = anytime_window(2.5, workers=workers, batch=100 * workers)
    assert np.floor(100 * window / times).sum(1).mean() > 100 * workers


def test_regret():
    lost = np.array([[3.0, 1.0], [2.0, 2.0], [0.0, 1.0]])
    assert dynamic_regret(lost, np.array([1.0, 2.0, 0.0])).tolist() == [1.0, 1.0, 1.5]
    assert static_regret(lost, np.array([[1.0, 2.0], [2.0, 0.5], [2.0, 0.0]])).tolist() == [1.0, 1.5, 2.0]
    assert path_length(np.array([[0.0], [2.0], [1.0]])).tolist() == [0.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="got 3 and 2"):
        dynamic_regret(lost, np.zeros(2))


def test_losses_of_another_shape_are_refused():
    """A column of the best losses would be broadcast over the rounds."""
    with pytest.raises(ValueError, match=r"compared with 1, got \(2, 2\)"):
        unwrap(dynamic_regret)(np.ones((3, 2)), np.zeros((3, 1)))


@pytest.mark.parametrize(("window", "finished"), [(2.0, 2), (2.5, 3), (9.0, 4), (0.0, 0)])
def test_only_what_has_begun_is_finished(window, finished):
    assert count_processed(np.ones((1, 4)), window, last="finish").tolist() == [finished]

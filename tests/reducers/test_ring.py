"""The ring of coded partial sums; its laws and bytes are in `test_laws.py`."""

import numpy as np
import pytest
from workers import trajectory

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.reducers import ring


def test_without_loss_it_is_the_mean():
    updates = {"a": np.random.default_rng(0).standard_normal((1, 4, 3, 7)).astype(np.float32)}
    updates["b"] = updates["a"][..., 0, :2].astype(np.float16)
    means, owns, _ = trajectory(ring(jc.identity()), updates)
    np.testing.assert_allclose(means["a"], updates["a"].mean(1), atol=1e-6)
    np.testing.assert_allclose(means["b"], updates["b"].mean(1), atol=1e-3)
    np.testing.assert_allclose(owns["a"], updates["a"], atol=1e-6)


@pytest.mark.slow
def test_errors_add_up_with_every_station():
    """A code of known variance, ω = 1/3 with equality, on equal updates of equal entries."""
    omega, size, steps = 1 / 3, 96, 250
    spread = {}
    for workers in (2, 5):
        updates = np.ones((steps, workers, size), np.float32)
        for name, make in (("ring", ring), ("two", jd.two_shot)):
            code = jd.compressors.random_k(0.75, unbiased=True)._replace(shared_key=False)
            spread[name, workers] = ((trajectory(make(code), updates)[0] - 1) ** 2).mean()
        variance = 0.0
        for station in range(1, workers + 1):
            variance = (1 + omega) * variance + omega * station**2
        assert spread["ring", workers] == pytest.approx(variance / workers**2, rel=0.1)
        assert spread["two", workers] == pytest.approx(omega * (1 + (1 + omega) / workers), rel=0.1)
    assert spread["ring", 5] > 2 * spread["ring", 2]
    assert spread["two", 5] < spread["two", 2]


def test_a_biased_code_is_off_by_its_bias_at_every_station():
    """A code that always takes a hundredth away."""
    identity = jc.identity()
    shrinking = identity._replace(
        decompress=lambda payload, like: 0.99 * identity.decompress(payload, like), variance=None
    )
    for workers in (2, 8):
        means, owns, _ = trajectory(ring(shrinking), np.ones((1, workers, 8), np.float32))
        shrunk = sum(0.99 ** (workers - k) for k in range(workers)) / workers
        np.testing.assert_allclose(means[0], shrunk, rtol=1e-5)
        np.testing.assert_allclose(owns.mean(1), means, rtol=1e-5)


def test_feedback_around_it_is_refused():
    for wrap in (jd.error_feedback, jd.reducers.ef21, jd.reducers.loco):
        with pytest.raises(ValueError, match=r"grow with the number of workers: use two_shot\(\)"):
            wrap(ring(jd.top_k(0.5)))

"""What rules compute with."""

import functools

import jax.numpy as jnp
import numpy as np

from jaxdist.asynchronous.values import mean_of, spec_of, sum_of


def test_sums_of_many_are_those_of_one_after_the_other():
    rng = np.random.default_rng(0)
    values = [{"w": jnp.asarray(rng.standard_normal(5).astype(np.float32))} for _ in range(40)]
    for count in (1, 2, 17, 18, 40):
        found = sum_of(values[:count])["w"]
        one_by_one = functools.reduce(lambda a, b: a + b, [value["w"] for value in values[:count]])
        np.testing.assert_array_equal(found, one_by_one)
    np.testing.assert_allclose(mean_of(values)["w"], np.mean([value["w"] for value in values], axis=0), rtol=1e-6)
    assert sum_of([spec_of(values[0])] * 40) is spec_of(values[0])

"""Branches for platforms are traced once for each shape, however many programs contain them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist._core.branches import bind

TRACED = []


def add(number, x):
    TRACED.append(number)
    return x + number


def test_equal_arguments_give_the_same_function():
    assert bind(add, 1) is bind(add, 1) is not bind(add, 2)
    assert bind(jnp.sum, axis=0) is bind(jnp.sum, axis=0) is not bind(jnp.sum, axis=1)
    with pytest.raises(TypeError, match="unhashable"):
        bind(add, [1])


def test_a_second_program_of_the_shape_traces_no_branch_again():
    def compute(x):
        return lax.platform_dependent(x, cpu=bind(add, 1), default=bind(add, 2))

    TRACED.clear()
    for number in range(3):
        x = jnp.float32(number)
        assert float(jax.jit(lambda x: compute(x))(x)) == number + 1
    assert sorted(TRACED) == [1, 2]

"""Leaves whose dtype has no mean: refused by their own name, by transformations, reducers and the gradient."""

import re

import jax.numpy as jnp
import optax
import pytest
from register import CASES
from test_overwritten import PARAMS, TX

import jaxdist as jd

REASONS = {
    "complex64": "keep the real and the imaginary part",
    "float8_e4m3fn": "keep the parameters in bfloat16 or float32",
    "float4_e2m1fn": "keep the parameters in bfloat16 or float32",
    "int4": "quantized parameters have no gradient",
}


def params_of(dtype):
    return {"a": {"w": jnp.ones((4, 2)).astype(jnp.dtype(dtype))}}


@pytest.mark.parametrize("dtype", REASONS)
@pytest.mark.parametrize("name", TX)
def test_transformations_name_leaf_and_reason(name, dtype):
    with pytest.raises(ValueError, match=rf"\['a'\]\['w'\] has dtype {dtype}: .*{REASONS[dtype]}"):
        TX[name].init(params_of(dtype))


@pytest.mark.parametrize("dtype", REASONS)
def test_every_reducer_names_leaf_and_reason(dtype):
    wanted = re.compile(rf"\['w'\] has dtype {dtype}: .*{REASONS[dtype]}")
    wrong = [name for name, case in CASES.items() if not wanted.search(refusal(case.make(), dtype))]
    assert not wrong, f"make these with from_generator, or give them for_real_numbers(init): {', '.join(wrong)}"


def refusal(reducer, dtype):
    try:
        reducer.init(params_of(dtype))
    except ValueError as error:
        return str(error)
    return ""


def test_gradients_of_another_dtype_are_refused_too():
    tx, params = jd.all_reduce(jd.exact(), axis=None), {"w": jnp.ones(2)}
    gradient = {"w": jnp.ones(2, jnp.complex64)}
    with pytest.raises(ValueError, match=r"has dtype complex64: .*jax\.lax\.complex"):
        tx.update(gradient, tx.init(params), params)


# Those of 8 bits are only rounded there, and computed in float32.
@pytest.mark.parametrize("dtype", sorted(REASONS.keys() - {"float8_e4m3fn"}))
def test_parameters_on_disk_are_refused_alike(tmp_path, dtype):
    stored = jd.offload.nvme(optax.sgd(0.1), jd.offload.Store(str(tmp_path)))
    with pytest.raises(ValueError, match=rf"\['w'\] has dtype {dtype}: .*{REASONS[dtype]}"):
        stored.init(params_of(dtype))
    with pytest.raises(ValueError, match="agree_on_maximum"):
        stored.init(PARAMS)

"""Recipes hand the options that they do not name to what they wrap."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import jaxdist as jd

SGD = optax.sgd(0.1)
RECIPES = {
    "local_sgd": lambda **options: jd.local_sgd.local_sgd(SGD, sync_period=4, **options),
    "post_local_sgd": lambda **options: jd.local_sgd.post_local_sgd(SGD, switch_step=2, sync_period=4, **options),
    "diloco": lambda **options: jd.local_sgd.diloco(SGD, sync_period=4, **options),
    "streaming_diloco": lambda **options: jd.local_sgd.streaming_diloco(SGD, sync_period=4, fragments=2, **options),
    "sparse_loco": lambda **options: jd.local_sgd.sparse_loco(SGD, **options),
    "slowmo": lambda **options: jd.local_sgd.slowmo(SGD, sync_period=4, learning_rate=0.1, **options),
    "muloco": lambda **options: jd.local_sgd.muloco(0.02, adam_learning_rate=1e-3, **options),
    "palsgd": lambda **options: jd.local_sgd.palsgd(SGD, learning_rate=0.1, **options),
    "async_model_average": lambda **options: jd.recipes.bagua.async_model_average(SGD, sync_period=4, **options),
    "bytegrad": lambda **options: jd.recipes.bagua.bytegrad(SGD, **options),
    "qadam": lambda **options: jd.recipes.bagua.qadam(1e-3, **options),
    "ddp": lambda **options: jd.recipes.ddp(**options),
    "gradient_allreduce": lambda **options: jd.recipes.bagua.gradient_allreduce(SGD, **options),
    "compressed_adam": lambda **options: jd.recipes.compressed_adam(1e-3, jd.exact(), **options),
    "low_precision_decentralized": lambda **options: jd.recipes.bagua.low_precision_decentralized(SGD, 4, **options),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_option_is_pythons_own_error(name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'wormup_steps'"):
        RECIPES[name](wormup_steps=3)


@pytest.mark.parametrize("name", [*RECIPES][:9])
def test_options_reach_local_steps(name):
    recipe = RECIPES[name]
    assert isinstance(recipe(axis="pod"), optax.GradientTransformationExtraArgs)
    with pytest.raises(ValueError, match="offset must be less than sync_period"):
        recipe(offset=1000)


@pytest.mark.parametrize("name", ["ddp", "bytegrad", "gradient_allreduce", "compressed_adam"])
def test_options_reach_all_reduce(name):
    assert isinstance(RECIPES[name](axis="pod", delay=1), optax.GradientTransformationExtraArgs)
    with pytest.raises(ValueError, match="delay must be 0 or 1, got 2"):
        RECIPES[name](delay=2)


def test_options_reach_gossip():
    def key(seed):
        return RECIPES["low_precision_decentralized"](seed=seed).init(jnp.zeros(3)).key

    assert key(0) == key(0) != key(1)


@pytest.mark.parametrize(
    ("name", "option"),
    [("sparse_loco", "reducer"), ("post_local_sgd", "warmup_steps"), ("async_model_average", "overlap_correction")],
)
def test_an_option_of_the_method_itself_cannot_be_passed(name, option):
    with pytest.raises(TypeError, match=f"multiple values for keyword argument '{option}'"):
        RECIPES[name](**{option: 3})


def test_the_signature_names_all_options():
    parameters = inspect.signature(jd.local_sgd.muloco).parameters
    assert parameters["momentum"].default == 0.8
    assert {"reducer", "axis", "warmup_steps", "buffers"} <= parameters.keys()
    assert "options" not in parameters
    assert "reducer" not in inspect.signature(jd.local_sgd.sparse_loco).parameters

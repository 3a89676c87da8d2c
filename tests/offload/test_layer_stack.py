"""What is wrong in the functions of a stack of layers: named when the run is made, or before a step computes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from stacks import STACK, make_batch, make_params

from jaxdist import offload


def make_host_layers(stack, folder):
    run = offload.host_layers(stack, optax.sgd(0.1))

    def start():
        params = make_params(2)
        state = run.init(lambda i: params["layers"][i], 2, embed=params["embed"], head=params["head"])
        return lambda call, batch: getattr(run, call)(state, batch)

    return start


def make_nvme_layers(stack, folder):
    run = offload.nvme_layers(stack, optax.sgd(0.1), offload.Store(folder))

    def start():
        params = make_params(2)
        run.init(lambda i: params["layers"][i], 2, embed=params["embed"], head=params["head"])
        return lambda call, batch: getattr(run, call)(batch)

    return start


MAKERS = pytest.mark.parametrize("make", [make_host_layers, make_nvme_layers])


@MAKERS
@pytest.mark.parametrize(
    ("name", "function", "match"),
    [
        (
            "layer",
            lambda p, x, key: x,
            r"layer\(params, x\), and its arguments are \(p, x, key\): missing .*'key'; bind",
        ),
        ("layer", lambda x: x, r"layer of the stack is called as layer\(params, x\), and its arguments are \(x\): too"),
        ("embed", lambda batch: batch, r"embed of the stack is called as embed\(params, batch\)"),
        ("head", lambda p, x: x.mean(), r"head of the stack is called as head\(params, x, batch\)"),
        ("layer", 3, r"LayerStack\(layer=\) must be a function layer\(params, x\), got 3"),
    ],
)
def test_arguments_are_checked_when_the_run_is_made(tmp_path, make, name, function, match):
    with pytest.raises(ValueError, match=match):
        make(STACK._replace(**{name: function}), tmp_path)


@jax.custom_vjp
def without_gradient(x):
    return x


def forward(x):
    return x, None


def backward(_, cotangent):
    raise ValueError("no gradient here")


without_gradient.defvjp(forward, backward)


@MAKERS
@pytest.mark.parametrize(
    ("name", "function", "match"),
    [
        ("embed", lambda p, batch: None, "embed must return the input of the first layer, floating arrays, got None"),
        ("embed", lambda p, batch: "text", "embed must return arrays, got 'text'"),
        (
            "layer",
            lambda p, x: (x, x),
            r"must return what it takes.* the next one takes it\. Change shapes and dtypes in",
        ),
        ("layer", lambda p, x: "text", "layer must return arrays, got 'text'"),
        ("head", lambda p, x, batch: x, "head must return one floating number"),
        ("head", lambda p, x, batch: "text", "head must return arrays, got 'text'"),
        ("embed", lambda p, batch: without_gradient(batch["x"] @ p["w"]), "no gradient here"),
    ],
)
def test_results_are_checked_before_anything_runs(tmp_path, make, name, function, match):
    ran = []

    def embed(params, batch):
        jax.debug.callback(lambda: ran.append("embed"))
        return STACK.embed(params, batch) if name != "embed" else function(params, batch)

    stack = STACK._replace(embed=embed) if name == "embed" else STACK._replace(embed=embed, **{name: function})
    call = make(stack, tmp_path)()
    with pytest.raises(ValueError, match=match):
        call("step", make_batch(0))
    assert not ran
    if match == "no gradient here":
        # The loss alone needs none, and the state is whole.
        assert jnp.isfinite(call("loss", make_batch(0)))
        assert ran


@pytest.mark.parametrize("where", ["host", "disk"])
def test_masks_of_the_whole_model_are_refused(tmp_path, where):
    inner, params = optax.adamw(0.1, mask={"embed": True, "layers": True, "head": False}), make_params(2)
    store = offload.Store(tmp_path)
    run = offload.host_layers(STACK, inner) if where == "host" else offload.nvme_layers(STACK, inner, store)
    with pytest.raises(ValueError, match=r"masks or labels for the whole model, .*: pass a function of the parameters"):
        run.init(params["layers"].__getitem__, 2, embed=params["embed"], head=params["head"])

"""The user's own shardings over axes other than the workers': states are made with them, and keep them."""

from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import jaxdist as jd

SPECS = {"layers": {"w": P(None, "fsdp", "model")}, "w": P("model"), "norm": P()}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


class State(NamedTuple):
    params: dict
    opt: tuple


def make_mesh(kind=AxisType.Auto, slices=2):
    return jax.make_mesh(
        (slices, 2, 2), ("dcn", "fsdp", "model"), axis_types=(kind,) * 3, devices=jax.devices()[: slices * 4]
    )


def make_params():
    return {"layers": {"w": jnp.ones((3, 4, 8))}, "w": jnp.ones((4, 8)), "norm": jnp.ones(8)}


def spec_at(leaf):
    return tuple(leaf.sharding.spec) + (None,) * (leaf.ndim - len(leaf.sharding.spec))


@KINDS
def test_moments_and_masters_follow_their_parameters(kind):
    tx = optax.chain(jd.all_reduce(jd.exact(), axis="dcn", specs=SPECS), optax.adam(1e-3))
    state = jd.init_state(
        lambda: State(make_params(), tx.init(make_params())), make_mesh(kind), axis="dcn", specs=SPECS
    )
    adam = state.opt[1][0]
    for tree in (state.params, adam.mu, adam.nu):
        assert spec_at(tree["layers"]["w"]) == (None, "fsdp", "model")
        assert spec_at(tree["w"]) == ("model", None)
        assert spec_at(tree["norm"]) == (None,)
    assert adam.count.sharding.is_fully_replicated


@KINDS
def test_copies_of_workers_are_sharded_within_a_worker(kind):
    tx = jd.local_steps(optax.adam(1e-3), optax.sgd(1.0), sync_period=2, axis="dcn")
    state = jd.init_state(
        lambda: State(jd.PerWorker(make_params()), tx.init(make_params())), make_mesh(kind), axis="dcn", specs=SPECS
    )
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 3, 4, 8)]
    assert len(moments) == 3
    assert {spec_at(leaf) for leaf in moments} == {("dcn", None, "fsdp", "model")}


def test_other_shapes_than_the_parameters_are_replicated():
    """Factored moments have the path of their parameter, and scalars in place of what they do not factor."""
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    state = jd.init_state(lambda: State(make_params(), tx.init(make_params())), make_mesh(), axis="dcn", specs=SPECS)
    others = [x for x in jax.tree.leaves(state.opt) if x.shape not in ((3, 4, 8), (4, 8))]
    assert others
    assert all(leaf.sharding.is_fully_replicated for leaf in others)


def test_residuals_of_shards_keep_their_own_dimensions():
    reducer = jd.error_feedback(jd.compressed(jd.top_k(0.25)))
    tx = jd.all_reduce(reducer, axis="dcn", specs=SPECS)
    state = jd.init_state(lambda: State(make_params(), tx.init(make_params())), make_mesh(), axis="dcn", specs=SPECS)
    residual = state.opt.reducer["fsdp+model"].residual.value["layers"]["w"].value
    assert residual.shape == (2, 4, 3, 2, 4)
    assert spec_at(residual) == ("dcn", ("fsdp", "model"), None, None, None)


@KINDS
def test_place_keeps_what_is_sharded_over_other_axes(kind):
    mesh = make_mesh(kind)
    params = jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s)), make_params(), SPECS)
    with jax.set_mesh(mesh):
        moved = jd.place({"p": params, "own": jd.PerWorker(params)}, mesh, axis="dcn")
    assert spec_at(moved["p"]["layers"]["w"]) == (None, "fsdp", "model")
    assert spec_at(moved["own"].value["layers"]["w"]) == ("dcn", None, "fsdp", "model")
    assert moved["p"]["norm"].sharding.is_fully_replicated
    over_workers = jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(mesh, P("dcn", "model")))
    assert spec_at(jd.place(over_workers, mesh, axis="dcn")) == (None, "model")
    # To another number of workers too.
    smaller = jd.resize(moved, make_mesh(kind, slices=1), axis="dcn")
    assert spec_at(smaller["p"]["layers"]["w"]) == (None, "fsdp", "model")
    assert smaller["own"].value["w"].shape == (1, 4, 8)


def test_a_dimension_that_does_not_divide_on_the_new_mesh_is_replicated():
    x = jax.device_put(jnp.ones((2, 3)), jax.NamedSharding(make_mesh(), P("fsdp")))
    assert jd.place(x, jd.make_mesh({"dcn": 2, "fsdp": 4}), axis="dcn").sharding.is_fully_replicated


def test_an_optimizer_state_without_arrays_of_parameters():
    """A program that makes it alone passes the specs whatever the optimizer is."""
    mesh, specs = make_mesh(), {"w": P("fsdp", "model")}
    state = jd.init_state(lambda: optax.sgd(0.1).init({"w": jnp.ones((4, 8))}), mesh, axis="dcn", specs=specs)
    assert not jax.tree.leaves(state)
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    state = jd.init_state(lambda: noise.init({"w": jnp.ones((4, 8))}), mesh, axis="dcn", specs=specs)
    assert state.count.sharding.is_fully_replicated
    # Flat shards are cut over the workers alone.
    tx = jd.zero_redundancy(optax.adam(0.1), axis="dcn")
    state = jd.init_state(lambda: tx.init({"w": jnp.ones((4, 8))}), mesh, axis="dcn", specs=specs)
    assert spec_at(state.inner[0].mu["w"].value) == ("dcn",)


def test_specs_of_no_array_are_refused():
    def make_state():
        return {"params": make_params()}

    with pytest.raises(ValueError, match=r"specs have P.* for the parameter \['u'\], but no array of the state"):
        jd.init_state(make_state, make_mesh(), axis="dcn", specs={"u": P("fsdp")})
    with pytest.raises(ValueError, match=r"pass its spec, sharding\.spec"):
        jd.init_state(make_state, make_mesh(), axis="dcn", specs={"w": jax.NamedSharding(make_mesh(), P())})


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ({"layers": SPECS["layers"], "w": P("model")}, r"for each array, .*: there is none for \['norm'\]$"),
        (SPECS | {"bias": P()}, r"nothing is at \['bias'\]$"),
        ({"layers": P(), "v": P(), "norm": P()}, r"there is none for \['w'\], and nothing is at \['v'\]$"),
        (OrderedDict(SPECS), r"they are a OrderedDict for a dict$"),
        (SPECS | {"norm": P(None, "fsdp")}, r"for an array of 2 dimensions, and a parameter has the shape \(8,\)"),
    ],
)
def test_specs_that_do_not_fit_the_parameters_are_refused(specs, said):
    tx = jd.all_reduce(jd.exact(), axis="dcn", specs=specs)
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=said):
        tx.init(make_params())

"""Linear layers in tiles, against the same layers whole."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_close

import jaxdist as jd
from jaxdist import analysis, offload
from jaxdist.offload import tile, tiled_dense, tiled_layers, tiled_mlp
from jaxdist.zero import shard


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5, jnp.float32)


X, W, B = normal(3, 5, 10, seed=1), normal(10, 14, seed=2), normal(14, seed=3)
OUT, C = normal(14, 6, seed=4), normal(6, seed=5)


def whole(kernel):
    """The kernel of its tiles."""
    return jnp.concatenate([jnp.concatenate(row, 1) for row in kernel.tiles])[: kernel.shape[0], : kernel.shape[1]]


def value_and_grads(f, *arguments):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.square(f(*a)).sum(), argnums=tuple(range(len(arguments)))))(
        *arguments
    )


@pytest.fixture(scope="module")
def dense():
    return value_and_grads(lambda x, w, b: x @ w + b.reshape(1, 1, -1), X, W, B)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("in_splits", "out_splits", "remat"), [(2, 7, True), (3, 4, True), (4, 1, False)])
def test_dense_equals_untiled(in_splits, out_splits, remat, dense):
    """Also where the splits do not divide: 10 rows in 3 or 4, 14 columns in 4."""

    def f(x, w, b):
        return tiled_dense(x, w, b, in_splits=in_splits, out_splits=out_splits, remat=remat)

    assert_close(value_and_grads(f, X, W, B), dense, 1e-5)


def test_gradients_of_tiles(dense):
    """Tiles as parameters: what lies beyond the kernel stays zero."""
    grid = tile(W, in_splits=3, out_splits=4)
    value, (_, gradient) = value_and_grads(lambda x, w: tiled_dense(x, w, B), X, grid)
    assert_close((value, whole(gradient)), (dense[0], dense[1][1]), 1e-5)
    assert gradient.tiles[2][3].shape == (4, 4)
    assert not gradient.tiles[2][0][2:].any()
    assert not gradient.tiles[0][3][:, 2:].any()


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("activation", "splits"), [(jnp.tanh, 1), (jax.nn.sigmoid, 4)])
def test_mlp_equals_untiled(activation, splits):
    """14 hidden units in 4 pieces; sigmoid of nothing is not nothing, and must not reach the padding of `w_out`."""

    def plain(x, w, b, out, c):
        return activation(x @ w + b.reshape(1, 1, -1)) @ out + c.reshape(1, 1, -1)

    def tiled(x, w, b, out, c):
        return tiled_mlp(x, w, out, activation, bias_in=b, bias_out=c, splits=splits)

    assert_close(value_and_grads(tiled, X, W, B, OUT, C), value_and_grads(plain, X, W, B, OUT, C), 1e-5)
    grids: Any = (tile(W, out_splits=4), tile(OUT, in_splits=4))
    gradients = jax.jit(jax.grad(lambda grids: tiled_mlp(X, grids[0], grids[1], activation, bias_in=B).sum()))(grids)
    assert not gradients[0].tiles[0][3][:, 2:].any()
    assert not gradients[1].tiles[3][0][2:].any()


def test_gated_mlp():
    def gate(a, b):
        return jax.nn.silu(a) * b

    def tiled(x, w, out):
        return tiled_mlp(x, (w, 2 * w), out, gate, splits=2)

    def plain(x, w, out):
        return gate(x @ w, x @ (2 * w)) @ out

    assert_close(value_and_grads(tiled, X, W, OUT), value_and_grads(plain, X, W, OUT), 1e-5)


def test_an_activation_whose_derivative_is_infinite_at_zero():
    """In the padding of the last tile, without biases."""
    x, w = X, jnp.abs(W)

    def root(y):
        return jnp.sqrt(jnp.abs(y))

    tiled = value_and_grads(lambda x, w, out: tiled_mlp(x, w, out, root, splits=4), x, w, OUT)
    assert_close(tiled, value_and_grads(lambda x, w, out: root(x @ w) @ out, x, w, OUT), 1e-5)


def test_no_examples():
    assert tiled_dense(jnp.zeros((0, 10)), W, out_splits=4).shape == (0, 14)


def test_half_precision_adds_in_float32():
    x, w = (normal(*s, seed=s[0]).astype(jnp.bfloat16) for s in ((4, 512), (512, 8)))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    y = tiled_dense(x, w, in_splits=64)
    assert y.dtype == jnp.bfloat16
    assert np.abs(np.asarray(y, np.float64) - exact).max() < 0.005 * np.abs(exact).max()


def stage_3(width, splits, tokens=8, model=32):
    """One SGD step of a two-layer net whose tiles are cut over the workers."""
    w_in, w_out = normal(model, width, seed=6), normal(width, model, seed=7)
    params = {"in": tile(w_in, out_splits=splits), "out": tile(w_out, in_splits=splits)}

    def step(state, batch):
        def loss(p, batch):
            return jnp.square(tiled_mlp(batch, p["in"], p["out"], jnp.tanh) - batch).mean()

        # The gradients of cut tiles are means already.
        value, grads = jd.local_value_and_grad(loss)(state["params"], batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": new}, {"loss": jax.lax.pmean(value, "data")}

    def make():
        return {"params": shard(params, smallest=0)}

    return step, make, {"in": w_in, "out": w_out}, normal(4 * tokens, model, seed=8)


@pytest.fixture(scope="module")
def mesh_of_4():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


@pytest.mark.slow
def test_cut_tiles(mesh_of_4):
    """On the mesh and simulated, two steps equal those of whole kernels; the bytes are those of stage 3."""
    step, make, plain, batch = stage_3(70, 3)
    run = jd.distribute(step, mesh_of_4, donate=False)
    state, simulated = jd.init_state(make, mesh_of_4), jd.init_state(make, 4)
    again = jd.simulate(step, 4)
    program = run.lower(state, jd.global_batch(batch, mesh_of_4)).compile()
    for _ in range(2):
        state, _ = run(state, batch)
        simulated, _ = again(simulated, batch)
        gradient = jax.grad(lambda p: jnp.square(jnp.tanh(batch @ p["in"]) @ p["out"] - batch).mean())(plain)
        plain = jax.tree.map(lambda p, g: p - 0.1 * g, plain, gradient)
    for found in (state, simulated):
        params: Any = jd.consensus(found["params"])
        assert_close({name: whole(params[name]) for name in plain}, plain, 1e-6)
    cut = 2 * 3 * 32 * 24  # padded to 24 hidden units a tile
    assert analysis.collectives(program).wire_bytes == 3 * 3 / 4 * 4 * cut + 2 * 3 / 4 * 4


@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_width(mesh_of_4):
    """Four times as wide in four times as many tiles: only this worker's own pieces, stacked for the loop, grow."""

    def temporaries(width, splits):
        step, make, _, batch = stage_3(width, splits, model=128)
        return analysis.pods.plan(jd.distribute(step, mesh_of_4), make, batch, mesh_of_4).memory.temporary

    tile_bytes, narrow, wide = 2 * 4 * 128 * 256, temporaries(1024, 4), temporaries(4096, 16)
    untiled = temporaries(4096, 1)
    own = 2 * 4 * 128 * 4096 // 4
    assert wide - narrow < 3 * own
    assert wide < 4 * tile_bytes + 3 * own
    assert untiled > wide + 8 * tile_bytes


def test_hidden_layer_is_never_whole():
    """On one device, without anything cut: the saving of the pair."""

    def temporaries(splits):
        def loss(w, out, x):
            return jnp.square(tiled_mlp(x, w, out, jnp.tanh, splits=splits)).sum()

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 2048), (2048, 32), (512, 32))]
        return analysis.memory(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()).temporary

    assert temporaries(16) < 0.3 * temporaries(1)


def test_flax():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(20, dtype=jnp.float32, name="wide")(x))
            return nn.Dense(3, name="last")(x)

    model: Any = Model()
    x = normal(4, 6)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    kernel = params["wide"]["kernel"]
    tiled = params | {"wide": params["wide"] | {"kernel": tile(kernel, out_splits=4)}}

    def loss(p, batch):
        with nn.intercept_methods(tiled_layers()):
            return model.apply({"params": p}, batch).sum()

    expected = jax.jit(jax.value_and_grad(lambda p: model.apply({"params": p}, x).sum()))(params)
    value, gradient = jax.jit(jax.value_and_grad(loss))(tiled, x)
    gradient["wide"]["kernel"] = whole(gradient["wide"]["kernel"])
    assert_close((value, gradient), expected, 1e-5)

    # The same with tiles cut over two workers, who each see half of the batch.
    marked = {"p": tiled | {"wide": tiled["wide"] | {"kernel": shard(tiled["wide"]["kernel"], smallest=0)}}}

    def step(state, batch):
        value, gradient = jd.local_value_and_grad(lambda p, b: 2 * loss(p, b))(state["p"], batch)
        gradient["last"] = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), gradient["last"])
        gradient["wide"]["bias"] = jax.lax.pmean(gradient["wide"]["bias"], "data")
        return {"p": gradient}, jax.lax.pmean(value, "data")

    found, value = jd.simulate(step, 2)(jd.place(marked, 2), x)
    cut: Any = jd.consensus(found)
    cut["p"]["wide"]["kernel"] = whole(cut["p"]["wide"]["kernel"])
    assert_close((value, cut["p"]), expected, 1e-5)


def test_a_dense_layer_keeps_its_precision_and_its_product():
    kernel, x = normal(6, 20), normal(4, 6)
    calls = []

    def dot_general(*arguments, **options):
        calls.append(options["precision"])
        return jax.lax.dot_general(*arguments, **options)

    def run(layer, x):
        with nn.intercept_methods(tiled_layers()):
            return layer.apply({"params": {"kernel": tile(kernel, out_splits=4)}}, inputs=x)

    for product in (None, dot_general):
        layer = nn.Dense(20, use_bias=False, precision=("highest", "default"), dot_general=product)
        program = str(jax.make_jaxpr(lambda x, layer=layer: run(layer, x))(x))
        assert "HIGHEST" in program
    assert calls
    assert set(calls) == {("highest", "default")}
    with pytest.raises(ValueError, match="dot_general_cls has variables of its own: leave its kernel whole"):
        run(nn.Dense(20, use_bias=False, dot_general_cls=lambda: dot_general), x)


def test_refusals():
    grid: Any = tile(W, out_splits=2)
    with pytest.raises(ValueError, match=r"needs a kernel \[n, m\], got shape \(14,\)"):
        tile(B)
    with pytest.raises(ValueError, match="out_splits must be between 1 and the 14 entries to split, got 15"):
        tile(W, out_splits=15)
    with pytest.raises(ValueError, match=r"input of shape \(2, 9\) does not fit a kernel \(10, 14\)"):
        tiled_dense(jnp.ones((2, 9)), grid)
    with pytest.raises(ValueError, match=r"got splits \(2, 1\) for a kernel in 1 x 2 tiles"):
        tiled_dense(X, grid, in_splits=2)
    with pytest.raises(ValueError, match="needs tiles that are marked, not a mark"):
        tiled_dense(X, jd.Sharded(W))
    with pytest.raises(ValueError, match="cut by as many in_splits"):
        tiled_mlp(X, grid, tile(OUT, in_splits=7))
    with pytest.raises(ValueError, match="PerWorker kernel is whole already"):
        tiled_dense(X, offload.Tiled([[jd.PerWorker(W)]], shape=W.shape))

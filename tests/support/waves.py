"""A stack of equal layers between an embedding and a head, for the tests of wavelet."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.overlap import Layered

LAYERS, WIDTH, BATCH = 6, 32, 8


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def embed(p, batch):
    return batch[0] @ p


def head(p, x, batch):
    return jnp.mean(jnp.square(x @ p["w"] - batch[1]))


def params(layers=LAYERS):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / WIDTH**0.5, jnp.float32)

    return Layered(
        draw(WIDTH, WIDTH), {"w": draw(layers, WIDTH, WIDTH), "b": draw(layers, WIDTH)}, {"w": draw(WIDTH, 1)}
    )


def data(seed, examples=BATCH):
    rng = np.random.default_rng(seed + 1)
    return tuple(jnp.asarray(rng.normal(size=(examples, width)), jnp.float32) for width in (WIDTH, 1))


def loss(params, batch):
    """With one layer's activations computed again at a time, as wavelet does."""
    x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), embed(params.embed, batch), params.layers)
    return head(params.head, x, batch)


def separate(params):
    """A tuple of layers for stacked ones."""
    count = jax.tree.leaves(params.layers)[0].shape[0]
    return params._replace(layers=tuple(jax.tree.map(lambda x, i=i: x[i], params.layers) for i in range(count)))


def together(params):
    """The inverse."""
    return params._replace(layers=jax.tree.map(lambda *x: jnp.stack(x), *params.layers))

"""Images that need no download: scikit-learn's 1797 handwritten digits of 8 by 8 pixels, alike or divided by label."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from ..._core.checks import check_range
from ..._core.types import Metrics, PRNGKeyArray, PyTree
from ...runtime.dirichlet_split import dirichlet_split
from .base import PLAIN, LayerRunner, Workload

HELD_OUT_IMAGES = 360
_SPLIT_SEED = 0


class Digits(NamedTuple):
    """A batch: `images [n, 8, 8, 1]` float32 in [0, 1] and `labels [n]` int32."""

    images: np.ndarray
    labels: np.ndarray


class ConvNet(nn.Module):
    """Two convolutions and two dense layers, about 80 thousand parameters at width 32."""

    width: int = 32

    @nn.compact
    def __call__(self, images: Float[Array, "batch 8 8 1"]) -> Float[Array, "batch 10"]:
        x = nn.relu(nn.Conv(self.width, (3, 3), name="conv_1")(images))
        x = nn.relu(nn.Conv(2 * self.width, (3, 3), strides=2, name="conv_2")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(2 * self.width, name="dense")(x))
        return nn.Dense(10, name="out")(x)


def splits() -> tuple[Digits, Digits]:
    """Training and held-out images, in a fixed split."""
    # Here, since it loads SciPy: a third of the start of every other command.
    from sklearn.datasets import load_digits

    raw: Any = load_digits()
    # One split for all seeds, so that held-out losses can be compared.
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(raw.target))
    # Pixels are whole numbers from 0 to 16.
    images = (raw.images[order, :, :, None] / 16).astype(np.float32)
    labels = raw.target[order].astype(np.int32)
    cut = len(order) - HELD_OUT_IMAGES
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])


def digits_workload(width: int = 32, *, workers: int = 1, concentration: float | None = None) -> Workload:
    """A small convolutional network on scikit-learn's digits; batches are drawn with replacement from `(seed, step)`.

    Args:
      width: channels of the first convolution; the model has about `80 * width**2` parameters.
      workers: with `concentration`, the number of workers; each then has its own fixed set of images.
      concentration: similarity of the workers' labels, as in `dirichlet_split`: 0.1 is very different. None: every
        batch is drawn from all images.

    Examples:
      >>> digits_workload().batch(0, 0, 16).images.shape
      (16, 8, 8, 1)
    """
    check_range("width", width, 1, ends="[]")
    train, held_out_images = splits()
    model = ConvNet(width)
    draw_own = _divide_by_label(train.labels, workers, concentration)

    def init(key: PRNGKeyArray) -> PyTree:
        return model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]

    def loss(params: PyTree, batch: Digits, *, layers: LayerRunner = PLAIN) -> Float[Array, ""]:
        return metrics(params, batch, layers=layers)["loss"]

    def metrics(params: PyTree, batch: Digits, *, layers: LayerRunner = PLAIN) -> Metrics:
        logits = layers.one(lambda params, images: model.apply({"params": params}, images))(params, batch.images)
        return {
            "loss": jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)),
            "accuracy": jnp.mean((jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)),
        }

    def batch(seed: int, step: int, size: int) -> Digits:
        if draw_own is None:
            rows = np.random.default_rng((seed, step)).integers(0, len(train.labels), size)
        else:
            rows = draw_own(seed, step, size)
        return Digits(train.images[rows], train.labels[rows])

    def evaluation_batches(size: int) -> list[Digits]:
        # Whole batches only: one shape is one compilation.
        whole = max(1, HELD_OUT_IMAGES // size)
        slices = [slice(n * size, (n + 1) * size) for n in range(whole)]
        return [Digits(held_out_images.images[rows], held_out_images.labels[rows]) for rows in slices]

    return Workload("digits", init, loss, metrics, batch, evaluation_batches, unit="images", units_per_example=1)


def _divide_by_label(
    labels: np.ndarray, workers: int, concentration: float | None
) -> Callable[[int, int, int], np.ndarray] | None:
    """The `own_batches` of the workers; None without a concentration, if all draw from all images."""
    check_range("workers", workers, 1, ends="[]")
    if concentration is not None:
        return own_batches(equal_parts(labels, workers, concentration=concentration))
    if workers > 1:
        raise ValueError(f"workers={workers} divides the images by label: add concentration=0.1, or leave it out")
    return None


def equal_parts(labels: np.ndarray, workers: int, *, concentration: float) -> list[np.ndarray]:
    """The parts of `dirichlet_split` without the examples that are left over: all workers have as many.

    Examples:
      >>> [len(part) for part in equal_parts(np.arange(100) % 10, 8, concentration=0.1)]
      [12, 12, 12, 12, 12, 12, 12, 12]
    """
    return [part[: len(labels) // workers] for part in dirichlet_split(labels, workers, concentration=concentration)]


def own_batches(parts: list[np.ndarray]) -> Callable[[int, int, int], np.ndarray]:
    """Makes `rows(seed, step, size)`: `[size]` indices, drawn with replacement from each worker's own examples.

    The first `size / workers` belong to worker 0, and so on, as `distribute` and `simulate` divide them.

    Examples:
      >>> import numpy as np
      >>> own_batches([np.array([7]), np.array([9])])(0, 0, 4).tolist()
      [7, 7, 9, 9]
    """

    def rows(seed: int, step: int, size: int) -> np.ndarray:
        if size % len(parts):
            raise ValueError(f"a batch must be a multiple of the {len(parts)} workers, got {size}")
        # A function of seed and step alone: every method that is compared draws the same rows.
        rng = np.random.default_rng((seed, step))
        return np.concatenate([rng.choice(part, size // len(parts)) for part in parts])

    return rows

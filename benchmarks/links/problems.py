"""The models that both systems train: sizes, initial values and data, in NumPy, so that both start equal."""

import itertools
import os
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# A byte-level language model of 4.9 million parameters, one of 29.9 million, and a classifier of 10.5 million.
WIDTH, LARGE_WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 256, 640, 6, 4, 128, 256
DIMENSIONS = (1024, 2048, 2048, 2048, 10)
# The batch of a worker: `BATCH_FACTOR` times as much computation for the same bytes.
SEQUENCES, EXAMPLES = (int(os.environ.get("BATCH_FACTOR", "1")) * size for size in (4, 64))
RATES = {"lm": 1e-3, "mlp": 0.05}
MOMENTUM = 0.9
BATCHES = 16
# What the language models read: losses are compared on the same text, and each version of Python has another one.
TEXT = Path(os.environ.get("TEXT", sysconfig.get_paths()["stdlib"]))


class Problem(NamedTuple):
    """Initial parameters by name, and some batches `(inputs, targets)` of one worker."""

    params: dict[str, np.ndarray]
    batches: list[tuple[np.ndarray, np.ndarray]]


def language_model(rank: int, *, width: int = WIDTH) -> Problem:
    """A transformer on the source of Python's standard library."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    params: dict[str, Any] = {
        "embedding": normal(VOCABULARY, width, scale=0.02),
        "position": normal(CONTEXT, width, scale=0.02),
        "gain": np.ones(width, np.float32),
        "head": normal(width, VOCABULARY, scale=0.02),
    }
    depth = (2 * LAYERS) ** -0.5  # residual branches start small
    for layer in range(LAYERS):
        params |= {
            f"attention_gain_{layer}": np.ones(width, np.float32),
            f"qkv_{layer}": normal(width, 3 * width, scale=width**-0.5),
            f"out_{layer}": normal(width, width, scale=width**-0.5 * depth),
            f"feed_gain_{layer}": np.ones(width, np.float32),
            f"up_{layer}": normal(width, 4 * width, scale=width**-0.5),
            f"down_{layer}": normal(4 * width, width, scale=(4 * width) ** -0.5 * depth),
        }
    text = np.frombuffer(_standard_library(), np.uint8)
    batches = []
    for number in range(BATCHES):
        starts = np.random.default_rng((number, rank)).integers(0, text.size - CONTEXT - 1, SEQUENCES)
        window = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        batches.append((window[:, :-1], window[:, 1:]))
    return Problem(params, batches)


def classifier(rank: int) -> Problem:
    """A multilayer perceptron that learns the outputs of a small fixed network for random inputs."""
    random = np.random.default_rng(0)
    params = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(DIMENSIONS)):
        scale = (2 / inputs) ** 0.5 * (0.1 if outputs == DIMENSIONS[-1] else 1.0)
        params[f"weight_{layer}"] = (random.standard_normal((inputs, outputs)) * scale).astype(np.float32)
        params[f"bias_{layer}"] = np.zeros(outputs, np.float32)
    teacher = np.random.default_rng(1)
    hidden, out = teacher.standard_normal((DIMENSIONS[0], 64)), teacher.standard_normal((64, DIMENSIONS[-1]))
    batches = []
    for number in range(BATCHES):
        x = np.random.default_rng((number, rank)).standard_normal((EXAMPLES, DIMENSIONS[0])).astype(np.float32)
        batches.append((x, (np.maximum(x @ hidden, 0) @ out).argmax(1).astype(np.int32)))
    return Problem(params, batches)


PROBLEMS = {"lm": language_model, "lm30": partial(language_model, width=LARGE_WIDTH), "mlp": classifier}


def _standard_library() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(TEXT.glob("*.py")) if "_sysconfigdata" not in path.name)

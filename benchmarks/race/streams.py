"""The data of the race: endless batches and a held-out set, the same for both systems."""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

from problems import CONTEXT, DIMENSIONS, EXAMPLES, PROBLEMS, SEQUENCES, _standard_library

HELD_OUT_BYTES = 200_000
TINY = (32, 48, 10)  # a classifier to try the commands with
Batch = tuple[np.ndarray, np.ndarray]


class Stream(NamedTuple):
    """Initial parameters, a worker's batch of every step, and its share of the held-out batches."""

    params: dict[str, np.ndarray]
    batch: object  # batch(seed, step) -> (inputs, targets)
    held_out: list[Batch]


def language_model(rank: int, workers: int, *, problem: str = "lm") -> Stream:
    text = np.frombuffer(_standard_library(), np.uint8)
    train, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]

    def windows(source: np.ndarray, starts: np.ndarray) -> Batch:
        rows = source[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    def batch(seed: int, step: int) -> Batch:
        starts = np.random.default_rng((seed, step, rank)).integers(0, train.size - CONTEXT - 1, SEQUENCES)
        return windows(train, starts)

    # Eight batches in all, evenly spread; each worker evaluates its share.
    starts = np.linspace(0, held_out.size - CONTEXT - 1, 8 * SEQUENCES).astype(int).reshape(8, SEQUENCES)
    own = [windows(held_out, rows) for rows in starts[rank::workers]]
    return Stream(PROBLEMS[problem](rank).params, batch, own)


def classifier(rank: int, workers: int, *, inputs: int = DIMENSIONS[0]) -> Stream:
    teacher = np.random.default_rng(1)
    hidden, out = teacher.standard_normal((inputs, 64)), teacher.standard_normal((64, DIMENSIONS[-1]))

    def draw(*key: int) -> Batch:
        x = np.random.default_rng(key).standard_normal((EXAMPLES, inputs)).astype(np.float32)
        return x, (np.maximum(x @ hidden, 0) @ out).argmax(1).astype(np.int32)

    # A first number that no seed has.
    own = [draw(10**6, number) for number in range(rank, 8, workers)]
    return Stream(PROBLEMS["mlp"](rank).params, lambda seed, step: draw(seed, step, rank), own)


def tiny(rank: int, workers: int) -> Stream:
    random = np.random.default_rng(0)
    params = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(TINY)):
        params[f"weight_{layer}"] = (random.standard_normal((inputs, outputs)) * inputs**-0.5).astype(np.float32)
        params[f"bias_{layer}"] = np.zeros(outputs, np.float32)
    return classifier(rank, workers, inputs=TINY[0])._replace(params=params)


STREAMS = {"lm": language_model, "lm30": partial(language_model, problem="lm30"), "mlp": classifier, "tiny": tiny}

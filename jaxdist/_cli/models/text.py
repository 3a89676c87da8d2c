"""Text that needs no download: the source of Python's standard library."""

import functools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import gpt
from .base import PLAIN, EqualLayers, Workload

# Tests, tables and bundled programs: missing from some installations, or unlike other source.
SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
MAX_BYTES = 16 * 2**20
HELD_OUT_SHARE = 10  # one file in ten; the last tenth of a single file


class Corpus(NamedTuple):
    """Bytes for training and for evaluation, from different files if there are several."""

    train: np.ndarray  # `[n]` uint8
    held_out: np.ndarray  # `[m]` uint8
    train_files: tuple[str, ...]  # names of the files in `train`, in order
    held_out_files: tuple[str, ...]  # names of the files in `held_out`, in order


def standard_library() -> dict[str, bytes]:
    """Reads the standard library's modules: name to source, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = (path for path in _walk(root, skip=SKIPPED.__contains__) if path.name.endswith(".py"))
    # `_sysconfigdata_*` differs between machines.
    files = _read(root, (path for path in modules if "_sysconfigdata" not in path.name))
    if not files:
        raise ValueError(f"no standard library source under {root}; pass your own text with --text")
    return files


def files_under(path: str | Path) -> dict[str, bytes]:
    """Reads one file, or every text file of a folder: name to content, in the order of their names.

    Hidden files and files that contain a zero byte (not text) are skipped.
    """
    path = Path(path)
    if path.is_file():
        return {path.name: path.read_bytes()}
    if not path.is_dir():
        raise ValueError(f"no file or folder at {path}")
    visible = (p for p in _walk(path, skip=lambda name: name.startswith(".")) if p.is_file())
    files = _read(path, visible)
    if not files:
        raise ValueError(f"no text files under {path}")
    return files


def _walk(root: Path, *, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yields every file below a folder, without files and folders whose names `skip` accepts."""
    for folder, folders, names in os.walk(root):
        # Not even looked into: `site-packages` and `.git` may hold a hundred thousand files.
        folders[:] = [name for name in folders if not skip(name)]
        yield from (Path(folder, name) for name in names if not skip(name))


def _read(root: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    """Reads text files in the order of their names, up to `MAX_BYTES` but at least one, without empty ones."""
    # Sorted, since the order of a directory differs between file systems.
    named = sorted((p.relative_to(root).as_posix(), p) for p in paths)
    files, size = {}, 0
    for name, path in named:
        content = path.read_bytes()
        # A zero byte is the usual sign of a binary file.
        if not content or b"\0" in content:
            continue
        size += len(content)
        # Whole files in a fixed order: equal files give equal text on every machine.
        if size > MAX_BYTES and files:
            break
        files[name] = content
    return files


def corpus(path: str | Path | None = None) -> Corpus:
    """Reads the text and splits it.

    The split is by a hash of each file's name, so that it is stable when files are added; of a single file the last
    tenth is held out.

    Examples:
      >>> text = corpus()
      >>> text.train.size > 9 * text.held_out.size / 2, set(text.train_files) & set(text.held_out_files)
      (True, set())
    """
    files = standard_library() if path is None else files_under(path)
    # Unlike `hash`, a checksum is the same in every process.
    held_out = [name for name in files if zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0]
    train = [name for name in files if name not in set(held_out)]
    if train and held_out:
        return Corpus(_bytes(files, train), _bytes(files, held_out), tuple(train), tuple(held_out))
    # A single file, or an unlucky few, cannot be divided by name.
    whole = _bytes(files, list(files))
    cut = whole.size - whole.size // HELD_OUT_SHARE
    return Corpus(whole[:cut], whole[cut:], tuple(files), tuple(files))


def _bytes(files: dict[str, bytes], names: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(files[name] for name in names), dtype=np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns the `[batch, length]` windows of `text` at `starts`."""
    return text[starts[:, None] + np.arange(length)[None, :]]


def text_workload(
    config: gpt.GPTConfig = gpt.SIZES["demo"], *, path: str | Path | None = None, held_out_examples: int = 256
) -> Workload:
    """A byte-level GPT on the standard library's source, or on a file or folder at `path`.

    A batch is `[size, context + 1]` uint8, at positions drawn from `(seed, step)`.

    Examples:
      >>> work = text_workload()
      >>> batch = work.batch(0, 7, 4)
      >>> batch.shape, batch.dtype, bool((batch == work.batch(0, 7, 4)).all())
      ((4, 65), dtype('uint8'), True)
    """
    text = corpus(path)
    length = config.context + 1
    if min(text.train.size, text.held_out.size) < length:
        raise ValueError(
            f"the text is too short for a context of {config.context}: {text.train.size} bytes to train on"
            f" and {text.held_out.size} held out"
        )

    def batch(seed: int, step: int, size: int) -> np.ndarray:
        # Any byte may start a window, also one that crosses from one file into the next.
        starts = np.random.default_rng((seed, step)).integers(0, text.train.size - length + 1, size)
        return windows(text.train, starts, length)

    def evaluation_batches(size: int) -> list[np.ndarray]:
        # Evenly spread over the held-out files without overlap, in whole batches.
        available = min(held_out_examples, text.held_out.size // length)
        starts = np.linspace(0, text.held_out.size - length, available).astype(np.int64)
        whole = available - available % size if available >= size else available
        return [windows(text.held_out, starts[first : first + size], length) for first in range(0, whole, size)]

    loss = functools.partial(gpt.loss, config)
    return Workload(
        name="text",
        init=functools.partial(gpt.init, config),
        loss=loss,
        metrics=lambda params, batch, layers=PLAIN: {"loss": loss(params, batch, layers=layers)},
        batch=batch,
        held_out=evaluation_batches,
        unit="tokens",
        units_per_example=config.context,
    )


def text_layers(config: gpt.GPTConfig) -> EqualLayers:
    """The layers of a GPT, whose inputs are float32.

    Examples:
      >>> layered = text_layers(gpt.SIZES["tiny"])
      >>> layered.count, layered.input_bytes
      (1, 2048.0)
    """
    size = 4.0 * config.context * config.width
    return EqualLayers(lambda count: text_workload(config._replace(layers=count)), config.layers, size)

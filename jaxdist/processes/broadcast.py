"""Broadcasts values from one process to all, and checks that all processes have the same values."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._core.compat import with_weak_types
from .._core.hashing import hash_of
from .._core.trees import describe_structure, is_key, leaf_name
from .._core.types import PyTree
from ..schedule.buckets import assign_buckets

MESSAGE_BYTES = 250 << 20


def broadcast(tree: PyTree, *, source: int = 0) -> PyTree:
    """Copies the values of one process to all: initial parameters, statistics, a state read from one disk.

    All processes must call it together. It is not needed if all make their parameters from one seed. Parameters from a
    local file, or from a different seed in each process, would differ, and each process would train a different model.

    *On the wire*: the bits of the tree, in messages of about 250 MiB; before, of each process 8 bytes and 4 for each
    leaf.

    Args:
      tree: NumPy or JAX arrays of this process (not yet placed on a mesh of several), keys too. All processes have the
        same tree with the same shapes and dtypes; only the values of `source` matter. NumPy arrays stay NumPy arrays.

    Raises:
      ValueError: an array is distributed over processes; in all processes, a tree, shape or dtype differs, with the
        number of the process.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> params = jd.processes.broadcast({"w": np.random.default_rng().normal(size=3)})
      >>> params["w"].shape
      (3,)
    """
    _check_source(source)
    names, hosts = _on_host(tree)
    _check_structure(tree, source)
    different = _first_difference(names, [_hash_type(x) for x in hosts], source)
    if different:
        raise ValueError(f"{different} in shape or dtype: all processes must build the same model")
    if jax.process_count() > 1:
        # As bytes: every dtype arrives bit for bit, and small leaves share a message.
        words = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in hosts]
        for members in assign_buckets([x.size for x in words], bucket_bytes=MESSAGE_BYTES):
            message = np.concatenate([words[i] for i in members])
            arrived = multihost_utils.broadcast_one_to_all(message, is_source=jax.process_index() == source)
            parts = np.split(np.asarray(arrived), np.cumsum([words[i].size for i in members])[:-1])
            for i, part in zip(members, parts, strict=True):
                # Copied: the message cannot be written to.
                hosts[i] = part.copy().view(hosts[i].dtype).reshape(hosts[i].shape)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([_restore_type(host, leaf) for host, leaf in zip(hosts, leaves, strict=True)])


def assert_same(tree: PyTree) -> None:
    """Checks that all processes have the same values, bit for bit. For a placed state see `runtime.disagreement`.

    All processes must call it together.

    *On the wire*: of each process 8 bytes, and 4 for each leaf.

    Raises:
      ValueError: in all processes: the leaf, and the process whose value differs from that of process 0.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> jd.processes.assert_same({"w": np.ones(3)})
    """
    names, hosts = _on_host(tree)
    _check_structure(tree, 0)
    different = _first_difference(names, [hash_of(x) ^ _hash_type(x) for x in hosts], 0)
    if different:
        raise ValueError(f"{different}: use jd.processes.broadcast(tree) to copy the values of one process")


def of_all_processes(numbers: list[int]) -> np.ndarray:
    """Gathers a few 32-bit words of every process, as `[P, k]`."""
    own = np.asarray(numbers, np.uint32)
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


def _check_source(source: int) -> None:
    if not 0 <= source < jax.process_count():
        raise ValueError(f"source must be one of the {jax.process_count()} processes, from 0, got {source}")


def _check_structure(tree: PyTree, source: int) -> None:
    """Checks that all trees are the same, before anything is sent whose size depends on the tree."""
    words = of_all_processes([zlib.crc32(describe_structure(tree).encode()), jax.tree.structure(tree).num_leaves])
    other = np.flatnonzero((words != words[source]).any(1))
    if len(other):
        raise ValueError(
            f"process {other[0]} has a different tree than process {source}, with {words[other[0], 1]} leaves and "
            f"{words[source, 1]}: all processes must build the same model"
        )


def _hash_type(x: np.ndarray) -> int:
    return zlib.crc32(f"{x.dtype.name}{x.shape}".encode())


def _first_difference(names: list[str], numbers: list[int], source: int) -> str:
    """Names the first leaf whose number differs from that of `source`, as the beginning of a sentence."""
    found = of_all_processes(numbers)
    # One row a process, one column a leaf.
    processes, leaves = np.nonzero(found != found[source])
    if not len(leaves):
        return ""
    more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
    return f"leaf `{names[leaves[0]]}` of process {processes[0]} differs from that of process {source}{more}"


def _on_host(tree: PyTree) -> tuple[list[str], list[np.ndarray]]:
    """Returns the names of the leaves and their values in host memory, keys as their words."""
    names, hosts = [], []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names.append(leaf_name(path))
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                raise ValueError(
                    f"leaf `{names[-1]}` is distributed over processes: call this before place(state, mesh); "
                    "runtime.disagreement(state, mesh) compares placed states"
                )
            leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        hosts.append(np.asarray(leaf))
    return names, hosts


def _restore_type(host: np.ndarray, leaf: Any) -> Any:
    """Converts a value to the type of its leaf: a NumPy array, a JAX array, weakly typed or not, or a typed key."""
    if not isinstance(leaf, jax.Array):
        return host
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(host), impl=jax.random.key_impl(leaf))
    return with_weak_types(jnp.asarray(host), leaf)

"""The same values in all processes: said, checked, and made so."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._core.hashing import hash_of
from .._core.trees import leaf_name
from .._core.types import PyTree
from ..schedule.buckets import assign_buckets

MESSAGE_BYTES = 250 << 20


def broadcast(tree: PyTree, *, source: int = 0) -> PyTree:
    """The values that one process has, for all of them: initial parameters, statistics, a state read from one disk.

    Processes that make their parameters from one seed need none of it. Parameters read from a file, or made from a
    seed of each process, would differ, and training would go on with as many models.

    *On the wire*: the bits of the tree, in messages of about 250 MiB; before, of each process 8 bytes and 4 for each
    leaf.

    Args:
      tree: numpy or JAX arrays of this process (not yet placed on a mesh of several), keys too. All processes have the
        same tree with the same shapes and dtypes; of their values only those of `source` matter.
      source: the number of the process.

    Returns:
      The tree with the values of `source` in every bit, numpy where numpy came in. All processes must call it together.

    Raises:
      ValueError: there is no such process; an array is spread over processes; in all processes, a tree, shape or dtype
        that differs, with the number of the process.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> # From here on the same in every process:
      >>> params = jd.processes.broadcast({"w": np.random.default_rng().normal(size=3)})
      >>> params["w"].shape
      (3,)
    """
    if not 0 <= source < jax.process_count():
        raise ValueError(f"source must be one of the {jax.process_count()} processes, from 0, got {source}")
    names, hosts = _on_host(tree)
    _check_structure(tree, source)
    different = _first_difference(names, [_kind(x) for x in hosts], source)
    if different:
        raise ValueError(f"{different} in shape or dtype: all processes must build the same model")
    if jax.process_count() > 1:
        words = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in hosts]
        for members in assign_buckets([x.size for x in words], bucket_bytes=MESSAGE_BYTES):
            message = np.concatenate([words[i] for i in members])
            arrived = multihost_utils.broadcast_one_to_all(message, is_source=jax.process_index() == source)
            parts = np.split(np.asarray(arrived), np.cumsum([words[i].size for i in members])[:-1])
            for i, part in zip(members, parts, strict=True):
                hosts[i] = part.view(hosts[i].dtype).reshape(hosts[i].shape)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([_as_it_came(host, leaf) for host, leaf in zip(hosts, leaves, strict=True)])


def assert_same(tree: PyTree, *, source: int = 0) -> None:
    """Raises unless all processes hold the same values, down to the bits. For a placed state see `disagreement`.

    *On the wire*: of each process 8 bytes, and 4 for each leaf.

    Args:
      tree: numpy or JAX arrays of this process. All processes must call it together.
      source: the process whose values count as the right ones.

    Raises:
      ValueError: in all processes alike: the leaf, and the process that has another value than `source`.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> jd.processes.assert_same({"w": np.ones(3)})
    """
    names, hosts = _on_host(tree)
    _check_structure(tree, source)
    different = _first_difference(names, [hash_of(x) ^ _kind(x) for x in hosts], source)
    if different:
        raise ValueError(f"{different}: jd.processes.broadcast(tree) gives all processes the same")


def of_all_processes(numbers: list[int]) -> np.ndarray:
    """`[P, k]`: a few 32-bit words of every process."""
    own = np.asarray(numbers, np.uint32)
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


def _check_structure(tree: PyTree, source: int) -> None:
    """Before anything whose size depends on it is sent."""
    structure = jax.tree.structure(tree)
    words = of_all_processes([zlib.crc32(str(structure).encode()), structure.num_leaves])
    other = np.flatnonzero((words != words[source]).any(1))
    if len(other):
        raise ValueError(
            f"process {other[0]} has another tree than process {source}, with {words[other[0], 1]} leaves and "
            f"{words[source, 1]}: all processes must build the same model"
        )


def _kind(x: np.ndarray) -> int:
    return zlib.crc32(f"{x.dtype.name}{x.shape}".encode())


def _first_difference(names: list[str], numbers: list[int], source: int) -> str:
    """The first leaf of which a process has another number than `source`, as the beginning of a sentence."""
    found = of_all_processes(numbers)
    processes, leaves = np.nonzero(found != found[source])
    if not len(leaves):
        return ""
    more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
    return f"leaf `{names[leaves[0]]}` of process {processes[0]} differs from that of process {source}{more}"


def _on_host(tree: PyTree) -> tuple[list[str], list[np.ndarray]]:
    """The names of the leaves and their values, keys as words."""
    names, hosts = [], []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names.append(leaf_name(path))
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                raise ValueError(
                    f"leaf `{names[-1]}` is spread over processes: this is for values before place(state, mesh); "
                    "parallel.disagreement(state, mesh) compares placed ones"
                )
            leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        hosts.append(np.asarray(leaf))
    return names, hosts


def _as_it_came(host: np.ndarray, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return host
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(host), impl=jax.random.key_impl(leaf))
    return jnp.asarray(host)

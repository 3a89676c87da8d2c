"""Checks what `zero_redundancy` and `gathered` are given."""

import math
from typing import Any

import jax

from .._core.types import AxisNames, PyTree, Updates
from ..comm.base import Comm
from ..state.marks import OnHost, PerWorker, Sharded, is_mark
from ..transforms.extra_args import refuse_examples
from ..transforms.local_gradients import varies_somewhere
from ..transforms.quantized_state import is_coded
from ..wire.buffers import MULTIPLE, shard_length


def check_inner(state: PyTree) -> None:
    """Checks that the state is not that of a transformation that belongs outside."""
    refuse_examples(state)
    if any(isinstance(x, OnHost) for x in jax.tree.leaves(state, is_leaf=is_mark)):
        raise ValueError("zero_redundancy cannot wrap offload.host: use offload.host(zero_redundancy(inner)) instead")
    if any(isinstance(x, PerWorker) for x in jax.tree.leaves(state, is_leaf=is_mark)):
        raise ValueError(
            "zero_redundancy shards the state of one optimizer for all workers, and this one has a state per worker: "
            "put accumulate around, accumulate(zero_redundancy(inner), k), and per_worker in front, with reducer="
        )
    if any(is_coded(x) for x in jax.tree.leaves(state, is_leaf=is_coded)):
        raise ValueError(
            "zero_redundancy around quantized_state would gather the decoded state: use zero_redundancy(optimizer, "
            "state_compressor=dynamic_fp8(block=8))"
        )


def check_replicated(params: PyTree, extra_args: dict[str, Any], axis: AxisNames) -> None:
    """Checks that whole parameters and an optimizer's extra arguments are not typed as differing between workers.

    Shards may differ.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if varies_somewhere(leaf, axis):
            raise ValueError(
                f"the parameter {jax.tree_util.keystr(path)} differs between workers of axis {axis!r}, but "
                "zero_redundancy updates one model for all of them: remove the PerWorker mark from the train state, or "
                "let workers of another axis differ, PerWorker(params, axis='pod') with zero_redundancy(axis='chip')"
            )
    for name, value in extra_args.items():
        nodes = jax.tree.leaves(value, is_leaf=is_mark)
        if any(isinstance(x, jax.Array) and varies_somewhere(x, axis) for x in nodes):
            cure = f"average it, jax.lax.pmean({name}, {axis!r})"
            if any(map(is_mark, nodes)):
                cure = (
                    "average its leaves except the Sharded ones, which are shards of the mean: jax.tree.map(lambda x: "
                    f"x if isinstance(x, jd.Sharded) else jax.lax.pmean(x, {axis!r}), {name}, "
                    "is_leaf=lambda x: isinstance(x, jd.Sharded))"
                )
            raise ValueError(
                f"{name}= differs between workers of axis {axis!r}, but zero_redundancy needs the same value on all: "
                f"{cure}"
            )


def check_means(updates: Updates, axis: AxisNames) -> None:
    """Checks that gradients that were not to be reduced are not typed as differing between workers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if varies_somewhere(leaf, axis):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} differs between workers of axis {axis!r}, but with "
                "reducer=None zero_redundancy takes gradients that are means already: put all_reduce in front, "
                "optax.chain(all_reduce(reducer), zero_redundancy(inner, reducer=None)), or leave reducer=None out"
            )


def check_sharding(params: PyTree, comm: Comm, *, caller: str = "zero_redundancy") -> None:
    """Checks that sharded parameters are cut as gradients, and the state of each parameter, are."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_mark)[0]:
        if not is_mark(leaf):
            continue
        name = jax.tree_util.keystr(path) or "the parameter"
        if not isinstance(leaf, Sharded):
            raise ValueError(
                f"{name} is marked {type(leaf).__name__}, but {caller} supports only replicated and Sharded "
                "parameters: unwrap it in the step, or use another optimizer for it with optax.partition"
            )
        expected = shard_length(math.prod(leaf.shape), comm.size)
        if leaf.value.shape != (expected,):
            raise ValueError(
                f"{name} of shape {leaf.shape} is cut into shards of shape {leaf.value.shape} for {comm.size} workers, "
                f"but {caller} needs shards of {expected} entries: mark it with zero.shard(params) or "
                f"Sharded(..., multiple={MULTIPLE}), and place the state on this number of workers"
            )

"""Leaves whose "gradient" is their next value, as flax keeps the statistics of its fp8 layers: the maximum of them."""

import jax
import jax.numpy as jnp

from .._core.trees import OVERWRITTEN, is_overwritten, leaves_with_collections
from .._core.types import Array, AxisNames, PyTree, Updates
from ..comm.over import over
from ..wire.buffers import fuse


def agree_on_maximum(
    gradients: Updates, params: PyTree, *, axis: AxisNames = "data", examples: Array | int | None = None
) -> Updates:
    """Replaces the leaves that flax overwrites with their gradient by their maximum over workers.

    The fp8 layers of flax keep scales, by which they divide, and histories of the largest magnitudes in a collection
    `_overwrite_with_gradient`. What `jax.grad` returns for them is no derivative but their next value. That
    of the batch of all workers is the maximum

        v = max_w v_w

    of what each found in its own rows: a mean would be too small, and fp8 would clip. Call it on the gradients of
    `local_value_and_grad`, whose parts by `micro_batches=` it merges in the same way. The next values then go into the
    train state as they are, which `TrainState.apply_gradients` of flax does; neither a reducer nor an optimizer may see
    them, and all that communicate refuse them. A value that is not finite on any worker leaves its leaf as it was.

    Where each worker has a model of its own (`local_steps`, `gossip`), pass `axis=None`: each keeps the statistics of
    its own data, over rounds too, of which only values that are not finite are left out; `consensus` and `resize` take
    the maximum.

    *On the wire*: one all-reduce of these leaves, `2(W-1)/W · 4` bytes an entry; nothing without such leaves.

    *State*: none.

    Args:
      gradients: a tree with the collection anywhere in its paths, or with Variables of nnx that have its name. All
        other leaves are returned as they are.
      params: the tree of the old values, with the structure of the gradients.
      axis: the mesh axis of the workers, or several; `None`: a single worker.
      examples: this worker's number of examples; one with 0 is left out, and with none at all the values stay.

    Returns:
      The gradients, in which these leaves are equal on all workers.

    Raises:
      ValueError: the structures differ, or the axis is not bound.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"params": jnp.zeros(()), "_overwrite_with_gradient": {"amax": jnp.zeros(())}}
      >>> def step(x):
      ...     gradients = {"params": x, "_overwrite_with_gradient": {"amax": jnp.abs(x)}}
      ...     return jd.transforms.agree_on_maximum(gradients, params)["_overwrite_with_gradient"]["amax"]
      >>> jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([1.0, -3.0])).tolist()
      [3.0, 3.0]

    References:
      Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, 2022.
    """
    found, structure = leaves_with_collections(gradients), jax.tree.structure(gradients)
    if jax.tree.structure(params) != structure:
        raise ValueError(f"gradients have the structure {structure}, and params {jax.tree.structure(params)}")
    old, leaves = jax.tree.leaves(params), [leaf for _, leaf in found]
    chosen = [i for i, (path, _) in enumerate(found) if is_overwritten(path)]
    comm = over(axis)
    own = [leaves[i] for i in chosen]
    if examples is not None:
        own = [jnp.where(jnp.asarray(examples) > 0, value, -jnp.inf).astype(value.dtype) for value in own]
    for i, value in zip(chosen, fuse(comm, comm.max, comm.varying(own)), strict=True):
        # A history is kept or replaced as a whole, since a new one is shifted by an entry.
        leaves[i] = jnp.where(jnp.isfinite(value).all(), value, old[i])
    return structure.unflatten(leaves)


def explain_overwritten(what: str) -> str:
    """The reason why a leaf of the collection is refused, and what to do with it."""
    return (
        f"{what} is in the collection {OVERWRITTEN!r}, whose gradients are not derivatives but next values (fp8 "
        "statistics): neither a reducer nor an optimizer may see them. Give both the other collections alone, "
        "tx.update(gradients['params'], ...), take the maximum over workers, "
        "jd.transforms.agree_on_maximum(gradients, params), and let it replace the old values "
        "(docs/how-to/use-flax.md)"
    )

"""ZeRO: each worker keeps the optimizer state of a part of the model, and updates that part for all."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._marks import bind
from ..._typing import Array, AxisNames, Int, PyTree, State, Updates
from ...comm import Comm, over
from ...compressors.base import working_dtype
from ...schedule import assign_buckets
from ..local_gradients import check_leaves, check_local, refuse_model_axes, scale, weight_of
from ..optimizers.base import NO_PARAMS
from .dependence import owner_of, reach
from .flat import closed, cut, gather, opened, piece, reduce_scatter

# That of DDP. The gradients of a bucket are given up as soon as it has been sent.
BUCKET_BYTES = 25 * 2**20


class ZeroState(NamedTuple):
    """What this worker keeps for its part of the model.

    `inner`: the state of the optimizer; what stands beside a parameter is `Sharded`, all else agreed. `master`: the
    parameters in more precise numbers, `Sharded`, or `()`. `empty` counts steps without any example (agreed).
    """

    inner: State
    master: PyTree
    empty: Int[Array, ""]


def zero_redundancy(
    inner: optax.GradientTransformation,
    *,
    stage: Literal[1, 2] = 1,
    reduced: bool = False,
    master_dtype: Any | None = None,
    clip_norm: float | int | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Cuts the optimizer's state over the workers: each updates its part of the parameters, and all gather the updates.

    `g = reduce_scatter(g_w)`, `u, s = inner(g, s, θ_part)`, `updates = all_gather(u)`: the bytes of an all-reduce, and
    `K/W` instead of `K` bytes of state a parameter. It replaces `all_reduce`.

    Leaves are cut flat, wherever the cuts fall, so `inner` must treat every entry by itself. That is proven from its
    trace: Adam, SGD, Lion and the like pass; what looks at whole leaves (LAMB, Adafactor, Muon, masks by `ndim`) or at
    all of them (clipping by the global norm: `clip_norm=` does that here) is refused.

    *On the wire* for `n` entries in float32: a reduce-scatter and an all-gather, `2(W-1)/W · 4n` bytes sent (padded);
    on the CPU backend the reduce-scatter is an all-to-all. With `clip_norm` or `examples` four bytes more each. With
    `reduced`, the all-gather alone, but `all_reduce` before it sends twice as much.

    *State*: cut over the workers, all of `inner`'s that is shaped like the parameters, and the master parameters.

    Args:
      inner: an elementwise optimizer, `optax.adamw(3e-4)`, with its schedules.
      stage: 1: one collective for all gradients. 2: one for each 25 MiB of them, so that gradients need not all exist
        at once.
      reduced: the gradients are means already, `optax.chain(jd.all_reduce(...), jd.zero_redundancy(...,
        reduced=True))`.
      master_dtype: `jnp.float32` keeps the parameters in it beside the state and updates those: for bfloat16
        parameters, which lose small updates. The gather then sends the new parameters in their own dtype.
      clip_norm: gradients are scaled down to this global norm.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`. Its `update` takes `examples=`, as `all_reduce`.

    Raises:
      ValueError: arguments are out of range; in `init`, `inner` is not elementwise; at trace time, what `all_reduce`
        raises, or if `params` are missing.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.zero_redundancy(optax.adam(0.1))
      >>> def step(state, batch):
      ...     gradients = {"w": state["w"] - batch.mean()}
      ...     updates, opt = tx.update(gradients, state["opt"], {"w": state["w"]})
      ...     return {"w": state["w"] + updates["w"], "opt": opt}, {}
      >>> state = {"w": jnp.zeros(10), "opt": tx.init({"w": jnp.zeros(10)})}
      >>> state, _ = jd.simulate(step, workers=2)(jd.place(state, 2), jnp.ones(4))
      >>> round(float(state["w"][0]), 3), state["opt"].inner[0].mu["w"].value.shape  # 2 parts of 8
      (0.1, (16,))

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020. Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", arXiv
      2004.13336, 2020.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}: stage 3 cuts the parameters too, see parallel.gathered")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")
    inner = optax.with_extra_args_support(inner)

    def held(x):
        return jnp.array(x, master_dtype or x.dtype)

    def init(params) -> State:
        check_leaves(params)
        _check_elementwise(inner, params)
        shapes = jax.tree.map(held, params)
        state = inner.init(shapes)
        inner_state = cut(state, owner_of(inner, state, shapes))
        master = () if master_dtype is None else cut(shapes, jax.tree.map(lambda _: 0, shapes))
        return ZeroState(bind(inner_state, axis), bind(master, axis), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        check_leaves(updates)
        refuse_model_axes("zero_redundancy", "use placement.zero_shardings with plain jit")
        comm = over(axis)
        with jax.named_scope("zero_redundancy"):
            leaves, tree = jax.tree.flatten(updates)
            some = True
            if reduced:
                mine = [piece(leaf, comm) for leaf in leaves]
            else:
                check_local(updates, axis)
                if examples is not None:
                    weight, some = weight_of(examples, comm)
                    leaves = jax.tree.leaves(scale(updates, weight))
                cap = sum(leaf.nbytes for leaf in leaves) + 1 if stage == 1 else BUCKET_BYTES
                buckets = assign_buckets([leaf.nbytes for leaf in leaves], bucket_bytes=cap)
                mine = reduce_scatter(leaves, buckets, comm)
            if clip_norm is not None:
                mine = _clipped(mine, clip_norm, comm)
            mine = [g.astype(master_dtype or g.dtype) for g in mine]
            kept = opened(state.master) if master_dtype else jax.tree.map(lambda p: piece(p, comm), params)
            steps, inner_state = inner.update(tree.unflatten(mine), opened(state.inner), kept, **extra_args)
            steps = jax.tree.map(lambda u: jnp.where(some, u, jnp.zeros_like(u)), steps)
            if master_dtype is None:
                out = tree.unflatten(gather(jax.tree.leaves(steps), leaves, comm))
                master = ()
            else:
                master = optax.apply_updates(kept, steps)
                out = _differences(master, params, comm)
            inner_state = jax.tree.map(lambda new, old: jnp.where(some, new, old), inner_state, opened(state.inner))
        return out, ZeroState(
            closed(inner_state, state.inner), closed(master, state.master), state.empty + jnp.where(some, 0, 1)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_elementwise(inner: optax.GradientTransformation, params: PyTree) -> None:
    found = reach(inner, params)
    if found == "tree":
        raise ValueError(
            "the optimizer's update of one leaf depends on others (clipping by the global norm?), and a worker sees a "
            "part of each only: use zero_redundancy(..., clip_norm=) and leave the clipping out of the chain"
        )
    if found == "leaf":
        raise ValueError(
            "the optimizer looks at whole leaves (norms, factors, orthogonalisation, masks by shape), and a worker "
            "sees a flat part of each only: use an elementwise one, a mask by name, or all_reduce alone"
        )


def _clipped(pieces: list[Array], norm: float | int, comm: Comm) -> list[Array]:
    square = comm.sum(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in pieces), jnp.zeros(())))
    factor = jnp.minimum(1.0, norm / jnp.maximum(jnp.sqrt(square), jnp.finfo(jnp.float32).tiny))
    return [x * factor.astype(x.dtype) for x in pieces]


def _differences(master: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """The updates that make the parameters the master in their own dtype; sent in that dtype."""
    leaves, tree = jax.tree.flatten(params)
    own = [x.astype(p.dtype) for x, p in zip(jax.tree.leaves(master), leaves, strict=True)]
    new = gather(own, leaves, comm)
    return tree.unflatten([_difference(x, p) for x, p in zip(new, leaves, strict=True)])


def _difference(new: Array, old: Array) -> Array:
    wide = working_dtype(old.dtype)
    return (new.astype(wide) - old.astype(wide)).astype(old.dtype)

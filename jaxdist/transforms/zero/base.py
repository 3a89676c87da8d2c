"""ZeRO: each worker keeps the optimizer state of a part of the model, and updates that part for all."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._marks import Sharded, bind, is_mark, with_value
from ..._typing import Array, AxisNames, Int, PyTree, State, Updates
from ...comm import Comm, over
from ...compressors.base import working_dtype
from ...reducers._flat import MULTIPLE
from ...schedule import assign_buckets
from ..local_gradients import check_leaves, check_local, refuse_model_axes, scale, weight_of
from ..optimizers.base import NO_PARAMS
from .flat import gather, piece, reduce_scatter
from .parts import Part, on_parts

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
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Cuts the optimizer's state over the workers: each updates its part of the parameters, and all gather the updates.

    `g = reduce_scatter(g_w)`, `u, s = inner(g, s, θ_part)`, `updates = all_gather(u)`: the bytes of an all-reduce, and
    `K/W` instead of `K` bytes of state a parameter. It replaces `all_reduce`.

    Leaves are cut flat, wherever the cuts fall, and yet any optimizer gives the result that it would give uncut: its
    trace is evaluated on the parts. What it does entry by entry (Adam, SGD, Lion) stays so; norms of whole leaves or of
    all of them (LAMB, LARS, clipping by the global norm) are sums over the workers, of four bytes each; what looks at
    leaves in any other way (the rows and columns of Adafactor, the products of Muon) gathers them first.

    *On the wire* for `n` entries in float32: a reduce-scatter and an all-gather, `2(W-1)/W · 4n` bytes sent (padded);
    on the CPU backend the reduce-scatter is an all-to-all. With `examples` four bytes more. With `reduced`, the
    all-gather alone, but `all_reduce` before it sends twice as much. Muon gathers its momentum and not its updates, the
    same bytes; Adafactor one array more for each leaf that it factors.

    Parameters that are `Sharded` themselves (stage 3, `parallel.gathered`) have gradients that are cut and averaged
    already; for them nothing is sent here, unless `inner` asks for more than entries.

    *State*: cut over the workers, all of `inner`'s that is shaped like the parameters, and the master parameters.

    Args:
      inner: any optimizer, or a chain with clipping, schedules, masks and weight decay.
      stage: 1: one collective for all gradients. 2: one for each 25 MiB of them, so that gradients need not all exist
        at once.
      reduced: the gradients are means already, `optax.chain(jd.all_reduce(...), jd.zero_redundancy(...,
        reduced=True))`.
      master_dtype: `jnp.float32` keeps the parameters in it beside the state and updates those: for bfloat16
        parameters, which lose small updates. The gather then sends the new parameters in their own dtype.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`. Its `update` takes `examples=`, as `all_reduce`.

    Raises:
      ValueError: `stage` is not 1 or 2; at trace time, what `all_reduce` raises, or if `params` are missing.

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
    inner = optax.with_extra_args_support(inner)

    def init(params) -> State:
        params = jax.tree.map(lambda p: p.value if is_mark(p) else p, params, is_leaf=is_mark)
        check_leaves(params)
        held = jax.tree.map(lambda x: jnp.array(x, master_dtype or x.dtype), params)
        state = inner.init(held)
        beside = _beside(inner, state, held)
        state = jax.tree.map(lambda x, is_beside: _sharded(x) if is_beside else x, state, beside)
        master = () if master_dtype is None else jax.tree.map(_sharded, held)
        return ZeroState(bind(state, axis), bind(master, axis), jnp.zeros((), jnp.int32))

    def mean_parts(leaves, examples, comm):
        """The part of the mean of each gradient that is this worker's, and whether there was any example."""
        if reduced:
            return [piece(leaf, comm) for leaf in leaves], True
        some = True
        check_local(leaves, axis)
        if examples is not None:
            weight, some = weight_of(examples, comm)
            leaves = scale(leaves, weight)
        sizes = [leaf.nbytes for leaf in leaves]
        buckets = assign_buckets(sizes, bucket_bytes=BUCKET_BYTES if stage == 2 else sum(sizes) + 1)
        return reduce_scatter(leaves, buckets, comm), some

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        refuse_model_axes("zero_redundancy", "use placement.zero_shardings with plain jit")
        comm = over(axis)
        with jax.named_scope("zero_redundancy"):
            leaves, tree = jax.tree.flatten(updates, is_leaf=is_mark)
            uncut = [leaf for leaf in leaves if not is_mark(leaf)]
            check_leaves(uncut)
            if examples is not None and len(uncut) < len(leaves):
                raise ValueError("gradients of Sharded parameters are means already: weigh the loss by the examples")
            means, some = mean_parts(uncut, examples, comm)
            means = iter(means)
            mine = tree.unflatten([leaf.value if is_mark(leaf) else next(means) for leaf in leaves])

            like = jax.tree.map(
                lambda p: jax.ShapeDtypeStruct(p.shape, master_dtype or (p.value if is_mark(p) else p).dtype),
                params,
                is_leaf=is_mark,
            )
            gradients = jax.tree.map(lambda x, p: Part(x.astype(p.dtype), p.shape), mine, like)
            held = _as_parts(params, comm) if master_dtype is None else _as_parts(state.master)
            steps, new = on_parts(
                lambda *trees: inner.update(*trees, **extra_args),
                comm,
                (like, _logical(state.inner), like),
                (gradients, _as_parts(state.inner), held),
            )
            inner_state = _like_before(new, state.inner, some, comm)
            steps = jax.tree.map(lambda u: _masked(u, some), steps, is_leaf=_is_part)
            master = state.master
            if master_dtype is not None:
                moved = jax.tree.map(lambda x, u: x.value + _local(u, comm), held, steps, is_leaf=_is_part)
                master = jax.tree.map(with_value, master, moved, is_leaf=is_mark)
                steps = moved
            out = (_taken if master_dtype is None else _differences)(steps, params, comm)
        return out, ZeroState(inner_state, master, state.empty + jnp.where(some, 0, 1))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_part(x: Any) -> bool:
    return isinstance(x, Part)


def _beside(inner: optax.GradientTransformation, state: PyTree, params: PyTree) -> PyTree:
    """A tree of booleans: which leaves of a state stand beside a parameter and have its shape."""

    def one(leaf, param):
        return leaf if isinstance(leaf, optax.MaskedNode) else leaf.shape == param.shape

    return optax.tree.map_params(
        inner,
        one,
        state,
        params,
        transform_non_params=lambda x: jax.tree.map(lambda _: False, x),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def _sharded(x: Array) -> Sharded:
    return Sharded(x, multiple=MULTIPLE)


def _logical(tree: PyTree) -> PyTree:
    """The shapes of the whole state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.value.dtype) if is_mark(x) else x, tree, is_leaf=is_mark
    )


def _as_parts(tree: PyTree, comm: Comm | None = None) -> PyTree:
    """What is marked as its part; with `comm`, what is not as a part that is known whole."""

    def one(x):
        if is_mark(x):
            return Part(x.value, x.shape)
        return x if comm is None else Part(piece(x, comm), x.shape, x)

    return jax.tree.map(one, tree, is_leaf=is_mark)


def _local(x: Any, comm: Comm) -> Array:
    return x.value if _is_part(x) else piece(x, comm)


def _like_before(new: PyTree, old: PyTree, some: Array | bool, comm: Comm) -> PyTree:
    """The state with its marks; the old one if there was no example."""

    def one(before, after):
        if is_mark(before):
            return with_value(before, jnp.where(some, _local(after, comm), before.value))
        return jnp.where(some, after.whole(comm) if _is_part(after) else after, before)

    return jax.tree.map(one, old, new, is_leaf=lambda x: is_mark(x) or _is_part(x))


def _masked(x: Any, some: Array | bool) -> Any:
    return jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), x)


def _taken(steps: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """The updates: cut where the parameters are, else of all workers; what each has computed whole is not sent."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    steps = jax.tree.leaves(steps, is_leaf=_is_part)
    known = [x.full if _is_part(x) else x for x in steps]
    sent = [not is_mark(p) and full is None for p, full in zip(leaves, known, strict=True)]
    missing = [x for x, is_sent in zip(steps, sent, strict=True) if is_sent]
    arrived = iter(gather([x.value for x in missing], [x.shape for x in missing], comm))

    def one(p, x, full, is_sent):
        return next(arrived) if is_sent else with_value(p, _local(x, comm)) if is_mark(p) else full

    return tree.unflatten([one(*each) for each in zip(leaves, steps, known, sent, strict=True)])


def _differences(master: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """The updates that make the parameters the master in their own dtype; sent in that dtype."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    pairs = list(zip(jax.tree.leaves(master), leaves, strict=True))
    sent = [(x.astype(p.dtype), p.shape) for x, p in pairs if not is_mark(p)]
    arrived = iter(gather([x for x, _ in sent], [shape for _, shape in sent], comm))

    def one(x, p):
        if is_mark(p):
            return with_value(p, _difference(x.astype(p.value.dtype), p.value))
        return _difference(next(arrived), p)

    return tree.unflatten([one(*pair) for pair in pairs])


def _difference(new: Array, old: Array) -> Array:
    # In float32, unlike other updates: added to a bfloat16 parameter it gives the new one exactly.
    wide = working_dtype(old.dtype)
    return new.astype(wide) - old.astype(wide)

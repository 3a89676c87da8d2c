"""ZeRO: each worker keeps the optimizer state of a part of the model, and updates that part for all."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import NO_PARAMS
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..compressors.base import Compressor
from ..reducers.base import Extras, Reducer, is_map_params_placeholder, shards_of
from ..reducers.exact import exact
from ..state.correspondence import NONE, beside
from ..state.marks import Sharded, bind, is_mark, with_value
from ..transforms.local_gradients import check_leaves, check_local, refuse_model_axes, scale, weight_of
from ..transforms.optax_wrappers import check_shapes
from ..wire.encoded import contraction_form
from ..wire.flat import MULTIPLE
from ..wire.shards import piece
from .checks import check_agreed, check_cut, check_inner
from .parts import Part, on_parts
from .shards import buckets_of, cut_alone, init_buckets, mean_pieces, whole_again
from .state_compression import check_state_code, compacted, compacted_again, expanded
from .updates import CodedState, coded, coded_differences, differences, is_part, local, residual_of, taken

EXACT = exact()


class ZeroState(NamedTuple):
    """What this worker keeps for its part of the model.

    `inner`: the state of the optimizer; what stands beside a parameter is `Sharded`, all else agreed. `master`: the
    parameters in more precise numbers, `Sharded`, or `()`. `empty` counts steps without any example (agreed).
    `reducer`: that of the gradients, for each bucket. `coded`: of the code of the updates, or `()`.
    """

    inner: State
    master: PyTree
    empty: Int[Array, ""]
    reducer: State
    coded: State


def zero_redundancy(
    inner: optax.GradientTransformation,
    *,
    stage: Literal[1, 2] = 1,
    reducer: Reducer | None = EXACT,
    compressor: Compressor | None = None,
    master_dtype: Any | None = None,
    state_compressor: Compressor | None = None,
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
    on the CPU backend the reduce-scatter is an all-to-all. With `examples` four bytes more. With `reducer=None`, the
    all-gather alone, but `all_reduce` before it sends twice as much. Muon gathers its momentum and not its updates, the
    same bytes; Adafactor one array more for each leaf that it factors. With codes, `(W-1)` times the bytes of a code of
    `n/W` entries, for the gradients (`reducer`) and for the updates (`compressor`).

    With `compressor`, all workers, the owner too, apply what the code of an update decodes to, so parameters stay
    equal. What the code loses is owed: its owner adds it to the next update, and parameters never stray further than
    one such residual from where uncoded updates would have led. With master parameters the difference between them and
    the parameters is sent, and is the residual.

    Parameters that are `Sharded` themselves (stage 3, `zero.gathered`) have gradients that are cut and averaged
    already; for them nothing is sent here, unless `inner` asks for more than entries.

    *State*: cut over the workers, all of `inner`'s that is shaped like the parameters, and the master parameters; with
    `compressor` a residual in float32, unless there are master parameters. That of the reducer: error feedback keeps a
    whole gradient in float32 on each worker.

    Args:
      inner: any optimizer, or a chain with clipping, schedules, masks and weight decay. What else its update is passed
        must be agreed: `value=jax.lax.pmean(loss, axis)` for Polyak's steps, a `value_fn` with such a mean for line
        searches.
      stage: 1: one collective for all gradients, and one for all updates. 2: one for each 25 MiB of them, so that
        neither need all exist at once.
      reducer: averages the gradients, in its reduce-scatter form: `exact()`, `two_shot(qsgd(4))`,
        `error_feedback(two_shot(int4()))`, with two axes `hierarchical`. `None`: the gradients are means already,
        `optax.chain(jd.all_reduce(...), jd.zero_redundancy(..., reducer=None))`.
      compressor: the code of the updates that are gathered, `compressors.int8()`. An unbiased one is scaled to a
        contraction, as in error feedback. What `inner` computes whole is not sent and has no code (Muon).
      master_dtype: `jnp.float32` keeps the parameters in it beside the state and updates those: for bfloat16
        parameters, which lose small updates. The gather then sends the new parameters in their own dtype (with
        `compressor`, the code of how they change).
      state_compressor: how each worker keeps its part of the optimizer's large arrays between steps, as
      `quantized_state` does:
        `compressors.dynamic_fp8(block=8)` for 8-bit Adam, `2 · (1 + 1/8) / W` bytes a parameter in place of `8 / W`, or
        `compressors.cast(jnp.bfloat16, rounding="stochastic")`. The master parameters stay as they are.
      axis: the mesh axis of the workers. Pods may differ: `local_steps(zero_redundancy(..., axis="chip"), ...,
        axis="pod")`, and so inside `noloco` and `gossip`.

    Returns:
      A gradient transformation for local gradients; it needs `params`. Its `update` takes `examples=`, as `all_reduce`.

    Raises:
      ValueError: `stage` is not 1 or 2, `inner` is an `offload.host` (which belongs outside), a `quantized_state`,
        `dpsgd` (which takes gradients of single examples) or `lookahead` (which has two sets of parameters), the cuts
        would go through blocks of `state_compressor`, the reducer has no reduce-scatter form, or the code states
        neither
        contraction nor variance; at trace time, what `all_reduce` raises, or if `params` are missing, or cut in another
        way than `zero.shard` cuts them, or if, on a mesh, they or another argument differ between workers.

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
      2004.13336, 2020. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
      arXiv 2306.10209, 2023.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}: stage 3 cuts the parameters too, see zero.gathered")
    if state_compressor is not None:
        check_state_code(state_compressor)
    inner = optax.with_extra_args_support(inner)
    advice = "optax.chain(all_reduce(reducer), zero_redundancy(inner, reducer=None)), which sends 3Ψ"
    form = None if reducer is None else shards_of(reducer, advice=advice)
    code = None if compressor is None else contraction_form(compressor)

    def init(params) -> State:
        given = params
        params = jax.tree.map(lambda p: p.value if is_mark(p) else p, params, is_leaf=is_mark)
        check_leaves(params)
        held = jax.tree.map(lambda x: jnp.array(x, master_dtype or x.dtype), params)
        state = inner.init(held)
        check_inner(state)
        shapes = [x.shape for x in jax.tree.leaves(held)]
        state = jax.tree.map(
            lambda x, k: _sharded(x) if k != NONE and x.shape == shapes[k] else x,
            state,
            beside(inner.init, state, held),
        )
        if state_compressor is not None:
            state = compacted(state_compressor, state)
        master = () if master_dtype is None else jax.tree.map(_sharded, held)
        return ZeroState(
            bind(state, axis),
            bind(master, axis),
            jnp.zeros((), jnp.int32),
            bind(_reducer_state(given), axis),
            () if code is None else bind(_code_state(given), axis),
        )

    def _reducer_state(params):
        if form is None or is_map_params_placeholder(params):
            return () if form is None else 0
        uncut = _uncut(params)
        return init_buckets(form, uncut, buckets_of(uncut, stage))

    def _code_state(params):
        residual = residual_of(params) if master_dtype is None else ()
        return CodedState(jax.random.key(0), jnp.zeros((), jnp.int32), residual)

    def mean_parts(updates, params, state, examples, comm, extras):
        """The part of the mean of each gradient that is this worker's, and whether there was any example."""
        if form is None:
            return jax.tree.map(lambda x: piece(x, comm), updates), state, True
        some = True
        check_local(updates, axis)
        if examples is not None:
            weight, some = weight_of(examples, comm)
            updates = scale(updates, weight)
        means, new = mean_pieces(form, updates, state, buckets_of(params, stage), comm, extras)
        return means, jax.tree.map(lambda new, old: jnp.where(some, new, old), new, state), some

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        refuse_model_axes("zero_redundancy", "use zero.zero_shardings with plain jit")
        comm = over(axis)
        given = updates, state
        updates, state, params = cut_alone((updates, state, params), axis)
        with jax.named_scope("zero_redundancy"):
            check_cut(params, comm)
            check_agreed(_uncut(params), extra_args, axis)
            uncut = _uncut(updates)
            check_leaves(uncut)
            check_shapes(uncut, _uncut(params))
            leaves, tree = jax.tree.flatten(updates, is_leaf=is_mark)
            if examples is not None and any(map(is_mark, leaves)):
                raise ValueError("gradients of Sharded parameters are means already: weigh the loss by the examples")
            extras = Extras(extra_args.get("step"), extra_args.get("learning_rate"))
            means, reducer_state, some = mean_parts(uncut, _uncut(params), state.reducer, examples, comm, extras)
            arrived = iter(jax.tree.leaves(means))
            mine = tree.unflatten([leaf.value if is_mark(leaf) else next(arrived) for leaf in leaves])

            like = jax.tree.map(
                lambda p: jax.ShapeDtypeStruct(p.shape, master_dtype or (p.value if is_mark(p) else p).dtype),
                params,
                is_leaf=is_mark,
            )
            gradients = jax.tree.map(lambda x, p: Part(x.astype(p.dtype), p.shape), mine, like)
            held = _as_parts(params, comm) if master_dtype is None else _as_parts(state.master)
            before = state.inner if state_compressor is None else expanded(state_compressor, state.inner.inner)
            steps, new = on_parts(
                lambda *trees: inner.update(*trees, **extra_args),
                comm,
                (like, _logical(before), like),
                (gradients, _as_parts(before), held),
            )
            inner_state = _like_before(new, before, some, comm)
            if state_compressor is not None:
                inner_state = compacted_again(state_compressor, inner_state, state.inner, some, comm)
            steps = jax.tree.map(lambda u: _masked(u, some), steps, is_leaf=is_part)
            master, coded_state = state.master, state.coded
            if master_dtype is None:
                out, coded_state = deliver(steps, params, coded_state, some, comm)
            else:
                moved = jax.tree.map(lambda x, u: x.value + local(u, comm), held, steps, is_leaf=is_part)
                master = jax.tree.map(with_value, master, moved, is_leaf=is_mark)
                out, coded_state = deliver(moved, params, coded_state, some, comm)
        empty = jnp.where(some, state.empty, next_count(state.empty))
        return whole_again((out, ZeroState(inner_state, master, empty, reducer_state, coded_state)), given, axis)

    def deliver(steps, params, state, some, comm):
        """The updates for all, of the steps of this worker's parts or of its master parameters."""
        if code is None:
            return (taken if master_dtype is None else differences)(steps, params, comm), state
        return (coded if master_dtype is None else coded_differences)(steps, params, state, code, some, comm)

    return optax.GradientTransformationExtraArgs(init, update)


def _uncut(tree: PyTree) -> PyTree:
    """Without what is marked; a leaf keeps its path."""
    return jax.tree.map(lambda x: None if is_mark(x) else x, tree, is_leaf=is_mark)


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


def _like_before(new: PyTree, old: PyTree, some: Array | bool, comm: Comm) -> PyTree:
    """The state with its marks; the old one if there was no example."""

    def one(before, after):
        if is_mark(before):
            return with_value(before, jnp.where(some, local(after, comm), before.value))
        return jnp.where(some, after.whole(comm) if is_part(after) else after, before)

    return jax.tree.map(one, old, new, is_leaf=lambda x: is_mark(x) or is_part(x))


def _masked(x: Any, some: Array | bool) -> Any:
    return jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), x)

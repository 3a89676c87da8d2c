"""ZeRO stages 1 and 2: each worker keeps and updates one shard of the optimizer state, then all gather the updates.

`examples/from_scratch/zero.py` is the first stage in 100 lines of plain JAX.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import NO_PARAMS
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Flag, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..compressors.compressor import Compressor
from ..compressors.scaled import contraction_form
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Reducer, Use, check_use, shards_of
from ..reducers.trees import is_map_params_placeholder
from ..state.marks import NO_PARAMETER, Sharded, bind, is_mark, parameter_indices, with_value
from ..transforms.averaged import average_arguments
from ..transforms.extra_args import with_extra_args
from ..transforms.in_plain_jit import with_own_map
from ..transforms.local_gradients import check_leaves, check_local, check_shapes, refuse_model_axes
from ..transforms.weights import scale_leaves, weight_of, weight_of_leaves, widen_weight, zero_unless
from ..wire.buffers import MULTIPLE
from ..wire.shards import shard_of
from .checks import check_inner, check_means, check_replicated, check_sharding
from .parts import as_parts, on_parts
from .placed import placed_zero
from .shards import (
    StateCodec,
    buckets_of,
    compressing_codec,
    identity_codec,
    init_buckets,
    reduce_buckets,
    shard_for_one_worker,
    unshard_for_one_worker,
)
from .state import ZeroState
from .updates import (
    Delivery,
    deliver_encoded_params,
    deliver_encoded_updates,
    deliver_params,
    deliver_updates,
    follow_params,
)
from .values import Part, is_part, local_shard

EXACT = exact()
ALREADY_REDUCED = (
    "if all_reduce comes before zero_redundancy, leave it out, since zero_redundancy averages gradients itself, or "
    "pass reducer=None; otherwise "
)


class _Gradients(NamedTuple):
    """How gradients become this worker's shards of their mean.

    `init(params)` makes the state, and `reduce_to_shards(gradients, params, state, weight, arguments, comm)` returns
    the shards, the new state, and a boolean: did any worker have an example? With weights of leaves one for each.
    """

    init: Callable[[PyTree], State]
    reduce_to_shards: Callable[..., tuple[Updates, State, Flag]]


def zero_redundancy(
    inner: optax.GradientTransformation,
    *,
    stage: Literal[1, 2, 3] = 1,
    reducer: Reducer | None = EXACT,
    compressor: Compressor | None = None,
    master_dtype: Any | None = None,
    state_compressor: Compressor | None = None,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shards the optimizer's state over the workers: each updates its shard of the parameters, and all gather updates.

    `g = reduce_scatter(g_w)`, `u, s = inner(g, s, θ_shard)`, `updates = all_gather(u)`, as `inner` has them on whole
    arrays. It replaces `all_reduce`.

    *On the wire* for `n` entries in float32: a reduce-scatter and an all-gather, `2(W-1)/W · 4n` bytes; with
    `examples` four bytes more; for products of matrices `(W-1)/W² · 4n` more; with compression `(W-1)` times the
    payload of `n/W` entries, each way.

    *State*: sharded, what `inner` has of the parameters' shape, and masters; with `compressor` and no masters a float32
    residual; the reducer's own.

    Args:
      inner: any optimizer or chain. Extra arguments must be equal on all workers.
      stage: 1: one collective for all gradients, one for all updates. 2: one for each 25 MiB.
      reducer: averages gradients, in its reduce-scatter form: `exact()`, `two_shot(qsgd(4))`. `None`: they are means,
        and only updates are sent.
      compressor: compresses the updates.
      master_dtype: of masters, such as `jnp.float32`.
      state_compressor: compresses the shards of large arrays between steps, as `quantized_state`: for Adam
        `compressors.dynamic_fp8(block=8)` takes `2.25 / W` instead of `8 / W` bytes a parameter.
      axis: the mesh axis of the workers.
      specs: under plain `jit`, a tree of `PartitionSpec`, as `P("data", "model")`, that shards gradients and state; in
        stage 3 parameters too.

    Returns:
      A transformation for local gradients; `update` needs `params`, takes `examples=` and `active=` as `all_reduce`,
      and `moved=True` if something else may have changed the parameters.

    Raises:
      ValueError: `stage` is unknown; `inner` is `offload.host`, `quantized_state`, `dpsgd` or `lookahead`; shards cut
        blocks of `state_compressor`; the reducer has no reduce-scatter form; `compressor` states neither contraction
        nor variance. At trace time: as `all_reduce`; `params` or extra arguments differ between workers; `params` are
        missing, or sharded otherwise than by `zero.shard`; `moved` with `compressor` and `master_dtype`; `specs` in a
        map.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.zero_redundancy(optax.adam(0.1))
      >>> def step(state, batch):
      ...     gradients = {"w": state["w"] - batch.mean()}
      ...     updates, opt = tx.update(gradients, state["opt"], {"w": state["w"]})
      ...     return {"w": state["w"] + updates["w"], "opt": opt}, {}
      >>> state = {"w": jnp.zeros(10), "opt": tx.init({"w": jnp.zeros(10)})}
      >>> state, _ = jd.simulate(step, workers=2)(jd.place(state, 2), jnp.ones(4))
      >>> round(float(state["w"][0]), 3), state["opt"].inner[0].mu["w"].value.shape  # 2 shards of 8
      (0.1, (16,))

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      arXiv:1910.02054, 2020. Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
      arXiv:2004.13336, 2020. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
      Training", arXiv:2306.10209, 2023.
    """
    if stage not in (1, 2) and (specs is None or stage != 3):
        raise ValueError(
            f"stage must be 1 or 2, got {stage}; to shard the parameters too (stage 3), use zero.gathered, or specs= "
            "under plain jit"
        )
    if specs is not None:
        if compressor is not None or state_compressor is not None:
            name = "state_compressor" if compressor is None else "compressor"
            raise ValueError(
                f"zero_redundancy(specs=) leaves the gather and the state to the compiler, which has no {name}=: leave "
                "it out, or specs= on a mesh without further axes"
            )
        return placed_zero(
            with_extra_args(inner), reducer=reducer, specs=specs, stage=stage, master_dtype=master_dtype, axis=axis
        )
    if reducer is None:
        gradients = _Gradients(lambda params: (), partial(_shards_of_means, axis))
    else:
        advice = "optax.chain(all_reduce(reducer), zero_redundancy(inner, reducer=None)), which sends 3Ψ"
        form = shards_of(reducer, advice=advice)
        scatter = _ReduceScatter(form, stage, axis)
        gradients = _Gradients(scatter.init, scatter.reduce_to_shards)
    codec = identity_codec() if state_compressor is None else compressing_codec(state_compressor)
    if compressor is None:
        delivery = deliver_updates() if master_dtype is None else deliver_params()
    else:
        code = contraction_form(compressor)
        delivery = deliver_encoded_updates(code) if master_dtype is None else deliver_encoded_params(code)
    method = _ZeroRedundancy(with_extra_args(inner), gradients, codec, delivery, master_dtype, axis)
    tx = optax.GradientTransformationExtraArgs(method.init, method.update)
    # Means are the same outside of a map.
    return tx if reducer is None else with_own_map(tx, axis)


class _ZeroRedundancy(NamedTuple):
    inner: optax.GradientTransformationExtraArgs
    gradients: _Gradients
    codec: StateCodec
    delivery: Delivery
    master_dtype: Any
    axis: AxisNames

    def init(self, params: PyTree) -> ZeroState:
        # `init` sees whole arrays as written; `place` cuts the marked ones.
        values = jax.tree.map(lambda p: p.value if is_mark(p) else p, params, is_leaf=is_mark)
        check_leaves(values)
        optimized = jax.tree.map(lambda x: jnp.array(x, self.master_dtype or x.dtype), values)
        inner = self.inner.init(optimized)
        check_inner(inner)
        master = () if self.master_dtype is None else jax.tree.map(_mark_sharded, optimized)
        return ZeroState(
            bind(self.codec.init(self._mark_state(inner, optimized)), self.axis),
            bind(master, self.axis),
            jnp.zeros((), jnp.int32),
            bind(self.gradients.init(params), self.axis),
            bind(self.delivery.init(params), self.axis),
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree = None,
        *,
        examples: Any = None,
        active: Any = None,
        moved: bool = False,
        **extra_args: Any,
    ) -> tuple[Updates, ZeroState]:
        if params is None:
            raise ValueError(NO_PARAMS)
        comm, given = over(self.axis), (updates, state)
        refuse_model_axes("zero_redundancy", "use zero_redundancy(specs=) under plain jit")
        updates, state, params = shard_for_one_worker((updates, state, params), self.axis)
        with jax.named_scope("zero_redundancy"):
            # Gradients of `Sharded` parameters (stage 3) are sharded and averaged already.
            replicated = _without_marked(updates), _without_marked(params)
            self._check_arguments(*replicated, extra_args)
            check_sharding(params, comm)
            is_weighted = examples is not None or active is not None
            if is_weighted and len(jax.tree.leaves(replicated[0])) < len(jax.tree.leaves(updates)):
                raise ValueError(
                    "examples= and active= cannot weight the gradients of Sharded parameters, which are averaged "
                    "already: weigh the loss by the examples, local_value_and_grad(loss, weights=)"
                )
            weight = weight_of_leaves(examples, active, replicated[0])
            # What `inner` calls is averaged, since it takes any whole array for the same on all workers.
            extra_args = average_arguments(extra_args, self.axis, weight)
            # g = reduce_scatter(g_w): this worker's shard of the mean. Schedules of reducers read the extras.
            extras = Extras(extra_args.get("step"), extra_args.get("learning_rate"))
            means, reducer, used = self.gradients.reduce_to_shards(*replicated, state.reducer, weight, extras, comm)
            some = used if isinstance(used, bool) else used.any()
            shards = _fill_in(means, updates)
            if moved and self.master_dtype is not None:
                state = state._replace(master=_follow_params(state, params, comm))
            # u, s = inner(g, s, θ_shard).
            before = self.codec.decode(state.inner)
            steps, after = self._update_shards(shards, before, state.master, params, extra_args, comm)
            after = _restore_marks(after, before, self._used_state(before, params, used), comm)
            inner = self.codec.encode(after, state.inner, some, comm)
            # A step in which no worker had an example changes nothing, even if `inner` decays weights.
            steps = steps if isinstance(used, bool) else zero_unless(used, steps)
            # updates = all_gather(u).
            out, master, coded = self.delivery.send(steps, params, state.master, state.coded, some, comm)
        empty = jnp.where(some, state.empty, next_count(state.empty))
        return unshard_for_one_worker((out, ZeroState(inner, master, empty, reducer, coded)), given, self.axis)

    def _check_arguments(self, updates: Updates, params: PyTree, extra_args: dict[str, Any]) -> None:
        """Checks the gradients of replicated parameters, these parameters, and the optimizer's extra arguments."""
        check_replicated(params, extra_args, self.axis)
        check_leaves(updates)
        check_shapes(updates, params)

    def _update_shards(
        self, shards: Updates, inner: State, master: PyTree, params: PyTree, extra_args: dict[str, Any], comm: Comm
    ) -> tuple[Updates, State]:
        """`inner.update` of whole arrays, evaluated on this worker's shards: a `Part` for each array."""
        like = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, self.master_dtype or (p.value if is_mark(p) else p).dtype),
            params,
            is_leaf=is_mark,
        )
        # In their own dtype, as `inner` would get them otherwise: cast to float16, small ones would vanish.
        keep = self.master_dtype is None and not _has_narrow_shards(inner)
        like_gradients = jax.tree.map(
            lambda x, p: jax.ShapeDtypeStruct(p.shape, x.dtype if keep else p.dtype), shards, like
        )
        gradients = jax.tree.map(lambda x, p: Part(x.astype(p.dtype), p.shape), shards, like_gradients)
        # Replicated parameters are known in full: an optimizer that needs a whole one does not gather it.
        optimized = as_parts(params, comm) if self.master_dtype is None else as_parts(master)
        # `local_steps` passes its anchor, which is sharded as the parameters are.
        cut = {name: x for name, x in extra_args.items() if any(map(is_mark, jax.tree.leaves(x, is_leaf=is_mark)))}
        # An update that one worker computed goes to all workers at once, unless all that is sent is encoded or rounded.
        whole = jax.tree.map(lambda p: self.delivery.takes_whole and not is_mark(p), params, is_leaf=is_mark)
        return on_parts(
            lambda *trees: self.inner.update(*trees[:3], **{**extra_args, **trees[3]}),
            comm,
            (like_gradients, _whole_shapes(inner), like, _whole_shapes(cut)),
            (gradients, as_parts(inner), optimized, as_parts(cut)),
            whole=(whole, jax.tree.map(lambda x: not is_mark(x), inner, is_leaf=is_mark)),
        )

    def _mark_state(self, state: State, params: PyTree) -> State:
        """Marks as `Sharded` every array of an optimizer's state that is shaped like its parameter."""
        # Factored moments belong to a parameter too but have other shapes: they stay replicated.
        shapes = [x.shape for x in jax.tree.leaves(params)]
        return jax.tree.map(
            lambda x, k: _mark_sharded(x) if k != NO_PARAMETER and x.shape == shapes[k] else x,
            state,
            parameter_indices(self.inner.init, state, params),
        )

    def _used_state(self, state: State, params: PyTree, used: Flag) -> PyTree:
        """For each array of the optimizer's state whether any worker had an example for the parameter it belongs to."""
        if isinstance(used, bool) or not used.ndim:
            return jax.tree.map(lambda _: used, state, is_leaf=is_mark)
        owners = jax.tree.leaves(parameter_indices(self.inner.init, state, params))
        _, structure = jax.tree.flatten(state, is_leaf=is_mark)
        return structure.unflatten([used.any() if k == NO_PARAMETER else used[k] for k in owners])


def _follow_params(state: ZeroState, params: PyTree, comm: Comm) -> PyTree:
    """The master parameters, after a synchronizer around this transformation may have moved the parameters."""
    if jax.tree.leaves(state.coded) and jax.tree.leaves(_without_marked(params)):
        raise ValueError(
            "zero_redundancy with master_dtype= and compressor= sends what the parameters lack of the master, and "
            "would undo what local_steps, noloco or gossip do to the parameters: inside these leave out compressor=, "
            "since links within a pod are fast, or master_dtype="
        )
    return follow_params(state.master, params, comm)


class _ReduceScatter(NamedTuple):
    """The reduce-scatter form of a reducer, in the buckets of a stage."""

    form: Reducer
    stage: int
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        # `optax.tree.map_params` calls `init` with a placeholder, which has no leaves to put into buckets.
        if is_map_params_placeholder(params):
            return 0
        replicated = _without_marked(params)
        return init_buckets(self.form, replicated, buckets_of(replicated, self.stage))

    def reduce_to_shards(
        self,
        updates: Updates,
        params: PyTree,
        state: State,
        weight: Array | None,
        extras: Extras,
        comm: Comm,
    ) -> tuple[Updates, State, Flag]:
        """Averages local gradients by a reduce-scatter, weighted by the number of examples if it is given."""
        used = True
        check_local(updates, self.axis, reduced=ALREADY_REDUCED)
        if weight is not None:
            check_use(Use.EXAMPLES, self.form)
            weight, used = weight_of(widen_weight(weight, updates), comm)
            updates = scale_leaves(updates, weight)
        # Without any example the mean is zero, and the reducer's state remains.
        means, new = reduce_buckets(self.form, updates, state, buckets_of(params, self.stage), comm, extras)
        if isinstance(used, bool):
            return means, new, used
        if used.ndim and any(is_mark(x) for x in jax.tree.leaves(state, is_leaf=is_mark)):
            raise ValueError(
                "weights for single leaves would lose what a reducer of zero_redundancy has not sent yet of leaves "
                "that no worker used: use one without feedback, or pass one number as examples="
            )
        return means, jax.tree.map(lambda new, old: jnp.where(used.any(), new, old), new, state), used


def _shards_of_means(
    axis: AxisNames, updates: Updates, params: PyTree, state: State, weight: Any, extras: Extras, comm: Comm
) -> tuple[Updates, State, bool]:
    """Takes this worker's shards of gradients that are means already (`reducer=None`)."""
    del params, weight, extras
    check_means(updates, axis)
    return jax.tree.map(lambda x: shard_of(x, comm), updates), state, True


def _mark_sharded(x: Array) -> Sharded:
    return Sharded(x, multiple=MULTIPLE)


def _without_marked(tree: PyTree) -> PyTree:
    """The tree with `None` for every marked leaf; the others keep their paths."""
    return jax.tree.map(lambda x: None if is_mark(x) else x, tree, is_leaf=is_mark)


def _fill_in(means: Updates, updates: Updates) -> Updates:
    """The shards of the means of replicated parameters, and the values of the marked leaves of `updates`."""
    leaves, tree = jax.tree.flatten(updates, is_leaf=is_mark)
    reduced = iter(jax.tree.leaves(means))
    return tree.unflatten([leaf.value if is_mark(leaf) else next(reduced) for leaf in leaves])


def _has_narrow_shards(state: State) -> bool:
    """Returns whether moments have half precision, which gradients in float32 would widen."""
    shards = [x.value for x in jax.tree.leaves(state, is_leaf=is_mark) if is_mark(x)]
    return any(x.dtype != working_dtype(x.dtype) for x in shards if jnp.issubdtype(x.dtype, jnp.floating))


def _whole_shapes(tree: PyTree) -> PyTree:
    """The shapes and dtypes of the whole arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.value.dtype) if is_mark(x) else x, tree, is_leaf=is_mark
    )


def _restore_marks(new: PyTree, old: PyTree, used: PyTree, comm: Comm) -> PyTree:
    """The new state with the marks of the old one; the old one where no worker had an example."""

    def restore_mark(before: Any, after: Any, used: Flag) -> Any:
        if is_mark(before):
            return with_value(before, jnp.where(used, local_shard(after, comm), before.value))
        return jnp.where(used, after.whole(comm) if is_part(after) else after, before)

    return jax.tree.map(restore_mark, old, new, used, is_leaf=lambda x: is_mark(x) or is_part(x))

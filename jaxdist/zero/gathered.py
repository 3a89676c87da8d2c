"""ZeRO stage 3: parameters sharded over the workers, and gathered only while a layer needs them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import check_range
from .._core.compat import mixes_collectives
from .._core.hashing import cheap_hash
from .._core.trees import fold_keys, is_overwritten, map_with_collections
from .._core.types import Array, AxisNames, Like, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..compressors.compressor import Compressor, check_compressor
from ..reducers.exact import exact
from ..reducers.reducer import Reducer, shards_of
from ..state.marks import Sharded, axis_tuple, is_mark
from ..wire.buffers import MULTIPLE
from ..wire.shards import unshard
from .checks import check_sharding
from .placed_gathered import placed_gathered
from .shards import check_stateless, decode, encode, gather_payloads, key_of_shards

EXACT = exact()


def shard(params: PyTree, *, smallest: int = 100_000, axis: AxisNames = None) -> PyTree:
    """Marks large parameters as `Sharded`; those that are marked already, and fp8 statistics, stay as they are.

    Args:
      smallest: leaves with fewer entries stay replicated: gathering them costs latency and saves nothing.
      axis: the mesh axis to split them over; by default the one with which the state is placed. For pods that differ,
        `PerWorker(zero.shard(params, axis="chip"), axis="pod")`.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.zero.shard({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}, smallest=10)["b"].shape
      (4,)
      >>> type(jd.zero.shard({"w": jnp.zeros((4, 4))}, smallest=10)["w"]).__name__
      'Sharded'
    """
    check_range("smallest", smallest, 0, ends="[]")

    def mark_leaf(path: Any, x: Any) -> Any:
        # The gradient of a sharded leaf is a mean, which the next value of a statistic is not.
        stays = is_mark(x) or is_overwritten(path) or x.size < smallest
        return x if stays else Sharded(x, axis=axis, multiple=MULTIPLE)

    return map_with_collections(mark_leaf, params, is_leaf=is_mark)


def gathered(
    f: Callable[..., Any],
    *,
    axis: AxisNames = "data",
    remat: bool = True,
    reducer: Reducer = EXACT,
    compressor: Compressor | None = None,
    secondary_partition: bool = False,
    specs: PyTree | None = None,
) -> Callable[..., Any]:
    """Makes a layer or model `f(params, *args)` accept sharded parameters, which are whole only while `f` runs.

    The forward pass gathers the `Sharded` parameters. The backward pass gathers them again instead of keeping them, and
    its gradient for this worker's shard is the mean over workers, by a reduce-scatter: `local_value_and_grad` of a loss
    of gathered layers needs no `all_reduce`, except for replicated leaves. With `specs`, `jax.value_and_grad` of a
    plain `jit` is the whole gradient.

    *On the wire* for `n` entries in float32: two all-gathers and a reduce-scatter, `3(W-1)/W · 4n` bytes sent; one
    all-gather less without `remat`. With `compressor` a worker sends `bytes(n/W)` of its shard in place of `4n/W`.
    docs/explanation/zero-and-offloading.md has the bytes between groups of workers (ZeRO++).

    *State*: none.

    Args:
      f: sees whole arrays. `params` contains marks, and is none itself, which a step does not see.
      axis: the mesh axis of the workers, or several, slow links first.
      remat: compute `f` again in the backward pass; `False` keeps all whole parameters until then.
      reducer: averages gradients, in its reduce-scatter form; without state, so error feedback is refused.
      compressor: compresses the parameters; use small blocks, and 8 bits at first.
      secondary_partition: gather over the fast links alone in the backward pass, for two axes. It costs `n/L`
        entries a layer, for `L` workers on the fast axis.
      specs: in place of marks, under plain `jit`: a tree of `PartitionSpec` like `params`, as `P("data", "model")`. `f`
        gets a worker's rows of each array of its second argument, and returns rows, or numbers, which are averaged.

    Returns:
      The function with the same arguments.

    Raises:
      ValueError: the reducer has no reduce-scatter form, or keeps state (at trace time); `secondary_partition` without
        two axes, without `remat` or with `specs`; marks are not those of `zero.shard`; `specs` leave the axis out, or
        have it beside another in a dimension; rows do not divide.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layer = jd.zero.gathered(lambda p, x: x * p["w"].sum())
      >>> def step(state, x):
      ...     value, gradient = jd.local_value_and_grad(lambda p: layer(p, x[0]))(state["params"])
      ...     return {"params": gradient}, jax.lax.pmean(value, "data")
      >>> state = jd.place({"params": jd.zero.shard({"w": jnp.arange(3.0)}, smallest=0)}, 2)
      >>> state, value = jd.simulate(step, workers=2)(state, jnp.array([1.0, 3.0]))
      >>> float(value), state["params"]["w"].value[:4].tolist()
      (6.0, [2.0, 2.0, 2.0, 0.0])
    """
    if secondary_partition and len(axis_tuple(axis)) < 2:
        raise ValueError(f"secondary_partition=True needs two levels of workers, axis=(slow, fast), got axis={axis!r}")
    if secondary_partition and not remat:
        raise ValueError(
            "secondary_partition=True gathers again in the backward pass, which remat=False does not: use only one"
        )
    form = shards_of(reducer, advice="gathered(..., reducer=exact())")
    if compressor is not None:
        check_compressor(compressor)
    if specs is not None:
        if secondary_partition:
            raise ValueError(
                "secondary_partition=True is for parameters of zero.shard inside distribute: leave it out, or specs="
            )
        return placed_gathered(f, axis=axis, remat=remat, reducer=reducer, compressor=compressor, specs=specs)
    tx = _Gathered(axis, form, compressor, secondary_partition)

    def run(params, kept, *args):
        return f(tx.assemble(params, kept), *args)

    # Common subexpressions are not merged: a gather shared by both passes would keep its result from one to the other.
    again = jax.checkpoint(run, prevent_cse=True) if remat else run
    return lambda params, *args: again(params, tx.keep(params), *args)


def gathered_scan(
    f: Callable[..., Any],
    layers: Sequence[PyTree],
    x: Any,
    *args: Any,
    axis: AxisNames = "data",
    reducer: Reducer = EXACT,
    compressor: Compressor | None = None,
    secondary_partition: bool = False,
    prefetch: bool = False,
) -> Any:
    """Computes `x = f(layer, x, *args)` for each layer in turn, compiled once, with one layer whole at a time.

    *On the wire*: as `gathered`, once for each layer; with `prefetch` one gather less in total, since the backward pass
    starts with the layer that the forward pass ended with.

    Between CPU processes the loop is unrolled, since XLA there mixes collectives in a loop with others.

    Args:
      layers: the parameters of each layer, with the same tree, shapes and dtypes; separate in the train state. This
        worker's shards are stacked for the loop, which copies them.
      prefetch: gather the parameters of the next layer while this one computes, forward and backward, on links and
        compilers that can overlap them (not on CPU). Two layers are whole at a time, and the first and the last layer
        are compiled separately. Without it a layer waits for the parameters that it needs first, and overlaps the
        gathers of the others.

    Raises:
      ValueError: the layers differ in shapes, or there are none; `prefetch` with `secondary_partition`; the errors of
        `gathered`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layers = jd.place([jd.zero.shard({"w": jnp.full(3, 2.0)}, smallest=0) for _ in range(4)], 2)
      >>> def step(state, x):
      ...     last = jd.zero.gathered_scan(lambda p, x: x * p["w"][0], state, x[0])
      ...     return state, jax.lax.pmean(last, "data")
      >>> float(jd.simulate(step, workers=2)(layers, jnp.array([1.0, 3.0]))[1])
      32.0
    """
    kinds = {str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), layer)) for layer in layers}
    if len(kinds) != 1:
        raise ValueError(f"gathered_scan needs at least one layer, and all alike, got {len(kinds)} kinds")
    # A loop takes the layers' shards as one array for each leaf.
    stacked = jax.tree.map(lambda *shards: jnp.stack(shards), *layers)
    if prefetch:
        if secondary_partition:
            raise ValueError(
                "prefetch=True gathers over all links in the backward pass too: leave out secondary_partition"
            )
        tx = _Gathered(axis, shards_of(reducer, advice="gathered(..., reducer=exact())"), compressor, False)
        if compressor is not None:
            check_compressor(compressor)
        # Everything is typed as varying throughout, since gathered arrays are.
        stacked, x, args = over(axis).varying((stacked, x, args))
        return _scan_with_prefetch(f, lambda params: tx.assemble(params, tx.keep(params)), stacked, x, args)
    layer = gathered(f, axis=axis, reducer=reducer, compressor=compressor, secondary_partition=secondary_partition)
    return _loop_over(lambda x, params: (layer(params, x, *args), None), x, stacked)[0]


def _loop_over(
    body: Callable[..., Any], start: PyTree, layers: PyTree, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    return lax.scan(body, start, layers, reverse=reverse, unroll=mixes_collectives())


class _Gathered(NamedTuple):
    """`form` is the reduce-scatter form of the reducer of gradients."""

    axis: AxisNames
    form: Reducer
    compressor: Compressor | None
    secondary_partition: bool

    def keep(self, params: PyTree) -> Any:
        """The arrays to keep until the backward pass: payloads, or shards of this group's copy, or `()`."""
        comm = over(self.axis)
        sharded = [x for x in jax.tree.leaves(params, is_leaf=is_mark) if isinstance(x, Sharded)]
        if not sharded or (self.compressor is None and not self.secondary_partition):
            return ()
        # No gradient flows through the rounding: `_straight_through` defines it.
        shards = lax.stop_gradient([x.value for x in sharded])
        if self.compressor is not None:
            shards = encode(self.compressor, shards, [x.shape for x in sharded], key_of_shards(shards, comm), comm)
        # hpZ: gather over the slow links now, once for both passes.
        if self.secondary_partition:
            shards = gather_payloads(shards, _levels(comm)[1], agreed=False)
        return comm.varying(shards)

    def assemble(self, params: PyTree, kept: Any) -> PyTree:
        """Whole parameters. The gradient for a shard is the mean over workers, as if nothing had been compressed."""
        leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
        likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype) for leaf in leaves if isinstance(leaf, Sharded)]
        if not likes:
            return params
        shards = _shards(params)
        check_stateless(self.form, jax.tree.structure(shards).unflatten(likes))
        check_sharding(
            tree.unflatten([x if isinstance(x, Sharded) else None for x in leaves]), over(self.axis), caller="gathered"
        )
        full = iter(
            jax.tree.leaves(_straight_through(partial(self._gather, likes), self.form, self.axis)(shards, kept))
        )
        return tree.unflatten([next(full) if isinstance(leaf, Sharded) else leaf for leaf in leaves])

    def _gather(self, likes: Sequence[Like], shards: PyTree, kept: Any) -> PyTree:
        """The full arrays, from the shards or from what `_keep` has kept of them."""
        comm = over(self.axis)
        shards, tree = jax.tree.flatten(shards)
        if self.compressor is None and not self.secondary_partition:
            rows = [comm.all_gather(shard, agreed=False) for shard in shards]
        else:
            rows = gather_payloads(kept, _levels(comm)[0] if self.secondary_partition else comm, agreed=False)
            if self.secondary_partition:
                rows = jax.tree.map(_by_worker, rows)
            if self.compressor is not None:
                rows = decode(self.compressor, rows, shards, of_all=True)
        return tree.unflatten([unshard(row, like) for row, like in zip(rows, likes, strict=True)])


def _straight_through(forward: Callable[..., PyTree], form: Reducer, axis: AxisNames) -> Callable:
    """`forward(shards, kept)`, whose gradient for the shards is reduced by `form`, and that for `kept` is zero."""
    full = jax.custom_vjp(forward)

    def backward(_, gradients):
        # The reducer starts afresh in each step, with draws that depend on the gradients.
        comm = over(axis)
        gradients = comm.varying(gradients)
        state = fold_keys(form.init(gradients), cheap_hash(jax.tree.leaves(gradients)))
        return comm.varying(form.reduce(gradients, state, comm)[0].mean), None

    full.defvjp(lambda shards, kept: (forward(shards, kept), None), backward)
    return full


def _shards(params: PyTree) -> PyTree:
    """The shards of this worker, and `None` for replicated parameters."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Sharded) else None, params, is_leaf=is_mark)


def _levels(comm: Comm) -> tuple[Comm, Comm]:
    assert comm.inner is not None
    assert comm.outer is not None
    return comm.inner, comm.outer


def _by_worker(x: Array) -> Array:
    """`[L, P, ...]`, gathered over pods first and then over chips -> `[W, ...]`, in which the chip varies fastest."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


class _Scan(NamedTuple):
    """`layer(params, x, floats, integers) -> x`, and `gather(params)`, which makes a layer's parameters whole."""

    layer: Callable[..., PyTree]
    gather: Callable[[PyTree], PyTree]
    count: int


def _scan_with_prefetch(
    layer: Callable[..., PyTree], gather: Callable[[PyTree], PyTree], stacked: PyTree, x: PyTree, args: tuple[Any, ...]
) -> PyTree:
    """Computes `x = layer(gather(params), x, *args)` for each of the stacked `params` in turn.

    The loop computes with parameters that the previous round has gathered, and gathers those of the next, so that
    neither waits for the other. Automatic differentiation would save every loop carry, here every whole layer; so the
    backward pass is written out: a reversed loop, also one layer ahead. It starts with the last layer, still whole from
    the forward pass. The last layer of the forward loop and the first of the backward loop are outside of the loops,
    which would otherwise gather parameters that are never used.
    """
    leaves, tree = jax.tree.flatten(args)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    # Arrays that `layer` closes over have gradients too, so they become arguments.
    shapes = jax.eval_shape(lambda stacked: gather(_layer_at(stacked, 0)), stacked)
    closed_layer, consts = jax.closure_convert(layer, shapes, x, *args)
    floats = ([leaf for leaf, flag in zip(leaves, is_float, strict=True) if flag], list(consts))
    integers = [leaf for leaf, flag in zip(leaves, is_float, strict=True) if not flag]

    def call_layer(params, x, floats, integers):
        given, consts = floats
        first, second = iter(given), iter(integers)
        args = tree.unflatten([next(first) if flag else next(second) for flag in is_float])
        return closed_layer(params, x, *args, *consts)

    scan = _Scan(call_layer, gather, jax.tree.leaves(stacked)[0].shape[0])

    @jax.custom_vjp
    def run(stacked, x, floats, integers) -> Array:
        return _forward(scan, stacked, x, floats, integers)[0]

    run.defvjp(partial(_forward, scan), partial(_backward, scan))
    return run(stacked, x, floats, integers)


def _layer_at(tree: PyTree, l: Any) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, l, keepdims=False), tree)


def _forward(scan: _Scan, stacked: PyTree, x: PyTree, floats: PyTree, integers: PyTree) -> tuple[PyTree, tuple]:
    """The last `x`, and the residuals: every layer's output, and the last layer's whole parameters."""

    def body(carry, l):
        x, params = carry
        # Independent of `x`, so the gather can overlap the layer's computation.
        following = scan.gather(_layer_at(stacked, l + 1))
        x = scan.layer(params, x, floats, integers)
        return (x, following), x

    start = (x, scan.gather(_layer_at(stacked, 0)))
    (last, params), outputs = _loop_over(body, start, jnp.arange(scan.count - 1)) if scan.count > 1 else (start, ())
    return scan.layer(params, last, floats, integers), (stacked, x, outputs, params, floats, integers)


def _backward(scan: _Scan, saved: tuple, g: PyTree) -> tuple[PyTree, PyTree, PyTree, None]:
    stacked, x, outputs, params, floats, integers = saved

    def pull_back(params, x, g):
        layer = partial(_call_without_integers, scan, integers)
        return jax.vjp(layer, params, x, floats)[1](g)

    def store(gradients, l, of_whole):
        # The gradient of the gather is the reduce-scatter.
        (sharded,) = jax.vjp(scan.gather, _layer_at(stacked, l))[1](of_whole)
        return jax.tree.map(lambda all, new: lax.dynamic_update_index_in_dim(all, new, l, 0), gradients, sharded)

    def body(carry, l):
        g, params, gradients, sums = carry
        # The next round's parameters, one layer further down.
        ahead = scan.gather(_layer_at(stacked, l - 1))
        of_whole, g, of_floats = pull_back(params, _layer_at(outputs, l - 1), g)
        return (g, ahead, store(gradients, l, of_whole), jax.tree.map(jnp.add, sums, of_floats)), None

    # `floats` are used by every layer, so their gradients are summed over the layers.
    carry = (g, params, jax.tree.map(jnp.zeros_like, stacked), jax.tree.map(jnp.zeros_like, floats))
    if scan.count > 1:
        carry, _ = _loop_over(body, carry, jnp.arange(1, scan.count), reverse=True)
    g, params, gradients, sums = carry
    of_whole, g, of_floats = pull_back(params, x, g)
    return store(gradients, 0, of_whole), g, jax.tree.map(jnp.add, sums, of_floats), None


def _call_without_integers(scan: _Scan, integers: PyTree, params: PyTree, x: PyTree, floats: PyTree) -> PyTree:
    return scan.layer(params, x, floats, integers)

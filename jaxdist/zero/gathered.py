"""Parameters that are cut over the workers (ZeRO stage 3), whole only while a layer needs them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import working_dtype
from .._core.trees import fold_keys
from .._core.types import Array, AxisNames, Like, PRNGKeyArray, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..compressors.base import Compressor
from ..reducers.base import Reducer, shards_of
from ..reducers.exact import exact
from ..state.marks import Sharded, axis_tuple, is_mark
from ..wire.flat import MULTIPLE
from ..wire.shards import joined
from .checks import check_cut
from .prefetched import prefetched_scan
from .shards import decode, encode, gather_payloads

EXACT = exact()


def shard(params: PyTree, *, smallest: int = 100_000) -> PyTree:
    """Marks the parameters that are worth cutting as `Sharded`.

    Args:
      params: the parameters as written, whole arrays (or their shapes, under `eval_shape`).
      smallest: leaves with fewer entries stay whole on every worker: gathering them costs latency and saves nothing.

    Returns:
      The parameters with their marks, for the train state.

    Raises:
      ValueError: `smallest` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.zero.shard({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}, smallest=10)["b"].shape
      (4,)
      >>> type(jd.zero.shard({"w": jnp.zeros((4, 4))}, smallest=10)["w"]).__name__
      'Sharded'

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020 (the persistence threshold of DeepSpeed's stage 3).
    """
    if smallest < 0:
        raise ValueError(f"smallest must not be negative, got {smallest}")
    return jax.tree.map(lambda x: Sharded(x, multiple=MULTIPLE) if x.size >= smallest else x, params)


def gathered(
    f: Callable[..., Any],
    *,
    axis: AxisNames = "data",
    remat: bool = True,
    reducer: Reducer = EXACT,
    compressor: Compressor | None = None,
    secondary: bool = False,
) -> Callable[..., Any]:
    """`f(params, *args)`, a layer or a model, for parameters that are cut: whole while `f` runs, and then dropped.

    The forward pass gathers the `Sharded` parameters. The backward pass gathers them again instead of keeping them, and
    its gradient for this worker's part is the mean over workers, by a reduce-scatter: `local_value_and_grad` of a loss
    of gathered layers needs no `all_reduce`, but for the leaves that are not cut.

    *On the wire* for `n` entries in float32: two all-gathers and a reduce-scatter, `3(W-1)/W · 4n` bytes sent (without
    `remat` one all-gather less, and then all whole parameters live from the forward to the backward pass).

    The three parts of ZeRO++ make that cheap where groups of workers have slow links between them, over
    `axis=(slow, fast)` with `P` groups of `L`. Between groups a worker sends per layer of `n` float32 entries, beside
    `3(P-1)/P · 4n/L` for gathers and reduce-scatters of two levels:

    - `compressor=int8()` (qwZ): all compute with what a code of the parameters decodes to, `bytes(n/W)` instead of
      `4n/W` from each owner; forward and backward pass with the same. The owner updates its exact part, with the
      gradient for the decoded one: nothing piles up.
    - `secondary=True` (hpZ): what came over the slow links stays until the backward pass, which gathers over fast links
      alone. It costs `n/L` entries of memory a layer (or their code), which is why it is not the default.
    - `reducer=hierarchical(inner=two_shot(int4()), outer=two_shot(int4()))` (qgZ): gradients are coded, averaged in
      each group, coded again and averaged between groups, `(P-1)/P · bytes(n/L)` between them.

    Random codes draw by the bits of what they code: equal parameters get equal draws whenever they are gathered, other
    ones get others.

    Args:
      f: `f(params, *args)`; it sees whole arrays. `params` is a tree that contains marks, not a mark itself, which a
        step does not see.
      axis: the mesh axis of the workers.
      remat: compute `f` again in the backward pass.
      reducer: averages the gradients of cut parameters, in its reduce-scatter form; nothing of it outlives the step,
        so error feedback is refused.
      compressor: the code of the parameters; fine blocks, and 8 bits at first: 4 bits hurt small models.
      secondary: gather over the fast links alone in the backward pass; for two axes.

    Returns:
      The function of cut parameters.

    Raises:
      ValueError: the reducer has no reduce-scatter form or keeps something from step to step (at trace time);
        `secondary` without two axes or without `remat`; parameters are cut in another way than `zero.shard` cuts.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layer = jd.zero.gathered(lambda p, x: x * p["w"].sum())
      >>> def step(state, x):
      ...     value, gradient = jd.local_value_and_grad(lambda p: layer(p, x[0]))(state["params"])
      ...     return {"params": gradient}, jax.lax.pmean(value, "data")
      >>> state = jd.place({"params": jd.zero.shard({"w": jnp.arange(3.0)}, smallest=0)}, 2)
      >>> state, value = jd.simulate(step, workers=2)(state, jnp.array([1.0, 3.0]))
      >>> float(value), state["params"]["w"].value[:4].tolist()
      (6.0, [2.0, 2.0, 2.0, 0.0])

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv
      2304.11277, 2023. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
      arXiv 2306.10209, 2023.
    """
    if secondary and len(axis_tuple(axis)) < 2:
        raise ValueError(f"secondary=True is for two levels of workers, axis=(slow, fast), got axis={axis!r}")
    if secondary and not remat:
        raise ValueError("secondary=True gathers again in the backward pass, which remat=False does not: leave one out")
    form = shards_of(reducer, advice="gathered(..., reducer=exact())")
    keep, assemble = assembler(axis, form, compressor, secondary)

    def run(params, kept, *args):
        return f(assemble(params, kept), *args)

    # Between layers nothing may be merged: a gather shared by forward and backward pass would live through both.
    again = jax.checkpoint(run, prevent_cse=True) if remat else run
    return lambda params, *args: again(params, keep(params), *args)


def gathered_scan(
    f: Callable[..., Any],
    layers: Sequence[PyTree],
    x: Any,
    *args: Any,
    axis: AxisNames = "data",
    reducer: Reducer = EXACT,
    compressor: Compressor | None = None,
    secondary: bool = False,
    prefetch: bool = False,
) -> Any:
    """`x = f(layer, x, *args)` for each layer in turn, one layer whole at a time, compiled once for all.

    *On the wire*: as `gathered`, once for each layer; with `prefetch` one gather less in all, since the backward pass
    begins with the layer that the forward pass has ended with.

    Args:
      f: `f(params, x, *args) -> x`.
      layers: the parameters of each layer, with the same tree, shapes and dtypes; kept apart in the train state. This
        worker's parts are stacked for the loop, which copies them.
      x: what goes through the layers.
      args: passed to each.
      axis: the mesh axis of the workers.
      reducer: as in `gathered`.
      compressor: as in `gathered`.
      secondary: as in `gathered`.
      prefetch: gather the parameters of the next layer while this one computes, forward and backward, on links and
        compilers that do both at once (not on CPU). Two layers are whole at a time, and the first and the last layer
        are compiled by themselves. Without it a layer waits for what it needs first, and overlaps the gathers of what
        it needs later.

    Returns:
      The last `x`.

    Raises:
      ValueError: the layers are not alike, or there are none; `prefetch` and `secondary`; what `gathered` raises.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layers = jd.place([jd.zero.shard({"w": jnp.full(3, 2.0)}, smallest=0) for _ in range(4)], 2)
      >>> def step(state, x):
      ...     last = jd.zero.gathered_scan(lambda p, x: x * p["w"][0], state, x[0])
      ...     return state, jax.lax.pmean(last, "data")
      >>> float(jd.simulate(step, workers=2)(layers, jnp.array([1.0, 3.0]))[1])
      32.0

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020.
    """
    kinds = {str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), layer)) for layer in layers}
    if len(kinds) != 1:
        raise ValueError(f"gathered_scan needs at least one layer, and all alike, got {len(kinds)} kinds")
    stacked = jax.tree.map(lambda *pieces: jnp.stack(pieces), *layers)
    if prefetch:
        if secondary:
            raise ValueError("prefetch=True gathers over all links in the backward pass too: leave out secondary")
        keep, assemble = assembler(axis, shards_of(reducer, advice="gathered(..., reducer=exact())"), compressor, False)
        # Typed alike throughout, since what is gathered varies.
        stacked, x, args = over(axis).varying((stacked, x, args))
        return prefetched_scan(f, lambda params: assemble(params, keep(params)), stacked, x, args)
    layer = gathered(f, axis=axis, reducer=reducer, compressor=compressor, secondary=secondary)
    return lax.scan(lambda x, params: (layer(params, x, *args), None), x, stacked)[0]


def assembler(
    axis: AxisNames, form: Reducer, compressor: Compressor | None, secondary: bool
) -> tuple[Callable[[PyTree], Any], Callable[[PyTree, Any], PyTree]]:
    """Two functions: what to keep from the forward to the backward pass, and whole parameters of that.

    Args:
      axis: that of the workers.
      form: the reduce-scatter form of the reducer of the gradients.
      compressor: the code of the parameters, or `None`.
      secondary: keep what came over the slow links.

    Returns:
      `keep(params) -> kept` and `assemble(params, kept) -> whole`. The gradient with respect to a part is the mean of
      everybody's gradient for it, as if nothing had been coded; `kept` has none.
    """

    def keep(params):
        comm = over(axis)
        cut = [x for x in jax.tree.leaves(params, is_leaf=is_mark) if isinstance(x, Sharded)]
        if not cut or (compressor is None and not secondary):
            return ()
        parts = lax.stop_gradient([x.value for x in cut])
        if compressor is not None:
            parts = encode(compressor, parts, [x.shape for x in cut], _key_of(parts, comm), comm)
        if secondary:
            parts = gather_payloads(parts, _levels(comm)[1], agreed=False)
        return comm.varying(parts)

    def forward(parts, kept, likes):
        comm = over(axis)
        parts, tree = jax.tree.flatten(parts)
        if compressor is None and not secondary:
            rows = [comm.all_gather(part, agreed=False) for part in parts]
        else:
            rows = gather_payloads(kept, _levels(comm)[0] if secondary else comm, agreed=False)
            if secondary:  # chip and pod to worker, which counts chips first
                rows = jax.tree.map(_by_worker, rows)
            if compressor is not None:
                rows = decode(compressor, rows, parts)
        return tree.unflatten([joined(row, like) for row, like in zip(rows, likes, strict=True)])

    def assemble(params, kept):
        leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
        likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype) for leaf in leaves if isinstance(leaf, Sharded)]
        if not likes:
            return params
        _check_memory(form, _parts(params), likes)
        check_cut(tree.unflatten([x if isinstance(x, Sharded) else None for x in leaves]), over(axis), what="gathered")
        wholes = _straight_through(lambda parts, kept: forward(parts, kept, likes), form, axis)(_parts(params), kept)
        found = iter(jax.tree.leaves(wholes))
        return tree.unflatten([next(found) if isinstance(leaf, Sharded) else leaf for leaf in leaves])

    return keep, assemble


def _straight_through(forward: Callable[..., PyTree], form: Reducer, axis: AxisNames) -> Callable:
    whole = jax.custom_vjp(forward)

    def backward(_, gradients):
        comm = over(axis)
        gradients = comm.varying(gradients)
        state = fold_keys(form.init(gradients), _hash_of(jax.tree.leaves(gradients)))
        return comm.varying(form.reduce(gradients, state, comm)[0].mean), None

    whole.defvjp(lambda parts, kept: (forward(parts, kept), None), backward)
    return whole


def _parts(params: PyTree) -> PyTree:
    """The parts that this worker has, and nothing for what is not cut."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Sharded) else None, params, is_leaf=is_mark)


def _check_memory(form: Reducer, parts: PyTree, likes: Sequence[Like]) -> None:
    state = jax.eval_shape(form.init, jax.tree.structure(parts).unflatten(likes))
    if any(map(is_mark, jax.tree.leaves(state, is_leaf=is_mark))):
        raise ValueError(
            "the reducer of gathered() runs inside the backward pass and keeps nothing from step to step, and this one "
            "has error feedback: use it without, two_shot(qsgd(4)), or cut only the state, zero_redundancy(reducer=...)"
        )


def _levels(comm: Comm) -> tuple[Comm, Comm]:
    assert comm.inner is not None
    assert comm.outer is not None
    return comm.inner, comm.outer


def _by_worker(x: Array) -> Array:
    """`[L, P, ...]` of the chips of a pod, who have it of all pods -> `[W, ...]`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _key_of(parts: Sequence[Array], comm: Comm) -> PRNGKeyArray:
    """Other draws for other parameters, and the same ones whenever the same parameters are gathered again."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), _hash_of(parts)), comm.index)


def _hash_of(arrays: Sequence[Array]) -> Array:
    """A number that changes with the bits of arrays: of sums in two orders, which cost nothing beside a code."""
    total = jnp.zeros((), jnp.uint32)
    for x in arrays:
        wide = x.astype(working_dtype(x.dtype)).ravel()
        words = lax.bitcast_convert_type(wide.astype(jnp.float32), jnp.uint32)
        odd = 2 * lax.iota(jnp.uint32, words.size) + 1
        total = total * jnp.uint32(0x9E3779B1) + (words * odd).sum(dtype=jnp.uint32)
    return total

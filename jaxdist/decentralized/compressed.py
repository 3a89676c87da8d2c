"""Compressed gossip: CHOCO-SGD, DCD-PSGD, ECD-PSGD and SAPS-PSGD, and the exchange of payloads that they share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.trees import minus, plus, wide
from .._core.types import Array, Payload, PyTree
from ..comm.base import Comm
from ..compressors.base import Compressor, contraction_form
from ..topology.base import Topology
from ..transforms.common import zeros_like
from ..wire.flat import fuse_bytes, map_groups, stack_by_shape, unstack
from ..wire.mixing import times, weight_of
from .method import (
    Method,
    StepContext,
    StepResult,
    check_doubly_stochastic,
    check_interval,
    check_undirected,
    every_n_steps,
    mix,
)


@with_description
def choco(compressor: Compressor, *, step_size: float | int) -> Method:
    """Each worker sends the compressed difference between its model and a public copy `x̂` that its neighbors track.

        x_i += u_i;   x_i += γ Σ_j W_ij (x̂_j - x̂_i);   q_i = C(x_i - x̂_i), sent;   x̂_i += q_i

    Compression errors stay in `x - x̂` and are sent later, so any contraction works; unbiased compressors are shrunk to
    one (`compressors.scaled`). The mean of all models changes by the steps `u` alone, whatever the compressor.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, two models in float32: `x̂_i`, and `Σ_j W_ij (x̂_j - x̂_i)`, which sums up all that is needed of
    the neighbors' copies. All workers must start from one model, as `init_state` and `place` make them.

    Args:
      compressor: of one array; it must state its contraction or its variance.
      step_size: `γ` in (0, 1], the step towards the neighbors. Start at 0.5 and halve it if the loss or the distance of
        the models grows: the largest of 10 entries on a ring of 8 workers diverge at .5, and agree fastest at .2. Too
        low is slow: on a ring of 4 that train a language model by the largest tenth, 0.5, 0.2 and 0.1 ended 0.2, 1
        and 2 % above `d_psgd` (`benchmarks/reports/2026-11-starts`). Without compression 1 is plain gossip.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.choco(jd.top_k(0.5), step_size=0.4)
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target, state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(1)), "opt": tx.init(jnp.zeros(1))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(100):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> round(float(jd.consensus(state["x"])[0]), 3)
      1.5

    References:
      Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
      Communication", arXiv:1902.00340, 2019. Koloskova, Lin, Stich, Jaggi, "Decentralized Deep Learning with Arbitrary
      Communication Compression", arXiv:1907.09356, 2020 (the order of the steps).
    """
    if not 0 < step_size <= 1:
        raise ValueError(f"step_size must be in (0, 1], got {step_size}")
    step = partial(_choco_step, contraction_form(compressor, closest=True), step_size)
    return Method(partial(check_undirected, method="choco"), partial(_init_copy, "public"), step, flattens=True)


def _init_copy(name: str, params: PyTree, topology: Topology) -> dict[str, PyTree]:
    # All workers start from one model, so that the copies of it are equal and pull nowhere.
    return {name: params, "pull": zeros_like(params)}


def _choco_step(compressor: Compressor, step_size: float | int, context: StepContext) -> StepResult:
    public, pull = context.state["public"], context.state["pull"]
    steps, inner = context.adapt(context.gradients)
    # x_i += u_i + γ Σ_j W_ij (x̂_j - x̂_i). The pull is that of the previous exchange.
    params = plus(plus(context.params, steps), jax.tree.map(lambda x: step_size * x, pull))
    # q_i = C(x_i - x̂_i),  x̂_i += q_i
    own, from_neighbors = exchange(context, compressor, minus(params, public))
    return StepResult(params, inner, {"public": plus(public, own), "pull": plus(pull, from_neighbors)})


@with_description
def dcd_psgd(compressor: Compressor, *, interval: int = 1, replicas: bool = False) -> Method:
    """Each worker sends its compressed step and applies the decoded step to its own model, as its neighbors do.

        q_i = C(Σ_j W_ij x_j + u_i - x_i), sent;   x_i += q_i

    On a ring this is the low-precision decentralized algorithm of BAGUA.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes; with an interval, only in
    every `interval`-th step.

    *State*: per-worker, two models in float32: the decoded `x_i`, and `Σ_j W_ij (x_j - x_i)`. With `replicas`, `x_i`
    and one model for each neighbor. All workers must start from one model, as `init_state` and `place` make them.

    Args:
      compressor: of one array. It must be accurate, about 8 bits: the error of a step is never sent, and coarse
        compressors (a few bits, top-k) diverge where `choco` does not.
      interval: neighbors communicate at the end of every `interval` steps, and send all steps since the last time. More
        sends less, and workers drift further apart.
      replicas: keep the model of each neighbor, as public implementations do, instead of their weighted sum. The copies
        stay equal to the neighbors' own models in every bit, and no rounding adds up over a million steps, for the
        memory of one model per neighbor, less one.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.dcd_psgd(jd.compressors.int8())
      >>> tx = jd.gossip(optax.sgd(0.5), jd.topology.ring(4), method=method)
      >>> def one_worker(gradient):
      ...     return tx.update(gradient, tx.init(jnp.zeros(())), jnp.zeros(()))[0]
      >>> steps = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.arange(4.0))
      >>> [round(step, 3) for step in steps.tolist()]  # each worker's decoded step
      [0.0, -0.5, -1.0, -1.5]

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018. Gan
      et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_interval(interval)
    init = _init_replicas if replicas else partial(_init_copy, "known")
    step = partial(_dcd_step, interval, partial(_exchange_replicas if replicas else _exchange_sum, compressor))
    return Method(partial(check_undirected, method="dcd_psgd"), init, step, flattens=True)


def _dcd_step(interval: int, communicate: Callable[..., tuple[PyTree, PyTree]], context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    params = plus(context.params, steps)
    params, state = every_n_steps(context, interval, communicate, _keep, params, context.state)
    return StepResult(params, inner, state)


def _keep(comm: Comm, params: PyTree, state: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    return comm.varying(params), comm.varying(state)


def _exchange_sum(
    compressor: Compressor, context: StepContext, params: PyTree, state: dict[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    known, pull = state["known"], state["pull"]
    # q_i = C(Σ_j W_ij (x_j - x_i) + u_i),  x_i += q_i. Where rounding has moved the parameters off their decoded form,
    # that difference is sent too.
    own, from_neighbors = exchange(context, compressor, plus(minus(params, known), pull))
    known = plus(known, own)
    return known, {"known": known, "pull": plus(pull, from_neighbors)}


def _init_replicas(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    # This worker's model is in row 0, and the source of message k in row k + 1.
    rows = 1 + len(topology.rounds[0].messages)
    return {"replicas": jax.tree.map(lambda x: jnp.stack([x] * rows), params)}


def _exchange_replicas(
    compressor: Compressor, context: StepContext, params: PyTree, state: dict[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    rows = state["replicas"]
    weights = [weight_of(context.comm, message.weights) for message in context.topology.rounds[0].messages]

    # Σ_j W_ij (x_j - x_i) from this worker's copies of the models.
    def pull_of(x: Array) -> Array:
        return sum((times(x[k] - x[0], weight) for k, weight in enumerate(weights, start=1)), jnp.zeros_like(x[0]))

    known, pull = jax.tree.map(lambda x: x[0], rows), jax.tree.map(pull_of, rows)
    # Every row moves by the decoded step of its worker: x_j += q_j.
    rows = plus(rows, exchange_rows(context, compressor, plus(minus(params, known), pull)))
    return jax.tree.map(lambda x: x[0], rows), {"replicas": rows}


@with_description
def ecd_psgd(compressor: Compressor) -> Method:
    """Each worker averages its neighbors' decoded models over time, so that compression noise fades.

    In step `t = 2, 3, ...`, with the neighbors' estimates `x̃`:

        x_i' = Σ_j W_ij x̃_j + u_i;   z_i = (1 - t/2) x_i + (t/2) x_i', its code sent;
        x̃_i <- (1 - 2/t) x̃_i + (2/t) C(z_i)

    `z` is extrapolated by `t/2` steps and encoded as a whole, not as a difference: for unbiased compressors of high
    precision.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, one model in float32, `Σ_j W_ij x̃_j`. All workers must start from one model, as `init_state`
    and `place` make them.

    Args:
      compressor: an unbiased compressor of one array.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.ecd_psgd(jd.qsgd(8)))
      >>> tx.init(jnp.ones(3)).method.value.mixed.tolist()
      [1.0, 1.0, 1.0]

    References:
      Tang, Gan, Zhang, Zhang, Liu, arXiv:1803.06443, 2018, as `dcd_psgd`.
    """
    if compressor.variance is None:
        raise ValueError(
            "ecd_psgd averages the compression noise over time, so it needs an unbiased compressor (variance ω): use "
            "qsgd, or choco with any compressor"
        )
    step = partial(_ecd_step, compressor)
    prepare = partial(check_undirected, method="ecd_psgd")
    return Method(prepare, lambda params, topology: EstimateState(params), step, flattens=True)


class EstimateState(NamedTuple):
    """The state of `ecd_psgd` of one worker: `Σ_j W_ij x̃_j`, where its next step starts from."""

    mixed: PyTree

    keeps_apart = "estimates, from which the next step starts in place of the parameters"


def _ecd_step(compressor: Compressor, context: StepContext) -> StepResult:
    mixed = context.state.mixed
    steps, inner = context.adapt(context.gradients)
    # x' = Σ_j W_ij x̃_j + u
    params = plus(mixed, steps)
    # The count starts at 0, and the formula's `t` at 2.
    t = context.count.astype(jnp.float32) + 2

    # z = (1 - t/2) x + (t/2) x' = x' + (t/2 - 1) (x' - x)
    def extrapolate(old: Array, new: Array) -> Array:
        return new + (t / 2 - 1).astype(new.dtype) * (new - old)

    own, from_neighbors = exchange(context, compressor, jax.tree.map(extrapolate, wide(context.params), params))
    # Σ_j W_ij x̃_j <- (1 - 2/t) Σ_j W_ij x̃_j + (2/t) Σ_j W_ij C(z_j)
    mixed = jax.tree.map(lambda s, z: s + (2 / t).astype(s.dtype) * (z - s), mixed, plus(own, from_neighbors))
    return StepResult(params, inner, EstimateState(mixed))


@with_description
def saps_psgd(compressor: Compressor) -> Method:
    """Neighbors exchange a few entries of their models, which all workers draw alike, and average only these.

        x_i += u_i;   x_i += Σ_j W_ij (C(x_j) - C(x_i))

    C keeps some entries as they are, so this compresses the *differences* between neighbors without a memory of them.
    It works on graphs that change in every step, where `choco` and `dcd_psgd` have no neighbors to remember. The mean
    of all models changes by the steps `u` alone. Where a step of plain gossip leaves a share σ² of the expected square
    of the consensus error, this leaves `1 - ρ (1 - σ²)`, with a share ρ of the entries: about the same for the bytes.

    *Topologies*: doubly stochastic; all that change. The paper pairs workers by the speed of their links.

    *On the wire*: the payload of the compressor for each neighbor, one message for each dtype.

    *State*: none.

    Args:
      compressor: a linear one whose draws all workers share and that keeps entries as they are: `random_k(0.1)`. A
        higher density keeps workers closer together.

    Raises:
      ValueError: another compressor.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.saps_psgd(jd.compressors.random_k(0.25))
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.random_matchings(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target, state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(8)), "opt": tx.init(jnp.zeros(8))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(100):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> [round(x, 3) for x in jd.consensus(state["x"]).tolist()]
      [1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]

    References:
      Tang, Shi, Chu, "Communication-Efficient Decentralized Learning with Sparsification and Adaptive Peer Selection",
      arXiv:2002.09692, 2020.
    """
    if not (compressor.summable and compressor.shared_key) or compressor.contraction is None:
        raise ValueError(
            f"saps_psgd needs a compressor that keeps the same entries on all workers, got {compressor}: use random_k "
            "without unbiased=True, or choco on a static graph"
        )
    return Method(check_doubly_stochastic, lambda params, topology: (), partial(_saps_step, compressor), flattens=True)


def _saps_step(compressor: Compressor, context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    params = plus(context.params, steps)
    leaves, structure = jax.tree.flatten(params)
    groups, stacks, payloads = _compress_leaves(context, compressor, leaves)
    # C is linear: Σ_j W_ij C(x_j) is the code whose entries are averages.
    mixed = mix(context, payloads)
    pairs = zip(*(_decode(compressor, codes, stacks) for codes in (mixed, payloads)), strict=True)
    changes = structure.unflatten(unstack(groups, [new - old for new, old in pairs]))
    return StepResult(plus(params, changes), inner, ())


class _Exchanged(NamedTuple):
    """The positions of the leaves in each stack of one shape, the stacks, and their payloads.

    For each message of the topology `received` has the weight of its source on this worker, and the payloads.
    """

    groups: list[list[int]]
    stacks: list[Array]
    payloads: list[Payload]
    received: list[tuple[Array | float, list[Payload]]]


def exchange(context: StepContext, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Sends this worker's compressed tree `q_i` to its neighbors; returns `q_i` and `Σ_j W_ij (q_j - q_i)`, decoded.

    All workers decode the same payloads with the same program, so that their copies stay equal.
    """
    return map_groups(partial(_exchange_group, context, compressor), tree, results=2)


def _exchange_group(context: StepContext, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    own = _decode(compressor, payloads, stacks)
    total = [jnp.zeros_like(x) for x in own]
    for weight, arrived in received:
        theirs = _decode(compressor, arrived, stacks)
        # Where nothing arrives the payload is all zeros, which may decode to anything.
        total = [
            t + jnp.where(weight == 0, 0, times(their - mine, weight))
            for t, their, mine in zip(total, theirs, own, strict=True)
        ]
    return structure.unflatten(unstack(groups, own)), structure.unflatten(unstack(groups, total))


def exchange_rows(context: StepContext, compressor: Compressor, tree: PyTree) -> PyTree:
    """Sends this worker's compressed tree and returns all payloads decoded: `[1 + neighbors, *s]`, its own first."""
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    # One operation decodes all rows, so that the copies of a payload are equal in every bit, fused or not.
    rows = jax.tree.map(lambda *parts: jnp.stack(parts), payloads, *(arrived for _, arrived in received))
    decoded = [
        jax.vmap(partial(_decode_stack, compressor, stack))(payload)
        for payload, stack in zip(rows, stacks, strict=True)
    ]
    # Where nothing arrived the payload is all zeros, which may decode to anything.
    is_received = jnp.stack([jnp.asarray(weight != 0) for weight in (1.0, *(weight for weight, _ in received))])
    # Its own row instead, so that a replica that nobody updates follows the model, and not zeros.
    decoded = [jnp.where(is_received.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1]) for x in decoded]
    # `unstack` takes the leaves from the first axis, and these have the rows there.
    return structure.unflatten(unstack(groups, [jnp.moveaxis(x, 1, 0) for x in decoded]))


def _send_payloads(context: StepContext, compressor: Compressor, leaves: Sequence[Array]) -> _Exchanged:
    """Compresses the leaves in stacks of one shape and sends them along the edges of the graph."""
    comm, (static_round,) = context.comm, context.topology.rounds
    groups, stacks, payloads = _compress_leaves(context, compressor, leaves)
    arrays, payload_tree = jax.tree.flatten(payloads)
    received = []
    for message in static_round.messages:
        arrived = fuse_bytes(comm, lambda x, pairs=message.pairs: comm.ppermute(x, pairs), arrays)
        received.append((weight_of(comm, message.weights), payload_tree.unflatten(arrived)))
    return _Exchanged(groups, stacks, payloads, received)


def _compress_leaves(
    context: StepContext, compressor: Compressor, leaves: Sequence[Array]
) -> tuple[list[list[int]], list[Array], list[Payload]]:
    """Returns the positions of the leaves of each shape, their stacks, and the payloads of these."""
    key = context.key if compressor.shared_key else jax.random.fold_in(context.key, context.comm.index)
    groups, stacks = stack_by_shape(leaves)
    # Each leaf has its own key, by its position in the tree.
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    return groups, stacks, [jax.vmap(compressor.compress)(x, key) for x, key in zip(stacks, keys, strict=True)]


def _decode(compressor: Compressor, payloads: Sequence[Payload], stacks: Sequence[Array]) -> list[Array]:
    return [_decode_stack(compressor, stack, payload) for payload, stack in zip(payloads, stacks, strict=True)]


def _decode_stack(compressor: Compressor, stack: Array, payloads: Payload) -> Array:
    """Decodes the payloads of the rows of a stack in float32 or better."""
    like = jax.ShapeDtypeStruct(stack.shape[1:], working_dtype(stack.dtype))
    return jax.vmap(lambda payload: compressor.decompress(payload, like))(payloads)

"""One step over the parts of a stack of layers: forward, backward, and the updates on the way."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core.compat import shard_map
from ..._core.types import Array, AxisNames, PyTree
from ...comm.over import over
from ...reducers.reducer import NO_EXTRAS, Reducer
from ...state.marks import axis_tuple
from ..nvme.arrays import check_dtype, on_host
from ..nvme.disk import Access
from .parts import PartProgram, StackPart, reshape_vectors


class LayerStack(NamedTuple):
    """A model that is computed part by part: an embedding, equal layers one after the other, and a head.

    Attributes:
      embed: `embed(params, batch) -> x`, the input of the first layer: a tree of floating arrays.
      layer: `layer(params, x) -> x`, of the same shapes and dtypes. All layers have parameters of the same tree,
        shapes and dtypes, so that it is compiled once.
      head: `head(params, x, batch) -> loss`, a number: the mean over the examples of the batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> stack = offload.LayerStack(
      ...     embed=lambda p, batch: batch,
      ...     layer=lambda p, x: x + jnp.tanh(x @ p["w"]),
      ...     head=lambda p, x, batch: jnp.mean((x @ p["w"]) ** 2),
      ... )
      >>> stack.layer({"w": jnp.zeros((4, 4))}, jnp.ones((2, 4))).shape
      (2, 4)
    """

    embed: Callable[[PyTree, Any], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[[PyTree, PyTree, Any], Array]


class Programs(NamedTuple):
    """Compiled functions. Gradients of parameters are means over workers; `x` and its gradient are each worker's own.

    Attributes:
      embed: `(params, batch) -> x`.
      layer: `(params, x) -> x`.
      head: `(params, x, batch) -> loss`.
      head_grads: `(params, x, batch) -> (loss, gradient of params, gradient of x)`.
      layer_grads: `(params, x, gradient of the result) -> (gradient of params, gradient of x)`; computes the layer
        again.
      embed_grads: `(params, batch, gradient of the result) -> gradient of params`.
    """

    embed: Callable[[PyTree, Any], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[[PyTree, PyTree, Any], Array]
    head_grads: Callable[..., tuple[Array, PyTree, PyTree]]
    layer_grads: Callable[..., tuple[PyTree, PyTree]]
    embed_grads: Callable[..., PyTree]


class StepConfig(NamedTuple):
    """`axis` is `None` without a mesh."""

    stack: LayerStack
    reducer: Reducer
    mesh: Mesh | None
    axis: AxisNames

    def build_programs(self) -> Programs:
        """Compiles each function when it is first called."""
        # Of parameters every worker has all, of batches and activations its own examples.
        whole, own = PartitionSpec(), PartitionSpec(axis_tuple(self.axis))
        return Programs(
            self._compile(self._embed, (whole, own), own),
            self._compile(self._layer, (whole, own), own),
            self._compile(self._head, (whole, own, own), whole),
            self._compile(self._head_grads, (whole, own, own), (whole, whole, own)),
            self._compile(self._layer_grads, (whole, own, own), (whole, own)),
            self._compile(self._embed_grads, (whole, own, own), whole),
        )

    def _compile(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        if self.mesh is None:
            return jax.jit(f)
        names = set(self.mesh.axis_names)
        return jax.jit(
            shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=True)
        )

    def _own(self, params: PyTree) -> PyTree:
        # Else the gradient of replicated parameters would be summed over workers by `jax.vjp` itself.
        return over(self.axis).varying(params)

    def _mean(self, grads: PyTree) -> PyTree:
        """The mean of a part's gradients over workers: one call of the reducer for each part, in the backward pass."""
        if not jax.tree.leaves(grads):
            return grads
        return self.reducer.reduce(grads, self.reducer.init(grads), over(self.axis), NO_EXTRAS)[0].mean

    def _embed(self, params: PyTree, batch: Any) -> PyTree:
        x = self.stack.embed(self._own(params), batch)
        for leaf in jax.tree.leaves(x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"embed must return floating arrays, got one of {leaf.dtype}: convert it, or leave it out"
                )
        return x

    def _layer(self, params: PyTree, x: PyTree) -> PyTree:
        y = self.stack.layer(self._own(params), x)
        kinds = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree) for tree in (x, y)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"a layer must return what it takes, {kinds[0]}, got {kinds[1]}")
        return y

    def _head(self, params: PyTree, x: PyTree, batch: Any) -> Array:
        return over(self.axis).mean(self.stack.head(self._own(params), x, batch))

    def _head_grads(self, params: PyTree, x: PyTree, batch: Any) -> tuple[Array, PyTree, PyTree]:
        value_and_grad = jax.value_and_grad(self.stack.head, argnums=(0, 1))
        loss, (grads, cotangent) = value_and_grad(self._own(params), x, batch)
        return over(self.axis).mean(loss), self._mean(grads), cotangent

    def _layer_grads(self, params: PyTree, x: PyTree, cotangent: PyTree) -> tuple[PyTree, PyTree]:
        _, pull_back = jax.vjp(self.stack.layer, self._own(params), x)
        grads, cotangent = pull_back(cotangent)
        return self._mean(grads), cotangent

    def _embed_grads(self, params: PyTree, batch: Any, cotangent: PyTree) -> PyTree:
        _, pull_back = jax.vjp(lambda params: self.stack.embed(params, batch), self._own(params))
        (grads,) = pull_back(cotangent)
        return self._mean(grads)

    def place_params(self, tree: Any, leaves: list[np.ndarray]) -> PyTree:
        """Copies parameters to the device, or to all devices of the mesh."""
        where = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        # The context `jax.enable_x64` holds for one thread, and this is the one that reads ahead.
        for leaf in leaves:
            check_dtype(leaf.dtype)
        return tree.unflatten(jax.device_put(leaves, where))

    def place_batch(self, batch: PyTree) -> PyTree:
        """Copies a batch to the device, or splits it over the workers along its first dimension."""
        if self.mesh is None:
            return jax.device_put(batch)
        names = axis_tuple(self.axis)
        workers = math.prod(self.mesh.shape[name] for name in names)
        for leaf in jax.tree.leaves(batch):
            if not np.ndim(leaf) or np.shape(leaf)[0] % workers:
                raise ValueError(
                    f"a batch of shape {np.shape(leaf)} cannot be split over {workers} workers: its first dimension "
                    f"must be a multiple of {workers}"
                )
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(names)))


def check_reducer(reducer: Reducer) -> None:
    """Refuses reducers that keep something from one step to the next."""
    state = jax.eval_shape(reducer.init, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    if jax.tree.leaves(state):
        raise ValueError(
            f"the gradient of a layer is averaged when it has been computed, and nothing is kept of it, but {reducer} "
            "keeps residuals or random keys from step to step: use exact()"
        )


def to_host(x: PyTree) -> PyTree:
    """Copies activations to host memory, each device its own; they stay where they are if that is host memory."""
    return jax.tree.map(lambda leaf: _move(leaf, "pinned_host"), x)


def to_device(x: PyTree) -> PyTree:
    """The inverse of `to_host`."""
    return jax.tree.map(lambda leaf: _move(leaf, "device"), x)


def _move(leaf: Array, kind: str) -> Array:
    if all(map(on_host, leaf.devices())):
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))


def first_copy(leaf: Array) -> np.ndarray:
    """A replicated array, from its first device, as a vector."""
    return np.asarray(leaf.addressable_data(0)).reshape(-1)


def copy_forwarded(results: PyTree, params: PyTree) -> PyTree:
    """Copies results that are parameters themselves: `jit` returns the argument, whose memory is a buffer of disk."""
    given = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in given else leaf, results)


class _Visit(NamedTuple):
    """One access to a part, and the method that computes on it."""

    run: Callable[[int, PyTree, np.ndarray], None]
    part: int
    access: Access
    needs_params: bool


class Step:
    """The state of a step between its visits to parts: activations, and the gradient of the current one.

    Args:
      updates: the optimizer for the embedding, for layers and for the head; `numbers` are theirs for this step.
      train: False computes the loss alone.
    """

    def __init__(
        self,
        config: StepConfig,
        programs: Programs,
        parts: Sequence[StackPart],
        updates: Sequence[PartProgram],
        numbers: Sequence[Sequence[np.ndarray]],
        batch: PyTree,
        clip_norm: float | int | None,
        *,
        train: bool = True,
    ):
        self.config, self.programs, self.parts = config, programs, parts
        self.updates, self.numbers, self.clip_norm = updates, numbers, clip_norm
        self.batch = config.place_batch(batch)
        self.visits = self._schedule(train)
        # Parameters that the reading thread has copied to the device, by visit.
        self.placed: dict[int, PyTree] = {}
        # The result of each part on the host, until the backward pass takes it from the end.
        self.results: list[PyTree] = []
        self.x: Any = None
        self.cotangent: Any = None
        self.loss: Any = None
        self.train = train
        self.square = 0.0

    def _schedule(self, train: bool) -> list[_Visit]:
        last = len(self.parts) - 1
        forward = [_Visit(self.forward, i, self.parts[i].load_params(), True) for i in range(last)]
        if not train:
            return [*forward, _Visit(self.evaluate, last, self.parts[last].load_params(), True)]
        # The head's loss and gradient are computed together: it has no visit in the forward pass.
        reverse = range(last, -1, -1)
        if self.clip_norm is None:
            return [*forward, *(_Visit(self.backward, i, self.parts[i].update(), True) for i in reverse)]
        backward = [_Visit(self.backward, i, self.parts[i].write_grads(), True) for i in reverse]
        # In the same order once more: the gradient that is needed first has been on disk for longest.
        return [*forward, *backward, *(_Visit(self.update, i, self.parts[i].update(), False) for i in reverse)]

    def accesses(self) -> list[Access]:
        """What each visit reads and writes."""
        return [visit.access for visit in self.visits]

    def prepare(self, k: int, data: np.ndarray) -> None:
        """Copies the parameters of visit `k` to the device; called by the reading thread, ahead of the visit."""
        visit = self.visits[k]
        if visit.needs_params:
            part = self.parts[visit.part]
            self.placed[k] = self.config.place_params(
                part.model.tree, reshape_vectors(part.model, part.param_vectors(data))
            )

    def visit(self, k: int, data: np.ndarray) -> None:
        """Computes what visit `k` is for. When it returns, nothing reads the buffer any more."""
        visit = self.visits[k]
        if visit.needs_params and k not in self.placed:
            self.prepare(k, data)
        visit.run(visit.part, self.placed.pop(k, None), data)

    def forward(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the result of part `i`, and keeps it on the host for the backward pass."""
        del data
        x = self.programs.layer(params, self.x) if i else self.programs.embed(params, self.batch)
        self.x = jax.block_until_ready(copy_forwarded(x, params))
        if self.train:
            self.results.append(to_host(self.x))

    def evaluate(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the loss."""
        del i, data
        self.loss = jax.block_until_ready(self.programs.head(params, self.x, self.batch))

    def backward(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the gradient of part `i`, and updates it at once, or writes the gradient to disk."""
        # Of the activations on the device only the input of this part is left.
        self.x = None
        grads: PyTree = {}
        if i == len(self.parts) - 1:
            found = self.programs.head_grads(params, to_device(self.results.pop()), self.batch)
            self.loss, grads, self.cotangent = jax.block_until_ready(copy_forwarded(found, params))
        elif i:
            found = self.programs.layer_grads(params, to_device(self.results.pop()), self.cotangent)
            grads, self.cotangent = jax.block_until_ready(copy_forwarded(found, params))
        elif jax.tree.leaves(params):
            grads = jax.block_until_ready(self.programs.embed_grads(params, self.batch, self.cotangent))
        self._leave(self.parts[i], [first_copy(leaf) for leaf in jax.tree.leaves(grads)], data)

    def _leave(self, part: StackPart, grads: list[np.ndarray], data: np.ndarray) -> None:
        """Uses up the gradient of a part."""
        if self.clip_norm is None:
            self.updates[part.kind].run(self.numbers[part.kind], grads, data)
            return
        for grad in grads:
            wide = grad.astype(np.result_type(grad.dtype, np.float32), copy=False)
            self.square += float(np.vdot(wide, wide))
        part.store_grads(data, grads)

    def update(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Updates part `i` with its gradient from disk, clipped by the norm over all parts."""
        del params
        part, limit, norm = self.parts[i], self.clip_norm, np.sqrt(self.square)
        assert limit is not None
        grads = part.grad_vectors(data)
        # As `optax.clip_by_global_norm`: a norm that is not finite shows in the parameters.
        if not norm < limit:
            grads = [g / np.asarray(norm, g.dtype) * np.asarray(limit, g.dtype) for g in grads]
        self.updates[part.kind].run(self.numbers[part.kind], grads, data)

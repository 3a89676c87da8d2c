"""A model as a stack of layers, and the compiled functions of its parts."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core.compat import shard_map
from ..._core.types import Array, AxisNames, PyTree, State
from ...comm.over import over
from ...reducers.reducer import NO_EXTRAS, Law, Reducer
from ...state.marks import axis_tuple
from ...transforms.local_gradients import reduce_weighted
from ...transforms.weights import scale_leaves, weight_of
from ..nvme.model import Model, describe


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

    `examples` is each worker's number of examples, `[workers]`, or `None`.

    Attributes:
      embed: `(params, batch) -> x`.
      layer: `(params, x) -> x`.
      head: `(params, x, batch, examples) -> loss`.
      head_grads: `(params, x, batch, examples) -> (loss, gradient of params, gradient of x)`.
      layer_grads: `(params, x, gradient of the result, examples) -> (gradient of params, gradient of x)`; computes the
        layer again.
      embed_grads: `(params, batch, gradient of the result, examples) -> gradient of params`.
      step: `(params of embed, of a layer, of head, batch, examples, train=) -> loss`: all of them, to be traced alone.
    """

    embed: Callable[[PyTree, Any], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[..., Array]
    head_grads: Callable[..., tuple[Array, PyTree, PyTree]]
    layer_grads: Callable[..., tuple[PyTree, PyTree]]
    embed_grads: Callable[..., PyTree]
    step: Any

    def check(self, parts: Sequence[PyTree], batch: PyTree, examples: Array | None, *, train: bool) -> None:
        """Traces what a step calls, for parameters of these shapes: a mistake shows before anything runs."""
        kinds = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts[i]) for i in (0, 1, -1)]
        self.step.eval_shape(*kinds, batch, examples, train=train)


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
        programs = Programs(
            self._compile(self._embed, (whole, own), own),
            self._compile(self._layer, (whole, own), own),
            self._compile(self._head, (whole, own, own, own), whole),
            self._compile(self._head_grads, (whole, own, own, own), (whole, whole, own)),
            self._compile(self._layer_grads, (whole, own, own, own), (whole, own)),
            self._compile(self._embed_grads, (whole, own, own, own), whole),
            None,
        )

        def step(embed, layer, head, batch, examples, *, train):
            first = programs.embed(embed, batch)
            last = programs.layer(layer, first)
            if not train:
                return programs.head(head, last, batch, examples)
            loss, _, cotangent = programs.head_grads(head, last, batch, examples)
            _, cotangent = programs.layer_grads(layer, first, cotangent, examples)
            if jax.tree.leaves(embed):
                programs.embed_grads(embed, batch, cotangent, examples)
            return loss

        return programs._replace(step=jax.jit(step, static_argnames="train"))

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

    def _mean(self, grads: PyTree, examples: Array | None) -> PyTree:
        """The mean of a part's gradients over workers: one call of the reducer for each part, in the backward pass."""
        if not jax.tree.leaves(grads):
            return grads
        comm, weight = over(self.axis), None if examples is None else examples[0]
        extras = NO_EXTRAS._replace(examples=weight if self.reducer.forms.weighted else None)

        def reduce(grads: PyTree, state: State) -> tuple[PyTree, State]:
            reduced, state = self.reducer.reduce(grads, self.reducer.init(grads), comm, extras)
            return reduced.mean, state

        plain = self.reducer.law == Law.MEAN
        return reduce_weighted(reduce, grads, (), comm, weight, plain=plain, reducer=self.reducer)[0]

    def _mean_loss(self, loss: Array, examples: Array | None) -> Array:
        comm = over(self.axis)
        if examples is None:
            return comm.mean(loss)
        # The mean over no rows is NaN, which counts as often as there are rows: never.
        return comm.mean(scale_leaves(loss, weight_of(examples[0], comm)[0]))

    def _embed(self, params: PyTree, batch: Any) -> PyTree:
        x = self.stack.embed(self._own(params), batch)
        if not jax.tree.leaves(x):
            raise ValueError(f"embed must return the input of the first layer, floating arrays, got {x}")
        _kinds("embed", x)
        for leaf in jax.tree.leaves(x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"embed must return floating arrays, got one of {leaf.dtype}: convert it, or leave it out"
                )
        return x

    def _layer(self, params: PyTree, x: PyTree) -> PyTree:
        y = self.stack.layer(self._own(params), x)
        taken, returned = _kinds("layer", x), _kinds("layer", y)
        if taken != returned:
            raise ValueError(
                f"a layer must return what it takes, {taken}, got {returned}: the next one takes it. Change shapes and "
                "dtypes in embed or head"
            )
        return y

    def _loss(self, params: PyTree, x: PyTree, batch: Any) -> Array:
        loss = self.stack.head(params, x, batch)
        kinds = _kinds("head", loss)
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(loss)]
        if not jax.tree_util.all_leaves([loss]) or jnp.shape(loss) or not jnp.issubdtype(dtypes[0], jnp.floating):
            raise ValueError(
                f"head must return one floating number, the mean loss over the examples of the batch, got {kinds}"
            )
        return loss

    def _head(self, params: PyTree, x: PyTree, batch: Any, examples: Array | None) -> Array:
        return self._mean_loss(self._loss(self._own(params), x, batch), examples)

    def _head_grads(
        self, params: PyTree, x: PyTree, batch: Any, examples: Array | None
    ) -> tuple[Array, PyTree, PyTree]:
        value_and_grad = jax.value_and_grad(self._loss, argnums=(0, 1))
        loss, (grads, cotangent) = value_and_grad(self._own(params), x, batch)
        return self._mean_loss(loss, examples), self._mean(grads, examples), cotangent

    def _layer_grads(
        self, params: PyTree, x: PyTree, cotangent: PyTree, examples: Array | None
    ) -> tuple[PyTree, PyTree]:
        _, pull_back = jax.vjp(self.stack.layer, self._own(params), x)
        grads, cotangent = pull_back(cotangent)
        return self._mean(grads, examples), cotangent

    def _embed_grads(self, params: PyTree, batch: Any, cotangent: PyTree, examples: Array | None) -> PyTree:
        _, pull_back = jax.vjp(lambda params: self.stack.embed(params, batch), self._own(params))
        (grads,) = pull_back(cotangent)
        return self._mean(grads, examples)

    def place_params(self, params: PyTree) -> PyTree:
        """Copies arrays to the device, or to all devices of the mesh."""
        if self.mesh is not None:
            return jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))
        leaves, structure = jax.tree.flatten(params)
        # An array in the memory of a device's host goes to that device.
        places = [x.sharding.with_memory_kind("device") if isinstance(x, jax.Array) else None for x in leaves]
        return structure.unflatten([jax.device_put(x, place) for x, place in zip(leaves, places, strict=True)])

    def place_batch(self, batch: PyTree) -> PyTree:
        """Copies a batch to the device, or splits it over the workers along its first dimension."""
        if self.mesh is None:
            return jax.device_put(batch)
        workers = self._workers()
        for leaf in jax.tree.leaves(batch):
            if not np.ndim(leaf) or np.shape(leaf)[0] % workers:
                raise ValueError(
                    f"a batch of shape {np.shape(leaf)} cannot be split over {workers} workers: its first dimension "
                    f"must be a multiple of {workers}"
                )
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(axis_tuple(self.axis))))

    def count_examples(self, examples: Any) -> np.ndarray | None:
        """Each worker's number of examples, checked; `None` if all workers count alike."""
        if examples is None:
            return None
        workers, counts = self._workers(), np.atleast_1d(np.asarray(examples))
        if counts.shape != (workers,) or counts.dtype.kind not in "biuf":
            raise ValueError(
                f"examples must be one number for each of {workers} workers, got shape {counts.shape} of {counts.dtype}"
            )
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(f"examples must be at least 0 and finite, got {counts.tolist()}")
        return counts.astype(np.float32)

    def _workers(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in axis_tuple(self.axis))


def configure(name: str, stack: LayerStack, reducer: Reducer, mesh: Mesh | None, axis: AxisNames) -> StepConfig:
    """Checks the arguments of the function `name` that concern the workers."""
    if jax.process_count() > 1:
        raise ValueError(
            f"{name} runs in one process, with all devices of its machine, got {jax.process_count()} processes: "
            "shard the model over machines with zero.gathered_scan"
        )
    _check_stack(stack)
    _check_reducer(reducer)
    if mesh is None:
        return StepConfig(stack, reducer, None, None)
    if not set(axis_tuple(axis)) <= set(mesh.axis_names):
        raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {mesh.axis_names}")
    return StepConfig(stack, reducer, mesh, axis)


def _kinds(name: str, tree: PyTree) -> PyTree:
    """The shapes and dtypes of what the function `name` of the stack takes or returns."""

    def kind_of(leaf: Any) -> tuple[tuple[int, ...], str]:
        try:
            return jnp.shape(leaf), jnp.result_type(leaf).name
        except (TypeError, ValueError):
            raise ValueError(f"{name} must return arrays, got {leaf!r}") from None

    return jax.tree.map(kind_of, tree)


def _check_stack(stack: LayerStack) -> None:
    """Checks that the functions of a stack take the arguments that they are given."""
    for name, arguments in zip(stack._fields, ("params, batch", "params, x", "params, x, batch"), strict=True):
        function = getattr(stack, name)
        if not callable(function):
            raise ValueError(f"LayerStack({name}=) must be a function {name}({arguments}), got {function!r}")
        try:
            signature = inspect.signature(function)
        except ValueError:  # a function that is written in C
            continue
        try:
            signature.bind(*arguments.split(", "))
        except TypeError as error:
            raise ValueError(
                f"{name} of the stack is called as {name}({arguments}), and its arguments are {signature}: {error}; "
                "bind constants with functools.partial, and put what a layer needs of the batch into x"
            ) from None


def _check_reducer(reducer: Reducer) -> None:
    """Refuses reducers that keep something from one step to the next."""
    state = jax.eval_shape(reducer.init, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    if jax.tree.leaves(state):
        raise ValueError(
            f"the gradient of a layer is averaged when it has been computed, and nothing is kept of it, but {reducer} "
            "keeps residuals or random keys from step to step: use exact()"
        )


def describe_part(inner: optax.GradientTransformationExtraArgs, params: PyTree) -> Model:
    """`describe` for the parameters of one part, which are all that the optimizer sees."""
    try:
        return describe(inner, params, None)
    except ValueError as error:
        if "pytree structure error" not in str(error):
            raise
        raise ValueError(
            "the optimizer has masks or labels for the whole model, but it sees the embedding, a layer or the head "
            "alone: pass a function of the parameters that returns them"
        ) from error


def check_layer(model: Model, tree: PyTree, number: int) -> list[Any]:
    """The leaves of layer `number`, which must be as those of the first, which `model` describes."""
    leaves, structure = jax.tree.flatten(tree)
    found, first = [[(x.shape, x.dtype.name) for x in each] for each in (leaves, model.leaves)]
    if structure != model.tree or found != first:
        raise ValueError(f"layer {number} differs from layer 0: {found} instead of {first}; all must be alike")
    return leaves

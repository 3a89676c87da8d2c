"""Arrays of a state that lie coded between steps: the node that holds one, and trees of them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike

from .._core.trees import next_count
from .._core.types import Array, Int, Key, PyTree, Shape, State
from ..compressors.base import Compressor
from ..compressors.dynamic_fp8 import dynamic_fp8
from ..state.marks import is_mark

# Arrays with fewer entries stay as they are: they weigh nothing, and embeddings, norms and biases are sensitive.
SMALLEST = 4096


@jax.tree_util.register_pytree_with_keys_class
class Coded:
    """The payload that stands for an array of this shape and dtype."""

    __slots__ = ("dtype", "payload", "shape")

    def __init__(self, payload: Any, *, shape: Shape, dtype: DTypeLike):
        self.payload, self.shape, self.dtype = payload, tuple(shape), jnp.dtype(dtype)

    def tree_flatten_with_keys(self):
        """The payload is the only child."""
        return ((jax.tree_util.GetAttrKey("payload"), self.payload),), (self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        return cls(children[0], shape=aux[0], dtype=aux[1])

    def __repr__(self) -> str:
        return f"Coded({self.payload!r}, shape={self.shape}, dtype={self.dtype.name})"


def is_coded(x: Any) -> bool:
    """Whether `x` stands for an array."""
    return isinstance(x, Coded)


def worth_coding(x: Any, smallest: int = SMALLEST) -> bool:
    """Whether an array of a state is one of many floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and math.prod(x.shape) >= smallest


def encode_tree(code: Compressor, tree: PyTree, key: Key[Array, ""], wanted: Callable[[Any], bool]) -> PyTree:
    """The tree with a `Coded` for each array that is wanted so; each draws a key of its own."""
    leaves, structure = jax.tree.flatten(tree)

    def one(number: int, x: Array) -> Any:
        if not wanted(x):
            return x
        return Coded(code.compress(x, jax.random.fold_in(key, number)), shape=x.shape, dtype=x.dtype)

    return structure.unflatten([one(*numbered) for numbered in enumerate(leaves)])


def decode_tree(code: Compressor, tree: PyTree) -> PyTree:
    """The inverse of `encode_tree`."""

    def one(x: Any) -> Any:
        return code.decompress(x.payload, jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_coded(x) else x

    return jax.tree.map(one, tree, is_leaf=is_coded)


class CompactState(NamedTuple):
    """`inner`: the state of the optimizer, its large arrays coded; `count` of steps, from which rounding draws."""

    inner: PyTree
    count: Int[Array, ""]


def quantized_state(
    inner: optax.GradientTransformation, code: Compressor | None = None, *, smallest: int = SMALLEST
) -> optax.GradientTransformationExtraArgs:
    """Keeps the large arrays of an optimizer's state coded between steps: 8-bit Adam, or moments in bfloat16.

    `s = decode(c)`, `u, s = inner(g, s, θ)`, `c = code(s)`: everything is computed in the state's own dtype, leaf by
    leaf, and rounded at random when it is put back, right on average. Plain rounding would not do: with β₂ = 0.999 the
    second moment of Adam moves by a thousandth in a step, less than half a digit of bfloat16, and stands still.

    *On the wire*: nothing. It stands where the optimizer stands, after `all_reduce`, inside `local_steps` or
    `skip_nonfinite`; for `zero_redundancy` use its `state_compressor`, which codes the part of each worker.

    *State*: agreed, where that of `inner` is. For Adam `2 · (1 + 1/32)` bytes a parameter in place of 8, with
    `cast(jnp.bfloat16, rounding="stochastic")` 4; and a count.

    Args:
      inner: any optimizer that does not communicate.
      code: how arrays are kept: `dynamic_fp8()` by default; `cast(jnp.bfloat16, rounding="stochastic")` for twice the
        bytes, a sixth of the error, and fewer decoded arrays in memory while `inner` runs. Codes with evenly spaced
        numbers (`int8`, `qsgd`) make zeros of small second moments, by which Adam then divides.
      smallest: arrays with fewer entries stay as they are.

    Returns:
      A gradient transformation with the arguments of `inner`.

    Raises:
      ValueError: `smallest` is below 1, or `inner` communicates and keeps state that is not agreed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx, params = jd.transforms.quantized_state(optax.adam(1e-3)), jnp.zeros((64, 64))
      >>> state = tx.init(params)
      >>> sum(x.nbytes for x in jax.tree.leaves(state))  # 2 · (64² + 64² / 32) and two counts
      8456
      >>> updates, state = jax.jit(tx.update)(jnp.ones((64, 64)), state, params)
      >>> round(float(updates[0, 0]), 6)
      -0.001

    References:
      T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", arXiv
      2110.02861, 2021. DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, 2024 (moments in bfloat16).
    """
    if smallest < 1:
        raise ValueError(f"smallest must be at least 1, got {smallest}")
    carrier = dynamic_fp8() if code is None else code
    inner = optax.with_extra_args_support(inner)

    def encoded(state: PyTree, count: Array) -> CompactState:
        key = jax.random.fold_in(jax.random.key(0), count)
        return CompactState(encode_tree(carrier, state, key, lambda x: worth_coding(x, smallest)), count)

    def init(params) -> State:
        state = inner.init(params)
        if any(is_mark(x) for x in jax.tree.leaves(state, is_leaf=is_mark)):
            raise ValueError(
                "quantized_state needs an optimizer that does not communicate, and this one has leaves that "
                "differ between workers or are cut over them: put quantized_state inside, as in "
                "chain(all_reduce(...), quantized_state(adam(...))), or use zero_redundancy(..., state_compressor=)"
            )
        return encoded(state, jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra_args):
        updates, new = inner.update(updates, decode_tree(carrier, state.inner), params, **extra_args)
        return updates, encoded(new, next_count(state.count))

    return optax.GradientTransformationExtraArgs(init, update)

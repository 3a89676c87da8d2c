"""Quantized optimizer state: large arrays are encoded between steps."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike

from .._core.checks import check_range
from .._core.trees import next_count
from .._core.types import Array, Int, Key, PyTree, Shape, State, Updates
from ..compressors.compressor import Compressor, check_compressor
from ..compressors.dynamic_fp8 import dynamic_fp8
from ..state.marks import Inseparable, is_mark
from .extra_args import with_extra_args

# Arrays with fewer entries are not encoded: they need little memory, and norms and biases are sensitive.
SMALLEST = 4096


@jax.tree_util.register_pytree_with_keys_class
class Coded(Inseparable):
    """The payload of an encoded array, with the array's shape and dtype."""

    __slots__ = ("dtype", "payload", "shape")

    def __init__(self, payload: Any, *, shape: Shape, dtype: DTypeLike):
        self.payload, self.shape, self.dtype = payload, tuple(shape), jnp.dtype(dtype)

    def tree_flatten_with_keys(self):
        """Returns the payload as the only child."""
        # Shape and dtype are static: they are a part of the tree, so that `jit` compiles for them.
        return ((jax.tree_util.GetAttrKey("payload"), self.payload),), (self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """Inverts `tree_flatten_with_keys`."""
        return cls(children[0], shape=aux[0], dtype=aux[1])

    def __repr__(self) -> str:
        return f"Coded({self.payload!r}, shape={self.shape}, dtype={self.dtype.name})"


def is_coded(x: Any) -> bool:
    """Returns whether `x` is an encoded array."""
    return isinstance(x, Coded)


def worth_coding(x: Any, smallest: int = SMALLEST) -> bool:
    """Returns whether an array is floating and has at least `smallest` entries."""
    return jnp.issubdtype(x.dtype, jnp.floating) and math.prod(x.shape) >= smallest


def encode_tree(code: Compressor, tree: PyTree, key: Key[Array, ""], wanted: Callable[[Any], bool]) -> PyTree:
    """Replaces each array for which `wanted` is true by its `Coded`; the key is folded with the leaf's number."""
    leaves, structure = jax.tree.flatten(tree)

    # Leaves of equal shape must not be rounded alike.
    def encode_leaf(number: int, x: Array) -> Any:
        if not wanted(x):
            return x
        return Coded(code.compress(x, jax.random.fold_in(key, number)), shape=x.shape, dtype=x.dtype)

    return structure.unflatten([encode_leaf(number, x) for number, x in enumerate(leaves)])


def decode_tree(code: Compressor, tree: PyTree) -> PyTree:
    """Inverts `encode_tree`."""

    def decode_leaf(x: Any) -> Any:
        return code.decompress(x.payload, jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_coded(x) else x

    return jax.tree.map(decode_leaf, tree, is_leaf=is_coded)


class CompactState(NamedTuple):
    """`inner`: the optimizer's state with its large arrays encoded; `count` of steps, the seed of the rounding."""

    inner: PyTree
    count: Int[Array, ""]


def quantized_state(
    inner: optax.GradientTransformation, code: Compressor | None = None, *, smallest: int = SMALLEST
) -> optax.GradientTransformationExtraArgs:
    """Encodes the large arrays of an optimizer's state between steps: 8-bit Adam, or moments in bfloat16.

    `s = decode(c)`, `u, s = inner(g, s, θ)`, `c = code(s)`: the optimizer computes in the state's own dtype, leaf by
    leaf, and the result is rounded stochastically, without bias. Rounding to nearest would fail: with β₂ = 0.999 the
    second moment of Adam changes by a thousandth in a step, less than half a bfloat16 ulp, and would never move.

    *On the wire*: nothing. It goes where the optimizer would, after `all_reduce`, inside `local_steps` or
    `skip_nonfinite`; for `zero_redundancy` use its `state_compressor`, which encodes the shard of each worker.

    *State*: replicated if that of `inner` is. For Adam `2 · (1 + 1/32)` bytes a parameter in place of 8, with
    `cast(jnp.bfloat16, rounding="stochastic")` 4; and a count.

    Args:
      code: the compressor: `dynamic_fp8()` by default; `cast(jnp.bfloat16, rounding="stochastic")` for twice the bytes,
        a sixth of the error, and fewer decoded arrays in memory while `inner` runs. Codes with evenly spaced values
        (`int8`, `qsgd`) round small second moments to zero, by which Adam then divides.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx, params = jd.transforms.quantized_state(optax.adam(1e-3)), jnp.zeros((64, 64))
      >>> state = tx.init(params)
      >>> sum(x.nbytes for x in jax.tree.leaves(state))  # 2 · (64² + 64² / 32) and two counts
      8456
      >>> updates, state = jax.jit(tx.update)(jnp.ones((64, 64)), state, params)
      >>> round(float(updates[0, 0]), 6)
      -0.001

    References:
      Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, 2021.
      DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, 2024 (moments in bfloat16).
    """
    check_range("smallest", smallest, 1, ends="[]")
    if code is not None:
        check_compressor(code)
    tx = _QuantizedState(with_extra_args(inner), dynamic_fp8() if code is None else code, smallest)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _QuantizedState(NamedTuple):
    inner: optax.GradientTransformationExtraArgs
    compressor: Compressor
    smallest: int

    def init(self, params: PyTree) -> State:
        state = self.inner.init(params)
        if any(is_mark(x) for x in jax.tree.leaves(state, is_leaf=is_mark)):
            raise ValueError(
                "quantized_state needs an optimizer that does not communicate, and this one has leaves that differ "
                "between workers or are sharded over them; put quantized_state inside, as in chain(all_reduce(...), "
                "quantized_state(adam(...))), or use zero_redundancy(..., state_compressor=)"
            )
        return self._encode_state(state, jnp.zeros((), jnp.int32))

    def update(
        self, updates: Updates, state: State, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Updates, State]:
        updates, new = self.inner.update(updates, decode_tree(self.compressor, state.inner), params, **extra_args)
        return updates, self._encode_state(new, next_count(state.count))

    def _encode_state(self, state: PyTree, count: Array) -> CompactState:
        # The same key on all workers keeps replicated state replicated.
        key = jax.random.fold_in(jax.random.key(0), count)
        return CompactState(encode_tree(self.compressor, state, key, lambda x: worth_coding(x, self.smallest)), count)

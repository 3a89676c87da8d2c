"""A byte-level GPT: 256 tokens, no tokenizer, nothing to download."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8

from ..._core.types import PRNGKeyArray, PyTree
from .base import PLAIN, LayerRunner

Tokens = UInt8[Array | np.ndarray, "batch length"] | Int[Array | np.ndarray, "batch length"]


class GPTConfig(NamedTuple):
    """The sizes of a `GPT`."""

    layers: int = 3  # number of transformer blocks
    width: int = 128  # size of the residual stream; a multiple of `heads`
    heads: int = 4  # attention heads
    context: int = 64  # the largest number of tokens that a prediction can see
    vocabulary: int = 256  # number of tokens; 256 for bytes


SIZES = {
    "tiny": GPTConfig(layers=1, width=32, heads=2, context=16),
    "demo": GPTConfig(),
    "small": GPTConfig(layers=6, width=256, heads=8, context=256),
    "medium": GPTConfig(layers=12, width=512, heads=8, context=512),
    "large": GPTConfig(layers=12, width=768, heads=12, context=1024),
    # Named by their parameters: 12 width² per layer, and little more for a vocabulary of bytes.
    "125m": GPTConfig(layers=18, width=768, heads=12, context=2048),
    "350m": GPTConfig(layers=28, width=1024, heads=16, context=2048),
    "1b": GPTConfig(layers=20, width=2048, heads=16, context=2048),
    "3b": GPTConfig(layers=26, width=3072, heads=24, context=2048),
    "7b": GPTConfig(layers=35, width=4096, heads=32, context=2048),
    "13b": GPTConfig(layers=41, width=5120, heads=40, context=2048),
    "70b": GPTConfig(layers=87, width=8192, heads=64, context=2048),
}


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider MLP, each added to the residual stream."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        config = self.config
        length = x.shape[1]
        # The projections back into the stream start small, so that depth does not change the initial scale.
        into_stream = nn.initializers.normal(0.02 / (2 * config.layers) ** 0.5)

        h = nn.LayerNorm(use_bias=False, name="attention_norm")(x)
        qkv = nn.Dense(3 * config.width, use_bias=False, kernel_init=nn.initializers.normal(0.02), name="qkv")(h)
        q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], config.heads, -1), 3, axis=-1)
        # Attention: softmax(q kᵀ / √d) v, over this position and those before it.
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dense(config.width, use_bias=False, kernel_init=into_stream, name="attention_out")(h)

        # x + W₂ gelu(W₁ norm(x) + b₁) + b₂
        h = nn.LayerNorm(use_bias=False, name="mlp_norm")(x)
        h = nn.Dense(4 * config.width, kernel_init=nn.initializers.normal(0.02), name="mlp_in")(h)
        return x + nn.Dense(config.width, kernel_init=into_stream, name="mlp_out")(nn.gelu(h))


class GPT(nn.Module):
    """Embeddings, `config.layers` blocks, a norm and the output layer; each can be applied separately."""

    config: GPTConfig

    def setup(self) -> None:
        config = self.config
        self.tokens = nn.Embed(config.vocabulary, config.width, embedding_init=nn.initializers.normal(0.1))
        for layer in range(config.layers):
            # flax names parameters after attributes: block_0, block_1, ...
            setattr(self, f"block_{layer}", TransformerBlock(config))
        self.final_norm = nn.LayerNorm(use_bias=False)
        self.out = nn.Dense(config.vocabulary, use_bias=False, kernel_init=nn.initializers.normal(0.02))

    @nn.compact
    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """The start of the residual stream."""
        position = self.param("positions", nn.initializers.normal(0.02), (self.config.context, self.config.width))
        return self.tokens(tokens) + position[None, : tokens.shape[1]]

    def head(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length vocabulary"]:
        """From the residual stream to the logits of the next token."""
        return self.out(self.final_norm(x))

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length vocabulary"]:
        x = self.embed(tokens)
        for layer in range(self.config.layers):
            x = getattr(self, f"block_{layer}")(x)
        return self.head(x)


def init(config: GPTConfig, key: PRNGKeyArray) -> PyTree:
    """Draws the parameters of a `GPT`.

    Examples:
      >>> import jax
      >>> from jaxdist._cli.models import gpt
      >>> config = gpt.GPTConfig(layers=1, width=16, heads=2, context=8)
      >>> params = jax.jit(lambda key: gpt.init(config, key))(jax.random.key(0))
      >>> sum(leaf.size for leaf in jax.tree.leaves(params))
      11520
    """
    if config.width % config.heads:
        raise ValueError(f"width must be a multiple of heads, got width={config.width} and heads={config.heads}")
    return GPT(config).init(key, jnp.zeros((1, config.context), jnp.int32))["params"]


def loss(config: GPTConfig, params: PyTree, batch: Tokens, *, layers: LayerRunner = PLAIN) -> Float[Array, ""]:
    """Mean cross-entropy, in nats per byte, of every byte given the ones before it; uniform predictions have log 256.

    `batch` is `[batch, length + 1]` tokens, since inputs and targets overlap, with `length <= config.context`. The
    blocks of `params` may be in `"blocks"`, as `layers.alike` takes them.
    """
    if batch.shape[1] > config.context + 1:
        raise ValueError(
            f"a context of {config.context} takes at most {config.context + 1} tokens, got {batch.shape[1]}"
        )
    # Bytes until here: a quarter of the transfer to the devices.
    tokens = jnp.asarray(batch, jnp.int32)

    def bind_end(method: Callable, *names: str) -> Callable[[Array], Array]:
        f = layers.one(lambda params, x: GPT(config).apply({"params": params}, x, method=method))
        return lambda x: f({name: params[name] for name in names}, x)

    # `Any`, since flax types `apply` as all that it could return.
    def apply_block(params: PyTree, x: Array) -> Any:
        return TransformerBlock(config).apply({"params": params}, x)

    x = bind_end(GPT.embed, "tokens", "positions")(tokens[:, :-1])
    # Stacked by the caller, for a loop, or one entry for each block.
    blocks = params.get("blocks") or [params[f"block_{number}"] for number in range(config.layers)]
    # All blocks have one shape, so that ZeRO-3 can gather them in a loop.
    x = layers.alike(apply_block, blocks, x)
    # The softmax in float32, whatever the dtype of the parameters.
    logits = bind_end(GPT.head, "final_norm", "out")(x).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

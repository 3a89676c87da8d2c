"""Compresses the messages of any rule."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.types import PyTree
from ...compressors.codecs import decode_all, encode_all
from ...compressors.compressor import Codec, Compressor, check_compressor
from ...compressors.scaled import contraction_form
from ..protocol import REDUCED, Action, Actions, Message, Reaction, Reduce, Role, Rule, Send, Site
from ..values import Encoded, Spec, force, mean_of, numeric, spec_of, zeros_for_sum


class _CompressedRoleState(NamedTuple):
    """The state of a role whose messages are compressed; `inner` is that of the role itself."""

    inner: Any
    site: Site
    # The number of encoded messages, for random keys.
    sent: int
    # By `(kind, receiver)`.
    residuals: dict[tuple[str, int], Any]
    # The tags of collectives that were turned from means into gathers.
    means: tuple[int, ...]


class _Codec(NamedTuple):
    """A compressor of one array, and its functions of values."""

    # `(value, words) -> payload`, and `(value, residual, words) -> (payload, residual)`.
    encode: Callable[..., Any]
    encode_with_feedback: Callable[..., Any]
    zeros: Callable[..., Any]
    compressor: Compressor
    # One compiled function per shape, made by `_decode`.
    decoders: dict[Spec, Any]


def compressed(rule: Rule, codes: Mapping[str, Compressor], *, feedback: Sequence[str] = ()) -> Rule:
    """Compresses messages of the given kinds: `C(x)`, or with feedback `C(x + e)`, `e <- x + e - C(x + e)`.

    The rule is unchanged; its gradients and models arrive as decoded payloads. The kinds are those of the rule:
    `"gradient"` and `"params"` for all rules with a parameter server, and `"reduced"` for collectives, whose payloads
    are gathered and averaged after decoding. Integers, by which rules decide, are sent uncompressed.

    *On the wire*: the payload of each leaf; its code, and 4 bytes for the length of that, if the compressor has a codec
    (`qsgd(4, code="entropy")`). A replay without numerics has no payloads to encode, and counts their static size.

    *State*: with feedback, a residual for each receiver, of the size of a model, in float32 or wider.

    Args:
      rule: the method.
      codes: a compressor for each kind of message that is compressed.
      feedback: the kinds with error feedback. Use it for gradients with biased compressors such as `top_k`; it assumes
        that every gradient is sent, used or discarded. For a server's models it costs a model per worker.

    Raises:
      ValueError: `"gradient"` for a rule without a server; feedback for a kind without a compressor, or for a
        compressor that states neither contraction nor variance.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jaxdist as jd
      >>> from jaxdist.asynchronous import replay, rules
      >>> rule = rules.compressed(rules.asgd(optax.sgd(0.1)), {"gradient": jd.top_k(0.01)}, feedback=("gradient",))
      >>> task = replay.Task(jnp.ones(1000), lambda x, batch: (x**2).sum(), lambda *job: None)
      >>> run = replay.run(rule, task, workers=2, steps=10)
      >>> run.links[0, -1] / 5  # 10 entries of 4 bytes, and 12 bytes of positions
      52.0

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
      Speech DNNs", 2014 (the feedback); Stich, Karimireddy, "The error-feedback framework", arXiv:1909.05350, 2019
      (with delays).
    """
    if "gradient" in codes and rule.server is None:
        raise ValueError(f'{rule.name} has no server to send a gradient to: compress "reduced" or "params"')
    for code in codes.values():
        check_compressor(code)
    for kind in feedback:
        if kind not in codes:
            raise ValueError(f"feedback={tuple(feedback)} needs a compressor for {kind!r}; codes has {sorted(codes)}")
    codecs = {kind: _codec(contraction_form(code) if kind in feedback else code) for kind, code in codes.items()}
    method = _Compressed(codecs, tuple(feedback))
    return Rule(
        rule.name, method.compress_role(rule.worker), method.compress_role(rule.server) if rule.server else None
    )


class _Compressed(NamedTuple):
    """The codecs by kind, and the kinds with error feedback."""

    codecs: dict[str, _Codec]
    feedback: tuple[str, ...]

    def compress_role(self, role: Role) -> Role:
        def init(site: Site, params: Any) -> Reaction:
            inner, actions = role.init(site, params)
            return self._encode_actions(_CompressedRoleState(inner, site, 0, {}, ()), actions)

        def receive(state: _CompressedRoleState, sender: int, message: Message) -> Reaction:
            state, message = self._decode_message(state, message)
            inner, actions = role.receive(state.inner, sender, message)
            return self._encode_actions(state._replace(inner=inner), actions)

        return Role(init, receive, lambda state: role.params(state.inner), lambda state: role.waits_for(state.inner))

    def _encode_actions(self, state: _CompressedRoleState, actions: Actions) -> Reaction:
        encoded = []
        for action in actions:
            state, action = self._encode_action(state, action)
            encoded.append(action)
        return state, tuple(encoded)

    def _encode_action(self, state: _CompressedRoleState, action: Action) -> tuple[_CompressedRoleState, Action]:
        if type(action) is Send:
            message = action.message
            if message.kind in self.codecs and message.value is not None:
                state, value = self._encode(state, message.kind, action.to, message.value)
                return state, Send(action.to, message._replace(value=value))
        elif type(action) is Reduce and REDUCED in self.codecs and type(action.value) is not int:
            # All collectives share one residual; without feedback the receiver is not used.
            state, value = self._encode(state, REDUCED, 0, action.value)
            # Payloads cannot be averaged: they are gathered, and each member averages what it decodes.
            if action.op == "mean":
                state = state._replace(means=(*state.means, action.tag))
            return state, action._replace(value=value, op="gather")
        return state, action

    def _encode(
        self, state: _CompressedRoleState, kind: str, to: int, value: Any
    ) -> tuple[_CompressedRoleState, Encoded]:
        codec, site, like = self.codecs[kind], state.site, spec_of(value)
        words = np.array([site.seed & 0xFFFFFFFF, site.index + 1, state.sent], np.uint32)
        state = state._replace(sent=state.sent + 1)
        if kind not in self.feedback:
            return state, Encoded(_to_message(codec, codec.encode(value, words), like), like)
        # The first residual is zero.
        residual = state.residuals.get((kind, to))
        residual = codec.zeros(value) if residual is None else residual
        payload, residual = codec.encode_with_feedback(value, residual, words)
        state = state._replace(residuals=state.residuals | {(kind, to): residual})
        return state, Encoded(_to_message(codec, payload, like), like)

    def _decode_message(self, state: _CompressedRoleState, message: Message) -> tuple[_CompressedRoleState, Message]:
        value = message.value
        if type(value) is Encoded:
            return state, message._replace(value=_decode(self.codecs[message.kind], value))
        if message.kind == REDUCED and type(value) is tuple and value and type(value[0]) is Encoded:
            value = tuple([_decode(self.codecs[REDUCED], part) for part in value])
            if message.tag in state.means:
                state = state._replace(means=tuple([tag for tag in state.means if tag != message.tag]))
                value = mean_of(value)
            return state, message._replace(value=value)
        return state, message


def _to_message(codec: _Codec, payload: Any, like: Spec) -> Any:
    """The code of a payload as a vector of bytes, where the compressor has a codec; the payload itself elsewhere."""
    host = codec.compressor.codec
    if host is None or type(payload) is Spec:
        return payload
    return np.frombuffer(encode_all(host, force(payload), jax.tree.leaves(like.tree)), np.uint8)


def _keep_integers(compressor: Compressor) -> Compressor:
    """The compressor for arrays of floats; integers are their own payloads."""

    def compress(x: Any, key: Any) -> Any:
        return x if _is_integer(x) else compressor.compress(x, key)

    def decompress(payload: Any, like: Any) -> Any:
        return payload if _is_integer(like) else compressor.decompress(payload, like)

    codec = compressor.codec
    if codec is not None:
        codec = codec._replace(encode=partial(_to_bytes, codec), decode=partial(_from_bytes, codec))
    return compressor._replace(compress=compress, decompress=decompress, codec=codec)


def _is_integer(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _to_bytes(codec: Codec, payload: Any, like: Any) -> bytes:
    return np.asarray(payload).tobytes() if _is_integer(like) else codec.encode(payload, like)


def _from_bytes(codec: Codec, body: bytes, like: Any) -> Any:
    return np.frombuffer(body, like.dtype).reshape(like.shape) if _is_integer(like) else codec.decode(body, like)


def _codec(compressor: Compressor) -> _Codec:
    compressor = _keep_integers(compressor)
    return _Codec(
        numeric(partial(_encode_tree, compressor), lazy=True),
        numeric(partial(_encode_tree_with_feedback, compressor), outputs=2),
        zeros_for_sum,
        compressor,
        {},
    )


def _decode(codec: _Codec, encoded: Encoded) -> Any:
    like = encoded.like
    if like not in codec.decoders:
        codec.decoders[like] = numeric(partial(_decode_tree, codec.compressor, like=like.tree), lazy=True)
    payload, host = encoded.payload, codec.compressor.codec
    if host is not None and type(payload) is np.ndarray:
        payload = decode_all(host, payload.tobytes(), jax.tree.leaves(like.tree))
    return codec.decoders[like](payload)


def _encode_tree(compressor: Compressor, value: PyTree, words: Any) -> list[Any]:
    # Keys differ by seed, role, message and leaf.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(words[0]), words[1]), words[2])
    return [
        compressor.compress(leaf, jax.random.fold_in(key, index)) for index, leaf in enumerate(jax.tree.leaves(value))
    ]


def _encode_tree_with_feedback(
    compressor: Compressor, value: PyTree, residual: PyTree, words: Any
) -> tuple[list[Any], PyTree]:
    # C(x + e), e <- x + e - C(x + e)
    total = jax.tree.map(lambda x, e: x.astype(e.dtype) + e, value, residual)
    encoded = jax.tree.map(lambda t, x: t.astype(x.dtype), total, value)
    payloads = _encode_tree(compressor, encoded, words)
    decoded = _decode_tree(compressor, payloads, encoded)
    return payloads, jax.tree.map(lambda t, c: t - c.astype(t.dtype), total, decoded)


def _decode_tree(compressor: Compressor, payloads: list[Any], like: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([compressor.decompress(payload, leaf) for payload, leaf in zip(payloads, leaves)])

"""`power_sgd:4` on a command line and the object it stands for.

The grammar is a call without brackets: `name`, then after a colon values and `key=value` pairs separated by commas.
"""

import ast
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

from ... import compressors, optimizers, reducers
from ...compressors.base import Compressor
from ...reducers.base import Reducer
from ..models import gpt
from ..models.base import Workload

FEEDBACK: dict[str, tuple[Callable[[Reducer], Reducer], str]] = {
    "ef": (reducers.error_feedback, "what was not sent is kept and added to the next gradient"),
    "ef21": (reducers.ef21, "workers send the compressed change since their last estimate"),
    "loco": (reducers.loco, "a moving average of what was not sent is added, and kept in 8 bits"),
}
COLLECTIVES: dict[str, tuple[Callable[[Compressor], Reducer], str]] = {
    "ring": (reducers.ring, "coded partial sums round a ring, an error at each hop; to compare with two_shot"),
    "two_shot": (
        reducers.two_shot,
        "a coded exchange and a coded gather: the bytes of an all-reduce, for many workers",
    ),
}
# name: (factory of a reducer or of a compressor, how it is spelled, what it does)
REDUCERS: dict[str, tuple[Callable[..., Reducer | Compressor], str, str]] = {
    "exact": (reducers.exact, "exact", "plain all-reduce in float32"),
    "f16": (functools.partial(compressors.cast, jnp.float16), "f16", "float16 on the wire"),
    "bf16": (functools.partial(compressors.cast, jnp.bfloat16), "bf16", "bfloat16 on the wire"),
    "fp8": (compressors.fp8, "fp8[:block=N,format=e5m2]", "8-bit floats, a scale for each block; wants ef:"),
    "mxfp8": (compressors.mxfp8, "mxfp8[:format=e5m2]", "8-bit floats in MX blocks; wants ef:"),
    "mxfp4": (compressors.mxfp4, "mxfp4[:rounding=stochastic]", "4-bit floats in MX blocks; wants ef:"),
    "e3m0": (compressors.e3m0, "e3m0[:block=N,rounding=stochastic]", "powers of two of 4 bits; wants ef:"),
    "int8": (compressors.int8, "int8[:block=N,rounding=stochastic]", "8-bit integers, a scale for each block"),
    "int4": (
        compressors.int4,
        "int4[:block=N,rounding=stochastic]",
        "4-bit integers, a scale for each block; wants ef:",
    ),
    "min_max_uint8": (compressors.min_max_uint8, "min_max_uint8", "8-bit integers between the ends of each array"),
    "natural": (compressors.natural, "natural", "unbiased rounding to powers of two, 9 bits"),
    "qsgd": (compressors.qsgd, "qsgd:BITS[,bucket=N]", "unbiased rounding to 2, 3, 4 or 8 bits"),
    "nuqsgd": (compressors.nuqsgd, "nuqsgd:BITS[,bucket=N]", "unbiased rounding to powers of 1/2"),
    "random_k": (compressors.random_k, "random_k:DENSITY", "the same random entries on all workers; wants ef:"),
    "block_top_k": (compressors.block_top_k, "block_top_k:DENSITY[,block=N]", "the largest of each block; wants ef:"),
    "dgc": (reducers.dgc, "dgc:DENSITY[,momentum=M,...]", "the largest of an accumulated momentum; with plain sgd"),
    "gspar": (compressors.gspar, "gspar:DENSITY", "entries at random, the large ones for certain; unbiased"),
    "sign": (compressors.scaled_sign, "sign[:bucket=N]", "one bit an entry; wants ef:"),
    "drive": (compressors.drive, "drive[:block=N]", "one bit an entry after a random rotation; wants ef:"),
    "terngrad": (
        compressors.terngrad,
        "terngrad[:clip=2.5,bucket=N]",
        "0 or plus or minus the largest, right on average",
    ),
    "top_k": (compressors.top_k, "top_k:DENSITY", "the largest entries of each array; wants ef:"),
    "alq": (reducers.alq, "alq:BITS[,bucket=N]", "levels that follow the gradients"),
    "amq": (reducers.amq, "amq:BITS[,bucket=N]", "levels that are powers of a fitted number"),
    "majority": (reducers.majority_vote, "majority", "workers vote on each sign; wants a small learning rate"),
    "intsgd": (reducers.intsgd, "intsgd:BITS[,scale=S]", "sums of integers of 8 or 32 bits in a scale that follows"),
    "integer_sum": (reducers.integer_sum, "integer_sum:BITS", "sums of integers in the scale of the largest entry"),
    "power_sgd": (reducers.power_sgd, "power_sgd:RANK", "low-rank factors of each matrix; wants ef:"),
}
# Optimizers that communicate by themselves, in the place of a reducer and the optimizer after it.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], str, str]] = {
    "demo": (optimizers.demo, "demo:RATE[,k=N]", "the strongest frequencies of each worker's momentum; no --optimizer"),
    "dion": (optimizers.dion, "dion:RATE,rank=R", "orthonormal low-rank updates of matrices; no --optimizer"),
    "one_bit_adam": (
        optimizers.one_bit_adam,
        "one_bit_adam:RATE,freeze_step=N",
        "Adam, then its momentum by signs; no --optimizer",
    ),
    "qadam": (optimizers.qadam, "qadam:RATE[,warmup_steps=N]", "Adam, then its momentum in 8 bits; no --optimizer"),
}
LONGEST = 1000  # characters of a spelling, several times those of any that makes sense
MODELS = {"text": "gpt", "digits": "convnet"}


def describe() -> str:
    """The reducers, one a line, for `--help`."""
    lines = [f"{spelling}: {purpose}" for _, spelling, purpose in REDUCERS.values()]
    lines += [f"{prefix}:REDUCER: {purpose}" for prefix, (_, purpose) in FEEDBACK.items()]
    lines += [f"{prefix}:CODE: {purpose}" for prefix, (_, purpose) in COLLECTIVES.items()]
    lines += ["CODE+CODE: the second codes the values that the first one sends, as in top_k:0.01+qsgd:4"]
    lines += [f"{spelling}: {purpose}" for _, spelling, purpose in OPTIMIZERS.values()]
    return "\n".join(lines)


def checked(text: str) -> str:
    """The text, unless it is longer than a spelling may be: messages show all of it.

    Raises:
      ValueError: it is longer.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{text[:40]!r}... has {len(text):,} characters; a spelling has at most {LONGEST:,}")
    return text


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Splits `name:1,2,key=3` into name, values and keywords; what is no number or boolean stays a string.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_call
      >>> parse_call("sgd:0.1,momentum=0.9,nesterov=True")
      ('sgd', [0.1], {'momentum': 0.9, 'nesterov': True})
    """
    name, _, rest = checked(text).partition(":")
    values, keywords = [], {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.rpartition("=")
        if equals:
            keywords[key.strip()] = literal(value)
        else:
            values.append(literal(part))
    return name.strip(), values, keywords


def literal(text: str) -> Any:
    """A number, a boolean, or what else Python writes so; the text itself where it is none."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # the last two where it nests too deep
        return text.strip()


def call(kind: str, text: str, factory: Callable, values: list, keywords: dict) -> Any:
    """Calls the factory; arguments that it does not take are a `ValueError` that shows those that it does."""
    signature = inspect.signature(factory)
    try:
        bound = signature.bind(*values, **keywords)
    except TypeError as problem:
        raise ValueError(f"{kind} {text!r}: {problem}; it takes {usage(signature)}") from None
    for name, value in bound.arguments.items():
        wanted = None if isinstance(value, dict) else signature.parameters[name].annotation
        if (wanted is int and type(value) is not int) or (wanted is float and type(value) not in (int, float)):
            raise ValueError(
                f"{kind} {text!r}: {name} must be {'a whole ' if wanted is int else 'a '}number, got {value!r}"
            )
    try:
        return factory(*values, **keywords)
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{kind} {text!r}: {problem}") from problem


def usage(signature: inspect.Signature) -> str:
    """The arguments of a factory in the grammar of this module: `rank,start_step=0`."""
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    plain = [p for p in named if p.default is p.empty or isinstance(p.default, (int, float, str))]
    return ",".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in plain) or "no arguments"


def parse_reducer(text: str) -> Reducer:
    """Makes the reducer that `text` spells.

    Args:
      text: `[ef:|ef21:][two_shot:]name[:value,...]`; the names are the keys of `REDUCERS`.

    Returns:
      A `Reducer`.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_reducer
      >>> parse_reducer("ef:power_sgd:2").law.name
      'EXACT'
    """
    prefix, _, rest = checked(text).partition(":")
    if prefix in FEEDBACK:
        if not rest:
            raise ValueError(f"reducer {text!r}: name what the feedback goes around, as in {prefix}:top_k:0.01")
        if (second := rest.partition(":")[0]) in FEEDBACK:
            raise ValueError(f"reducer {text!r}: {second} is feedback already; use one, around what compresses")
        return call("reducer", text, FEEDBACK[prefix][0], [parse_reducer(rest)], {})
    if prefix in COLLECTIVES:
        return call("reducer", text, COLLECTIVES[prefix][0], [parse_code(rest)], {})
    made = _parse_plain(text)
    return reducers.compressed(made) if isinstance(made, Compressor) else made


def parse_code(text: str) -> Compressor:
    """Makes the compressor that `text` spells; `top_k:0.01+qsgd:4` codes the values of the first with the second.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_code
      >>> parse_code("qsgd:4").summable
      False
    """
    return _code(text, _parse_plain(text))


def _parse_plain(text: str) -> Reducer | Compressor:
    first, *others = re.split(r"\+(?=[a-z])", checked(text))
    made = _parse_one(first)
    if not others:
        return made
    *codes, last = [_code(text, one) for one in (made, *map(_parse_one, others))]
    for code in reversed(codes):
        last = call("reducer", text, compressors.chained, [code, last], {})
    return last


def _parse_one(text: str) -> Reducer | Compressor:
    name, values, keywords = parse_call(text)
    if name not in REDUCERS:
        known = ", ".join([*REDUCERS, *OPTIMIZERS])
        raise ValueError(f"unknown reducer {text!r}; known: {known}, reducers also as ef:NAME or ef21:NAME")
    return call("reducer", text, REDUCERS[name][0], values, keywords)


def _code(text: str, made: Reducer | Compressor) -> Compressor:
    if not isinstance(made, Compressor):
        raise ValueError(f"{text!r} is no code of one array, as qsgd:4 is")
    return made


def parse_method(
    text: str, optimizer: optax.GradientTransformation
) -> tuple[Reducer | None, optax.GradientTransformation]:
    """A reducer and the optimizer after it; or, where `text` spells an optimizer that communicates, no reducer and it.

    Example:
      >>> import optax
      >>> from jaxdist._cli.spellings.parse import parse_method
      >>> parse_method("demo:1e-3", optax.sgd(0.1))[0] is None
      True
    """
    name, values, keywords = parse_call(text)
    if name not in OPTIMIZERS:
        return parse_reducer(text), optimizer
    return None, call("optimizer", text, OPTIMIZERS[name][0], values, keywords)


def optimizers() -> list[str]:
    """The names of optax's optimizers: the public functions whose first argument is a learning rate."""
    return [name for name in sorted(dir(optax)) if _first_argument(getattr(optax, name)) == "learning_rate"]


def _first_argument(thing: Any) -> str | None:
    return next(iter(inspect.signature(thing).parameters), None) if inspect.isfunction(thing) else None


def learning_rate(text: str) -> float:
    """The learning rate in the spelling of an optimizer.

    Example:
      >>> from jaxdist._cli.spellings.parse import learning_rate
      >>> learning_rate("sgd:0.1,momentum=0.9")
      0.1
    """
    _, values, keywords = parse_call(text)
    return float(keywords["learning_rate"] if "learning_rate" in keywords else values[0])


def parse_optimizer(text: str) -> optax.GradientTransformation:
    """Makes any optax optimizer from `name:learning_rate[,key=value...]`.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_optimizer
      >>> _ = parse_optimizer("adamw:3e-4,b2=0.95")
    """
    name, values, keywords = parse_call(text)
    if name not in optimizers():
        raise ValueError(f"unknown optimizer {text!r}; optax has {', '.join(optimizers())}")
    if not values and "learning_rate" not in keywords:
        raise ValueError(f"optimizer {text!r} needs a learning rate, as in {name}:3e-4")
    rate = keywords["learning_rate"] if "learning_rate" in keywords else values[0]
    if type(rate) not in (int, float):
        raise ValueError(f"optimizer {text!r}: the learning rate must be a number, got {rate!r}")
    return call("optimizer", text, getattr(optax, name), values, keywords)


def parse_workload(name: str, model: str | None = None, *, path: str | Path | None = None) -> Workload:
    """Makes a workload from its name and its model's spelling.

    Args:
      name: `"text"` or `"digits"`.
      model: `gpt:SIZE[,key=value...]` for text, `convnet:WIDTH` for digits; None for the default.
      path: a text of one's own.

    Returns:
      A `Workload`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(MODELS)}")
    model = model or MODELS[name]
    kind, values, keywords = parse_call(model)
    if kind != MODELS[name]:
        raise ValueError(f"the workload {name!r} has the model {MODELS[name]!r}, got {model!r}")
    if name == "digits":
        if path is not None:
            raise ValueError("--text is for the workload 'text'")
        from ..models.digits import digits_workload

        return call("model", model, digits_workload, values, keywords)
    from ..models.text import text_workload

    return text_workload(call("model", model, gpt_config, values, keywords), path=path)


def gpt_config(size: str = "demo", **sizes: int) -> gpt.GPTConfig:
    """A named size of the GPT, with single fields changed."""
    if size not in gpt.SIZES:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(gpt.SIZES)}")
    unknown = set(sizes) - set(gpt.GPTConfig._fields)
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}; known: {', '.join(gpt.GPTConfig._fields)}")
    for field, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{field} must be a positive whole number, got {value!r}")
    return gpt.SIZES[size]._replace(**sizes)

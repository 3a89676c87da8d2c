"""Parses what a command line names: reducers, optimizers, methods of training and models.

A spelling is a call without brackets (see `grammar`): `power_sgd:4`, `ef:qsgd:4,bucket=256`, `diloco:H=50/ef:qsgd:4`.
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax

from ... import compressors, reducers
from ...compressors.base import Compressor
from ...reducers.base import Reducer
from ..models import gpt
from ..models.base import TrainingMethod, Workload
from . import grammar
from .grammar import call, parse_call
from .tables import COLLECTIVES, FEEDBACK, OPTIMIZERS, REDUCERS, SYNCS

MODELS = {"text": "gpt", "digits": "convnet"}
ZERO = "zero"


def describe_reducers() -> str:
    """All reducers, and the optimizers that replace them, one per line, for `--help`."""
    prefixes = [f"{name}:REDUCER: {entry.purpose}" for name, entry in FEEDBACK.items()]
    prefixes += [f"{name}:CODE: {entry.purpose}" for name, entry in COLLECTIVES.items()]
    chained = "CODE+CODE: the second code encodes the values that the first one sends, as in top_k:0.01+qsgd:4"
    return "\n".join([grammar.describe(REDUCERS), *prefixes, chained, grammar.describe(OPTIMIZERS)])


def describe_syncs() -> str:
    """The methods that synchronize every H steps, one per line, for `--help`."""
    lines = []
    for name, entry in SYNCS.items():
        arguments = grammar.usage(entry.factory, named=True, given=("sync_period", _rate_argument(entry.factory)))
        comma = "," if arguments and not arguments.startswith("[") else ""
        lines.append(f"{name}:H=N{comma}{arguments.replace('[', '[,') if not comma else arguments}: {entry.purpose}")
    return "\n".join(lines)


def parse_reducer(text: str) -> Reducer:
    """Makes the reducer that `text` spells: `[ef:|ef21:|loco:][ring:|two_shot:]name[:value,...]`.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_reducer
      >>> parse_reducer("ef:power_sgd:2").law.name
      'EXACT'
    """
    prefix, _, rest = grammar.check_length(text).partition(":")
    if prefix in FEEDBACK:
        if not rest:
            raise ValueError(f"reducer {text!r}: name what the feedback goes around, as in {prefix}:top_k:0.01")
        if (second := rest.partition(":")[0]) in FEEDBACK:
            raise ValueError(f"reducer {text!r}: {second} is feedback already; use one, around what compresses")
        return call("reducer", text, FEEDBACK[prefix].factory, [parse_reducer(rest)], {})
    if prefix in COLLECTIVES:
        return call("reducer", text, COLLECTIVES[prefix].factory, [parse_code(rest)], {})
    made = _parse_chain(text)
    return reducers.compressed(made) if isinstance(made, Compressor) else made


def parse_code(text: str) -> Compressor:
    """Makes the compressor that `text` spells; `top_k:0.01+qsgd:4` encodes the values of the first with the second.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_code
      >>> parse_code("qsgd:4").summable
      False
    """
    return _check_code(text, _parse_chain(text))


def _parse_chain(text: str) -> Reducer | Compressor:
    """Parses codes that are joined by `+`, from the last one inwards."""
    # A plus before a letter joins codes; one before a digit belongs to a number such as 1e+3.
    first, *others = re.split(r"\+(?=[a-z])", grammar.check_length(text))
    made = _parse_name(first)
    if not others:
        return made
    *codes, last = [_check_code(text, code) for code in (made, *map(_parse_name, others))]
    for code in reversed(codes):
        last = call("reducer", text, compressors.chained, [code, last], {})
    return last


def _parse_name(text: str) -> Reducer | Compressor:
    name, values, keywords = parse_call(text)
    if name not in REDUCERS:
        known = ", ".join([*REDUCERS, *OPTIMIZERS])
        raise ValueError(f"unknown reducer {text!r}; known: {known}, reducers also as ef:NAME or ef21:NAME")
    return call("reducer", text, REDUCERS[name].factory, values, keywords)


def _check_code(text: str, made: Reducer | Compressor) -> Compressor:
    if not isinstance(made, Compressor):
        raise ValueError(f"{text!r} is not a code for one array, such as qsgd:4")
    return made


def list_optimizers() -> list[str]:
    """The names of optax's optimizers: the public functions whose first argument is a learning rate."""
    return [name for name in sorted(dir(optax)) if _first_argument(getattr(optax, name)) == "learning_rate"]


def _first_argument(thing: Any) -> str | None:
    return next(iter(inspect.signature(thing).parameters), None) if inspect.isfunction(thing) else None


def parse_optimizer(text: str) -> optax.GradientTransformation:
    """Makes any optax optimizer from `name:learning_rate[,key=value...]`.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_optimizer
      >>> _ = parse_optimizer("adamw:3e-4,b2=0.95")
    """
    name, values, keywords = parse_call(text)
    if name not in list_optimizers():
        raise ValueError(f"unknown optimizer {text!r}; optax has {', '.join(list_optimizers())}")
    if not values and "learning_rate" not in keywords:
        raise ValueError(f"optimizer {text!r} needs a learning rate, as in {name}:3e-4")
    rate = keywords["learning_rate"] if "learning_rate" in keywords else values[0]
    if type(rate) not in (int, float):
        raise ValueError(f"optimizer {text!r}: the learning rate must be a number, got {rate!r}")
    return call("optimizer", text, getattr(optax, name), values, keywords)


def learning_rate(text: str) -> float:
    """The learning rate in the spelling of an optimizer.

    Example:
      >>> from jaxdist._cli.spellings.parse import learning_rate
      >>> learning_rate("sgd:0.1,momentum=0.9")
      0.1
    """
    _, values, keywords = parse_call(text)
    return float(keywords["learning_rate"] if "learning_rate" in keywords else values[0])


def is_sync(text: str) -> bool:
    """Returns whether a spelling begins with the name of a method that synchronizes every `H` steps.

    Example:
      >>> from jaxdist._cli.spellings.parse import is_sync
      >>> is_sync("diloco:H=50/qsgd:4"), is_sync("qsgd:4")
      (True, False)
    """
    return text.partition(":")[0].partition("/")[0].strip() in SYNCS


def parse_sync(text: str, optimizer: str) -> TrainingMethod:
    """Makes the method that `text` spells: `name:H=N[,key=value...][/REDUCER]`, with a name of `SYNCS`.

    Args:
      text: the spelling; the reducer carries the difference that a round sends.
      optimizer: the spelling of the optimizer of each worker; methods that need its learning rate read it from here.
    """
    spelling, slash, reducer = grammar.check_length(text).partition("/")
    name, values, keywords = parse_call(spelling)
    if name not in SYNCS:
        raise ValueError(f"unknown sync {text!r}; known: {', '.join(SYNCS)}, each with H=, as in diloco:H=50")
    factory = SYNCS[name].factory
    takes = inspect.signature(factory).parameters
    period = keywords.pop("H", None)
    if values or period is None:
        raise ValueError(f"sync {text!r}: give the number of steps between two rounds by name, as in {name}:H=50")
    if type(period) is not int or period < 1:
        raise ValueError(f"sync {text!r}: H must be a positive whole number, got {period!r}")
    given: dict[str, Any] = {"sync_period": period}
    if slash:
        if "reducer" not in takes:
            raise ValueError(f"sync {text!r}: {name} has a fixed encoding and takes no reducer")
        given["reducer"] = parse_reducer(reducer)
    inner = parse_optimizer(optimizer)
    if rate := _rate_argument(factory):
        given[rate] = learning_rate(optimizer)
    if "inner" in takes:
        factory = functools.partial(factory, inner)
    return TrainingMethod(None, call("sync", text, factory, [], given | keywords), period)


def _rate_argument(factory: Callable[..., Any]) -> str:
    """The required argument that takes the learning rate of the local steps; empty if there is none."""
    takes = inspect.signature(factory).parameters
    rate = "learning_rate" if "inner" in takes else "adam_learning_rate"
    return rate if rate in takes and takes[rate].default is inspect.Parameter.empty else ""


def parse_method(text: str, optimizer: str) -> TrainingMethod:
    """Makes the method that `text` spells.

    Args:
      text: a reducer, a stage of ZeRO (`zero:STAGE[/REDUCER]`), a method that synchronizes every `H` steps (see
        `parse_sync`), or an optimizer that communicates.
      optimizer: the spelling of the optimizer of each worker.

    Example:
      >>> from jaxdist._cli.spellings.parse import parse_method
      >>> parse_method("diloco:H=50/ef:qsgd:4", "adamw:1e-3").sync_period, parse_method("zero:3", "adamw:1e-3").stage
      (50, 3)
      >>> parse_method("demo:1e-3", "sgd:0.1").reducer is None
      True
    """
    if is_sync(text):
        return parse_sync(text, optimizer)
    if text.partition(":")[0].strip() == ZERO:
        return _parse_zero(text, optimizer)
    after = parse_optimizer(optimizer)
    name, values, keywords = parse_call(text)
    if name not in OPTIMIZERS:
        return TrainingMethod(parse_reducer(text), after)
    return TrainingMethod(None, call("optimizer", text, OPTIMIZERS[name].factory, values, keywords))


def _parse_zero(text: str, optimizer: str) -> TrainingMethod:
    spelling, slash, reducer = grammar.check_length(text).partition("/")
    _, values, keywords = parse_call(spelling)
    if keywords or values not in ([1], [2], [3]):
        raise ValueError(f"{text!r}: the stages of ZeRO are zero:1, zero:2 and zero:3")
    return TrainingMethod(parse_reducer(reducer if slash else "exact"), parse_optimizer(optimizer), stage=values[0])


def join_options(sync: str | None, zero: int, reducer: str | None, optimizer: str, *, default: str) -> str:
    """Joins `--sync`, or `--zero`, and `--reducer` to one spelling of a method; without any of them the default.

    Example:
      >>> from functools import partial
      >>> from jaxdist._cli.spellings.parse import join_options
      >>> join = partial(join_options, optimizer="adam:1e-3", default="exact")
      >>> join("diloco:H=50", 0, "ef:qsgd:4"), join(None, 2, "two_shot:qsgd:4"), join(None, 0, "f16")
      ('diloco:H=50/ef:qsgd:4', 'zero:2/two_shot:qsgd:4', 'f16')
    """
    if sync is not None and zero:
        raise ValueError(f"--zero {zero} shards state that is equal on all workers, and with --sync it is not")
    if sync is not None and not is_sync(sync):
        parse_sync(sync, optimizer)  # raises, with the known names
    first = f"{ZERO}:{zero}" if zero else sync
    if first is None:
        return default if reducer is None else reducer
    return first if reducer is None else f"{first}/{reducer}"


def parse_workload(name: str, model: str | None = None, *, path: str | Path | None = None) -> Workload:
    """Makes a workload from its name and its model's spelling.

    Args:
      name: `"text"` or `"digits"`.
      model: `gpt:SIZE[,key=value...]` for text, `convnet:WIDTH` for digits; None for the default.
      path: a file or folder to read instead of the default text.
    """
    if name not in MODELS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(MODELS)}")
    model = model or MODELS[name]
    kind, values, keywords = parse_call(model)
    if kind != MODELS[name]:
        raise ValueError(f"the workload {name!r} has the model {MODELS[name]!r}, got {model!r}")
    # Imported here, since each needs packages that the other does not.
    if name == "digits":
        if path is not None:
            raise ValueError("--text is for the workload 'text'")
        from ..models.digits import digits_workload

        return call("model", model, digits_workload, values, keywords)
    from ..models.text import text_workload

    return text_workload(call("model", model, gpt_config, values, keywords), path=path)


def gpt_config(size: str = "demo", **sizes: int) -> gpt.GPTConfig:
    """Returns a named size of the GPT, with the given fields changed."""
    if size not in gpt.SIZES:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(gpt.SIZES)}")
    unknown = set(sizes) - set(gpt.GPTConfig._fields)
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}; known: {', '.join(gpt.GPTConfig._fields)}")
    for field, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{field} must be a positive whole number, got {value!r}")
    return gpt.SIZES[size]._replace(**sizes)

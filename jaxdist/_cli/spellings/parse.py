"""Parses what a command line names: reducers, optimizers, methods of training, models, rules, durations and links.

A spelling is a call without brackets (see `grammar`): `power_sgd:4`, `ef:qsgd:4,bucket=256`, `diloco:H=50/ef:qsgd:4`.
`module:name` is a reducer of the user's own, as in `ef:my_reducers:diana:qsgd:4,rate=0.1`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from ... import compressors, reducers
from ...analysis import cost
from ...analysis.references import read_references
from ...asynchronous import durations, links, rules
from ...asynchronous.protocol import Rule
from ...compressors.compressor import Compressor
from ...reducers.reducer import Reducer
from ...transforms.all_reduce import all_reduce
from ...transforms.common import LearningRate
from ..models import gpt, own, own_step
from ..models.base import EqualLayers, TrainingMethod, Workload
from . import grammar, tables
from .grammar import call, parse_call
from .tables import AVERAGING, COLLECTIVES, FEEDBACK, LAWS, OPTIMIZERS, REDUCERS, RULES, SYNCS

MODELS = {"text": "gpt", "digits": "convnet"}
ZERO = "zero"
# What the first part of a spelled reducer may have been meant for.
_NAMES = (*REDUCERS, *OPTIMIZERS, *FEEDBACK, *COLLECTIVES, *SYNCS)
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_BYTES = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATIONS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}


def list_spellings() -> dict[str, dict[str, tuple[str, str]]]:
    """The catalogue of `jaxdist reducers`: the spelling and the purpose of every name, by the option that takes it."""
    around = {name: (f"{name}:REDUCER", entry.purpose) for name, entry in FEEDBACK.items()}
    around |= {name: (f"{name}:CODE", entry.purpose) for name, entry in COLLECTIVES.items()}
    around["+"] = ("CODE+CODE", "the second code encodes what the first one sends, as in top_k:0.01+qsgd:4")
    return {
        "--reducer": _spell_all(REDUCERS),
        "--reducer, around another": around,
        "--reducer, instead of --optimizer": _spell_all(OPTIMIZERS),
        "--sync": {name: (_spell_sync(name, entry), entry.purpose) for name, entry in SYNCS.items()},
        "--rule": _spell_all(RULES),
    }


def find_methods(text: str) -> list[Callable[..., Any]]:
    """The public functions of all names in a spelling, in its order, those that cite no paper left out.

    Examples:
      >>> [method.__name__ for method in find_methods("ef:top_k:0.01")]
      ['error_feedback', 'top_k']
    """
    tables = (FEEDBACK, COLLECTIVES, REDUCERS, OPTIMIZERS, SYNCS)
    found: dict[str, list[Callable[..., Any]]] = {}
    for name, entry in ((name, entry) for table in tables for name, entry in table.items()):
        factory = entry.factory
        found.setdefault(name, []).append(factory.func if isinstance(factory, functools.partial) else factory)
    for name in RULES:
        # By name, since some factories here only parse a graph.
        found.setdefault(name, []).append(getattr(rules, name))
    named: list[str] = []
    for part in re.split("[/+]", grammar.check_length(text)):
        words = part.split(":")
        for index, word in enumerate(words):
            if word not in found:
                # `MODULE:NAME` of the user's own, whose docstring may cite papers too.
                rest = ":".join(words[index:])
                if not (spelled := grammar.split_import(rest)):
                    grammar.refuse_name("name", text, word, found)
                found[rest] = [grammar.import_name("name", text, spelled, tuple(found))]
                named.append(rest)
                break
            named.append(word)
            # Behind other names there are arguments, such as graphs.
            if word not in FEEDBACK | COLLECTIVES:
                break
    methods = [method for word in dict.fromkeys(named) for method in found[word]]
    cited = [method for method in methods if read_references(inspect.getdoc(method) or "")]
    if not cited:
        raise ValueError(f"no paper is cited for {text}")
    return cited


def _spell_all(table: Mapping[str, grammar.Spelling]) -> dict[str, tuple[str, str]]:
    return {name: (grammar.spell(name, entry), entry.purpose) for name, entry in table.items()}


def _spell_sync(name: str, entry: grammar.Spelling) -> str:
    arguments = grammar.usage(entry.factory, named=True, given=("sync_period", _rate_argument(entry.factory)))
    if arguments.startswith("["):
        return f"{name}:H=N[,{arguments[1:]}"
    return f"{name}:H=N,{arguments}" if arguments else f"{name}:H=N"


def parse_reducer(text: str) -> Reducer:
    """Makes the reducer that `text` spells: `[ef:|ef21:|loco:][ring:|two_shot:]name[:value,...]`.

    Examples:
      >>> parse_reducer("ef:power_sgd:2").law.name
      'EXACT'
    """
    made = _parse_reducer_or_optimizer(text)
    if isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"reducer {text!r}: an optimizer that communicates has no place around or inside another method"
        )
    return made


def _parse_reducer_or_optimizer(text: str) -> Reducer | optax.GradientTransformation:
    prefix, _, rest = grammar.check_length(text).partition(":")
    # Feedback and collectives are prefixes: what follows is a spelling of its own.
    if prefix in FEEDBACK:
        if not rest:
            raise ValueError(f"reducer {text!r}: name what the feedback goes around, as in {prefix}:top_k:0.01")
        if (second := rest.partition(":")[0]) in FEEDBACK:
            raise ValueError(f"reducer {text!r}: {second} is feedback already; use one, around what compresses")
        return call("reducer", text, FEEDBACK[prefix].factory, [parse_reducer(rest)], {})
    if prefix in COLLECTIVES:
        return call("reducer", text, COLLECTIVES[prefix].factory, [parse_code(rest)], {})
    # A reducer of all leaves is complete; a code of one array is wrapped.
    made = _parse_chain(text)
    return reducers.compressed(made) if isinstance(made, Compressor) else made


def parse_code(text: str) -> Compressor:
    """Makes the compressor that `text` spells; `top_k:0.01+qsgd:4` encodes the values of the first with the second."""
    return _check_code(text, _parse_chain(text))


def _parse_chain(text: str) -> Reducer | Compressor | optax.GradientTransformation:
    """Parses codes that are joined by `+`, from the last one inwards."""
    # A plus before a letter joins codes; one before a digit belongs to a number such as 1e+3.
    first, *others = re.split(r"\+(?=[A-Za-z_])", grammar.check_length(text))
    made = _parse_name(first)
    if not others:
        return made
    *codes, last = [_check_code(text, code) for code in (made, *map(_parse_name, others))]
    # a+b+c is chained(a, chained(b, c)).
    for code in reversed(codes):
        last = call("reducer", text, compressors.chained, [code, last], {})
    return last


def _parse_name(text: str) -> Reducer | Compressor | optax.GradientTransformation:
    name, values, keywords = parse_call(text)
    if name in REDUCERS:
        return call("reducer", text, REDUCERS[name].factory, values, keywords)
    # A misspelt method or prefix arrives here too.
    if spelled := grammar.split_import(text):
        return _import_method(text, spelled)
    if re.match(r"[\w.:]*\w\(", text):
        raise ValueError(f"reducer {text!r}: give arguments after a colon, as in power_sgd:4,min_compression_rate=2")
    listed = ", ".join([*REDUCERS, *OPTIMIZERS]) + ", reducers also as ef:NAME or ef21:NAME, your own as MODULE:NAME"
    grammar.refuse_name("reducer", text, name, _NAMES, listed=listed)


def _import_method(text: str, spelled: grammar.Imported) -> Reducer | Compressor | optax.GradientTransformation:
    """Imports a reducer, a compressor or an optimizer that communicates, or calls the function that makes it."""
    made = grammar.import_name("reducer", text, spelled, _NAMES)
    if callable(made):
        _, values, keywords = parse_call(f"{spelled.name}:{spelled.arguments}")
        made = call("reducer", text, made, *_parse_inner(made, values, keywords), hidden=())
    elif spelled.arguments:
        raise ValueError(f"reducer {text!r}: {spelled.name} is no function; leave out {spelled.arguments!r}")
    if not isinstance(made, (Reducer, Compressor, optax.GradientTransformation)):
        raise ValueError(
            f"reducer {text!r}: {spelled.name} gives {type(made).__name__}; return a jaxdist.reducers.Reducer, a "
            "jaxdist.compressors.Compressor, or an optax transformation that communicates"
        )
    return made


def _parse_inner(
    factory: Callable[..., Any], values: list[Any], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Parses the arguments that the factory annotates as a reducer or a compressor: `inner=qsgd:4`."""
    parsers: dict[Any, Callable[[str], Any]] = {Reducer: parse_reducer, Compressor: parse_code}
    # Annotations are text after `from __future__ import annotations`.
    parameters = inspect.signature(factory, eval_str=True).parameters
    inner = {name: parsers[each.annotation] for name, each in parameters.items() if each.annotation in parsers}
    # Values come in the order of the signature; `call` refuses those that are too many.
    names = [*parameters][: len(values)]
    parsed = [inner[name](str(value)) if name in inner else value for name, value in zip(names, values)]
    keywords = {name: inner[name](str(value)) if name in inner else value for name, value in keywords.items()}
    return [*parsed, *values[len(names) :]], keywords


def _check_code(text: str, made: Any) -> Compressor:
    if not isinstance(made, Compressor):
        raise ValueError(f"{text!r} is not a code for one array, such as qsgd:4")
    return made


def list_optimizers() -> list[str]:
    """The names of optax's optimizers: the public functions whose first argument is a learning rate."""
    # A name with an underscore is private or deprecated; L-BFGS searches along a line, and needs the loss for it.
    names = [name for name in sorted(dir(optax)) if not name.startswith("_") and name != "lbfgs"]
    return [name for name in names if _first_argument(getattr(optax, name)) == "learning_rate"]


def _first_argument(thing: Any) -> str | None:
    return next(iter(inspect.signature(thing).parameters), None) if inspect.isfunction(thing) else None


def parse_optimizer(text: str, steps: int | None = None) -> optax.GradientTransformation:
    """Makes any optax optimizer from `name:learning_rate[,key=value...]`, as in `adamw:3e-4,b2=0.95`.

    `schedule=`, `warmup_steps=`, `decay_steps=` and `end_factor=` change the rate over the `steps` of the run: see
    `tables.make_rate`.
    """
    name, values, keywords = parse_call(text)
    if name not in list_optimizers():
        grammar.refuse_name("optimizer", text, name, list_optimizers())
    if not values and "learning_rate" not in keywords:
        raise ValueError(f"optimizer {text!r} needs a learning rate, as in {name}:3e-4")
    factory = getattr(optax, name)
    known = [*inspect.signature(factory).parameters, *tables.SCHEDULE_ARGUMENTS]
    for keyword in keywords:
        if keyword not in known:
            grammar.refuse_name(f"argument {keyword!r} of optimizer", text, keyword, known)
    # The optimizer takes the schedule as its rate.
    rate = _take_rate(text, values, keywords, steps)
    if "learning_rate" in keywords:
        return call("optimizer", text, factory, values, keywords | {"learning_rate": rate})
    return call("optimizer", text, factory, [rate, *values[1:]], keywords)


def learning_rate(text: str, steps: int | None = None) -> LearningRate:
    """The learning rate in the spelling of an optimizer, a number or a schedule: 0.1 for `sgd:0.1,momentum=0.9`."""
    _, values, keywords = parse_call(text)
    return _take_rate(text, values, keywords, steps)


def _take_rate(text: str, values: Sequence[Any], keywords: dict[str, Any], steps: int | None) -> LearningRate:
    """Returns the learning rate of an optimizer's arguments, and removes those of its schedule."""
    rate = keywords["learning_rate"] if "learning_rate" in keywords else values[0]
    # Text would fail only when the first step is traced.
    if type(rate) not in (int, float):
        raise ValueError(f"optimizer {text!r}: the learning rate must be a number, got {rate!r}")
    return tables.make_rate(text, rate, tables.take_schedule(keywords), steps)


def is_sync(text: str) -> bool:
    """Returns whether a spelling begins with the name of a method that synchronizes every `H` steps."""
    return text.partition(":")[0].partition("/")[0].strip() in SYNCS


def parse_sync(
    text: str, optimizer: str, *, steps: int | None = None, island: str | None = None, warm_up: bool = True
) -> TrainingMethod:
    """Makes the method that `text` spells: `name:H=N[,key=value...][/REDUCER]`, with a name of `SYNCS`.

    The reducer encodes the difference that a round sends. Methods that need the learning rate of the local steps read
    it from `optimizer`, the spelling of each worker's optimizer. With `island`, a mesh axis, all devices of that axis
    are one worker: they average their gradients in every step, and rounds are for `jaxdist.islands`. Without `warm_up`
    rounds begin at once, as in the steps after the warm-up that `text` spells.
    """
    spelling, slash, reducer = grammar.check_length(text).partition("/")
    name, values, keywords = parse_call(spelling)
    if name not in SYNCS:
        listed = ", ".join(SYNCS) + ", each with H=, as in diloco:H=50"
        grammar.refuse_name("sync", text, name, SYNCS, listed=listed)
    factory = SYNCS[name].factory
    takes = inspect.signature(factory).parameters
    # `H` is the papers' name for every method, whatever the factory calls it.
    period = keywords.pop("H", None)
    if values or period is None or "sync_period" in keywords:
        raise ValueError(f"sync {text!r}: give the number of steps between two rounds as H alone, as in {name}:H=50")
    if type(period) is not int or period < 1:
        raise ValueError(f"sync {text!r}: H must be a positive whole number, got {period!r}")
    given: dict[str, Any] = {"sync_period": period}
    if slash:
        if "reducer" not in takes:
            raise ValueError(f"sync {text!r}: {name} has a fixed encoding and takes no reducer")
        given["reducer"] = parse_reducer(reducer)
    inner = parse_optimizer(optimizer, steps)
    if island is not None:
        if not {"inner", "axis"} <= set(takes):
            raise ValueError(
                f"sync {text!r}: {name} has its own inner optimizer; islands take diloco, slowmo, local_sgd"
            )
        inner = optax.chain(all_reduce(reducers.exact(), axis=island), inner)
        given["axis"] = None
    # The rate of the local steps is that of --optimizer: it need not be spelled twice.
    if rate := _rate_argument(factory):
        given[rate] = learning_rate(optimizer, steps)
    # Methods around any optimizer take the one of --optimizer; the others have their own inside.
    if "inner" in takes:
        factory = functools.partial(factory, inner)
    made = call("sync", text, factory, [], given | keywords)
    # After that call, which refuses a length that is wrong.
    made = made if warm_up else factory(**given | keywords | dict.fromkeys(takes.keys() & tables.WARM_UPS, 0))
    # Parameters of an island are replicated: the step that is compiled takes no part in rounds.
    return TrainingMethod(None, made, None if island else period)


def _rate_argument(factory: Callable[..., Any]) -> str:
    """The required argument that takes the learning rate of the local steps; empty if there is none."""
    takes = inspect.signature(factory).parameters
    rate = "learning_rate" if "inner" in takes else "adam_learning_rate"
    return rate if rate in takes and takes[rate].default is inspect.Parameter.empty else ""


def parse_method(text: str, optimizer: str, steps: int | None = None, *, warm_up: bool = True) -> TrainingMethod:
    """Makes the method that `text` spells; a schedule in `optimizer` is over `steps`, `warm_up` as in `parse_sync`.

    Examples:
      >>> parse_method("diloco:H=50/ef:qsgd:4", "adamw:1e-3").sync_period, parse_method("zero:3", "adamw:1e-3").stage
      (50, 3)
      >>> parse_method("demo:1e-3", "sgd:0.1").reducer is None
      True
    """
    if is_sync(text):
        return parse_sync(text, optimizer, steps=steps, warm_up=warm_up)
    if text.partition(":")[0].strip() == ZERO:
        return _parse_zero(text, optimizer, steps)
    # Parsed even if the method replaces it, so that a wrong --optimizer never passes unnoticed.
    after = parse_optimizer(optimizer, steps)
    if text.partition(":")[0].partition("/")[0].strip() in OPTIMIZERS:
        return TrainingMethod(None, _parse_communicating(text))
    made = _parse_reducer_or_optimizer(text)
    return TrainingMethod(made, after) if isinstance(made, Reducer) else TrainingMethod(None, made)


def _parse_communicating(text: str) -> optax.GradientTransformation:
    """Makes an optimizer that communicates: `name[:value,...][/REDUCER]`."""
    spelling, slash, reducer = grammar.check_length(text).partition("/")
    name, values, keywords = parse_call(spelling)
    factory = OPTIMIZERS[name].factory
    takes = inspect.signature(factory).parameters
    if slash and "reducer" not in takes:
        raise ValueError(f"optimizer {text!r}: {name} has a fixed encoding and takes no reducer")
    if not slash and "reducer" in takes and takes["reducer"].default is inspect.Parameter.empty:
        raise ValueError(f"optimizer {text!r}: name the reducer after a slash, as in {name}:2e-3/ef:top_k:0.01")
    given = {"reducer": parse_reducer(reducer)} if slash else {}
    return call("optimizer", text, factory, values, keywords | given)


def _parse_zero(text: str, optimizer: str, steps: int | None) -> TrainingMethod:
    spelling, slash, reducer = grammar.check_length(text).partition("/")
    _, values, keywords = parse_call(spelling)
    if keywords or values not in ([1], [2], [3]):
        raise ValueError(f"{text!r}: the stages of ZeRO are zero:1, zero:2 and zero:3")
    made = parse_reducer(reducer if slash else "exact")
    return TrainingMethod(made, parse_optimizer(optimizer, steps), stage=values[0])


def join_options(sync: str | None, zero: int, reducer: str | None, optimizer: str, *, default: str) -> str:
    """Joins `--sync`, or `--zero`, and `--reducer` to one spelling of a method; without any of them the default.

    Examples:
      >>> from functools import partial
      >>> join = partial(join_options, optimizer="adam:1e-3", default="exact")
      >>> join("diloco:H=50", 0, "ef:qsgd:4"), join(None, 2, "two_shot:qsgd:4"), join(None, 0, "f16")
      ('diloco:H=50/ef:qsgd:4', 'zero:2/two_shot:qsgd:4', 'f16')
    """
    if sync is not None and zero:
        raise ValueError(f"--zero {zero} shards state that is equal on all workers, and with --sync it is not")
    if sync is not None and not is_sync(sync):
        # Raises, with the known names.
        parse_sync(sync, optimizer)
    first = f"{ZERO}:{zero}" if zero else sync
    if first is None:
        return default if reducer is None else reducer
    return first if reducer is None else f"{first}/{reducer}"


def parse_workload(name: str, model: str | None = None, *, path: str | Path | None = None) -> Workload:
    """Makes a workload from its name and its model: `gpt:SIZE[,key=value...]` for text, `convnet:WIDTH` for digits.

    A model `MODULE:FUNCTION[:value,key=value...]` of the user's own brings its data, and any name: see `own_workload`.
    """
    if model is not None and is_own_model(model):
        return _import_model(model, path)
    if name not in MODELS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(MODELS)}")
    model = model or MODELS[name]
    # gpt reads bytes and convnet images: a model of the other workload is a mistake.
    kind, values, keywords = parse_call(model)
    if kind != MODELS[name]:
        raise ValueError(
            f"{grammar.suggest(kind, [])}the workload {name!r} has the model {MODELS[name]!r}, or MODULE:FUNCTION of "
            f"your own, got {model!r}"
        )
    # Imported here, since each needs packages that the other does not.
    if name == "digits":
        if path is not None:
            raise ValueError("--text is for the workload 'text'")
        from ..models.digits import digits_workload

        return call("model", model, digits_workload, values, keywords)
    from ..models.text import text_workload

    return text_workload(call("model", model, gpt_config, values, keywords), path=path)


def is_own_model(text: str) -> bool:
    """Returns whether a model is spelled `MODULE:FUNCTION`, and is none of those with a name.

    Examples:
      >>> is_own_model("my_model:make"), is_own_model("gpt:tiny"), is_own_model("gpt")
      (True, False, False)
    """
    spelled = grammar.split_import(text)
    return spelled is not None and spelled.module not in MODELS.values()


def parse_layers(model: str) -> EqualLayers:
    """The layers of `gpt:SIZE`, or of a model of the user's own whose function returns a `LayerStack`."""
    if is_own_model(model):
        return own.own_layers(model, _call_model(model))
    from ..models.text import text_layers

    _, values, keywords = parse_call(model)
    return text_layers(call("model", model, gpt_config, values, keywords))


def _import_model(text: str, path: str | Path | None) -> Workload:
    """Imports and calls a function that returns `(loss, params, batch)`."""
    if path is not None:
        raise ValueError(f"--text is for the workload 'text', and {text} brings its own examples")
    return own.own_workload(text, _call_model(text))


def _call_model(text: str) -> Any:
    """Imports and calls a function of the user's own, and returns what it returns."""
    spelled = grammar.split_import(text)
    assert spelled is not None
    found = grammar.import_name("model", text, spelled, tuple(MODELS.values()))
    if not callable(found):
        raise ValueError(f"model {text!r}: {spelled.name} is no function; {own.RETURNS}")
    _, values, keywords = parse_call(f"{spelled.name}:{spelled.arguments}")
    return call("model", text, found, values, keywords, hidden=())


def parse_step(text: str) -> own_step.MakeStep:
    """Imports `MODULE:FUNCTION[:value,key=value...]`; what it returns calls the function with a mesh and these values.

    A reducer, if one is given, is the function's argument `reducer`.

    Raises:
      ValueError: there is no such function, or it takes no mesh; later, it takes no reducer, fails, or returns no step.
    """
    spelled = grammar.split_import(text)
    if spelled is None:
        raise ValueError(f"--step must be MODULE:FUNCTION, as in my_step:make, got {text!r}; {own_step.RETURNS}")
    found = grammar.import_name("step", text, spelled, ())
    if not callable(found):
        raise ValueError(f"step {text!r}: {spelled.name} is no function; {own_step.RETURNS}")
    if not own_step.takes_mesh(found):
        raise ValueError(f"step {text!r}: {spelled.name} has no first argument for the mesh; {own_step.RETURNS}")
    _, values, keywords = parse_call(f"{spelled.name}:{spelled.arguments}")

    def make(mesh: Mesh | AbstractMesh, reducer: Reducer | None = None) -> own_step.OwnStep:
        given = {} if reducer is None else {"reducer": reducer}
        if given and "reducer" not in inspect.signature(found).parameters:
            raise ValueError(
                f"step {text!r}: {spelled.name} has no argument for the reducer: write {spelled.name}(mesh, ..., "
                "reducer=jaxdist.exact()), and give it to jaxdist.all_reduce"
            )
        if given and "reducer" in keywords:
            raise ValueError(f"step {text!r} names its reducer: leave it out, to have others in its place")
        try:
            made = call("step", text, functools.partial(found, mesh), values, keywords | given, hidden=())
        except ValueError:
            raise
        except Exception as problem:
            raise ValueError(f"step {text!r}: {spelled.name} fails: {own_step.describe(problem)}") from problem
        return own_step.own_step(text, made, mesh)

    return make


def parse_axes(text: str) -> dict[str, int]:
    """Parses the axes of a mesh.

    Examples:
      >>> parse_axes("dcn=2,fsdp=4")
      {'dcn': 2, 'fsdp': 4}
    """
    axes: dict[str, int] = {}
    for part in grammar.check_length(text).split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in axes:
            raise ValueError(f"--axes must be names with sizes, slow links first, as in dcn=2,fsdp=4, got {text!r}")
        axes[name] = int(size)
    return axes


def gpt_config(size: str = "demo", **sizes: int) -> gpt.GPTConfig:
    """Returns a named size of the GPT, with the given fields changed."""
    if size not in gpt.SIZES:
        grammar.refuse_name("size", size, size, gpt.SIZES)
    unknown = set(sizes) - set(gpt.GPTConfig._fields)
    if unknown:
        field = sorted(unknown)[0]
        grammar.refuse_name("field", field, field, gpt.GPTConfig._fields)
    for field, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{field} must be a positive whole number, got {value!r}")
    return gpt.SIZES[size]._replace(**sizes)


def parse_rule(text: str, optimizer: optax.GradientTransformation, gradient: str | None = None) -> Rule:
    """Makes the rule that `text` spells; `gradient` is the code of its gradients, with `ef:` for error feedback."""
    name, values, keywords = parse_call(text)
    factory = grammar.look_up("rule", text, RULES, name)
    rule = call("rule", text, functools.partial(factory, optimizer=optimizer), values, keywords)
    if gradient is None:
        return rule
    if name in AVERAGING:
        raise ValueError(f"rule {text!r} sends models, and no gradients that a code could shrink: leave out --gradient")
    # Rules without a server reduce their gradients instead of sending them.
    kind = "gradient" if rule.server is not None else "reduced"
    # The rule keeps the residuals itself: `ef:` is no reducer here.
    code = parse_code(gradient.removeprefix("ef:"))
    return rules.compressed(rule, {kind: code}, feedback=(kind,) if gradient.startswith("ef:") else ())


def parse_factor(option: str, text: str, *others: str) -> list[float]:
    """Parses the value of an option: `4x`, or `6x,0.1` where `others` has the names of both numbers and an example."""
    first, *rest = grammar.check_length(text).split(",")
    try:
        numbers = [float(first.strip().removesuffix("x")), *map(float, rest)]
    except ValueError:
        numbers = []
    if len(numbers) == (2 if others else 1):
        return numbers
    wanted = f"{others[0]}, as in {others[1]}" if others and numbers else "a factor such as 4x"
    raise ValueError(f"{option} must be {wanted}, got {text!r}")


def parse_durations(
    law: str,
    *,
    slow: str | None = None,
    random_slow: str | None = None,
    failures: str | None = None,
    recorded: Path | None = None,
) -> durations.Durations:
    """Makes the distribution of the time that gradients take, from the options of the command."""
    name, values, keywords = parse_call(law)
    factory = grammar.look_up("law", law, LAWS, name)
    made = call("law", law, factory, values, keywords) if recorded is None else durations.from_file(recorded)
    if slow is not None:
        # Slowdowns and failures compose, each around the distribution so far.
        made = durations.one_slow(made, worker=0, factor=parse_factor("--slow", slow)[0])
    if random_slow is not None:
        factor, probability = parse_factor("--random-slow", random_slow, "a factor and a probability", "6x,0.1")
        made = durations.random_slow(made, factor=factor, probability=probability)
    if failures is not None:
        up, down = parse_factor("--failures", failures, "the mean seconds up and down", "100,5")
        made = durations.failures(made, up=up, down=down)
    return made


def parse_link(text: str) -> cost.Link:
    """Makes the link that `BANDWIDTH[,LATENCY]` spells.

    Examples:
      >>> parse_link("100mbit,20ms")
      Link(name='100mbit,20ms', latency=0.02, bandwidth=12500000.0)
    """
    rate, _, latency = grammar.check_length(text).partition(",")
    bandwidth, seconds = _parse_quantity(rate, _RATES), _parse_quantity(latency or "0s", _SECONDS)
    if not bandwidth or seconds is None:
        raise ValueError(f"a link is a bandwidth and a latency, such as 100mbit,20ms or 10gbit,50us, got {text!r}")
    return cost.Link(text, seconds, bandwidth)


def parse_bytes(option: str, text: str) -> float:
    """Parses the value of an option in bytes, or in bytes a second.

    Examples:
      >>> parse_bytes("--memory", "24GB"), parse_bytes("--bandwidth", "1.5TB/s")
      (24000000000.0, 1500000000000.0)
    """
    found = _parse_quantity(grammar.check_length(text).lower().removesuffix("/s"), _BYTES)
    if not found:
        raise ValueError(f"{option} must be a number of bytes, such as 24GB, 80GiB or 1TB/s, got {text!r}")
    return found


def parse_duration(option: str, text: str) -> float:
    """The seconds that a number with a unit spells.

    Examples:
      >>> parse_duration("--mtbf", "1y")
      31557600.0
    """
    seconds = _parse_quantity(grammar.check_length(text), _DURATIONS)
    if seconds is None:
        raise ValueError(f"{option} is a number with one of the units {', '.join(_DURATIONS)}, as in 90s, got {text!r}")
    return seconds


def _parse_quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z]+)\s*", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def parse_links(text: str | None, *, nic: bool = False) -> links.Links:
    """Makes the links of a simulation; None spells messages that take no time."""
    if text is None:
        return links.instant()
    # α-β: a message of n bytes takes latency + n / bandwidth.
    link = parse_link(text)
    return links.alpha_beta(float(link.latency), float(link.bandwidth), nic=nic)

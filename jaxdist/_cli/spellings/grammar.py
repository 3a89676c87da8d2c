"""The grammar of spellings: a call without brackets, `name:value,key=value`, checked against a signature."""

import ast
import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

LONGEST = 1000  # characters of a spelling, several times those of any that makes sense
# Arguments that the parsers fill in themselves, or that a command line has no use for.
HIDDEN = frozenset({"axis", "compressor", "inner", "optimizer", "reducer", "seed"})

# Both parts are names, so that `power_sgd:4` and `diloco:H=50` have another form.
_IMPORTED = re.compile(r"\s*([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?::(.*))?")


class Spelling(NamedTuple):
    """A factory that a command line may name, and what it makes in a few words."""

    factory: Callable[..., Any]
    purpose: str


def check_length(text: str) -> str:
    """Returns the text; raises ValueError if it is too long for a spelling, since messages show all of it."""
    if len(text) > LONGEST:
        raise ValueError(f"{text[:40]!r}... has {len(text):,} characters; a spelling has at most {LONGEST:,}")
    return text


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Splits `name:1,2,key=3` into name, values and keywords; anything but a number or boolean stays a string.

    Examples:
      >>> parse_call("sgd:0.1,momentum=0.9,nesterov=True")
      ('sgd', [0.1], {'momentum': 0.9, 'nesterov': True})
    """
    # The length first: messages repeat the text, and `literal_eval` recurses over it.
    name, _, rest = check_length(text).partition(":")
    values, keywords = [], {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.rpartition("=")
        if equals:
            keywords[key.strip()] = parse_literal(value)
        else:
            values.append(parse_literal(part))
    return name.strip(), values, keywords


def parse_literal(text: str) -> Any:
    """Evaluates a Python literal, such as a number or a boolean; returns any other text as it is."""
    try:
        return ast.literal_eval(text.strip())
    # The last two: nested too deep.
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text.strip()


def call(
    kind: str,
    text: str,
    factory: Callable[..., Any],
    values: list[Any],
    keywords: dict[str, Any],
    *,
    hidden: Collection[str] = HIDDEN,
) -> Any:
    """Calls a factory with parsed arguments; raises ValueError, with what it takes, if it refuses them.

    `kind` (a noun) and `text` (the spelling) are for the message, which leaves out the `hidden` arguments.
    """
    signature = inspect.signature(factory)
    try:
        # Binding first separates wrong arguments from values that the factory refuses.
        bound = signature.bind(*values, **keywords)
    except TypeError as problem:
        raise ValueError(
            f"{kind} {text!r}: {problem}; it takes {usage(factory, hidden=hidden) or 'no arguments'}"
        ) from None
    # Factories check ranges, not types: "four" would otherwise fail inside with an unclear message.
    for name, value in bound.arguments.items():
        number = _missing_number(signature.parameters[name], value)
        if number:
            raise ValueError(f"{kind} {text!r}: {name} must be {number}, got {value!r}")
    try:
        return factory(*values, **keywords)
    except (ValueError, TypeError) as problem:
        # The factory's own message explains the value; the spelling before it says where it came from.
        raise ValueError(f"{kind} {text!r}: {problem}") from problem


def _missing_number(parameter: inspect.Parameter, value: Any) -> str:
    """The kind of number that a parameter needs and the value is not; empty if there is nothing to say."""
    wanted, default = parameter.annotation, parameter.default
    # `type` and not `isinstance`: True is an instance of int.
    if wanted is int:
        return "" if type(value) in (int, dict) else "a whole number"
    if wanted is float:
        return "" if type(value) in (int, float, dict) else "a number"
    # Optax annotates arrays too. A union with words, such as `int | Literal["auto"]`, takes text.
    words = any(kind is str or isinstance(kind, str) for kind in _alternatives(wanted))
    return "a number" if type(value) is str and type(default) in (int, float) and not words else ""


def look_up(kind: str, text: str, table: Mapping[str, Spelling], name: str) -> Callable[..., Any]:
    """Returns the factory of `name`; raises ValueError with all spellings of the table if there is none."""
    if name not in table:
        refuse_name(kind, text, name, table, listed=", ".join(spell(*each) for each in table.items()))
    return table[name].factory


def refuse_name(kind: str, text: str, name: str, names: Collection[str], *, listed: str = "") -> NoReturn:
    """Raises ValueError for an unknown name, with the nearest of the names; `listed` shows them in another way.

    Examples:
      >>> refuse_name("reducer", "topk:0.1", "topk", ("sign", "top_k"))
      Traceback (most recent call last):
      ValueError: unknown reducer 'topk:0.1'; did you mean top_k? known: sign, top_k
    """
    raise ValueError(f"unknown {kind} {text!r}; {suggest(name, names)}known: {listed or ', '.join(names)}")


def suggest(name: str, names: Collection[str]) -> str:
    """What a name was meant for, as `did you mean top_k? `: the nearest of the names, or a module of this folder."""
    module, _, last = name.rpartition(".")
    if module in _modules_here():
        return f"did you mean {module}:{last}? "
    near = difflib.get_close_matches(name.lower(), names, 1)
    return f"did you mean {near[0]}? " if near else ""


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().glob("*.py")]


class Imported(NamedTuple):
    """The spelling `module:name:value,key=value` of a thing outside of this package, in its three parts."""

    module: str
    name: str
    arguments: str


def split_import(text: str) -> Imported | None:
    """Splits `module:name:arguments`; None for a text of another form.

    Examples:
      >>> split_import("my.reducers:diana:0.1"), split_import("power_sgd:4")
      (Imported(module='my.reducers', name='diana', arguments='0.1'), None)
    """
    found = _IMPORTED.fullmatch(check_length(text))
    return found and Imported(found[1], found[2], found[3] or "")


def import_name(kind: str, text: str, spelled: Imported, names: Collection[str]) -> Any:
    """Imports what `module:name` spells, from the working directory or the path.

    Raises ValueError if there is no such module or name, or if the module fails. `kind` and `text` are for the message,
    `names` are those that the module's name may have been meant for.
    """
    # As for `python -m`; an installed command has its own folder there.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = spelled.module
    try:
        found = importlib.import_module(module)
    except Exception as problem:
        if isinstance(problem, ModuleNotFoundError) and f"{module}.".startswith(f"{problem.name}."):
            # `eff:top_k:0.1` has the form of a module too.
            here = _modules_here()
            near = difflib.get_close_matches(module.lower(), [*here, *names], 1)
            if near and near[0] not in here:
                refuse_name(kind, text, module, names)
            advice = "run in its folder, or set PYTHONPATH"
            if module.endswith(".py"):
                advice = f"run in its folder, or import it as {module.removesuffix('.py')}"
            elif near:
                advice = f"did you mean {near[0]}?"
            raise ValueError(
                f"{kind} {text!r}: no module {module!r} in {Path.cwd()} or on the path; {advice}"
            ) from None
        lines = traceback.extract_tb(problem.__traceback__)
        # The line that its author can change, where there is one: not that of a function which it calls.
        own_lines = [line for line in lines if Path(line.filename).stem == module.rpartition(".")[2]]
        line = (own_lines or lines)[-1]
        raise ValueError(
            f"{kind} {text!r}: {module} fails at {line.filename}:{line.lineno}: {type(problem).__name__}: {problem}"
        ) from problem
    if not hasattr(found, spelled.name):
        own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == module]
        refuse_name(kind, text, spelled.name, own, listed=f"{', '.join(own) or 'nothing'} in {found.__file__}")
    return getattr(found, spelled.name)


def usage(
    factory: Callable[..., Any], *, named: bool = False, given: Collection[str] = (), hidden: Collection[str] = HIDDEN
) -> str:
    """The arguments of a factory as they are spelled: `RANK[,start_step=0]`, without those `given` and `hidden`.

    Arguments that cannot be spelled, such as functions, are left out; with `named` required ones have their name too.
    """
    # Functions and arrays have no spelling: only numbers, booleans and names are listed.
    required, optional = [], []
    for parameter in inspect.signature(factory).parameters.values():
        name, kinds = parameter.name, _alternatives(parameter.annotation)
        if name in hidden or name in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.default is parameter.empty:
            # A sync spells all of its arguments by name, like H.
            by_name = named or parameter.kind is parameter.KEYWORD_ONLY
            required.append(f"{name}=N" if by_name else name.upper())
        elif isinstance(parameter.default, (bool, int, float, str)):
            others = [kind for kind in kinds if isinstance(kind, str) and kind != parameter.default]
            optional.append(f"{name}={'|'.join([str(parameter.default), *others])}")
        elif parameter.default is None and {int, float, str} & set(kinds):
            optional.append(f"{name}=N" if str not in kinds else f"{name}={name.upper()}")
    rest = f"[{',' * bool(required)}{','.join(optional)}]" if optional else ""
    return ",".join(required) + rest


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal or get_args(annotation):
        return get_args(annotation)
    return (annotation,)


def spell(name: str, entry: Spelling) -> str:
    """The spelling of a table's entry with its arguments.

    Examples:
      >>> from jaxdist import compressors
      >>> spell("top_k", Spelling(compressors.top_k, "the largest entries"))
      'top_k:DENSITY[,method=threshold|exact]'
    """
    arguments = usage(entry.factory)
    if arguments.startswith("["):
        return f"{name}[:{arguments[1:]}"
    return f"{name}:{arguments}" if arguments else name

"""The grammar of spellings: a call without brackets, `name:value,key=value`, checked against a signature."""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

LONGEST = 1000  # characters of a spelling, several times those of any that makes sense
# Arguments that the parsers fill in themselves, or that a command line has no use for.
HIDDEN = frozenset({"axis", "compressor", "inner", "optimizer", "reducer", "seed"})


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

    Example:
      >>> from jaxdist._cli.spellings.grammar import parse_call
      >>> parse_call("sgd:0.1,momentum=0.9,nesterov=True")
      ('sgd', [0.1], {'momentum': 0.9, 'nesterov': True})
    """
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
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # the last two: nested too deep
        return text.strip()


def call(kind: str, text: str, factory: Callable[..., Any], values: list[Any], keywords: dict[str, Any]) -> Any:
    """Calls a factory with parsed arguments.

    Args:
      kind: the noun for error messages.
      text: the spelling, for error messages.
      factory: the function to call.
      values: its positional arguments.
      keywords: its keyword arguments.

    Returns:
      The result of the factory.

    Raises:
      ValueError: the factory does not take these arguments, or rejects them; the message shows what it takes.
    """
    signature = inspect.signature(factory)
    try:
        bound = signature.bind(*values, **keywords)
    except TypeError as problem:
        raise ValueError(f"{kind} {text!r}: {problem}; it takes {usage(factory) or 'no arguments'}") from None
    # Factories check ranges, not types: "four" would otherwise fail inside with an unclear message.
    for name, value in bound.arguments.items():
        wanted = None if isinstance(value, dict) else signature.parameters[name].annotation
        if (wanted is int and type(value) is not int) or (wanted is float and type(value) not in (int, float)):
            number = "a whole number" if wanted is int else "a number"
            raise ValueError(f"{kind} {text!r}: {name} must be {number}, got {value!r}")
    try:
        return factory(*values, **keywords)
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{kind} {text!r}: {problem}") from problem


def look_up(kind: str, text: str, table: Mapping[str, Spelling], name: str) -> Callable[..., Any]:
    """Returns the factory of `name`; raises ValueError with all spellings of the table if there is none."""
    if name not in table:
        raise ValueError(f"unknown {kind} {text!r}; known: {', '.join(spell(*each) for each in table.items())}")
    return table[name].factory


def usage(factory: Callable[..., Any], *, named: bool = False, given: Collection[str] = ()) -> str:
    """The arguments of a factory as they are spelled: `RANK[,start_step=0]`.

    Args:
      factory: a function; arguments that cannot be spelled, such as functions, are left out.
      named: spell required arguments by name too: `switch_step=N`.
      given: arguments to leave out.
    """
    required, optional = [], []
    for parameter in inspect.signature(factory).parameters.values():
        name, kinds = parameter.name, _alternatives(parameter.annotation)
        if name in HIDDEN or name in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.default is parameter.empty:
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
    """The members of a union or a `Literal`."""
    if get_origin(annotation) is Literal or get_args(annotation):
        return get_args(annotation)
    return (annotation,)


def spell(name: str, entry: Spelling) -> str:
    """The spelling of a table's entry with its arguments.

    Example:
      >>> from jaxdist import compressors
      >>> from jaxdist._cli.spellings.grammar import Spelling, spell
      >>> spell("top_k", Spelling(compressors.top_k, "the largest entries"))
      'top_k:DENSITY[,method=threshold|sampled|exact]'
    """
    arguments = usage(entry.factory)
    if arguments.startswith("["):
        return f"{name}[:{arguments[1:]}"
    return f"{name}:{arguments}" if arguments else name


def describe(table: Mapping[str, Spelling]) -> str:
    """The entries of a table, one per line, for `--help`."""
    return "\n".join(f"{spell(name, entry)}: {entry.purpose}" for name, entry in table.items())

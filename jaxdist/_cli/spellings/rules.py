"""Parses what asynchronous training needs: rules, links and the durations of gradients."""

import functools
import re
from pathlib import Path

import optax

from ...analysis import cost
from ...asynchronous import durations, links, rules
from ...asynchronous.protocol import Rule
from . import grammar, parse
from .tables import AVERAGING, LAWS, RULES

_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rule(text: str, optimizer: optax.GradientTransformation, gradient: str | None = None) -> Rule:
    """Makes the rule that `text` spells.

    Args:
      text: a name of `RULES` and its arguments.
      optimizer: the optimizer of the server, or of every worker.
      gradient: the code of the rule's gradients, with `ef:` before it for error feedback.

    Example:
      >>> import optax
      >>> from jaxdist._cli.spellings.rules import parse_rule
      >>> parse_rule("ringmaster:3", optax.sgd(0.1)).name
      'ringmaster'
    """
    name, values, keywords = grammar.parse_call(text)
    factory = grammar.look_up("rule", text, RULES, name)
    rule = grammar.call("rule", text, functools.partial(factory, optimizer=optimizer), values, keywords)
    if gradient is None:
        return rule
    if name in AVERAGING:
        raise ValueError(f"rule {text!r} sends models, and no gradients that a code could shrink: leave out --gradient")
    # Rules without a server reduce their gradients instead of sending them.
    kind = "gradient" if rule.server is not None else "reduced"
    code = parse.parse_code(gradient.removeprefix("ef:"))
    return rules.compressed(rule, {kind: code}, feedback=(kind,) if gradient.startswith("ef:") else ())


def parse_factor(option: str, text: str, *others: str) -> list[float]:
    """Parses `4x`, or `6x,0.1`: a factor and other numbers.

    Args:
      option: the option that has this value, for error messages.
      text: the value.
      others: names of all numbers and an example, if there are two numbers.
    """
    first, *rest = grammar.check_length(text).split(",")
    try:
        numbers = [float(first.strip().removesuffix("x")), *map(float, rest)]
    except ValueError:
        raise ValueError(f"{option} must be a factor such as 4x, got {text!r}") from None
    if others and len(numbers) != 2:
        names, example = others
        raise ValueError(f"{option} must be {names}, as in {example}, got {text!r}")
    return numbers


def parse_durations(
    law: str,
    *,
    slow: str | None = None,
    random_slow: str | None = None,
    failures: str | None = None,
    recorded: Path | None = None,
) -> durations.Durations:
    """Makes the distribution of the time that gradients take, from the options of the command.

    Example:
      >>> from jaxdist._cli.spellings.rules import parse_durations
      >>> parse_durations("constant:1", slow="4x").name
      'one_slow(constant)'
    """
    name, values, keywords = grammar.parse_call(law)
    factory = grammar.look_up("law", law, LAWS, name)
    made = grammar.call("law", law, factory, values, keywords) if recorded is None else durations.from_file(recorded)
    if slow is not None:
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

    Example:
      >>> from jaxdist._cli.spellings.rules import parse_link
      >>> parse_link("100mbit,20ms")
      Link(name='100mbit,20ms', latency=0.02, bandwidth=12500000.0)
    """
    rate, _, latency = grammar.check_length(text).partition(",")
    found = [_parse_quantity(rate, _RATES), _parse_quantity(latency or "0s", _SECONDS)]
    if None in found or not found[0]:
        raise ValueError(f"a link is a bandwidth and a latency, such as 100mbit,20ms or 10gbit,50us, got {text!r}")
    return cost.Link(text, found[1], found[0])


def _parse_quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units and match[1] != "." else None


def parse_links(text: str | None) -> links.Links:
    """Makes the links of a simulation; None spells messages that take no time."""
    if text is None:
        return links.instant()
    link = parse_link(text)
    return links.alpha_beta(float(link.latency), float(link.bandwidth))

"""The number that a loss is the mean over, found in its trace: the valid tokens of `sum(errors * mask) / mask.sum()`.

The loss must be `N / n + r`: `N` and `n` sums over the rows of the batch, `n` without the parameters, `r` without the
batch. Then `Σ N_i / Σ n_i + r` over the parts of a batch is the loss of the whole.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.jaxprs import CASTS, ELEMENTWISE, LOOP_RULES, RESHAPES, apply_primitive, evaluate
from .._core.types import Array


class Divisor(NamedTuple):
    """What the loss of a part is divided by."""

    number: Array  # n
    guarded: Array  # n, or what stands in its place if it is 0 or small: max(n, c); 0 if the part is to be left out
    bound: Array  # c, or -inf


class _Divisor(NamedTuple):
    number: "_Value"
    guarded: "_Value"
    bound: float = -math.inf


# What is divided: nothing of the batch; something of each row, to be added up; a sum over all rows.
_NOTHING, _ROWS, _TOTAL = 0, 1, 2


class _Quotient(NamedTuple):
    divisor: _Divisor | None  # `None`: the parts cannot be weighted by it
    terms: int = _NOTHING
    plus: bool = False  # something that does not depend on the batch was added
    entries: int = 0  # as those of a sum
    power: int = 0


_UNKNOWN = _Quotient(None)


class _Value(NamedTuple):
    """A value in the trace of a loss: what it depends on, and its role in a quotient."""

    key: int  # the same for the same value
    compute: Callable[[], Any] | None  # `None` if that takes the parameters
    shape: tuple[int, ...]
    params: bool = False
    batch: bool = False
    literal: float | None = None
    source: int = -1  # the key of the mask that is added up, or looked for a true entry
    mixed: bool = False  # an entry may depend on several rows of the batch
    total: bool = False  # a sum over all rows
    scaled: bool = False  # ... times a constant
    entries: int = 0  # of how many entries it is the sum, ...
    power: int = 0  # ... and -1 if it was divided by their number: a mean
    divisor: _Divisor | None = None  # this is one, repeated to any shape
    test: int = 0  # 1 if it is true where the source has rows that count, -1 if it is false there
    quotient: _Quotient | None = None

    def is_row(self) -> bool:
        """Returns whether each entry of an array is that of its own row."""
        return self.shape != () and self.divisor is None and (self.params or not self.mixed)


_SAME = frozenset(("neg", "copy", "convert_element_type", "transpose", "stop_gradient", *RESHAPES, *CASTS))
_SUMS = frozenset(("add", "sub", "add_any"))
_LINEAR = frozenset(("mul", "div", "select_n", *_SAME, *_SUMS))


def find_divisor(closed: Any, params: int, operands: Sequence[Any]) -> Divisor | None:
    """Returns the number that a loss is divided by, or `None` if it is divided by none of the batch.

    Only the equations that the number takes are evaluated again.

    Args:
      closed: the trace of the loss.
      params: the number of its arguments that are parameters, the first ones.
      operands: the other arguments, which differ between parts.

    Raises:
      ValueError: the loss has another form than `N / n + r`.
    """
    keys: dict[Any, int] = {}

    def key_of(*content: Any) -> int:
        return keys.setdefault(content, len(keys))

    def constant(value: Any) -> _Value:
        return _Value(key_of(id(value)), lambda: value, np.shape(value))

    def literal(atom: Any) -> _Value:
        number = np.asarray(atom.val)
        is_real = number.shape == () and not np.iscomplexobj(number)
        found = constant(atom.val)._replace(literal=float(number) if is_real else None)
        return found._replace(key=key_of(str(number.dtype), found.literal)) if is_real else found

    def argument(i: int, shape: tuple[int, ...]) -> _Value:
        compute = None if i < params else lambda: operands[i - params]
        key = key_of("argument", i)
        return _Value(key, compute, shape, params=i < params, batch=i >= params, source=key)

    def follow(equation: Any, values: list[_Value]) -> list[_Value]:
        is_known = not equation.effects and all(x.compute for x in values)
        run = cache(lambda: apply_primitive(equation, [x.compute() for x in values if x.compute]))
        # Of what takes the parameters nothing is compared.
        content = (
            (equation.primitive.name, str(equation.params), *(x.key for x in values)) if is_known else (len(keys),)
        )
        results = []
        for i, (atom, of_params, of_batch) in enumerate(_dependence(equation, values)):
            compute = (lambda i=i: run()[i]) if is_known else None
            out = _Value(key_of(*content, i), compute, getattr(atom.aval, "shape", ()), of_params, of_batch)
            results.append(_label(equation, values, out))
        return results

    arguments = [argument(i, atom.aval.shape) for i, atom in enumerate(closed.jaxpr.invars)]
    (found,) = evaluate(closed, follow, arguments, literal=literal, constant=constant)
    if found.quotient is None:
        return None
    quotient = found.quotient
    # A sum that is divided by a mean, or a mean by a sum, grows with the batch.
    is_mean = quotient.divisor and quotient.terms == _TOTAL and quotient.power == quotient.divisor.number.power
    if quotient.divisor is None or not is_mean or found.shape != ():
        raise ValueError(
            "the loss is divided by a number that is computed from the batch, and the mean of the means of parts is "
            "another one than that of the batch. Parts are weighted by that number if the loss is a sum over the "
            "batch divided by a single sum, such as mask.sum(), plus terms without the batch; of another loss pass "
            'weights=lambda batch: batch["mask"].sum(), with that number, or weights=lambda batch: 1 to count all '
            "parts alike"
        )
    number, guarded, bound = quotient.divisor
    n, in_place, bound = (jnp.asarray(x, jnp.float32) for x in (_read(number), _read(guarded), bound))
    # A part with n = 0 may have terms, as a loss over all boxes that is divided by the number of those with an object.
    # Where others are added they would count with it: then it is left out.
    return Divisor(n, jnp.where(n != 0, in_place, 0) if quotient.plus else in_place, bound)


def _read(value: _Value) -> Any:
    assert value.compute is not None
    return value.compute()


def _dependence(equation: Any, values: list[_Value]) -> list[tuple[Any, bool, bool]]:
    """Each result of an equation, and whether it depends on the parameters, with a gradient, and on the batch."""
    masks = [x.params + 2 * x.batch for x in values]
    if rule := LOOP_RULES.get(equation.primitive.name):
        found = rule(equation, masks)
    else:
        found = [reduce(or_, masks, 0)] * len(equation.outvars)
    return [
        (atom, bool(mask & 1) and _is_inexact(atom), bool(mask & 2))
        for atom, mask in zip(equation.outvars, found, strict=True)
    ]


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact)


def _label(equation: Any, values: list[_Value], out: _Value) -> _Value:
    """The result of an equation with its role."""
    name = equation.primitive.name
    same = values[0] if name in _SAME and _keeps_number(equation) else None
    if not out.batch:
        return out._replace(literal=same.literal if same and name != "neg" else None)
    out = out._replace(source=out.key, mixed=_mixes_rows(equation, values, out), test=0)
    if name in ("gt", "ne", "eq", "lt"):
        out = _label_test(name, values, out)
    elif name == "not":
        out = out._replace(test=-values[0].test, source=values[0].source if values[0].test else out.key)
    elif name == "reduce_or" and out.shape == () and not values[0].mixed:
        out = out._replace(test=1, source=values[0].source)
    elif same:
        out = out._replace(source=same.source, test=same.test)
    elif name == "convert_element_type" and equation.params["new_dtype"] == np.bool_:
        # As `mask != 0`.
        out = out._replace(source=values[0].source)
    out = _label_total(equation, values, out, same)
    return out._replace(divisor=_divisor(name, values, out, same), quotient=_follow_quotient(name, values, out, same))


def _keeps_number(equation: Any) -> bool:
    """Returns whether a change of type keeps fractions."""
    return _is_inexact(equation.outvars[0]) or not _is_inexact(equation.invars[0])


def _mixes_rows(equation: Any, values: list[_Value], out: _Value) -> bool:
    name, axes = equation.primitive.name, equation.params.get("axes") or ()
    is_key = any(jnp.issubdtype(getattr(x.aval, "dtype", bool), jax.dtypes.prng_key) for x in equation.outvars)
    reduces = out.shape == () and not is_key and any(x.batch and x.shape != () for x in values)
    along_rows = (isinstance(axes, tuple) and 0 in axes) or equation.params.get("axis") == 0
    return reduces or along_rows or name == "dot_general" or name in LOOP_RULES or any(x.mixed for x in values)


def _label_test(name: str, values: list[_Value], out: _Value) -> _Value:
    """Of a comparison with 0: of a number, whether there are rows that count, or of a mask, which do."""
    # 0 < n is n > 0.
    left, right = values if name != "lt" else values[::-1]
    is_number = _unguarded(left) is not None
    if right.literal != 0 or left.quotient or not (is_number or name != "eq"):
        return out
    return out._replace(source=left.source, test=(-1 if name == "eq" else 1) if is_number else 0)


def _label_total(equation: Any, values: list[_Value], out: _Value, same: _Value | None) -> _Value:
    """Marks sums over the rows: of terms that depend on the parameters, or of a mask."""
    name, first = equation.primitive.name, values[0]
    if math.prod(out.shape) != 1 or any(x.quotient for x in values):
        return out
    if name == "reduce_sum" and out.shape == () and (out.params or not first.mixed):
        out = out._replace(total=first.batch, source=first.source, entries=math.prod(first.shape))
    elif name == "dot_general" and out.params:
        out = out._replace(total=True, entries=math.prod(first.shape))
    # A number of rows stays positive.
    elif same and (name != "neg" or out.params):
        out = out._replace(total=same.total, scaled=same.scaled, entries=same.entries, power=same.power)
    elif name in _SUMS and (out.params or name != "sub"):
        is_total = all(x.total and x.power == first.power for x in values)
        scaled = any(x.scaled for x in values)
        out = out._replace(total=is_total, scaled=scaled, entries=first.entries, power=first.power)
    # Integers are rounded.
    elif name in ("mul", "div") and _is_inexact(equation.outvars[0]):
        left, right = values if first.total or name == "div" else values[::-1]
        is_factor = not right.batch and (out.params or (right.literal is not None and right.literal > 0))
        power = _power(name, left, right)
        out = out._replace(total=left.total and is_factor, scaled=True, entries=left.entries, power=power)
        out = out._replace(source=left.source)
    return out


def _power(name: str, total: _Value | _Quotient, factor: _Value) -> int:
    """The power of a sum that is multiplied or divided by a factor, which may be the number of its entries."""
    is_entries = factor.literal == total.entries
    return total.power - is_entries if name == "div" else total.power + (is_entries and total.power < 0)


def _divisor(name: str, values: list[_Value], out: _Value, same: _Value | None) -> _Divisor | None:
    if out.params or not out.compute or name == "neg":
        return None
    if same:
        return same.divisor
    if out.total:
        return _Divisor(out, out)
    found, others = [x for x in values if x.divisor], [x for x in values if not x.divisor]
    if name not in ("max", "select_n") or out.shape != () or len(found) != 1:
        return None
    number = _unguarded(found[0])
    if number and name == "max" and others[0].literal is not None:
        # The bound is that of the whole batch if the number is a sum, and not a mean such as `mask.mean()`.
        return _Divisor(number, out, -math.inf if found[0].scaled else others[0].literal)
    is_guard = number and name == "select_n" and _is_guarded(values, found[0]) and not others[1].batch
    return _Divisor(number, out) if number and is_guard else None


def _unguarded(value: _Value) -> _Value | None:
    """The number that a value is, repeated or converted, if it has no guard."""
    divisor = value.divisor
    return divisor.number if divisor and divisor.guarded.key == divisor.number.key else None


def _is_guarded(values: list[_Value], chosen: _Value, source: int | None = None) -> bool:
    """Returns whether it is `where(n > 0, chosen, constant)`."""
    condition, *cases = values
    return (
        condition.test != 0
        and condition.source == (chosen.source if source is None else source)
        and len(cases) == 2
        and cases[condition.test == 1] is chosen
    )


def _follow_quotient(name: str, values: list[_Value], out: _Value, same: _Value | None) -> _Quotient | None:
    quotients = [x.quotient for x in values if x.quotient]
    if not quotients:
        found = _begin_quotient(*values) if name == "div" else _UNKNOWN if _may_divide(name, values, out) else None
    elif _UNKNOWN in quotients:
        found = _UNKNOWN
    elif same:
        found = quotients[0]
    elif name in _SUMS:
        found = _add_quotients(values)
    elif name == "select_n":
        found = _select_quotient(values)
    elif name in ("mul", "div", "dot_general"):
        found = _multiply_quotient(name, values)
    elif name == "reduce_sum" and (quotients[0].terms == _ROWS or math.prod(values[0].shape) == 1):
        found = quotients[0]
        found = found._replace(entries=found.entries or math.prod(values[0].shape))
    else:
        found = _UNKNOWN
    if found is None or found.divisor is None:
        # Inputs of a model that are divided by a number of the batch, or a nonlinear function of rows.
        is_input = out.params and not any(x.params and x.batch for x in values)
        is_dropped = is_input or (name in ELEMENTWISE and name not in _LINEAR)
        return None if out.shape != () and is_dropped else found
    if found.terms == _ROWS and out.shape == ():
        return found._replace(terms=_TOTAL) if name in ("reduce_sum", "dot_general") else _UNKNOWN
    return found


def _may_divide(name: str, values: list[_Value], out: _Value) -> bool:
    """Returns whether a number of rows is used where a division by it would not be seen."""
    if name in ("integer_pow", "pow", "rsqrt"):
        # As `mask.sum() ** -1`, which is multiplied later.
        return out.shape == () and not out.params and values[0].divisor is not None
    # The branches of a cond and the bodies of loops are not followed.
    return name in LOOP_RULES and out.shape == () and out.params and any(x.divisor or x.test for x in values)


def _begin_quotient(top: _Value, bottom: _Value) -> _Quotient | None:
    # Of one example or token the divisor is its own; the sum over them counts all alike.
    if not bottom.batch or bottom.params or not (bottom.shape == () or bottom.divisor):
        return None
    if bottom.divisor is None or (top.batch and not top.total and not top.is_row()):
        return _UNKNOWN
    terms = _TOTAL if top.total else _ROWS if top.batch else _NOTHING
    return _Quotient(bottom.divisor, terms, entries=top.entries, power=top.power)


def _add_quotients(values: list[_Value]) -> _Quotient:
    quotients = [x.quotient for x in values if x.quotient]
    first = quotients[0]
    others = [x for x in values if not x.quotient]
    alike = all(_key(x) == _key(first) and (x.terms, x.power) == (first.terms, first.power) for x in quotients)
    if not alike or any(x.batch for x in others):
        return _UNKNOWN
    return first._replace(plus=bool(others) or any(x.plus for x in quotients))


def _key(quotient: _Quotient) -> int:
    return -1 if quotient.divisor is None else quotient.divisor.guarded.key


def _select_quotient(values: list[_Value]) -> _Quotient:
    condition, *cases = values
    if condition.quotient:
        return _UNKNOWN
    if not condition.batch:
        return _add_quotients(cases)
    quotients = [x for x in cases if x.quotient]
    others = [x for x in cases if not x.quotient]
    found = quotients[0].quotient
    if len(quotients) > 1 or found is None or found.divisor is None or any(x.batch for x in others):
        return _UNKNOWN
    if condition.shape == ():
        # What a part without rows gives is not added.
        return found if _is_guarded(values, quotients[0], found.divisor.number.source) else _UNKNOWN
    is_mask = found.terms == _ROWS and not found.plus and condition.is_row() and all(x.literal == 0 for x in others)
    return found if is_mask else _UNKNOWN


def _multiply_quotient(name: str, values: list[_Value]) -> _Quotient:
    """The product of a quotient and a value, or what such a quotient is divided by."""
    left, other = values if values[0].quotient else values[::-1]
    found = left.quotient
    if found is None or other.quotient or (name == "div" and left is not values[0]):
        return _UNKNOWN
    if not other.batch:
        is_sum = name == "dot_general"
        found = found if is_sum or found.terms != _TOTAL else found._replace(power=_power(name, found, other))
        return found if not is_sum or found.terms == _ROWS else _UNKNOWN
    if found.plus:
        return _UNKNOWN
    if found.terms != _TOTAL and other.is_row():
        return found._replace(terms=_ROWS) if name != "div" or found.terms == _ROWS else _UNKNOWN
    return (
        found._replace(terms=_TOTAL, entries=other.entries, power=other.power)
        if found.terms == _NOTHING and other.total and name == "mul"
        else _UNKNOWN
    )

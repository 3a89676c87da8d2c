"""The number that a loss is the mean over, found in its trace: the valid tokens of `sum(errors * mask) / mask.sum()`.

The loss must be `N / n + r`: `N` and `n` sums over the rows of the batch, `n` without the parameters, `r` without the
batch. Then `Σ N_i / Σ n_i + r` over the parts of a batch is the loss of the whole.

Loops are followed into their bodies. Which numbers are taken over the rows is read from a second trace, of twice as
many: a number of the batch whose shape does not grow with it, computed from one whose shape does, is a sum, a maximum
or another statistic of the rows. So that of each row, in `lax.map` over the rows too, is told from that of all.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.compat import scan_sizes
from .._core.dtypes import widest_float
from .._core.jaxprs import CASTS, ELEMENTWISE, LOOP_RULES, RESHAPES, apply_primitive, evaluate, inner_jaxprs
from .._core.types import Array


class Divisor(NamedTuple):
    """What the loss of a part is divided by."""

    number: Array  # n
    guarded: Array  # n, or what stands in its place if it is 0 or small: max(n, c); 0 if the part is to be left out
    bound: Array  # c, or -inf
    offset: Array  # c of n + c, or 0


class _Divisor(NamedTuple):
    number: "_Value"
    guarded: "_Value"
    bound: float = -math.inf
    offset: float = 0.0


# What is divided: nothing of the batch; something of each row, to be added up; a sum over all rows.
_NOTHING, _ROWS, _TOTAL = 0, 1, 2


class _Quotient(NamedTuple):
    divisor: _Divisor | None  # `None`: the parts cannot be weighted by it
    terms: int = _NOTHING
    plus: bool = False  # something that does not depend on the batch was added
    entries: int = 0  # as those of a sum
    power: int = 0
    stacked: bool = False  # those of the rounds of a loop, whose number does not grow with the batch


_UNKNOWN = _Quotient(None)


class _Value(NamedTuple):
    """A value in the trace of a loss: what it depends on, and its role in a quotient."""

    key: int  # the same for the same value
    compute: Callable[[], Any] | None  # `None` if that takes the parameters
    shape: tuple[int, ...]
    params: bool = False
    batch: bool = False
    chosen: bool = False  # it depends on the parameters, also without a gradient, as an `argmax` does
    grows: bool = False  # its shape does with the batch
    over: bool = False  # a statistic of the rows, repeated to any shape; `False` without a second trace
    literal: float | None = None
    source: int = -1  # the key of the mask that is added up, or looked for a true entry
    mixed: bool = False  # an entry may depend on several rows of the batch
    total: bool = False  # a sum over all rows
    scaled: bool = False  # ... times a constant
    entries: int = 0  # of how many entries it is the sum, ...
    power: int = 0  # ... and -1 if it was divided by their number: a mean
    divisor: _Divisor | None = None  # this is one, repeated to any shape
    test: int = 0  # 1 if it is true where the source has rows that count, -1 if it is false there
    finite: int = 0  # 1 if it is true where the source is finite, -1 if it is false there
    quotient: _Quotient | None = None

    def is_row(self) -> bool:
        """Returns whether each entry of an array is that of its own row."""
        return self.shape != () and self.divisor is None and (self.params or not self.mixed)


_SAME = frozenset(("neg", "copy", "convert_element_type", "transpose", "stop_gradient", *RESHAPES, *CASTS))
_SUMS = frozenset(("add", "sub", "add_any"))
_CHOICES = frozenset(("dynamic_slice", "gather"))
_LINEAR = frozenset(("mul", "div", "select_n", *_SAME, *_SUMS))


# A part without rows keeps this as its share of terms without the batch, which is lost in rounding.
_SMALL = 1e-6


def find_divisor(
    closed: Any, params: int, operands: Sequence[Any], *, parts: int, trace_larger: Callable[[], Any]
) -> Divisor | None:
    """Returns the number that a loss is divided by, or `None` if it is divided by none of the batch.

    Only the equations that the number takes are evaluated again.

    Args:
      closed: the trace of the loss.
      params: the number of its arguments that are parameters, the first ones.
      operands: the other arguments, which differ between parts.
      parts: the number of parts.
      trace_larger: returns the trace of a part of twice as many rows, or `None`. It is called for losses that are
        divided by numbers of which the first trace does not show whether they are those of single rows.

    Raises:
      ValueError: the loss has another form than `N / n + r`.
    """
    found, asked = _Finder(closed, params, operands, None).find()
    if asked and (larger := trace_larger()):
        found, _ = _Finder(closed, params, operands, _find_growing(closed, larger)).find()
    quotient = found.quotient
    if quotient is None:
        return None
    # A sum that is divided by a mean, or a mean by a sum, grows with the batch.
    is_mean = quotient.divisor and quotient.terms == _TOTAL and quotient.power == quotient.divisor.number.power
    # The term would count with `c` more in each part.
    is_shifted = quotient.divisor and quotient.plus and quotient.divisor.offset > _SMALL
    if quotient.divisor is None or not is_mean or is_shifted or found.shape != ():
        raise ValueError(
            "the loss is divided by a number that is computed from the batch, and the mean of the means of parts is "
            "another one than that of the batch. Parts are weighted by that number if the loss is a sum over the "
            "batch divided by a single sum, such as mask.sum(), plus terms without the batch; of another loss pass "
            'weights=lambda batch: batch["mask"].sum(), with that number, or weights=lambda batch: 1 to count all '
            "parts alike"
        )
    number, guarded, bound, offset = quotient.divisor
    # The mean of the whole batch is that of the means of its parts, whose sum is `parts` times as large.
    offset = offset * parts if number.power else offset
    n, in_place, bound, offset = (
        jnp.asarray(x, widest_float()) for x in (_read(number), _read(guarded), bound, offset)
    )
    # A part with n = 0 may have terms, as a loss over all boxes that is divided by the number of those with an object.
    # Where others are added they would count with it: then it is left out.
    return Divisor(n, jnp.where(n != 0, in_place, 0) if quotient.plus else in_place, bound, offset)


class _Finder:
    """Follows the values in the trace of a loss from its arguments to its result."""

    def __init__(self, closed: Any, params: int, operands: Sequence[Any], growing: frozenset[int] | None) -> None:
        self.closed, self.params, self.operands, self.growing = closed, params, operands, growing
        self.keys: dict[Any, int] = {}
        self.asked = False  # an answer depends on `growing`

    def find(self) -> tuple[_Value, bool]:
        """Returns the result of the loss, and whether it may be another one with a second trace."""
        arguments = [self.argument(i, atom) for i, atom in enumerate(self.closed.jaxpr.invars)]
        (found,) = self.evaluate(self.closed, arguments)
        return found, self.asked

    def evaluate(self, closed: Any, values: Sequence[_Value]) -> list[_Value]:
        return evaluate(closed, self.follow, values, literal=self.literal, constant=self.constant)

    def key_of(self, *content: Any) -> int:
        return self.keys.setdefault(content, len(self.keys))

    def grows(self, thing: Any) -> bool:
        return self.growing is not None and id(thing) in self.growing

    def constant(self, value: Any) -> _Value:
        return _Value(self.key_of(id(value)), lambda: value, np.shape(value))

    def literal(self, atom: Any) -> _Value:
        number = np.asarray(atom.val)
        is_real = number.shape == () and not np.iscomplexobj(number)
        found = self.constant(atom.val)._replace(literal=float(number) if is_real else None)
        return found._replace(key=self.key_of(str(number.dtype), found.literal)) if is_real else found

    def argument(self, i: int, atom: Any) -> _Value:
        is_param, key = i < self.params, self.key_of("argument", i)
        compute = None if is_param else lambda: self.operands[i - self.params]
        found = _Value(key, compute, atom.aval.shape, params=is_param, batch=not is_param, chosen=is_param)
        return found._replace(source=key, grows=self.grows(atom))

    def follow(self, equation: Any, values: list[_Value]) -> list[_Value]:
        is_known = not equation.effects and all(x.compute for x in values)
        run = cache(lambda: apply_primitive(equation, [x.compute() for x in values if x.compute]))
        # Of what takes the parameters nothing is compared.
        content = (
            (equation.primitive.name, str(equation.params), *(x.key for x in values)) if is_known else (len(self.keys),)
        )
        of_batch = [x for x in values if x.batch]
        chosen = any(x.chosen for x in values)
        results = []
        for i, (atom, on_params, on_batch) in enumerate(_dependence(equation, values)):
            compute = (lambda i=i: run()[i]) if is_known else None
            out = _Value(self.key_of(*content, i), compute, getattr(atom.aval, "shape", ()), on_params, on_batch)
            grows = self.grows(atom)
            over = (any(x.grows for x in of_batch) and not grows) or all(x.over for x in of_batch)
            # Some rows, as those of a round of a loop.
            over = values[0].over if equation.primitive.name in _CHOICES else over
            out = out._replace(chosen=chosen, grows=grows, over=self.growing is not None and on_batch and over)
            results.append(_label(equation, values, out, self.is_statistic))
        if equation.primitive.name == "scan" and of_batch:
            results = self.follow_loop(equation, values, results)
        return results

    def is_statistic(self, value: _Value) -> bool:
        self.asked = True
        return value.over

    def follow_loop(self, equation: Any, values: list[_Value], results: list[_Value]) -> list[_Value]:
        """The results of a scan, with their quotients and sums over the rounds."""
        body = equation.params["jaxpr"]
        consts, carried = scan_sizes(equation.params)
        inside, outside = body.jaxpr.invars, body.jaxpr.outvars

        def see(value: _Value, atom: Any, of: _Value) -> _Value:
            found = _Value(self.key_of(len(self.keys)), None, atom.aval.shape, of.params, of.batch, value.chosen)
            return found._replace(
                grows=self.grows(atom), over=value.over, mixed=value.mixed, literal=value.literal,
                quotient=value.quotient,
            )  # fmt: skip

        first, last = consts, consts + carried
        xs = [see(x, atom, x) for x, atom in zip(values[last:], inside[last:], strict=True)]
        # What a round passes on as it is is that of before the loop.
        is_kept = [x is y for x, y in zip(inside[first:last], outside[:carried], strict=True)]
        carry = [
            # What is added up from 0 is a sum if all that is added is.
            x if kept else see(x, atom, x)._replace(total=x.shape == () and x.literal == 0)
            for x, atom, kept in zip(values[first:last], inside[first:last], is_kept, strict=True)
        ]
        found, is_stable = [], False
        while not is_stable:
            found = self.evaluate(body, [*values[:consts], *carry, *xs])
            joined = [
                old
                if kept
                else see(new._replace(quotient=_join(old.quotient, new.quotient)), atom, of)._replace(
                    total=old.total and new.total and new.power == 0
                )
                for old, new, atom, of, kept in zip(
                    carry, found[:carried], inside[first:last], results[:carried], is_kept, strict=True
                )
            ]
            is_stable = all(_carried(x) == _carried(y) for x, y in zip(carry, joined, strict=True))
            carry = joined
        if self.growing is None and any(x.quotient or x.total for x in [*found, *carry]):
            self.asked = True
        # A sum over rounds that are those of the rows would grow with the batch.
        if self.grows(equation) or (self.growing is None and any(x.batch for x in xs)):
            return [x._replace(quotient=y.quotient and _UNKNOWN) for x, y in zip(results, found, strict=True)]
        results = [x._replace(quotient=y.quotient) for x, y in zip(results, found, strict=True)]
        sums = [
            x._replace(total=True, scaled=y.scaled, entries=y.entries * equation.params["length"])
            if sent.total and x.params and not kept
            else x
            for x, y, sent, kept in zip(results[:carried], found[:carried], carry, is_kept, strict=True)
        ]
        stacked = [
            x._replace(quotient=x.quotient and x.quotient._replace(stacked=x.quotient.terms == _TOTAL))
            for x in results[carried:]
        ]
        return [*sums, *stacked]


def _join(first: _Quotient | None, second: _Quotient | None) -> _Quotient | None:
    """What is carried into some round of a loop: one or the other."""
    if first is None or second is None:
        return first or second
    second = second._replace(plus=first.plus or second.plus)
    return second if _form(first._replace(plus=second.plus)) == _form(second) else _UNKNOWN


def _carried(value: _Value) -> Any:
    return _form(value.quotient), value.params, value.batch, value.over, value.chosen, value.total


def _form(quotient: _Quotient | None) -> Any:
    return quotient and (_key(quotient), quotient.terms, quotient.plus, quotient.power)


def _find_growing(closed: Any, larger: Any) -> frozenset[int] | None:
    """The variables whose shapes differ between two traces, and the scans whose lengths do, by `id`.

    `None` if the traces have other equations.
    """
    seen: dict[int, bool] = {}

    def compare(first: Any, second: Any) -> bool:
        pairs = [*zip(first.invars, second.invars, strict=True)]
        fits = len(first.eqns) == len(second.eqns)
        for one, other in zip(first.eqns, second.eqns, strict=False):
            bodies, others = inner_jaxprs(one), inner_jaxprs(other)
            fits &= one.primitive.name == other.primitive.name and len(bodies) == len(others)
            fits &= len(one.outvars) == len(other.outvars)
            if not fits:
                return False
            # One body may be that of several calls, with arguments of other shapes.
            fits &= all(
                len(x.jaxpr.invars) == len(y.jaxpr.invars) and compare(x.jaxpr, y.jaxpr)
                for x, y in zip(bodies, others, strict=True)
            )
            longer = one.params.get("length") != other.params.get("length")
            fits &= seen.setdefault(id(one), longer) == longer
            pairs += zip(one.outvars, other.outvars, strict=True)
        for x, y in pairs:
            differs = getattr(x.aval, "shape", ()) != getattr(y.aval, "shape", ())
            fits &= seen.setdefault(id(x), differs) == differs
        return fits

    return frozenset(key for key, differs in seen.items() if differs) if compare(closed.jaxpr, larger.jaxpr) else None


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


def _label(equation: Any, values: list[_Value], out: _Value, is_statistic: Callable[[_Value], bool]) -> _Value:
    """The result of an equation with its role."""
    name = equation.primitive.name
    same = values[0] if name in _SAME and _keeps_number(equation) else None
    if not out.batch:
        return out._replace(literal=same.literal if same and name != "neg" else None, total=bool(same and same.total))
    out = out._replace(source=out.key, mixed=_mixes_rows(equation, values, out), test=0)
    if name in ("gt", "ne", "eq", "lt"):
        out = _label_test(name, values, out)
    elif name == "not":
        is_test = values[0].test or values[0].finite
        out = out._replace(test=-values[0].test, finite=-values[0].finite)
        out = out._replace(source=values[0].source if is_test else out.key)
    elif name == "is_finite":
        out = out._replace(source=values[0].source, finite=1)
    elif name == "reduce_or" and out.shape == () and not values[0].mixed:
        out = out._replace(test=1, source=values[0].source)
    elif same:
        out = out._replace(source=same.source, test=same.test)
    elif name == "convert_element_type" and equation.params["new_dtype"] == np.bool_:
        # As `mask != 0`.
        out = out._replace(source=values[0].source)
    out = _label_total(equation, values, out, same)
    quotient = _follow_quotient(name, values, out, same, is_statistic)
    return out._replace(divisor=_divisor(name, values, out, same), quotient=quotient)


def _keeps_number(equation: Any) -> bool:
    """Returns whether a change of type keeps fractions."""
    return _is_inexact(equation.outvars[0]) or not _is_inexact(equation.invars[0])


def _mixes_rows(equation: Any, values: list[_Value], out: _Value) -> bool:
    name, axes = equation.primitive.name, equation.params.get("axes") or ()
    is_key = any(jnp.issubdtype(getattr(x.aval, "dtype", bool), jax.dtypes.prng_key) for x in equation.outvars)
    reduces = out.shape == () and not is_key and any(x.batch and x.shape != () for x in values)
    along_rows = (isinstance(axes, tuple) and 0 in axes) or equation.params.get("axis") == 0
    mixes = reduces or along_rows or (name == "dot_general" and not _multiplies_rows(equation, values))
    return mixes or name in LOOP_RULES or any(x.mixed for x in values)


def _multiplies_rows(equation: Any, values: list[_Value]) -> bool:
    """Returns whether a product of arrays has one row for each one of its first factor, the only one of the batch."""
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    return not values[1].batch and 0 not in contracted and not batched


def _label_test(name: str, values: list[_Value], out: _Value) -> _Value:
    """Of a comparison with 0: of a number, whether there are rows that count, or of a mask, which do."""
    # 0 < n is n > 0.
    left, right = values if name != "lt" else values[::-1]
    # As `isnan(x)`, which is x != x.
    is_nan = name == "ne" and left.key == right.key
    is_infinite = name == "eq" and right.literal is not None and math.isinf(right.literal)
    if left.quotient and (is_nan or is_infinite):
        return out._replace(source=left.source, finite=-1)
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
    elif name == "dot_general" and any(_is_ones(x, y) for x, y in (values, values[::-1])):
        # As `mask @ ones`.
        mask = next(x for x in values if x.batch)
        out = out._replace(total=True, source=mask.source, entries=math.prod(mask.shape))
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


def _is_ones(mask: _Value, other: _Value) -> bool:
    return mask.batch and not mask.mixed and not other.batch and other.literal == 1


def _power(name: str, total: _Value | _Quotient, factor: _Value) -> int:
    """The power of a sum that is multiplied or divided by a factor, which may be the number of its entries."""
    # Those of a stack are divided by the number of rounds.
    is_entries = factor.literal == total.entries and not (isinstance(total, _Quotient) and total.stacked)
    return total.power - is_entries if name == "div" else total.power + (is_entries and total.power < 0)


def _divisor(name: str, values: list[_Value], out: _Value, same: _Value | None) -> _Divisor | None:
    if out.params or not out.compute or name == "neg":
        return None
    if same or out.total:
        return same.divisor if same else _Divisor(out, out)
    found, others = [x for x in values if x.divisor], [x for x in values if not x.divisor]
    if name not in ("max", "select_n", "add") or out.shape != () or len(found) != 1:
        return None
    number = _unguarded(found[0])
    other = others[0].literal
    if number and other is not None and name == "max":
        # The bound is that of the whole batch if the number is a sum, and not a mean such as `mask.mean()`.
        return _Divisor(number, out, -math.inf if found[0].scaled else other)
    if name == "add":
        return _Divisor(number, out, offset=other) if number and other is not None and other > 0 else None
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


def _follow_quotient(
    name: str, values: list[_Value], out: _Value, same: _Value | None, is_statistic: Callable[[_Value], bool]
) -> _Quotient | None:
    quotients = [x.quotient for x in values if x.quotient]
    if not quotients or out.finite:
        found = _begin_quotient(name, values, out, is_statistic)
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
    elif name == "reduce_sum" and (
        quotients[0].terms == _ROWS or quotients[0].stacked or math.prod(values[0].shape) == 1
    ):
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
    # The branches of a cond are not followed.
    return name in ("cond", "while") and out.shape == () and out.params and any(x.divisor or x.test for x in values)


def _begin_quotient(
    name: str, values: list[_Value], out: _Value, is_statistic: Callable[[_Value], bool]
) -> _Quotient | None:
    if name != "div" or out.finite:
        return _UNKNOWN if _may_divide(name, values, out) else None
    top, bottom = values
    if not bottom.batch or bottom.params:
        return None
    # A scalar in the body of a loop may be that of one example. What it chooses by the parameters is a statistic of its
    # outputs, as those of batch normalization, which are those of parts.
    is_scalar = bottom.shape == () and (bottom.compute is not None or bottom.chosen)
    if bottom.divisor is None and not is_scalar:
        # Of one example or token the divisor is its own; the sum over them counts all alike.
        return _UNKNOWN if not bottom.chosen and is_statistic(bottom) else None
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
    return first._replace(plus=any(x.literal != 0 for x in others) or any(x.plus for x in quotients))


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
    if condition.finite:
        # As `nan_to_num`: what a part without rows gives is not added, and another is finite.
        is_same = condition.source == quotients[0].source and cases[condition.finite == 1] is quotients[0]
        return found if is_same else _UNKNOWN
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

"""Interpreters of jaxprs: evaluation by a rule, and dependence of results on inputs."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist._core.jaxprs import apply_primitive, describe_equation, evaluate, propagate


def test_a_rule_evaluates_calls_literals_and_constants():
    table = jnp.arange(3.0)

    def f(x):
        return jax.jit(lambda y: 2.0 * y + table)(x), x - 1.0

    names = []

    def rule(equation, operands):
        names.append(equation.primitive.name)
        return apply_primitive(equation, operands)

    x = jnp.ones(3)
    results = evaluate(jax.make_jaxpr(f)(x), rule, [x])
    for result, expected in zip(results, f(x), strict=True):
        assert result.tolist() == expected.tolist()
    assert sorted(names) == ["add", "mul", "sub"]


def test_loops_are_indivisible_unless_they_are_followed():
    def f(x, y, z):
        # A round moves x to y and y to z: z depends on all, x only on itself.
        return lax.fori_loop(0, 5, lambda _, carry: (carry[0] + 1, carry[0] + carry[1], carry[1] + carry[2]), (x, y, z))

    closed = jax.make_jaxpr(f)(*jnp.ones(3))
    assert propagate(closed, [1, 2, 4], loops=True).masks == [1, 3, 7]
    whole = propagate(closed, [1, 2, 4])
    assert whole.masks == [7, 7, 7]
    assert [equation.primitive.name for equation in whole.merges] == ["scan"]


def test_branches_depend_on_their_index_and_operands():
    closed = jax.make_jaxpr(lambda p, x, y: lax.cond(p, lambda: (x, 2 * y), lambda: (y, 3 * y)))(True, 1.0, 2.0)
    assert propagate(closed, [0, 1, 2], loops=True).masks == [3, 2]
    assert propagate(closed, [4, 1, 2], loops=True).masks == [7, 6]


def test_the_number_of_rounds_of_a_while_loop_affects_all_it_carries():
    def f(n, x):
        return lax.while_loop(lambda carry: carry[0] > 0, lambda carry: (carry[0] - 1, 2 * carry[1]), (n, x))

    assert propagate(jax.make_jaxpr(f)(3, 1.0), [1, 2], loops=True).masks == [1, 3]


def describe(f, *arguments):
    (equation,) = jax.make_jaxpr(f)(*arguments).eqns
    return describe_equation(equation)


def loop(factor, power=2, table=None):
    """A loop whose body is traced anew."""

    def body(carry, _):
        x, count = carry
        return (jax.nn.relu(x) ** power * factor + (0 if table is None else table.sum()), count + 1), None

    return lambda x: lax.scan(body, (x, 0), None, length=3)


def test_equal_descriptions_are_of_equal_functions():
    """Of other traces of the same function; and not of other numbers, shapes, bodies or constants."""
    x = jnp.ones(3)
    same = describe(loop(2.0), x)
    assert hash(same) == hash(describe(loop(2.0), x))
    assert same == describe(loop(2.0), x)
    others = [describe(f, y) for f, y in ((loop(2.5), x), (loop(2.0, 3), x), (loop(2.0), jnp.ones(4)))]
    others += [describe(lambda x: x + 1, x), describe(lambda x: x * 1, x)]
    assert len({same, *others}) == 6
    # Of constants the values count; not-a-number is equal to itself.
    assert describe(lambda x: x * jnp.nan, x) == describe(lambda x: x * jnp.nan, x)

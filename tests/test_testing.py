"""The public law checks find what is broken."""

import jax
import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist.comm import over
from jaxdist.reducers import Reduced, Reducer
from jaxdist.testing import assert_reducer_laws

LIKE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}


def averaging(change=lambda x: x):
    """The mean of `change(x)`, which claims to be that of `x`."""

    def reduce(updates, state, comm, **agreed):
        del agreed
        return Reduced(comm.mean(jax.tree.map(change, updates)), comm.varying(updates)), state

    return Reducer(lambda like: (), reduce)


def local(updates, state, comm, **agreed):
    return Reduced(updates, updates), state


def counting(updates, state, comm, **agreed):
    return averaging().reduce(updates, state, comm)[0], state + 0.5


def strict(updates, state, comm):
    return averaging().reduce(updates, state, comm)


def mean_of_zeros(x):
    return x / jnp.max(jnp.abs(x))


def own_is_twice(updates, state, comm, **agreed):
    reduced, state = averaging().reduce(updates, state, comm)
    return Reduced(reduced.mean, jax.tree.map(lambda x: 2 * x, reduced.own)), state


def forgetting():
    """Says inside feedback that all was sent, while half was."""
    half = averaging(lambda x: x / 2)._replace(law="none")
    return averaging()._replace(for_feedback=lambda: half._replace(law="exact"))


def holding(deliver=0.5, paid=1.0):
    """Delivers a part of what it owes; says that it has paid off so much of the rest."""

    def reduce(updates, state, comm, **agreed):
        del agreed
        owed = jax.tree.map(jnp.add, comm.mean(updates), state)
        mean = jax.tree.map(lambda x: deliver * x, owed)
        return Reduced(mean, comm.varying(updates)), jax.tree.map(lambda x: (1 - deliver) * x, owed)

    def held(state, like, comm):
        del like, comm
        return jax.tree.map(lambda x: paid * x, state)

    return Reducer(
        lambda like: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), reduce, law="telescoping", held=held
    )


BROKEN = {
    "the mean and unmarked state are agreed": Reducer(lambda like: (), local),
    "init needs shapes only": Reducer(lambda like: over("data").size, averaging().reduce),
    "state keeps its tree": Reducer(lambda like: jnp.zeros((), jnp.int32), counting),
    "zeros give finite means": averaging(mean_of_zeros),
    "the mean is like the updates": averaging(lambda x: x.astype(jnp.float32)),
    "exact: mean": Reducer(lambda like: (), own_is_twice),
    "feedback telescopes": forgetting(),
    "telescoping: mean": holding(paid=0.9),
    "telescoping: says what is held": holding()._replace(held=None),
    "unbiased": averaging(lambda x: 0.99 * x)._replace(law="unbiased"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_reducer_is_told_its_law(law):
    with pytest.raises(AssertionError, match=f"law '{law}"):
        assert_reducer_laws(BROKEN[law], like=LIKE, steps=2)


def test_extras_must_be_accepted():
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        assert_reducer_laws(Reducer(lambda like: (), strict), like=LIKE)


def test_a_sound_reducer_passes_with_the_standard_leaves():
    assert_reducer_laws(averaging())
    assert_reducer_laws(averaging(lambda x: x / 2)._replace(law="none"), like=LIKE)
    assert_reducer_laws(jd.exact(), workers={"pod": 2, "chip": 2}, like=LIKE)
    assert_reducer_laws(holding(), like=LIKE)

"""Every law of reducers on drawn trees: shapes that divide by nothing, any number of workers, any seed.

One example by default, thirty with `--slow`; the same ones in each run.
"""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from register import CASES

from jaxdist.testing import assert_reducer_laws

shapes = st.one_of(
    st.sampled_from([(), (1,), (0, 3), (1, 1)]),
    st.integers(1, 40).map(lambda n: (n,)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
)
# Names that begin alike, and an order that is not that of insertion: leaves are found by structure, not by luck.
trees = st.dictionaries(st.sampled_from(["w", "w_1", "b", "a"]), shapes, min_size=1, max_size=3)
examples = {
    "name": st.sampled_from(sorted(CASES)),
    "tree": trees,
    "workers": st.sampled_from([1, 2, 3, 5]),
    "dtype": st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    "seed": st.integers(0, 2**32 - 1),
}


def check(name, tree, workers, dtype, seed):
    case = CASES[name]
    assert_reducer_laws(
        case.make(),
        workers=workers if case.levels == 1 else {"pod": 2, "chip": workers},
        like={leaf: jax.ShapeDtypeStruct(shape, jnp.float32) for leaf, shape in tree.items()},
        tolerance=max(case.tolerance, 1e-5),
        dtypes=[dtype],
        key=jax.random.key(seed),
    )


@settings(max_examples=1, derandomize=True)
@given(**examples)
def test_reducers_keep_their_laws_on_drawn_trees(name, tree, workers, dtype, seed):
    check(name, tree, workers, dtype, seed)


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(**examples)
def test_reducers_keep_their_laws_on_many_drawn_trees(name, tree, workers, dtype, seed):
    check(name, tree, workers, dtype, seed)

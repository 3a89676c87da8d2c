"""A fresh state may be donated: each of its arrays has memory of its own, apart from that of the parameters too."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from method_register import LINES
from register_run import State, params

import jaxdist as jd


def buffers(tree):
    """Where each array is; those without entries are nowhere."""
    raw = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [x.unsafe_buffer_pointer() for x in raw if x.size]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", LINES)
def test_no_two_leaves_of_a_fresh_state_are_one_buffer(name):
    start = params()
    found = Counter(buffers((start, LINES[name].make().init(start))))
    assert max(found.values()) == 1


def test_a_fresh_state_is_donated():
    tx = jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=2, axis=None)
    state = State(params(), tx.init(params()))

    def step(state):
        updates, opt = tx.update(state.params, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt)

    new = jax.jit(step, donate_argnums=0)(state)
    assert state.opt.since.is_deleted()
    assert int(new.opt.count) == 1

"""Compositions of gossip that cannot work, and what they say."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import topology as graphs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jd.gossip(optax.sgd(1.0), graphs.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)])), "use method=sgp"),
        (
            lambda: jd.gossip(optax.sgd(1.0), graphs.exponential(4), method=jd.decentralized.d2()),
            "needs symmetric weights",
        ),
        (
            lambda: jd.gossip(optax.sgd(1.0), graphs.shift_one(4), method=jd.decentralized.d2()),
            "same neighbors in every step",
        ),
        (
            lambda: jd.gossip(
                optax.sgd(1.0),
                graphs.one_peer_exponential(4),
                method=jd.decentralized.choco(jd.top_k(0.1), step_size=0.1),
            ),
            "choco needs the same neighbors in every step",
        ),
        (
            lambda: jd.gossip(optax.sgd(1.0), graphs.random_matchings(4), method=jd.decentralized.dcd_psgd(jd.qsgd(8))),
            "dcd_psgd needs the s",
        ),
        (
            lambda: jd.gossip(optax.sgd(1.0), graphs.exponential(8), method=jd.decentralized.ecd_psgd(jd.qsgd(8))),
            "ecd_psgd needs symmetric",
        ),
        (lambda: jd.gossip(optax.sgd(1.0), graphs.ring(4), method=jd.decentralized.relay_sgd()), "needs a tree"),
        (
            lambda: jd.gossip(optax.sgd(1.0), graphs.from_matrix(np.eye(3)), method=jd.decentralized.relay_sgd()),
            "needs a tree",
        ),
        (lambda: jd.decentralized.choco(jd.top_k(0.1), step_size=0.0), r"step_size must be in \(0, 1\], got 0.0"),
        (lambda: jd.decentralized.ecd_psgd(jd.top_k(0.1)), "needs an unbiased compressor"),
        (lambda: jd.decentralized.quasi_global_momentum(0.1, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: jd.decentralized.quasi_global_adam(b2=1.0), "b2 must be in"),
        (
            lambda: jd.gossip(
                optax.sgd(1.0), graphs.from_matrix(np.array([[0.5, 0.5], [0, 1.0]])), method=jd.decentralized.sgp()
            ),
            "push-sum needs columns that sum to 1",
        ),
    ],
)
def test_what_cannot_work_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_cannot_work_in_a_step_says_so():
    x = jnp.zeros(2)
    tx = jd.gossip(optax.sgd(0.1), graphs.ring(4), axis=None)
    with pytest.raises(ValueError, match="has 4 workers, but axis None has 1"):
        tx.update(x, tx.init(x), x)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(x, tx.init(x))
    with pytest.raises(ValueError, match="does not support example weighting"):
        tx.update(x, tx.init(x), x, examples=3)
    quasi = jd.gossip(optax.sgd(0.1), graphs.ring(1), method=jd.decentralized.quasi_global_momentum(), axis=None)
    with pytest.raises(ValueError, match="divides by the rate"):
        quasi.update(x, quasi.init(x), x)
    alone = jd.gossip(optax.sgd(0.5), graphs.ring(1), axis=None)
    np.testing.assert_array_equal(np.asarray(alone.update(x + 1, alone.init(x), x)[0]), -0.5)
    with pytest.raises(ValueError, match="so it must be static"):
        alone.update(x, alone.init(x), x, round=jnp.zeros((), int))
    with pytest.raises(ValueError, match="round must be from 0 to 0, the last round of ring, got 1"):
        alone.update(x, alone.init(x), x, round=1)


def test_what_is_no_graph_and_no_method_is_named():
    # Without the type checks of the tests, which would raise first.
    gossip = getattr(jd.gossip, "__wrapped__", jd.gossip)
    with pytest.raises(TypeError, match=r"expected a topology, such as topology\.ring\(8\), got <function ring"):
        gossip(optax.sgd(1.0), graphs.ring)
    with pytest.raises(TypeError, match=r"expected a method of gossip, such as d_psgd\(\), got <function d2"):
        gossip(optax.sgd(1.0), graphs.ring(4), method=jd.decentralized.d2)

"""Graphs: their matrices, rates, messages; MATCHA; what cannot be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import topology as graphs
from jaxdist.topology.base import color_arcs, color_edges, matrices
from jaxdist.topology.matcha import _laplacian, second_moment

ANY_NUMBER = [
    graphs.ring,
    graphs.complete,
    graphs.exponential,
    graphs.star,
    graphs.path,
    graphs.binary_tree,
    graphs.one_peer_exponential,
    graphs.random_matchings,
    graphs.relabeled_ring,
]
# Gaps of weights 1/(degree + 1), computed with another program: ρ of ring, torus, hypercube, exponential, star, path.
RATES = {
    4: (0.3333, 0.3333, 0.3333, 0.3333, 0.75, 0.8047),
    8: (0.8047, 0.5, 0.5, 0.5, 0.875, 0.9493),
    16: (0.9493, 0.6, 0.6, 0.6, 0.9375, 0.9872),
    32: (0.9872, 0.8828, 0.6667, 0.6667, 0.9688, 0.9968),
    64: (0.9968, 0.8828, 0.7143, 0.7143, 0.9844, 0.9992),
}


@pytest.mark.parametrize("make", ANY_NUMBER, ids=lambda make: make.__name__)
def test_any_number_of_workers_mixes_to_the_mean(make):
    for workers in (1, 2, 3, 5, 6, 8, 12, 13):
        graph = make(workers)
        assert graphs.is_doubly_stochastic(graph)
        assert all((one >= 0).all() for one in matrices(graph))
        x = np.arange(workers, dtype=float) ** 2
        after = x
        for step in range(600):
            after = graphs.matrix(graph, step) @ after
        np.testing.assert_allclose(after, x.mean(), atol=1e-2 * max(workers, 2))


@pytest.mark.parametrize("make", [graphs.torus, graphs.hypercube, graphs.shift_one], ids=lambda make: make.__name__)
def test_numbers_with_factors_mix_to_the_mean(make):
    for workers in (4, 8, 16):
        graph = make(workers)
        assert graphs.is_doubly_stochastic(graph)
        assert graphs.mixing_rate(graph) < 0.99


@pytest.mark.parametrize("workers", RATES)
def test_rates_equal_the_table(workers):
    made = [graphs.ring, graphs.torus, graphs.hypercube, graphs.exponential, graphs.star, graphs.path]
    found = [graphs.mixing_rate(make(workers)) for make in made]
    np.testing.assert_allclose(found, RATES[workers], atol=5e-5)


def test_the_least_eigenvalue_of_even_rings_and_tori():
    assert graphs.smallest_eigenvalue(graphs.ring(8)) == pytest.approx(-1 / 3)
    assert graphs.smallest_eigenvalue(graphs.torus(8)) == pytest.approx(-0.5)
    assert graphs.smallest_eigenvalue(graphs.lazy(graphs.torus(8))) == pytest.approx(0.25)


def test_one_peer_exponential_is_exact_after_a_turn():
    for workers, left in ((2, 0), (4, 0), (8, 0), (64, 0), (6, 0.2165), (12, 0.2091)):
        graph = graphs.one_peer_exponential(workers)
        assert [len(one.messages) for one in graph.rounds] == [1] * (workers - 1).bit_length()
        assert graphs.mixing_rate(graph) ** len(graph.order) == pytest.approx(left, abs=5e-5)
        product = np.linalg.multi_dot([np.eye(workers), *reversed(matrices(graph)), np.eye(workers)])
        assert np.linalg.norm(product - 1 / workers, 2) == pytest.approx(left, abs=5e-5)


def test_random_graphs_mix_as_fast_as_theory_says():
    ring = graphs.relabeled_ring(16, rounds=1500)
    # √((tr W'W - 1) / (n - 1)) is the rate over all orders; a sample has a largest eigenvalue a little above.
    assert 0.5375 < graphs.expected_mixing_rate(ring) < 0.5375 * 1.04
    pairs = graphs.random_matchings(8, rounds=3000)
    assert 0.4286 < graphs.expected_mixing_rate(pairs) ** 2 < 0.4286 * 1.06
    fixed = graphs.ring(16)
    assert graphs.expected_mixing_rate(fixed) == pytest.approx(graphs.mixing_rate(fixed))


def test_other_seeds_draw_other_graphs():
    for make in (graphs.random_matchings, graphs.relabeled_ring):
        assert make(8, seed=3) == make(8, seed=3)
        assert make(8, seed=3) != make(8, seed=4)
        assert len(make(8, rounds=5).order) == 5


def test_shift_one_pairs_the_halves():
    graph = graphs.shift_one(8)
    met = set()
    for one in graph.rounds:
        (message,) = one.messages
        partner = dict(message.pairs)
        assert all(partner[partner[i]] == i and (i < 4) != (partner[i] < 4) for i in range(8))
        met |= set(message.pairs)
    assert len(met) == 2 * 16
    product = np.linalg.multi_dot(matrices(graphs.shift_one(4)))
    np.testing.assert_allclose(product, 0.25)


@given(st.integers(2, 9), st.data())
@settings(max_examples=60)
def test_colors(workers, data):
    """Every edge once, no worker twice in a group; the fewest groups for arcs, at most one more for edges."""
    arcs = [(i, j) for i, j in itertools.permutations(range(workers), 2) if data.draw(st.booleans())]
    groups = color_arcs(arcs)
    assert sorted(itertools.chain(*groups)) == arcs
    assert all(len(set(end)) == len(end) for group in groups for end in zip(*group, strict=True))
    degrees = [sum(arc[side] == i for arc in arcs) for i in range(workers) for side in (0, 1)]
    assert len(groups) == max(degrees)

    edges = sorted({(min(arc), max(arc)) for arc in arcs})
    matchings = color_edges(edges)
    assert sorted(itertools.chain(*matchings)) == edges
    assert all(len(set(itertools.chain(*group))) == 2 * len(group) for group in matchings)
    degrees = [sum(i in edge for edge in edges) for i in range(workers)]
    assert len(matchings) <= max(degrees) + (max(degrees) > 0)


def test_a_matrix_of_ones_own_comes_back():
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((7, 7)) < 0.5, rng.random((7, 7)), 0) + np.eye(7)
    for one in (weights / weights.sum(1, keepdims=True), weights / weights.sum(0)):
        graph = graphs.from_matrix(one)
        np.testing.assert_allclose(graphs.matrix(graph), one)
        sent = np.count_nonzero(one, 0).max() - 1, np.count_nonzero(one, 1).max() - 1
        assert len(graph.rounds[0].messages) == max(sent)
    tree = graphs.from_edges(4, [(1, 0), (2, 1), (3, 2)])
    assert graphs.matrix(tree).tolist() == graphs.matrix(graphs.path(4)).tolist()
    assert len(tree.rounds[0].messages) == 2


def test_push_sum_matrices_keep_the_sum():
    graph = graphs.digraph(5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 3)])
    np.testing.assert_allclose(graphs.matrix(graph).sum(0), 1)
    assert not graphs.is_doubly_stochastic(graph)
    assert 0.5 < graphs.mixing_rate(graph) < 1


def test_matcha_on_a_ring_of_four():
    solved = graphs.matchings(graphs.ring(4))
    assert len(solved.edges) == 2
    np.testing.assert_allclose(solved.probabilities, 0.5, atol=1e-6)
    assert solved.alpha == pytest.approx(0.5, abs=1e-4)
    laplacians = np.array([_laplacian(4, group) for group in solved.edges])
    closed = second_moment(laplacians, np.array(solved.probabilities), 0.5)
    counted = np.mean(
        [
            np.linalg.matrix_power(np.eye(4) - 0.5 * np.tensordot(on, laplacians, 1), 2)
            for on in itertools.product([0, 1], repeat=2)
        ],
        axis=0,
    )
    np.testing.assert_allclose(closed, counted, atol=1e-6)
    assert np.linalg.norm(closed - 0.25, 2) == pytest.approx(0.5, abs=1e-6)
    whole = graphs.matcha(graphs.ring(4), budget=1.0)
    assert graphs.matchings(graphs.ring(4), budget=1.0).alpha == pytest.approx(1 / 3, abs=1e-4)
    assert graphs.mixing_rate(whole) ** 2 == pytest.approx(1 / 9, abs=1e-4)


def test_matcha_favors_the_link_that_holds_a_graph_together():
    """Two triangles and a bridge: the matching with the bridge is on more often than by equal shares."""
    base = graphs.from_edges(6, [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (2, 3)])
    solved = graphs.matchings(base)
    on = {edge: p for group, p in zip(solved.edges, solved.probabilities) for edge in group}
    assert on[2, 3] > 0.6
    assert sum(solved.probabilities) == pytest.approx(0.5 * len(solved.edges))
    laplacians = np.array([_laplacian(6, group) for group in solved.edges])
    equal = np.full(len(laplacians), 0.5)
    connected = [np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1] for p in (np.array(solved.probabilities), equal)]
    assert connected[0] > 1.1 * connected[1]
    drawn = graphs.matcha(base, rounds=400)
    sent = [sum(len(m.pairs) for m in drawn.rounds[which].messages) / 2 for which in drawn.order]
    expected = sum(p * len(group) for group, p in zip(solved.edges, solved.probabilities))
    assert np.mean(sent) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graphs.ring(0), "workers must be at least 1, got 0"),
        (lambda: graphs.torus(7), "7 is prime: use ring"),
        (lambda: graphs.torus(8, shape=(3, 3)), "with the product 8"),
        (lambda: graphs.hypercube(6), "power of two of workers, got 6"),
        (lambda: graphs.shift_one(5), "even number of workers, got 5"),
        (lambda: graphs.random_matchings(4, rounds=0), "rounds must be at least 1"),
        (lambda: graphs.from_edges(3, [(0, 3)]), r"got \(0, 3\)"),
        (lambda: graphs.digraph(3, [(1, 1)]), r"got \(1, 1\)"),
        (lambda: graphs.from_matrix(np.ones((2, 2))), "must sum to 1"),
        (lambda: graphs.from_matrix(np.ones((2, 3)) / 3), "must be square"),
        (lambda: graphs.from_matrix(np.full((2, 2), np.nan)), "must be finite"),
        (lambda: graphs.matcha(graphs.exponential(8)), "undirected"),
        (lambda: graphs.matcha(graphs.shift_one(8)), "stays the same"),
        (lambda: graphs.matcha(graphs.from_edges(4, [(0, 1), (2, 3)])), "connected"),
        (lambda: graphs.matcha(graphs.ring(4), budget=0.0), r"budget must be in \(0, 1\], got 0.0"),
        (lambda: graphs.smallest_eigenvalue(graphs.exponential(8)), "symmetric"),
    ],
)
def test_what_cannot_be_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (graphs.ring(8), "Topology('ring', workers=8, degree=2, rounds=1)"),
        (graphs.star(5), "Topology('star', workers=5, degree=4, rounds=1)"),
        (graphs.one_peer_exponential(8), "Topology('one-peer exponential', workers=8, degree=1, rounds=3)"),
        (graphs.complete(1), "Topology('complete', workers=1, degree=0, rounds=1)"),
    ],
)
def test_a_graph_prints_its_size(graph, text):
    assert repr(graph) == text

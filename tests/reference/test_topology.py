"""Mixing matrices against their analytic gaps, graphs drawn by hand, and rounds with failures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from .topology import (
    draw,
    exponential,
    exponential_directed,
    exponential_directed_gap,
    from_edges,
    full,
    gap,
    grid,
    metropolis,
    random,
    ring,
    ring_gap,
    squarest,
    torus,
    torus_gap,
    without,
)

SYMMETRIC = [ring, grid, torus, exponential, full]
EVERY = [*SYMMETRIC, exponential_directed]
SIZES = [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17]

graphs = pytest.mark.parametrize("graph", EVERY)
sizes = pytest.mark.parametrize("m", SIZES)


def drawn(m, k, seed=0):
    return random(draw(m, k, np.random.default_rng(seed)))


def assert_doubly_stochastic(W):
    assert (W >= 0).all()
    np.testing.assert_allclose(W.sum(axis=0), 1, rtol=1e-12)
    np.testing.assert_allclose(W.sum(axis=1), 1, rtol=1e-12)


def neighbours(W, i):
    """Those that node i hears."""
    return {j for j in range(len(W)) if W[i, j] > 0 and j != i}


@pytest.mark.parametrize(
    ("graph", "gaps"),
    [
        (ring, (0.1953, 0.0507, 0.0032, 0.0013)),
        (grid, (0.1464, 0.1314, 0.0323, 0.0205)),
        (torus, (0.5, 0.4, 0.1172, 0.0764)),
        (exponential, (0.6667, 0.5, 0.3333, 0.2667)),
        (exponential_directed, (0.5, 0.4, 0.2857, 0.25)),
        (full, (1, 1, 1, 1)),
    ],
)
def test_table_of_gaps(graph, gaps):
    for m, expected in zip((8, 16, 64, 100), gaps, strict=True):
        assert abs(gap(graph(m)) - expected) <= 0.5e-4 + 1e-12


def test_analytic_gaps():
    for m in (4, 5, 6, 7, 8, 12, 25):
        assert math.isclose(gap(ring(m)), ring_gap(m), rel_tol=1e-10)
    for m in (9, 12, 15, 16, 20, 25, 30):
        assert math.isclose(gap(torus(m)), torus_gap(m), rel_tol=1e-10)
    for m in (2, 4, 6, 8, 10, 12, 16, 22, 32):
        assert math.isclose(gap(exponential_directed(m)), exponential_directed_gap(m))
    assert not math.isclose(gap(exponential_directed(9)), exponential_directed_gap(9))


@sizes
@graphs
def test_doubly_stochastic_and_connected(graph, m):
    W = graph(m)
    assert_doubly_stochastic(W)
    assert (np.diag(W) > 0).all()
    assert 0 < gap(W) <= 1 + 1e-12
    if graph is not exponential_directed:
        assert (W == W.T).all()
        eigenvalues = np.sort(np.linalg.eigvalsh(W))
        assert m == 1 or math.isclose(
            1 - gap(W), max(eigenvalues[-2], -eigenvalues[0]), abs_tol=1e-9
        )


def test_directed_exponential_graph_is_not_symmetric():
    """Node 0 sends to 1, 2, 4 and hears 7, 6, 4."""
    W = exponential_directed(8)
    assert neighbours(W.T, 0) == {1, 2, 4}
    assert neighbours(W, 0) == {7, 6, 4}
    assert set(W[W > 0]) == {1 / 4}
    assert neighbours(exponential_directed(5).T, 0) == {1, 2, 4}
    assert set(np.unique(exponential_directed(5))) == {0, 1 / 4}
    assert neighbours(exponential(8), 0) == {1, 7, 2, 6, 4}


def test_metropolis_by_hand():
    """A star of four: the hub has degree 3, a leaf keeps what it does not give to the hub."""
    star = from_edges(4, [(0, 1), (0, 2), (3, 0)])
    np.testing.assert_allclose(star[0], [1 / 4] * 4)
    np.testing.assert_allclose(star[1], [1 / 4, 3 / 4, 0, 0])
    path = from_edges(4, [(0, 1), (1, 2), (2, 3)])
    np.testing.assert_allclose(path[0], [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(path[1], [1 / 3, 1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(grid(5), from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)]))
    np.testing.assert_allclose(metropolis(np.ones((5, 5), dtype=bool)), full(5))
    np.testing.assert_allclose(from_edges(3, [(0, 1), (1, 0), (2, 2)])[2], [0, 0, 1])


def test_ring_by_hand():
    np.testing.assert_allclose(ring(5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(ring(3), full(3))
    np.testing.assert_allclose(ring(2), full(2))


def test_lattices():
    """Node (a, b) of r x c is number a*c + b."""
    assert [squarest(m) for m in (1, 7, 8, 12, 64)] == [(1, 1), (1, 7), (2, 4), (3, 4), (8, 8)]
    assert neighbours(grid(6), 0) == {1, 3}
    assert neighbours(grid(6), 4) == {1, 3, 5}
    assert neighbours(grid(6), 2) == {1, 5}
    assert neighbours(torus(12), 0) == {1, 3, 4, 8}
    assert neighbours(torus(12), 7) == {6, 4, 3, 11}
    np.testing.assert_allclose(torus(12)[0, [0, 1, 3, 4, 8]], 1 / 5)
    np.testing.assert_allclose(torus(7), ring(7))


def test_random_graph_by_hand():
    """Being drawn is enough to be a neighbour."""
    W = random([[1, 2], [0], [], [2]])
    np.testing.assert_allclose(W, from_edges(4, [(0, 1), (0, 2), (2, 3)]))
    peers = draw(9, 3, np.random.default_rng(1))
    assert all(len(set(p)) == 3 and i not in p for i, p in enumerate(peers))
    assert_doubly_stochastic(random(peers))
    assert all(set(p) <= neighbours(random(peers), i) for i, p in enumerate(peers))


@pytest.mark.parametrize("failed", [[], [2], [0, 3], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("W", [*[g(6) for g in SYMMETRIC], drawn(6, 2)])
def test_without_failed_nodes(W, failed):
    """Links to them are gone, other links as they were; the mean survives."""
    X = without(W, failed)
    assert_doubly_stochastic(X)
    assert (X == X.T).all()
    for i in range(6):
        if i in failed:
            assert (X[i] == np.eye(6)[i]).all()
            continue
        assert math.isclose(X[i, i], W[i, i] + sum(W[i, f] for f in failed))
        assert all(X[i, j] == (0 if j in failed else W[i, j]) for j in range(6) if j != i)
    np.testing.assert_allclose(X, without(W, failed[::-1]), atol=1e-15)


def test_without_changes_a_copy():
    W = ring(6)
    assert without(W, [1])[0, 1] == 0
    np.testing.assert_array_equal(W, ring(6))


def test_failures_on_a_directed_graph_move_the_mean():
    X = without(exponential_directed(8), [3])
    np.testing.assert_allclose(X.sum(axis=1), 1)
    assert abs(X.sum(axis=0) - 1).max() > 0.2

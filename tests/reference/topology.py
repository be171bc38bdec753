"""Mixing matrices of m nodes in plain numpy, their spectral gaps, and rounds in which nodes fail.

W_ij is the weight that node i gives to what node j sends. Every matrix here is doubly stochastic:
rows sum to one (a mix is an average), columns too (the mean over nodes survives the mix). All but
`exponential_directed` are symmetric. Undirected graphs carry Metropolis weights,

    W_ij = 1 / (1 + max(deg_i, deg_j)) on the edges,   W_ii = 1 - sum_{j != i} W_ij.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .problem import Array


def metropolis(adjacent: NDArray[np.bool_]) -> Array:
    """W of an undirected graph, from its symmetric (m, m) adjacency; the diagonal is ignored."""
    m = len(adjacent)
    degree = [sum(bool(adjacent[i, j]) for j in range(m) if j != i) for i in range(m)]
    W = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            if j != i and adjacent[i, j]:
                W[i, j] = 1 / (1 + max(degree[i], degree[j]))
        W[i, i] = 1 - W[i].sum()
    return W


def from_edges(m: int, edges: Iterable[tuple[int, int]]) -> Array:
    """W of the undirected graph with these edges; a pair may come twice, a loop is ignored."""
    adjacent = np.zeros((m, m), dtype=bool)
    for i, j in edges:
        adjacent[i, j] = adjacent[j, i] = True
    return metropolis(adjacent)


def ring(m: int) -> Array:
    """i ~ i +- 1 mod m."""
    return from_edges(m, [(i, (i + 1) % m) for i in range(m)])


def squarest(m: int) -> tuple[int, int]:
    """(r, c) with r * c = m, r <= c and r as large as possible."""
    r = max(r for r in range(1, math.isqrt(m) + 1) if m % r == 0)
    return r, m // r


def grid(m: int) -> Array:
    """r x c lattice without wrap, node (a, b) in row a*c + b."""
    r, c = squarest(m)
    right = [(a * c + b, a * c + b + 1) for a in range(r) for b in range(c - 1)]
    below = [(a * c + b, (a + 1) * c + b) for a in range(r - 1) for b in range(c)]
    return from_edges(m, right + below)


def torus(m: int) -> Array:
    """r x c lattice with wrap in both directions."""
    r, c = squarest(m)
    right = [(a * c + b, a * c + (b + 1) % c) for a in range(r) for b in range(c)]
    below = [(a * c + b, (a + 1) % r * c + b) for a in range(r) for b in range(c)]
    return from_edges(m, right + below)


def hops(m: int) -> list[int]:
    """2^k for 0 <= k < log2 m: ceil(log2 m) numbers below m."""
    return [2**k for k in range(m) if 2**k < m]


def exponential(m: int) -> Array:
    """i ~ i +- 2^k mod m, undirected."""
    return from_edges(m, [(i, (i + h) % m) for i in range(m) for h in hops(m)])


def exponential_directed(m: int) -> Array:
    """Node i sends to itself and to i + 2^k mod m; all weights 1/(1 + ceil(log2 m))."""
    W = np.zeros((m, m))
    for i in range(m):
        for h in [0, *hops(m)]:
            W[(i + h) % m, i] = 1 / (1 + len(hops(m)))
    return W


def full(m: int) -> Array:
    """11^T/m."""
    return np.full((m, m), 1 / m)


def random(peers: Sequence[Sequence[int]]) -> Array:
    """Node i drew peers[i]; whoever drew or was drawn is a neighbour."""
    return from_edges(len(peers), [(i, j) for i, others in enumerate(peers) for j in others])


def draw(m: int, k: int, rng: np.random.Generator) -> list[list[int]]:
    """k peers for every node, uniformly without replacement, for `random`."""
    return [
        rng.choice([j for j in range(m) if j != i], size=k, replace=False).tolist()
        for i in range(m)
    ]


def without(W: Array, failed: Iterable[int]) -> Array:
    """W of a round in which the nodes `failed` neither send nor receive.

    Their rows become those of the identity; elsewhere the weight given to them goes to the own
    model. Rows sum to one in any case; columns do only if W is symmetric, so with the directed
    graph the mean over nodes does not survive a failure.
    """
    W = W.copy()
    for f in failed:
        for i in range(len(W)):
            if i != f:
                W[i, i] += W[i, f]
                W[i, f] = 0
        W[f] = 0
        W[f, f] = 1
    return W


def gap(W: Array) -> float:
    """Spectral gap 1 - ||W - 11^T/m||_2; for a symmetric W 1 - max(|lambda_2|, |lambda_m|)."""
    return float(1 - np.linalg.norm(W - full(len(W)), ord=2))


def ring_gap(m: int) -> float:
    """m >= 4: eigenvalues (1 + 2 cos(2 pi a/m))/3, a = 0 .. m-1."""
    return 2 / 3 * (1 - math.cos(2 * math.pi / m))


def torus_gap(m: int) -> float:
    """r, c >= 3: eigenvalues (1 + 2 cos(2 pi a/r) + 2 cos(2 pi b/c))/5."""
    r, c = squarest(m)
    eigenvalues = [
        (1 + 2 * math.cos(2 * math.pi * a / r) + 2 * math.cos(2 * math.pi * b / c)) / 5
        for a in range(r)
        for b in range(c)
    ]
    return 1 - max(abs(value) for value in eigenvalues[1:])


def exponential_directed_gap(m: int) -> float:
    """m even."""
    return 2 / (1 + math.ceil(math.log2(m)))

"""Graphs of nodes and their mixing matrices.

On an undirected graph W has Metropolis weights (Xiao, Boyd, Kim: Distributed Average Consensus with
Least-Mean-Square Deviation, JPDC 2007): 1 / (1 + max(deg_i, deg_j)) on edges, the rest on the
diagonal. Every W here is doubly stochastic, (m, m), float64.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedaccord.core.options import listed

SLACK = 1e-6  # tolerance of the row sums of a matrix from a file
SCALINGS = 10_000  # of a restricted matrix; those of our graphs need at most 500


def mixing_matrix(topology: str, m: int, *, t: int, seed: int, peers: int, file: str) -> Tensor:
    """W (m, m), float64, of round t.

    Raises ValueError, in one line, if m nodes do not fit the topology or the file.
    """
    if topology == "file":
        return read(file, m)
    if topology == "exponential-directed":
        hops = _hops(m)
        receives = circulant(m, hops).T  # i sends to i + hop
        return (torch.eye(m, dtype=torch.float64) + receives) / (1 + len(hops))
    if topology == "random":
        return metropolis(random_graph(m, peers, random.Random(f"gossip {seed} {t}")))
    return metropolis(_GRAPHS[topology](m))


# --- graphs: adjacency (m, m), bool, no loops -----------------------------------------------------


def circulant(m: int, hops: Iterable[int]) -> Tensor:
    """i -> i + hop, modulo m."""
    graph = torch.zeros(m, m, dtype=torch.bool)
    for hop in hops:
        graph[torch.arange(m), (torch.arange(m) + hop) % m] = True
    return graph.fill_diagonal_(False)


def ring(m: int) -> Tensor:
    return circulant(m, [1, -1])


def _hops(m: int) -> list[int]:
    """1, 2, 4, ... below m."""
    return [1 << k for k in range(math.ceil(math.log2(m)))] if m > 1 else []


def exponential(m: int) -> Tensor:
    return circulant(m, [hop for h in _hops(m) for hop in (h, -h)])


def lattice(m: int, wrap: bool) -> Tensor:
    """Rows x columns, as square as m allows; ``wrap``: periodic borders.

    Raises ValueError if m is a prime.
    """
    name = "torus" if wrap else "grid"
    rows = next(r for r in range(math.isqrt(m), 0, -1) if m % r == 0)
    if rows == 1 and m > 3:
        raise ValueError(
            f"gossip.topology: expected a number of nodes with factors for {name!r}, got {m}; "
            "use ring or exponential, or another number of nodes"
        )
    node = torch.arange(m).view(rows, -1)
    graph = torch.zeros(m, m, dtype=torch.bool)
    for axis in (0, 1):
        beside = node.roll(-1, axis)
        if not wrap:
            last = node.shape[axis] - 1
            graph[node.narrow(axis, 0, last), beside.narrow(axis, 0, last)] = True
        else:
            graph[node, beside] = True
    return (graph | graph.T).fill_diagonal_(False)


def random_graph(m: int, peers: int, generator: random.Random) -> Tensor:
    """Each node draws ``peers`` other nodes (0: min(10, m/2)); links are undirected.

    Raises ValueError, in one line, if there are not so many other nodes.
    """
    k = peers or min(10, m // 2)
    if k >= m:
        raise ValueError(
            f"gossip.peers: expected fewer than the {m} nodes, got {k}; lower it or use full"
        )
    graph = torch.zeros(m, m, dtype=torch.bool)
    for i in range(m):
        others = [j for j in range(m) if j != i]
        graph[i, generator.sample(others, k)] = True
    return graph | graph.T


_GRAPHS: dict[str, Callable[[int], Tensor]] = {
    "ring": ring,
    "grid": lambda m: lattice(m, wrap=False),
    "torus": lambda m: lattice(m, wrap=True),
    "exponential": exponential,
    "full": lambda m: ~torch.eye(m, dtype=torch.bool),
}


def read(file: str, m: int) -> Tensor:
    """W from JSON: ``{"edges": [[0, 1], ...]}``, undirected, or ``{"matrix": [[...], ...]}``.

    Raises ValueError, in one line, if the file cannot be read, has other content, or does not fit m
    nodes.
    """
    if not Path(file).is_absolute():
        raise ValueError(f"gossip.file: expected an absolute path with topology file, got {file!r}")
    try:
        if Path(file).exists() and not Path(file).is_file():  # a pipe would block
            raise ValueError("not a file")
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        (kind, values), *more = content.items()
        array = torch.tensor(values, dtype=torch.float64)
        if more or kind not in ("edges", "matrix") or array.ndim != 2:
            raise ValueError("another layout")
        numbers = [number for row in values for number in row]
    except OSError as error:
        raise ValueError(f"gossip.file: cannot read {file} ({error.strerror})") from None
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError):
        raise ValueError(
            f'gossip.file: expected {{"edges": [[0, 1], ...]}} or {{"matrix": [[...], ...]}} in '
            f"{file}, got something else"
        ) from None
    kinds = (int,) if kind == "edges" else (int, float)
    if wrong := [v for v in numbers if type(v) not in kinds or not math.isfinite(v)]:
        wanted = "numbers of nodes" if kind == "edges" else "finite numbers"
        raise ValueError(f"gossip.file: expected {wanted} in {file}, got {json.dumps(wrong[0])}")
    if kind == "edges":
        W = metropolis(_from_edges(array.long(), m, file))
    else:
        if tuple(array.shape) != (m, m):
            raise ValueError(
                f"gossip.file: expected a row and a column for each of {m} nodes in {file}, got a "
                f"matrix of {len(array)} x {array.shape[1]}"
            )
        W = array
    return W


def _from_edges(edges: Tensor, m: int, file: str) -> Tensor:
    if edges.shape[1:] != (2,) or edges.min() < 0 or edges.max() >= m:
        raise ValueError(
            f"gossip.file: expected pairs of nodes 0..{m - 1} in {file}, got "
            f"{next(e for e in edges.tolist() if len(e) != 2 or min(e) < 0 or max(e) >= m)}"
        )
    graph = torch.zeros(m, m, dtype=torch.bool)
    graph[edges[:, 0], edges[:, 1]] = True
    return (graph | graph.T).fill_diagonal_(False)


# --- mixing matrices ------------------------------------------------------------------------------


def metropolis(graph: Tensor) -> Tensor:
    """W of an undirected graph: 1 / (1 + max(deg_i, deg_j)) on edges, the rest on the diagonal."""
    degree = graph.sum(1)
    W = graph / (1.0 + torch.maximum(degree[:, None], degree[None, :]).double())
    return W + torch.diag(1 - W.sum(1))


def check(W: Tensor) -> None:
    """Raise ValueError, in one line, unless W is doubly stochastic and its powers connect all
    nodes."""
    if (W < 0).any():
        row = int((W < 0).any(1).nonzero()[0])
        raise ValueError(
            f"gossip: expected a mixing matrix without negative weights, got row {row}"
            f" with {W[row].min():g}"
        )
    for name, sums in (("row", W.sum(1)), ("column", W.sum(0))):
        wrong = ((sums - 1).abs() > SLACK).nonzero()
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"gossip: expected rows and columns of the mixing matrix that sum to 1, got "
                f"{name} {i} with sum {sums[i]:g}"
            )
    if len(parts := components(W)) > 1:
        raise ValueError(
            f"gossip: expected a connected graph, got {len(parts)} parts, one of them nodes "
            f"{parts[-1]}; add edges between them"
        )
    if (every := period(W)) > 1:
        raise ValueError(
            "gossip: expected a mixing matrix with which all models meet, got one whose power "
            f"{every} has {every} parts without links; give a node a weight of its own"
        )


def components(W: Tensor) -> list[list[int]]:
    """The strongly connected components of W's graph."""
    links, left, parts = W != 0, torch.ones(len(W), dtype=torch.bool), []
    back = links.T.contiguous()
    while left.any():
        first = int(left.nonzero()[0])
        part = _reached(links, first) & _reached(back, first)
        parts.append(part.nonzero().flatten().tolist())
        left &= ~part
    return parts


def _reached(links: Tensor, first: int) -> Tensor:
    """(m,) the nodes that paths from one lead to, itself too: each row is read once."""
    reached = torch.zeros(len(links), dtype=torch.bool)
    reached[first] = True
    latest = reached
    while latest.any():
        latest = links[latest].any(0) & ~reached
        reached = reached | latest
    return reached


def period(W: Tensor) -> int:
    """The greatest common divisor of the lengths of the cycles of W's graph, which is strongly
    connected; 1: some power of W has no zeros."""
    if W.diagonal().any():
        return 1
    links = W != 0
    depth, latest, steps = torch.full((len(W),), -1), torch.zeros(len(W), dtype=torch.bool), 0
    latest[0] = True
    while latest.any():
        depth[latest] = steps
        latest, steps = links[latest].any(0) & (depth < 0), steps + 1
    begins, ends = links.nonzero().T
    return math.gcd(*(depth[begins] + 1 - depth[ends]).unique().tolist())


def spectral_gap(W: Tensor) -> float:
    """1 - ||W - 11^T/m||, by which a gossip step shrinks the distance to consensus at least."""
    if torch.equal(W, W.T):  # a fraction of the time of the singular values
        return 1 - float(torch.linalg.eigvalsh(W - 1 / len(W)).abs().max())
    return 1 - float(torch.linalg.matrix_norm(W - 1 / len(W), ord=2))


def restricted(W: Tensor, nodes: Sequence[int]) -> Tensor:
    """W of these nodes alone, doubly stochastic again, without new links.

    A symmetric W keeps its weights, and the weights of absent nodes move to the diagonal. Else rows
    and columns are scaled in turn (Sinkhorn, Knopp 1967), without links that are on no cycle.
    Raises ValueError, in one line, if that does not converge.
    """
    W = W[nodes][:, nodes]
    if torch.equal(W, W.T):
        return W + torch.diag(1 - W.sum(1))
    block = torch.zeros_like(W)
    for part in components(W):
        block[torch.tensor(part)[:, None], part] = W[torch.tensor(part)[:, None], part]
    block += torch.diag((block.diagonal() == 0).double())  # scaling needs a diagonal
    for _ in range(SCALINGS):
        if (block.sum(1) - 1).abs().max() <= 1e-13:
            return block
        block /= block.sum(1, keepdim=True)
        block /= block.sum(0, keepdim=True)
    raise ValueError(
        f"gossip: expected weights of the nodes {listed(nodes)} that can be scaled to sums of 1, "
        "as some are absent, got weights of very different size: give the matrix larger ones"
    )

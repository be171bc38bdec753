"""Graphs of nodes and their mixing matrices: doubly stochastic, connected, of the known gaps."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaccord.engine import History
from fedaccord.federation.round import Round
from fedaccord.plugins._topologies import (
    check,
    circulant,
    components,
    period,
    restricted,
    spectral_gap,
)
from fedaccord.plugins.gossip import TOPOLOGIES, Gossip, GossipTopology
from fedaccord.strategies import DFedAvg
from tests import federation
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import close

M = 8
LEAST_SQUARES = LeastSquares(M, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)


def matrix(topology: str, m: int, t: int = 0, **more: Any) -> torch.Tensor:
    return Gossip(topology=topology, **more).matrix(m, t, seed=0)


# --- graphs and matrices --------------------------------------------------------------------------


@given(topology=st.sampled_from(TOPOLOGIES), m=st.integers(1, 40))
@settings(max_examples=200)
def test_every_matrix_is_doubly_stochastic_and_connected(topology: str, m: int) -> None:
    prime = m > 3 and all(m % r for r in range(2, m))
    if topology in ("grid", "torus") and prime:
        with pytest.raises(ValueError, match=f"got {m}"):
            matrix(topology, m)
        return
    W = matrix(topology, m)
    close(W.sum(0), torch.ones(m, dtype=torch.float64), 1e-14)
    close(W.sum(1), torch.ones(m, dtype=torch.float64), 1e-14)
    assert (W >= 0).all()
    assert (W.diagonal() > 0).all()
    if topology != "exponential-directed":
        assert torch.equal(W, W.T)
    if topology != "random":
        check(W)
        assert m == 1 or 0 < spectral_gap(W) <= 1 + 1e-12


def test_random_graphs_come_from_seed_and_round() -> None:
    assert torch.equal(matrix("random", 12, t=3), matrix("random", 12, t=3))
    assert not torch.equal(matrix("random", 12, t=3), matrix("random", 12, t=4))
    other_seed = Gossip(topology="random").matrix(12, 3, seed=1)
    assert not torch.equal(matrix("random", 12, t=3), other_seed)
    peers = (matrix("random", 12, peers=3) != 0).sum(1) - 1
    assert peers.min() >= 3  # its own draws, and those who drew it


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_restricted_matrix_keeps_links_and_is_doubly_stochastic(topology: str) -> None:
    W, nodes = matrix(topology, 16), [0, 1, 3, 4, 5, 8, 10, 12, 15]
    rest = restricted(W, nodes)
    ones = torch.ones(len(nodes), dtype=torch.float64)
    close(rest.sum(0), ones, 1e-12)
    close(rest.sum(1), ones, 1e-12)
    assert not (rest[W[nodes][:, nodes] == 0]).any()
    if topology != "exponential-directed":
        off = ~torch.eye(len(nodes), dtype=torch.bool)
        assert torch.equal(rest[off], W[nodes][:, nodes][off])


def test_a_restricted_matrix_with_links_that_lie_on_no_cycle() -> None:
    """They cannot be part of a doubly stochastic matrix; scaling alone would take forever."""
    W = (torch.eye(4) + torch.eye(4).roll(1, 1)).double() / 2  # 0 -> 1 -> 2 -> 3 -> 0
    assert torch.equal(restricted(W, [0, 1, 2]), torch.eye(3, dtype=torch.float64))
    ring = torch.eye(4).roll(1, 1).double()  # the same without self-loops
    assert torch.equal(restricted(ring, [0, 1, 2]), torch.eye(3, dtype=torch.float64))


def test_a_restricted_matrix_with_links_that_are_too_weak() -> None:
    pair = torch.tensor([[0.5, 0.5 - 1e-7], [0.5 - 1e-7, 0.5]], dtype=torch.float64)
    bridge = torch.tensor([[1e-7, 0], [0, 1e-7]], dtype=torch.float64)
    W = torch.cat([torch.cat([pair, bridge], 1), torch.cat([bridge.flip(0), pair], 1)])
    check(W)
    with pytest.raises(
        ValueError, match=r"^gossip: expected weights of the nodes \[0, 1, 2\] that"
    ):
        restricted(W, [0, 1, 2])


# --- from a file ----------------------------------------------------------------------------------


def uneven(**change: float) -> list[list[float]]:
    """All 1/M but for row 5, by column."""
    W: list[list[float]] = torch.full((M, M), 1 / M).tolist()
    for column, by in change.items():
        W[5][int(column[1:])] += by
    return W


RING_ALONE = (torch.eye(M).roll(1, 1) + torch.eye(M).roll(-1, 1)).div(2).tolist()
THREE_OR_FIVE = (torch.eye(M).roll(3, 1) + torch.eye(M).roll(5, 1)).div(2).tolist()  # directed
ONE_WAY = (torch.eye(M) * 0.5 + torch.eye(M)[[1, 2, 3, 0, 5, 6, 7, 4]] * 0.5).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"edges": [[0, 1], [2, 3]]}, r"expected a connected graph, got 6 parts"),
        ({"edges": [[0, 1], [1, 8]]}, r"expected pairs of nodes 0..7 .* got \[1, 8\]"),
        ({"edges": [[0, 1, 1]]}, r"expected pairs of nodes"),
        ({"edges": [[0, 1.5]]}, r"expected numbers of nodes in .*, got 1\.5$"),
        ({"edges": [[0, True]]}, r"expected numbers of nodes in .*, got true$"),
        ({"matrix": [[float("nan")] * 8] * 8}, r"expected finite numbers in .*, got NaN$"),
        ({"matrix": [[False] * 8] * 8}, r"expected finite numbers in .*, got false$"),
        ({"matrix": uneven(c2=0.01)}, r"got row 5 with sum 1.01"),
        ({"matrix": uneven(c2=0.01, c3=-0.01)}, r"got column 2 with sum 1.01"),
        ({"matrix": (2 * torch.eye(M) - 1 / M).tolist()}, r"negative weights, got row 0"),
        ({"matrix": ONE_WAY}, r"connected graph, got 2 parts, one of them nodes \[4, 5, 6, 7\]"),
        ({"matrix": RING_ALONE}, r"all models meet, got one whose power 2 has 2 parts"),
        ({"matrix": THREE_OR_FIVE}, r"all models meet, got one whose power 2 has"),
        ({"matrix": torch.eye(M).roll(1, 1).tolist()}, r"got one whose power 8 has 8 parts"),
        ({"matrix": [[1.0]]}, r"a row and a column for each of 8 nodes .* 1 x 1"),
        ({"weights": [[1.0]]}, r"got something else"),
        ([[0, 1]], r"got something else"),
    ],
)
def test_a_graph_from_a_file(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(content))
    gossip = Gossip(topology="file", file=str(file))
    with pytest.raises(ValueError, match=message):
        GossipTopology(gossip, seed=0).facts(M)


@pytest.mark.parametrize("hops", [(1, 2), (1, 4), (3, 6), (1, -1), (2, -2, 1), (1, 3, 5)])
@pytest.mark.parametrize("m", [5, 6, 7, 8, 12])
def test_the_period_of_a_graph(hops: tuple[int, ...], m: int) -> None:
    """With 1 some power has no zero; else the power of that number is the first with parts."""
    W = circulant(m, hops).double()
    W /= W.sum(1)
    if len(components(W)) > 1:
        return
    number = period(W)
    if number == 1:
        assert (torch.linalg.matrix_power(W, m * m) > 0).all()
    else:
        parts = [len(components(torch.linalg.matrix_power(W, k))) for k in range(1, number + 1)]
        assert parts[-1] == number > max(parts[:-1])


def test_files_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"edges": [[i, (i + 1) % M] for i in range(M)]}))
    ring = matrix("ring", M)
    assert torch.equal(matrix("file", M, file=str(file)), ring)
    file.write_text(json.dumps({"matrix": ring.tolist()}))
    assert torch.equal(matrix("file", M, file=str(file)), ring)
    with pytest.raises(ValueError, match="cannot read"):
        matrix("file", M, file=str(tmp_path / "nothing.json"))
    os.mkfifo(pipe := tmp_path / "pipe")  # to read it would block
    with pytest.raises(ValueError, match="got something else"):
        matrix("file", M, file=str(pipe))


def test_the_file_of_a_graph_is_read_once_a_run(tmp_path: Path) -> None:
    """If it changes meanwhile, the rounds have the graph of the start."""
    file = tmp_path / "graph.json"

    def run(**keys: Any) -> History:
        ring = [[i, (i + 1) % M] for i in range(M)]
        file.write_text(json.dumps({"edges": ring}))
        graph = {"gossip.topology": "file", "gossip.file": str(file)}
        schedule = problem.everyone(M, 3)
        return federation.run("dfedavg", LEAST_SQUARES, W0, schedule, **graph, **keys)

    def change(round: Round) -> None:
        file.write_text(json.dumps({"edges": [[i, j] for i in range(M) for j in range(i)]}))

    unchanged, changed = run(), run(on_round=change)
    assert "[7, 6]" in file.read_text()
    assert torch.equal(changed.weights, unchanged.weights)
    assert changed.metrics["spectral-gap"].equals(unchanged.metrics["spectral-gap"])


def test_a_method_reads_the_file_of_a_graph_anew_for_each_run(tmp_path: Path) -> None:
    """Also if a run begins while another one has not ended."""
    file = tmp_path / "graph.json"
    plain: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "batch_size": 0}
    method = DFedAvg(
        **{"clip_norm": 0.0, "precision": "float64", "local_steps": 2, **plain},
        plugins=(Gossip(topology="file", file=str(file)),),
    )

    def gaps(edges: list[list[int]], **keys: Any) -> list[float]:
        file.write_text(json.dumps({"edges": edges}))
        history = federation.run(method, LEAST_SQUARES, W0, problem.everyone(M, 2), **keys)
        return [*history.metrics["spectral-gap"][1:]]

    others: list[float] = []

    def begin_another(round: Round) -> None:
        if not others:
            others.extend(gaps([[i, j] for i in range(M) for j in range(i)]))

    ring = gaps([[i, (i + 1) % M] for i in range(M)], on_round=begin_another)
    assert ring[0] == ring[1] < 0.2
    assert others == [pytest.approx(1)] * 2


def test_components() -> None:
    W = torch.eye(5)
    W[0, 1] = W[1, 2] = W[2, 0] = W[3, 4] = 1
    assert components(W) == [[0, 1, 2], [3], [4]]


def test_a_matrix_beyond_memory_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^gossip: expected at most 10000 nodes, .* got 1000000$"):
        Gossip().matrix(10**6, 0, 0)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_components_are_the_nodes_that_reach_each_other(share: float) -> None:
    links = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) < share
    reach = torch.linalg.matrix_power((links | torch.eye(20, dtype=torch.bool)).double(), 20) > 0
    both = (reach & reach.T).unique(dim=0).tolist()
    assert sorted([i for i in range(20) if row[i]] for row in both) == components(links.double())


def test_the_spectral_gap_of_a_symmetric_matrix_is_that_of_its_singular_values() -> None:
    W = matrix("grid", 12)
    gap = 1 - float(torch.linalg.matrix_norm(W - 1 / 12, ord=2))
    assert spectral_gap(W) == pytest.approx(gap, abs=1e-14)

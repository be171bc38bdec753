"""Graphs, mixing matrices, and the decentralised round on top of them."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.engine import History
from fedaccord.strategies.base import FederatedStrategy
from fedaccord.strategies.gossip import (
    TOPOLOGIES,
    Gossip,
    Network,
    among,
    check,
    consensus_distance,
    parts,
    spectral_gap,
)
from tests.federation import run
from tests.reference import problem
from tests.reference.problem import LeastSquares

M = 8
LEAST_SQUARES = LeastSquares(M, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)


def matrix(topology: str, m: int, t: int = 0, **more: Any) -> torch.Tensor:
    return Gossip(topology=topology, **more).matrix(m, t, seed=0)


# --- graphs and matrices --------------------------------------------------------------------------


@given(topology=st.sampled_from(TOPOLOGIES), m=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_matrix_is_doubly_stochastic_and_connected(topology: str, m: int) -> None:
    prime = m > 3 and all(m % r for r in range(2, m))
    if topology in ("grid", "torus") and prime:
        with pytest.raises(ValueError, match=f"got {m}"):
            matrix(topology, m)
        return
    W = matrix(topology, m)
    torch.testing.assert_close(W.sum(0), torch.ones(m, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(W.sum(1), torch.ones(m, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (W >= 0).all()
    assert (W.diagonal() > 0).all()
    if topology != "exponential-directed":
        assert torch.equal(W, W.T)
    if topology != "random":
        check(W)
        assert m == 1 or 0 < spectral_gap(W) <= 1 + 1e-12


@pytest.mark.parametrize("m", [4, 5, 8, 16, 64, 100])
def test_the_gaps_that_theory_gives(m: int) -> None:
    ring = 2 / 3 * (1 - math.cos(2 * math.pi / m))
    assert spectral_gap(matrix("ring", m)) == pytest.approx(ring, abs=1e-12)
    assert spectral_gap(matrix("full", m)) == pytest.approx(1, abs=1e-12)
    if m % 2 == 0:
        directed = 2 / (1 + math.ceil(math.log2(m)))
        gap = spectral_gap(matrix("exponential-directed", m))
        assert gap == pytest.approx(directed, abs=1e-12)
    if m in (16, 64, 100):  # r x r torus
        r = math.isqrt(m)
        torus = (2 - 2 * math.cos(2 * math.pi / r)) / 5
        assert spectral_gap(matrix("torus", m)) == pytest.approx(torus, abs=1e-12)


def test_a_grid_is_as_square_as_it_can_be() -> None:
    W = matrix("grid", 6)  # 0 1 2 / 3 4 5
    neighbours = [row.nonzero().flatten().tolist() for row in W.fill_diagonal_(0)]
    assert neighbours == [[1, 3], [0, 2, 4], [1, 5], [0, 4], [1, 3, 5], [2, 4]]


def test_random_graphs_come_from_seed_and_round() -> None:
    assert torch.equal(matrix("random", 12, t=3), matrix("random", 12, t=3))
    assert not torch.equal(matrix("random", 12, t=3), matrix("random", 12, t=4))
    other_seed = Gossip(topology="random").matrix(12, 3, seed=1)
    assert not torch.equal(matrix("random", 12, t=3), other_seed)
    peers = (matrix("random", 12, peers=3) != 0).sum(1) - 1
    assert peers.min() >= 3  # its own draws, and those who drew it


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_among_keeps_links_and_is_doubly_stochastic(topology: str) -> None:
    W, nodes = matrix(topology, 16), [0, 1, 3, 4, 5, 8, 10, 12, 15]
    rest = among(W, nodes)
    ones = torch.ones(len(nodes), dtype=torch.float64)
    torch.testing.assert_close(rest.sum(0), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(rest.sum(1), ones, rtol=0, atol=1e-12)
    assert not (rest[W[nodes][:, nodes] == 0]).any()
    if topology != "exponential-directed":
        off = ~torch.eye(len(nodes), dtype=torch.bool)
        assert torch.equal(rest[off], W[nodes][:, nodes][off])


def test_among_with_links_that_lie_on_no_cycle() -> None:
    """They cannot be part of a doubly stochastic matrix; scaling alone would take forever."""
    W = (torch.eye(4) + torch.eye(4).roll(1, 1)).double() / 2  # 0 -> 1 -> 2 -> 3 -> 0
    assert torch.equal(among(W, [0, 1, 2]), torch.eye(3, dtype=torch.float64))


# --- one gossip step ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_mixing_is_the_matrix_power_in_place(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.strategies.gossip.CHUNK", 30)  # three columns at a time
    W, x = matrix("grid", 10), torch.randn(10, 11, dtype=torch.float64)
    expected = np.linalg.matrix_power(W.numpy(), steps) @ x.numpy()
    network = Network(W, steps)
    mixed = network.mix(x)
    assert mixed.data_ptr() == x.data_ptr()
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert network.sent == steps * 2 * 13  # links of a 2 x 5 grid, each way


def test_peers_send_over_the_links_that_leave_them() -> None:
    W = torch.tensor([[0, 1, 0], [0.5, 0, 0.5], [0.5, 0, 0]])  # 0 sends to 1 and 2
    network = Network(W, 1)
    network.send(torch.tensor([1.0, 0.5, 0.25]))
    assert network.sent == 2 * 1 + 0.5 + 0.25


def test_mixing_takes_a_small_constant_of_memory() -> None:
    x = torch.randn(16, 200_000)
    with torch.profiler.profile(profile_memory=True) as profile:
        Network(matrix("ring", 16), 4).mix(x)
    events = [e.self_cpu_memory_usage for e in profile.events()]
    assert max(events) <= 2 * 4 * (1 << 18)  # a chunk, of x's 12.8 MB


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_consensus_contracts_at_the_rate_of_the_gap(topology: str) -> None:
    """And exactly so along the slowest direction."""
    W = matrix(topology, 16)
    x = torch.randn(16, 50, dtype=torch.float64)
    mean, before = x.mean(0), consensus_distance(x)
    Network(W, 1).mix(x)
    rate = (1 - spectral_gap(W)) ** 2
    assert consensus_distance(x) <= rate * before + 1e-12
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)

    _, _, directions = torch.linalg.svd(W - 1 / 16)
    slow = directions[:1].T.clone()
    before = consensus_distance(slow)
    Network(W, 1).mix(slow)
    assert consensus_distance(slow) == pytest.approx(rate * before, abs=1e-12)


# --- rounds ---------------------------------------------------------------------------------------


def federate(strategy: str | FederatedStrategy, rounds: int = 6, **more: Any) -> History:
    more = {"local_steps": 4} | more
    return run(strategy, LEAST_SQUARES, W0, problem.everyone(M, rounds), **more)


LINEAR = [
    name
    for name, kind in S.METHODS.items()
    if "Gossip" not in kind.refuses and not issubclass(kind, S.DFedAvg)
]


@pytest.mark.parametrize("algo", LINEAR)
def test_many_steps_on_a_connected_graph_are_a_server(algo: str) -> None:
    """For every method that takes gossip, memory of the server included."""
    more = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05}
    served = federate(algo, **more)
    gossip = {"gossip.topology": "grid", "gossip.steps": 2000}
    mixed = federate(algo, **more, **gossip)
    for i in range(M):
        np.testing.assert_allclose(mixed.weights[:, i], served.weights, rtol=1e-10, atol=1e-10)
    for a, b in zip(served.clients, mixed.clients, strict=True):
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


SAME: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "a full graph is a server": (
        *("dfedavg", {"gossip.topology": "full"}),
        *("fedavg", {"fraction_train": 1.0}),
    ),
    "with SAM too": (
        *("dfedsam", {"gossip.topology": "full", "sam.rho": 0.05}),
        *("fedsam", {"sam.rho": 0.05}),
    ),
    "no radius, no SAM": ("dfedsam", {"sam.rho": 0}, "dfedavg", {}),
    "no momentum": ("dfedavgm", {"dfedavgm.momentum": 0.0}, "dfedavg", {}),
    "one step of many": ("dfedsam-mgs", {"gossip.steps": 1}, "dfedsam", {}),
    "adapt, then combine": (
        *("dpsgd", {"dpsgd.variant": "atc", "local_steps": 0}),
        *("dfedavg", {"local_steps": 1}),
    ),
    "masks of ones on a full graph": (
        *("dispfl", {"gossip.topology": "full", "dispfl.density": 1.0}),
        *("fedavg", {"fraction_train": 1.0}),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_identities(name: str) -> None:
    a, more_a, b, more_b = SAME[name]
    common = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05, "clip_norm": 4.0}
    found, expected = federate(a, **(common | more_a)), federate(b, **(common | more_b))
    w = expected.weights if expected.weights.ndim == 3 else expected.weights[:, None]
    np.testing.assert_allclose(found.weights, w.expand(-1, M, -1), rtol=1e-10, atol=1e-10)


def test_many_gossip_steps_are_a_step_of_the_matrix_power(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    power = torch.linalg.matrix_power(matrix("grid", M), 3)
    file.write_text(json.dumps({"matrix": power.tolist()}))
    many = federate("dfedsam-mgs", **{"gossip.topology": "grid", "gossip.steps": 3})
    one = federate("dfedsam", **{"gossip.topology": "file", "gossip.file": str(file)})
    np.testing.assert_allclose(many.weights, one.weights, rtol=1e-10, atol=1e-10)


def test_gossip_scaffold_keeps_the_mean_of_its_control_variates() -> None:
    strategy = S.Scaffold(precision="float64", local_steps=4, batch_size=0, plugins=(Gossip(),))
    found = federate(strategy)
    c_i = torch.stack([state.c_i for state in found.clients])
    np.testing.assert_allclose(strategy.state.c.mean(0), c_i.mean(0), rtol=1e-10, atol=1e-12)
    assert strategy.state.c.std(0).min() > 1e-6  # the nodes' own


def test_metrics_of_a_round() -> None:
    found = federate("dfedavg", **{"gossip.topology": "ring", "gossip.steps": 2})
    d, last = LEAST_SQUARES.dim, found.metrics.iloc[-1]
    assert found.weights.shape == (7, M, d)
    assert found.averages.shape == (7, d)
    assert last["peer-vectors"] == 2 * M * 2  # links each way, steps
    assert last["peer-bytes"] == 2 * M * 2 * d * 8
    assert last["down-vectors"] == last["up-vectors"] == M
    assert last["spectral-gap"] == pytest.approx(0.1953, abs=1e-4)
    assert last["consensus-after"] == pytest.approx(consensus_distance(found.weights[-1]))
    assert last["consensus-before"] > last["consensus-after"]
    np.testing.assert_allclose(found.averages[-1], found.weights[-1].mean(0), atol=1e-12)
    np.testing.assert_allclose(found.model["weight"][0], found.averages[-1], atol=1e-12)


def test_nodes_and_generalisation_gap_are_evaluated() -> None:
    found = simulate(
        "dfedavg", rounds=2, num_clients=4, local_epochs=1, **{"eval-train": True, "threads": 1}
    ).metrics
    last, first = found.iloc[-1], found.iloc[0]
    assert 0 < last["test-accuracy-nodes"] < 1
    assert last["test-accuracy-nodes-std"] > 0
    gap = last["train-accuracy"] - last["test-accuracy"]
    assert last["generalisation-gap"] == pytest.approx(gap)
    assert math.isnan(first["test-accuracy-nodes"])  # all the same before round 1
    off = simulate("dfedavg", rounds=1, num_clients=4, **{"gossip.eval-nodes": False}).metrics
    assert not any("nodes" in column for column in off)


def test_an_absent_node_keeps_its_model(caplog: pytest.LogCaptureFixture) -> None:
    schedule = [range(M), [0, 1, 2, 4, 5, 6, 7], range(M)]
    with caplog.at_level(logging.WARNING, "flwr"):
        found = run("dfedavg", LEAST_SQUARES, W0, schedule, local_steps=4)
    assert "round 2: nodes [3] did not answer and keep their models" in caplog.text
    assert torch.equal(found.weights[2, 3], found.weights[1, 3])
    assert not torch.equal(found.weights[3, 3], found.weights[2, 3])
    assert found.metrics["replies"].tolist()[1:] == [8, 7, 8]
    # the ring is a path then: its links keep their weights, in both directions
    assert found.metrics["peer-vectors"].tolist()[1:] == [16, 12, 16]


# --- bad input ------------------------------------------------------------------------------------


def fails(message: str, **gossip: Any) -> None:
    with pytest.raises(ValueError, match=message):
        federate("dfedavg", **{f"gossip.{key}": value for key, value in gossip.items()})


def test_settings_out_of_range() -> None:
    fails("gossip.steps: expected at least 1, got 0", steps=0)
    fails("gossip.topology: expected one of", topology="star")
    fails("gossip.peers: expected fewer than the 8 nodes, got 8", topology="random", peers=8)
    fails("expected a graph for DFedAvg, got none", topology="none")
    fails("gossip.file: expected an absolute path", topology="file")
    seven = LeastSquares(7, seed=0)
    for topology in ("grid", "torus"):
        with pytest.raises(ValueError, match=f"factors for '{topology}', got 7"):
            run("dfedavg", seven, W0, problem.everyone(7, 1), **{"gossip.topology": topology})
    with pytest.raises(ValueError, match="weighting: expected uniform with gossip"):
        federate("dfedavg", weighting="examples")
    with pytest.raises(ValueError, match="local-steps: dpsgd takes one step a round, got 4"):
        federate("dpsgd")
    with pytest.raises(ValueError, match="expected 1 with dispfl, got 2"):
        federate("dispfl", **{"gossip.steps": 2})


def uneven(**change: float) -> list[list[float]]:
    """All 1/M but for row 5, by column."""
    W: list[list[float]] = torch.full((M, M), 1 / M).tolist()
    for column, by in change.items():
        W[5][int(column[1:])] += by
    return W


ONE_WAY = (torch.eye(M) * 0.5 + torch.eye(M)[[1, 2, 3, 0, 5, 6, 7, 4]] * 0.5).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"edges": [[0, 1], [2, 3]]}, r"expected a connected graph, got 6 parts"),
        ({"edges": [[0, 1], [1, 8]]}, r"expected pairs of nodes 0..7 .* got \[1, 8\]"),
        ({"edges": [[0, 1, 1.0]]}, r"expected pairs of nodes"),
        ({"matrix": uneven(c2=0.01)}, r"got row 5 with sum 1.01"),
        ({"matrix": uneven(c2=0.01, c3=-0.01)}, r"got column 2 with sum 1.01"),
        ({"matrix": (2 * torch.eye(M) - 1 / M).tolist()}, r"negative weights, got row 0"),
        ({"matrix": ONE_WAY}, r"connected graph, got 2 parts, one of them nodes \[4, 5, 6, 7\]"),
        ({"matrix": [[1.0]]}, r"a row and a column for each of 8 nodes .* 1 x 1"),
        ({"weights": [[1.0]]}, r"got something else"),
        ([[0, 1]], r"got something else"),
    ],
)
def test_a_graph_from_a_file(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(content))
    fails(message, topology="file", file=str(file))


def test_files_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"edges": [[i, (i + 1) % M] for i in range(M)]}))
    ring = matrix("ring", M)
    assert torch.equal(matrix("file", M, file=str(file)), ring)
    file.write_text(json.dumps({"matrix": ring.tolist()}))
    assert torch.equal(matrix("file", M, file=str(file)), ring)
    with pytest.raises(ValueError, match="cannot read"):
        matrix("file", M, file=str(tmp_path / "nothing.json"))


def test_parts() -> None:
    W = torch.eye(5)
    W[0, 1] = W[1, 2] = W[2, 0] = W[3, 4] = 1
    assert parts(W) == [[0, 1, 2], [3], [4]]

"""Gossip: one step of it, what a round says of it, who is absent, and what it refuses."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from fedaccord import simulate
from fedaccord.engine import History
from fedaccord.plugins._topologies import spectral_gap
from fedaccord.plugins.gossip import CHUNK, TOPOLOGIES, Gossip, Network, consensus_distance
from tests import federation
from tests.fake_mps import fake_mps
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.reference.topology import without
from tests.strategies.federate import close

M = 8
LEAST_SQUARES = LeastSquares(M, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)


def matrix(topology: str, m: int, t: int = 0, **more: Any) -> torch.Tensor:
    return Gossip(topology=topology, **more).matrix(m, t, seed=0)


# --- one gossip step ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_mixing_is_a_product_with_the_matrix_power(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.plugins.gossip.CHUNK", 30)  # three columns at a time
    W, x = matrix("grid", 10), torch.randn(10, 11, dtype=torch.float64)
    before, network = x.clone(), Network(W, steps)
    mixed = network.mix(x)
    expected = np.linalg.matrix_power(W.numpy(), steps) @ x.numpy()
    np.testing.assert_allclose(mixed.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, before)
    assert network.sent == steps * 2 * 13  # links of a 2 x 5 grid, each way


def test_peers_send_over_the_links_that_leave_them() -> None:
    W = torch.tensor([[0, 1, 0], [0.5, 0, 0.5], [0.5, 0, 0]])  # 0 sends to 1 and 2
    network = Network(W, 1)
    network.send(torch.tensor([1.0, 0.5, 0.25]))
    assert network.sent == 2 * 1 + 0.5 + 0.25


class Sizes(TorchFunctionMode):
    """Collects the sizes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
        return result


def test_a_gpu_without_float64_counts_and_measures_in_float32() -> None:
    with fake_mps():
        network = Network(torch.full((4, 4), 0.25, dtype=torch.float64), 1)
        network.send(torch.ones(4, device="mps"))
        distance = consensus_distance([torch.empty(10, device="mps") for _ in range(4)])
    assert isinstance(network.sent, torch.Tensor)
    assert network.sent.dtype == distance.dtype == torch.float32


def test_mixing_takes_a_small_constant_of_memory() -> None:
    """Beside its result, which is as large as what is mixed."""
    network, x = Network(matrix("ring", 16), 4), torch.randn(16, 100_000)
    with Sizes() as results:
        network.mix(x)
    assert [size for size in results.sizes if size > CHUNK] == [x.numel()]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_consensus_contracts_at_the_rate_of_the_gap(topology: str) -> None:
    """And exactly so along the slowest direction."""
    W = matrix(topology, 16)
    x = torch.randn(16, 50, dtype=torch.float64)
    mean, before = x.mean(0), float(consensus_distance(x))
    mixed = Network(W, 1).mix(x)
    rate = (1 - spectral_gap(W)) ** 2
    assert consensus_distance(mixed) <= rate * before + 1e-12
    close(mixed.mean(0), mean, 1e-12)

    _, _, directions = torch.linalg.svd(W - 1 / 16)
    slow = directions[:1].T.clone()
    before = float(consensus_distance(slow))
    after = float(consensus_distance(Network(W, 1).mix(slow)))
    assert after == pytest.approx(rate * before, abs=1e-12)


# --- rounds ---------------------------------------------------------------------------------------


def run(algo: str, rounds: int = 3, **keys: Any) -> History:
    keys = {"local_steps": 2} | keys
    return federation.run(algo, LEAST_SQUARES, W0, problem.everyone(M, rounds), **keys)


def test_the_gap_of_random_graphs_is_that_of_each_round() -> None:
    history = run("dfedavg", **{"gossip.topology": "random", "gossip.peers": 2})
    gaps = [spectral_gap(matrix("random", M, t, peers=2)) for t in range(3)]
    assert history.metrics["spectral-gap"].tolist()[1:] == pytest.approx(gaps)
    assert len({*gaps}) == 3


@pytest.mark.parametrize(("absent", "parts"), [([3], 1), ([3, 4], 1), ([1, 3, 6], 3)])
def test_absent_nodes_may_cut_the_graph_into_parts(
    absent: list[int], parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = [range(M), [i for i in range(M) if i not in absent]]
    with caplog.at_level(logging.WARNING, "flwr"):
        federation.run("dfedavg", LEAST_SQUARES, W0, schedule, local_steps=2)
    assert f"the others mix over the remaining graph, in {parts} part(s)" in caplog.text


def test_metrics_of_a_round() -> None:
    history = run("dfedavg", **{"gossip.topology": "ring", "gossip.steps": 2})
    d, last = LEAST_SQUARES.dim, history.metrics.iloc[-1]
    assert history.weights.shape == (4, M, d)
    assert history.averages.shape == (4, d)
    assert last["peer-vectors"] == 2 * M * 2  # links each way, steps
    assert last["peer-bytes"] == 2 * M * 2 * d * 8
    assert last["down-vectors"] == last["up-vectors"] == M
    assert last["spectral-gap"] == pytest.approx(0.1953, abs=1e-4)  # of one step
    facts = Gossip(topology="ring", steps=2).graph(seed=0).facts(M)["gossip"]
    assert facts["spectral-gap"] == last["spectral-gap"]
    assert last["consensus-after"] == pytest.approx(float(consensus_distance(history.weights[-1])))
    assert last["consensus-before"] > last["consensus-after"]
    W = Gossip(topology="ring").matrix(M, 2, seed=0)
    local = torch.linalg.solve(W @ W, history.weights[-1])  # what the nodes had before they mixed
    steps = (local - history.weights[-2]) ** 2  # of each node from its own model
    assert last["drift"] == pytest.approx(float(steps.sum(1).mean()))
    assert not {"consistency", "spread"} & {*last.index}  # of one server
    np.testing.assert_allclose(history.averages[-1], history.weights[-1].mean(0), atol=1e-12)
    np.testing.assert_allclose(history.model["weight"][0], history.averages[-1], atol=1e-12)


def test_nodes_and_generalisation_gap_are_evaluated() -> None:
    history = simulate(
        "dfedavg", rounds=2, num_clients=4, local_epochs=1, **{"eval-train": True, "threads": 1}
    ).metrics
    last, first = history.iloc[-1], history.iloc[0]
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
        history = federation.run("dfedavg", LEAST_SQUARES, W0, schedule, local_steps=2)
    assert "round 2: nodes [3] did not answer and keep their models" in caplog.text
    assert torch.equal(history.weights[2, 3], history.weights[1, 3])
    assert not torch.equal(history.weights[3, 3], history.weights[2, 3])
    assert history.metrics["replies"].tolist()[1:] == [8, 7, 8]
    # the ring is a path then: its links keep their weights, in both directions
    assert history.metrics["peer-vectors"].tolist()[1:] == [16, 12, 16]
    W = torch.from_numpy(without(matrix("ring", M).numpy(), [3]))
    others = [i for i in range(M) if i != 3]
    local = torch.linalg.solve(W, history.weights[2])  # before they mixed; node 3: as ever
    row = history.metrics.iloc[2]
    assert row["consensus-before"] == pytest.approx(float(consensus_distance(local)))
    assert row["spectral-gap"] == pytest.approx(spectral_gap(W[others][:, others]))


# --- bad input ------------------------------------------------------------------------------------


def fails(message: str, algo: str = "dfedavg", **keys: Any) -> None:
    with pytest.raises(ValueError, match=message):
        run(algo, 1, **keys)


def test_settings_out_of_range() -> None:
    fails("gossip.steps: expected at least 1, got 0", **{"gossip.steps": 0})
    fails("gossip.topology: expected one of", **{"gossip.topology": "star"})
    fails("expected a graph for DFedAvg, got none", **{"gossip.topology": "none"})
    fails("weighting: expected uniform with", weighting="examples")
    fails("local-steps: dpsgd takes one step a round, got 2", "dpsgd")
    fails("expected 1 with dispfl, got 2", "dispfl", **{"gossip.steps": 2})


def test_graphs_that_do_not_fit_the_nodes() -> None:
    fails(
        "gossip.peers: expected fewer than the 8 nodes, got 8",
        **{"gossip.topology": "random", "gossip.peers": 8},
    )
    fails("gossip.file: expected an absolute path", **{"gossip.topology": "file"})
    for topology in ("grid", "torus"):
        with pytest.raises(ValueError, match=f"factors for '{topology}', got 7"):
            Gossip(topology=topology).matrix(7, 0, seed=0)

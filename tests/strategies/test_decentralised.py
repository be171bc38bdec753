"""The methods without a server equal their dense references: every node's model and state."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins._topologies import spectral_gap
from fedaccord.strategies import Gossip
from tests import federation
from tests.reference import dfedavg, dpsgd, gossip_feddyn, gossip_scaffold, problem, topology
from tests.reference.gossip import GossipHistory
from tests.reference.problem import Array, LeastSquares
from tests.strategies.federate import client_vectors, close, federate

M, T, K = 8, 5, 3
LEAST_SQUARES = LeastSquares(M, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
SETTINGS: dict[str, Any] = {"lr": 0.05, "lr_decay": 0.95, "weight_decay": 0.05, "clip_norm": 5.0}
BETA, RADIUS = 0.15, 0.3
GRAPHS = {
    "ring": topology.ring,
    "grid": topology.grid,
    "torus": topology.torus,
    "exponential": topology.exponential,
    "exponential-directed": topology.exponential_directed,
    "full": topology.full,
}

Case = tuple[type[FederatedStrategy], ModuleType, dict[str, Any], dict[str, Any]]
METHODS: dict[str, Case] = {
    "DFedAvg": (S.DFedAvg, dfedavg, {}, {}),
    "DFedAvgM": (S.DFedAvgM, dfedavg, {"momentum": 0.6}, {}),
    "DPSGD lian": (S.DPSGD, dpsgd, {"variant": "lian"}, {"local_steps": 1}),
    "DPSGD atc": (S.DPSGD, dpsgd, {"variant": "atc"}, {"local_steps": 1}),
    "Scaffold": (S.Scaffold, gossip_scaffold, {"server_lr": 0.8}, {}),
    "FedDyn": (S.FedDyn, gossip_feddyn, {"alpha": 0.3}, {}),
}
STATES = {"Scaffold": "c_i", "FedDyn": "lam"}

# Each pair of (plug-ins, graph, batches, failing nodes) is in some row.
PAIRWISE = [
    ("none", "ring", False, False),
    ("none", "random", True, True),
    ("none", "exponential-directed", True, False),
    ("relaxed", "ring", True, True),
    ("relaxed", "exponential-directed", False, False),
    ("relaxed", "random", False, False),
    ("sam", "ring", True, False),
    ("sam", "exponential-directed", False, False),
    ("sam", "random", False, True),
    ("relaxed+sam", "ring", False, True),
    ("relaxed+sam", "exponential-directed", True, False),
    ("relaxed+sam", "random", True, False),
]


@pytest.mark.parametrize("m", [4, 6, 8, 9, 16])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_those_of_the_reference(name: str, m: int) -> None:
    W, expected = Gossip(topology=name).matrix(m, 0, 0), GRAPHS[name](m)
    close(W, expected, 1e-15)
    close(spectral_gap(W), topology.gap(expected), 1e-12)


def matrices(name: str, rounds: int = T) -> list[Array]:
    """The mixing matrix of every round; a random one is drawn by us and weighed by them."""
    if name != "random":
        return [GRAPHS[name](M)] * rounds
    matrices, gossip = [], Gossip(topology="random", peers=2)
    for t in range(rounds):
        linked = gossip.matrix(M, t, 0).numpy() != 0
        np.fill_diagonal(linked, False)
        matrices.append(topology.metropolis(linked))
    return matrices


def failures(rounds: int = T) -> list[list[int]]:
    """None, one and two nodes in turn; a node that fails returns."""
    rng = np.random.default_rng(4)
    return [sorted(rng.choice(M, size=t % 3, replace=False).tolist()) for t in range(rounds)]


def make(name: str, plugins: str, graph: str, **more: Any) -> FederatedStrategy:
    kind, _, own, theirs = METHODS[name]
    own_plugins: list[Any] = [Gossip(topology=graph, peers=2, steps=2)]
    if "relaxed" in plugins:
        own_plugins.append(S.RelaxedInit(beta=BETA))
    if "sam" in plugins:
        own_plugins.append(S.SAM(rho=RADIUS))
    common = {"precision": "float64", "local_steps": theirs.get("local_steps", K), "batch_size": 0}
    return kind(plugins=tuple(own_plugins), **(common | SETTINGS | own | more))


def expected_of(name: str, plugins: str, graph: str, rounds: int, **more: Any) -> GossipHistory:
    _, reference, own, theirs = METHODS[name]
    keys = {"local_steps": K, "gossip_steps": 2, **SETTINGS, **own, **theirs, **more}
    if "relaxed" in plugins:
        keys["ri_beta"] = BETA
    if "sam" in plugins:
        keys["sam_rho"] = RADIUS
    mixing = matrices(graph, rounds)
    expected: GossipHistory = reference.run(LEAST_SQUARES, W0, mixing, **keys)
    return expected


@pytest.mark.parametrize(
    ("plugins", "graph", "batched", "failing"),
    PAIRWISE,
    ids=[f"{p}-{g}{'-batches' * b}{'-failures' * f}" for p, g, b, f in PAIRWISE],
)
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_dense_reference(
    name: str, plugins: str, graph: str, batched: bool, failing: bool
) -> None:
    steps = METHODS[name][3].get("local_steps", K)
    batches = problem.minibatches(LEAST_SQUARES, T, steps, 5, seed=7) if batched else None
    failed = failures() if failing else None
    expected = expected_of(name, plugins, graph, T, batches=batches, failed=failed)
    schedule = present(failed, T)
    method = make(name, plugins, graph)
    history = federate(method, LEAST_SQUARES, W0, schedule, batches=batches)
    close(history.weights, expected.weights)
    close(history.averages, expected.averages)
    close([m["consensus-before"] for m in history.metrics], expected.before)
    close([m["consensus-after"] for m in history.metrics], expected.after)
    if name in STATES:
        close(client_vectors(history.clients, STATES[name]), expected.clients[STATES[name]])
    if "relaxed" in plugins:
        close(client_vectors(history.clients, "last"), expected.clients["last"])
    if name == "Scaffold":
        close(history.server[-1].c, expected.clients["c"])


def present(failed: list[list[int]] | None, rounds: int) -> list[list[int]]:
    absent = failed or [[]] * rounds
    return [[i for i in range(M) if i not in absent[t]] for t in range(rounds)]


def test_the_rows_hold_every_pair() -> None:
    columns = [
        ("none", "relaxed", "sam", "relaxed+sam"),
        ("ring", "exponential-directed", "random"),
    ]
    for j, a in enumerate([*columns, (False, True), (False, True)]):
        for k, b in enumerate([*columns, (False, True), (False, True)][:j]):
            pairs = {(row[j], row[k]) for row in PAIRWISE}
            missing = {(x, y) for x in a for y in b} - pairs
            # on a directed graph the references do not say what failing nodes leave of it
            assert missing <= {(True, "exponential-directed")}, (j, k)


@pytest.mark.parametrize("name", METHODS)
def test_through_messages_equals_the_dense_reference(name: str) -> None:
    """The same numbers after records, messages, modules and autograd, with failing nodes."""
    rounds = 4
    failed = failures(rounds)
    expected = expected_of(name, "relaxed+sam", "random", rounds, failed=failed)
    method = make(name, "relaxed+sam", "random")
    history = federation.run(method, LEAST_SQUARES, W0, present(failed, rounds))
    close(history.weights, expected.weights)
    metrics = history.metrics.iloc[1:]
    close(metrics["consensus-before"], expected.before)
    close(metrics["consensus-after"], expected.after)


@pytest.mark.parametrize("name", METHODS)
def test_nodes_may_take_unequal_steps(name: str) -> None:
    if name.startswith("DPSGD"):
        return
    steps = [2, 4, 1, 3, 5, 2, 1, 3]
    expected = expected_of(name, "none", "ring", T, local_steps=steps)
    history = federate(
        make(name, "none", "ring"), LEAST_SQUARES, W0, present(None, T), local_steps=steps
    )
    close(history.weights, expected.weights)


@pytest.mark.parametrize("graph", ["ring", "random"])
def test_feddyn_without_a_server_around_the_relaxed_start(graph: str) -> None:
    more = {"ri_beta": BETA, "ri_center": "start"}
    expected = expected_of("FedDyn", "none", graph, T, **more)
    plugins = (Gossip(topology=graph, peers=2, steps=2), S.RelaxedInit(beta=BETA, center="start"))
    method = S.FedDyn(alpha=0.3, plugins=plugins, precision="float64", local_steps=K, **SETTINGS)
    history = federate(method, LEAST_SQUARES, W0, present(None, T))
    close(history.weights, expected.weights)
    close(client_vectors(history.clients, "lam"), expected.clients["lam"])


@pytest.mark.parametrize(("kind", "steps"), [(S.DFedSAM, 1), (S.DFedSAMMGS, 4)])
def test_dfedsam_and_multiple_gossip_steps(kind: type[FederatedStrategy], steps: int) -> None:
    """As they are without a word: a ring, radius 0.01, one step or four."""
    expected = dfedavg.run(
        *(LEAST_SQUARES, W0, matrices("ring")),
        **{"local_steps": K, "gossip_steps": steps, "sam_rho": 0.01},
        **SETTINGS,
    )
    method = kind(precision="float64", local_steps=K, **SETTINGS)
    close(federate(method, LEAST_SQUARES, W0, present(None, T)).weights, expected.weights)


def test_without_a_server_each_node_has_its_own_reply() -> None:
    """The stack of nodes is not a mean: nodes differ after a round, on a ring."""
    history = federate(make("DFedAvg", "none", "ring"), LEAST_SQUARES, W0, present(None, 1))
    assert torch.pdist(history.weights[1]).min() > 1e-3

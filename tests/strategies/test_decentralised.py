"""The methods without a server equal their dense references: every node's model and state."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.engine import History
from fedaccord.strategies import Gossip
from fedaccord.strategies.base import FederatedStrategy
from fedaccord.strategies.dispfl import _generator as generator_of
from fedaccord.strategies.dispfl import first_mask, layer_sizes, next_mask
from tests.federation import half_square, run, run_on_batches
from tests.reference import (
    dfedavg,
    dfedavgm,
    dfedsam,
    dispfl,
    dpsgd,
    gossip_feddyn,
    gossip_scaffold,
    problem,
    topology,
)
from tests.reference.gossip import GossipHistory
from tests.reference.problem import Array, LeastSquares

M, T, K = 8, 30, 5
LEAST_SQUARES = LeastSquares(M, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
SETTINGS = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05, "clip_norm": 4.0}
GRAPHS = {
    "ring": topology.ring,
    "grid": topology.grid,
    "torus": topology.torus,
    "exponential": topology.exponential,
    "exponential-directed": topology.exponential_directed,
    "full": topology.full,
}

Case = tuple[type[FederatedStrategy], ModuleType, dict[str, Any], dict[str, Any]]
METHODS: list[Case] = [
    (S.DFedAvg, dfedavg, {}, {}),
    (S.DFedAvgM, dfedavgm, {"momentum": 0.6}, {}),
    (S.DPSGD, dpsgd, {"variant": "lian"}, {"local_steps": 1}),
    (S.DPSGD, dpsgd, {"variant": "atc"}, {"local_steps": 1}),
    (S.Scaffold, gossip_scaffold, {"server_lr": 0.8}, {}),
    (S.FedDyn, gossip_feddyn, {"alpha": 0.3}, {}),
]
IDS = ["-".join([kind.__name__, *map(str, own.values())]) for kind, _, own, _ in METHODS]
STATES = {"Scaffold": ["c_i"], "FedDyn": ["lam"]}


@pytest.mark.parametrize("m", [4, 6, 8, 9, 16])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_those_of_the_reference(name: str, m: int) -> None:
    ours = Gossip(topology=name).matrix(m, 0, 0).numpy()
    np.testing.assert_allclose(ours, GRAPHS[name](m), rtol=0, atol=1e-15)


def matrices(name: str) -> list[Array]:
    """The mixing matrix of every round; a random one is drawn by us and weighed by them."""
    if name != "random":
        return [GRAPHS[name](M)] * T
    gossip = Gossip(topology="random", peers=2)
    found = []
    for t in range(T):
        linked = gossip.matrix(M, t, 0).numpy() != 0
        np.fill_diagonal(linked, False)
        found.append(topology.metropolis(linked))
    return found


@pytest.mark.parametrize("batched", [False, True], ids=["full-batch", "minibatch"])
@pytest.mark.parametrize("graph", ["ring", "exponential-directed", "random"])
@pytest.mark.parametrize(
    ("kind", "reference", "own", "theirs", "plugins"),
    [
        pytest.param(*case, plugins, id=f"{name}-{plugins}")
        for case, name in zip(METHODS, IDS, strict=True)
        for plugins in ("none", "relaxed", "sam", "relaxed+sam")
    ],
)
def test_equals_the_dense_reference(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    own: dict[str, Any],
    theirs: dict[str, Any],
    graph: str,
    plugins: str,
    batched: bool,
) -> None:
    more: dict[str, Any] = {}
    given: list[Any] = [Gossip(topology=graph, peers=2, steps=2)]
    if "relaxed" in plugins:
        given.append(S.RelaxedInit(beta=0.08))
        more["ri_beta"] = 0.08
    if "sam" in plugins:
        given.append(S.SAM(rho=0.05))
        more["sam_rho"] = 0.05
    expected, found = both(
        *(kind, reference, own, theirs | more, tuple(given), matrices(graph)), batched=batched
    )
    compare(found, expected, kind)
    if "relaxed" in plugins:
        last = torch.stack([state.last for state in found.clients])
        close(last, expected.clients["last"])


@pytest.mark.parametrize("graph", ["ring", "random"])
@pytest.mark.parametrize(("kind", "reference", "own", "theirs"), METHODS, ids=IDS)
def test_equals_the_dense_reference_while_nodes_fail(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    own: dict[str, Any],
    theirs: dict[str, Any],
    graph: str,
) -> None:
    rng = np.random.default_rng(4)
    failed = [sorted(rng.choice(M, size=t % 3, replace=False).tolist()) for t in range(T)]
    gossip = (Gossip(topology=graph, peers=2, steps=2),)
    expected, found = both(
        *(kind, reference, own, theirs, gossip, matrices(graph)), batched=False, failed=failed
    )
    compare(found, expected, kind)


def test_dfedsam_and_multiple_gossip_steps() -> None:
    for kind, steps in ((S.DFedSAM, 1), (S.DFedSAMMGS, 4)):
        expected = dfedsam.run(
            *(LEAST_SQUARES, W0, matrices("ring")),
            local_steps=K,
            gossip_steps=steps,
            sam_rho=0.01,
            **SETTINGS,
        )
        name = {S.DFedSAM: "dfedsam", S.DFedSAMMGS: "dfedsam-mgs"}[kind]
        keys = {key.replace("_", "-"): value for key, value in SETTINGS.items()}
        found = run(
            *(name, LEAST_SQUARES, W0, problem.everyone(M, T)),
            local_steps=K,
            **keys,  # type: ignore[arg-type]
        )
        close(found.weights, expected.weights)


def both(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    own: dict[str, Any],
    theirs: dict[str, Any],
    plugins: tuple[Any, ...],
    mixing: list[Array],
    *,
    batched: bool,
    failed: list[list[int]] | None = None,
) -> tuple[GossipHistory, History]:
    steps = theirs.get("local_steps", K)
    batches = problem.minibatches(LEAST_SQUARES, T, steps, 5, seed=7) if batched else None
    theirs = {"local_steps": steps, "gossip_steps": 2, **own, **theirs}
    expected: GossipHistory = reference.run(
        *(LEAST_SQUARES, W0, mixing), batches=batches, failed=failed, **SETTINGS, **theirs
    )
    local: dict[str, Any] = {"local_epochs": 1} if batched else {"local_steps": steps}
    strategy = kind(
        precision="float64",
        plugins=plugins,
        batch_size=50 if batched else 0,
        **SETTINGS,
        **local,
        **own,
    )
    gone = failed or [[]] * T
    schedule = [[i for i in range(M) if i not in gone[t]] for t in range(T)]
    if batches is None:
        return expected, run(strategy, LEAST_SQUARES, W0, schedule)
    return expected, run_on_batches(strategy, LEAST_SQUARES, W0, schedule, batches)


def compare(found: History, expected: GossipHistory, kind: type[FederatedStrategy]) -> None:
    close(found.weights, expected.weights)
    close(found.averages, expected.averages)
    metrics = found.metrics.iloc[1:]
    close(torch.tensor(metrics["consensus-before"].to_numpy()), expected.before)
    close(torch.tensor(metrics["consensus-after"].to_numpy()), expected.after)
    for name in STATES.get(kind.__name__, []):
        states = [getattr(state, "base", state) for state in found.clients]
        close(torch.stack([getattr(state, name) for state in states]), expected.clients[name])


def close(found: torch.Tensor | None, expected: Array) -> None:
    assert found is not None
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)


# --- DisPFL ---------------------------------------------------------------------------------------

WIDE = LeastSquares(M, num_rows=20, dim=12, seed=5)
LAYERS = [(2, 4), (4,)]
X0 = np.random.default_rng(2).normal(size=12)


class TwoLayers(torch.nn.Module):
    """Least squares in twelve parameters, cut as two layers are."""

    def __init__(self, w0: Array) -> None:
        super().__init__()
        w = torch.from_numpy(w0)
        self.first = torch.nn.Parameter(w[:8].clone().view(2, 4))
        self.second = torch.nn.Parameter(w[8:].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.first.flatten(), self.second])[:, None]


@pytest.mark.parametrize("failing", [False, True], ids=["all", "some-fail"])
@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("graph", ["ring", "random"])
def test_dispfl_equals_the_dense_reference(graph: str, regrow: str, failing: bool) -> None:
    rng = np.random.default_rng(4)
    failed = [sorted(rng.choice(M, size=t % 3 * failing, replace=False)) for t in range(T)]
    like = torch.zeros(12, dtype=torch.float64)
    masks = np.stack([first_mask(LAYERS, 0.5, 0, i, like).numpy() for i in range(M)])

    def any_of(i: int, t: int, layer: int, candidates: Array, n: int) -> Array:
        """The n candidates of the highest random numbers, which our nodes draw for all."""
        score = torch.rand(12, generator=generator_of("regrow", 0, t, i)).numpy()
        score = score[8 * layer : 8 + 4 * layer]
        order = np.argsort(-score[candidates], kind="stable")
        return candidates[order[:n]]

    expected = dispfl.run(
        *(WIDE, X0, matrices(graph)),
        local_steps=K,
        shapes=LAYERS,
        masks=masks,
        failed=failed,
        kappa_0=0.8,
        variant=regrow,
        regrow=any_of if regrow == "random" else None,
        **SETTINGS,
    )
    strategy = S.DisPFL(
        precision="float64",
        plugins=(Gossip(topology=graph, peers=2),),
        prune=0.8,
        regrow=regrow,
        batch_size=0,
        local_steps=K,
        **SETTINGS,
    )
    found = simulate(
        strategy,
        clients=WIDE.clients(),
        model=TwoLayers(X0),
        loss=half_square,
        rounds=T,
        participation=[[i for i in range(M) if i not in failed[t]] for t in range(T)],
        dtype=torch.float64,
        record="weights",
    )
    assert found.weights is not None
    seen = found.weights * torch.from_numpy(
        expected.traces["masks"]
    )  # nodes mask what the relay sends
    close(seen, expected.weights)
    close(torch.stack([state.mask for state in found.clients]), expected.clients["mask"])
    close(torch.stack([state.w for state in found.clients]), expected.clients["last"])
    assert not np.array_equal(expected.clients["mask"], masks)  # some have moved


def test_peers_of_dispfl_send_density_and_a_bit_a_parameter() -> None:
    found = simulate(
        "dispfl", rounds=1, num_clients=6, local_epochs=1, threads=1, **{"dispfl.density": 0.3}
    )
    d = sum(p.numel() for p in found.model.values())
    density = float(found.clients[0].mask.mean())
    assert density == pytest.approx(0.3, abs=1e-3)
    links = 2 * 6
    assert found.metrics["peer-vectors"].iloc[-1] == pytest.approx(links * (density + 1 / 32))
    assert found.metrics["up-vectors"].iloc[-1] == 2 * 6  # at the relay masks are vectors
    assert d == 55210


@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.9, 1.0])
def test_layers_get_the_density_of_an_erdos_renyi_kernel(density: float) -> None:
    shapes = [(64, 3, 5, 5), (64,), (384, 1600), (10, 384), (10,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    ones = layer_sizes(shapes, density)
    assert ones == dispfl.ones_per_layer(shapes, density)
    assert sum(ones) == pytest.approx(density * sum(sizes), abs=len(shapes))


def test_a_mask_moves_within_its_layer() -> None:
    mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1])
    w = torch.tensor([3.0, -1, 2, 0, 0, 0, 5, 4])
    g = torch.tensor([0.0, 9, 0, 1, 7, 2, 0, 0])
    moved = next_mask(mask, w, [(2, 3), (2,)], 0.4, g)
    # n = ceil(0.4 * 3) = 2: -1 and 2 leave, then the largest of 9, 0, 1, 7, 2 come; the other
    # layer is dense, so what leaves comes back
    assert moved.tolist() == [1, 1, 0, 0, 1, 0, 1, 1]
    assert mask.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]

"""DisPFL: its rounds equal the dense reference, its masks are what the paper says of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core.vectors import generator
from fedaccord.plugins.gossip import Network
from fedaccord.strategies import Gossip
from fedaccord.strategies.dispfl import Up, first_mask, layer_sizes, next_mask
from tests.federation import half_square
from tests.reference import dispfl, problem
from tests.reference.problem import Array, LeastSquares
from tests.strategies.federate import client_vectors, close, federate
from tests.strategies.test_decentralised import SETTINGS, M, failures, matrices, present

T, K = 8, 3
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


def any_of(i: int, t: int, layer: int, candidates: Array, n: int) -> Array:
    """The n candidates of the highest random numbers, which our nodes draw for all."""
    score = torch.rand(12, generator=generator(f"regrow 0 {t} {i}")).numpy()
    score = score[8 * layer : 8 + 4 * layer]
    order = np.argsort(-score[candidates], kind="stable")
    return candidates[order[:n]]


def method(graph: str, regrow: str, **more: Any) -> S.DisPFL:
    plugins = (Gossip(topology=graph, peers=2),)
    common: dict[str, Any] = {"precision": "float64", "local_steps": K, "batch_size": 0}
    return S.DisPFL(plugins=plugins, prune=0.8, regrow=regrow, **common, **SETTINGS, **more)


def expected_of(
    graph: str, regrow: str, rounds: int, failed: Any, batches: Any = None
) -> dispfl.GossipHistory:
    masks = np.stack([first_mask(LAYERS, 0.5, 0, i).numpy() for i in range(M)])
    assert len(np.unique(masks, axis=0)) == M
    return dispfl.run(
        *(WIDE, X0, matrices(graph, rounds)),
        local_steps=K,
        shapes=LAYERS,
        masks=masks,
        failed=failed,
        kappa_0=0.8,
        variant=regrow,
        regrow=any_of if regrow == "random" else None,  # type: ignore[arg-type]
        batches=batches,
        **SETTINGS,
    )


@pytest.mark.parametrize(
    ("failing", "batched"), [(False, True), (True, False)], ids=["minibatch", "some-fail"]
)
@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("graph", ["ring", "random", "exponential-directed"])
def test_equals_the_dense_reference(graph: str, regrow: str, failing: bool, batched: bool) -> None:
    failed = failures(T) if failing else [[]] * T
    batches = problem.minibatches(WIDE, T, K, 7, seed=7) if batched else None
    expected = expected_of(graph, regrow, T, failed, batches)
    history = federate(
        *(method(graph, regrow), WIDE, X0, present(failed, T)), shapes=LAYERS, batches=batches
    )
    masks = torch.from_numpy(expected.traces["masks"])
    close(history.weights * masks, expected.weights)  # nodes mask what the relay sends
    close(client_vectors(history.clients, "mask"), expected.clients["mask"])
    close(client_vectors(history.clients, "w"), expected.clients["last"])
    assert not np.array_equal(expected.clients["mask"], masks[0])  # some have moved


def test_through_messages_equals_the_dense_reference() -> None:
    rounds, failed = 4, failures(4)
    expected = expected_of("random", "gradient", rounds, failed)
    history = simulate(
        method("random", "gradient"),
        clients=WIDE.clients(),
        model=TwoLayers(X0),
        loss=half_square,
        rounds=rounds,
        participation=present(failed, rounds),
        record="weights",
    )
    close(history.weights * torch.from_numpy(expected.traces["masks"]), expected.weights)
    close(client_vectors(history.clients, "mask"), expected.clients["mask"])
    close(client_vectors(history.clients, "w"), expected.clients["last"])


def first_masks(**more: Any) -> torch.Tensor:
    """Masks of the first round, which nothing moves with prune=0."""
    still = S.DisPFL(precision="float64", local_steps=1, prune=0.0, **more)
    history = federate(still, WIDE, X0, present(None, 1), shapes=LAYERS)
    return client_vectors(history.clients, "mask")


def test_nodes_begin_with_different_masks() -> None:
    """As dense as each other in every layer, and a function of the seed."""
    masks = first_masks()
    assert len(masks.unique(dim=0)) == M
    ones = layer_sizes(LAYERS, 0.5)
    for layer, number in zip(masks.split([8, 4], dim=1), ones, strict=True):
        assert layer.sum(1).tolist() == [number] * M
    assert torch.equal(masks, first_masks())
    assert not torch.equal(masks, first_masks(seed=1))


def test_peers_send_density_and_a_bit_a_parameter() -> None:
    history = federate(
        S.DisPFL(precision="float64", local_steps=1), WIDE, X0, present(None, 1), shapes=LAYERS
    )
    density = float(client_vectors(history.clients, "mask").mean())
    assert density == pytest.approx(0.5)
    links = 2 * M  # of a ring, each way
    assert history.metrics[0]["peer-vectors"] == pytest.approx(links * (density + 1 / 64))
    assert history.metrics[0]["up"] == 2 * M  # at the relay masks are vectors


@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.9, 1.0])
def test_layers_get_the_density_of_an_erdos_renyi_kernel(density: float) -> None:
    shapes = [(64, 3, 5, 5), (64,), (384, 1600), (10, 384), (10,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    ones = layer_sizes(shapes, density)
    assert ones == dispfl.ones_per_layer(shapes, density)
    assert sum(ones) == pytest.approx(density * sum(sizes), abs=len(shapes))


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_a_layer_of_one_number_is_trained(density: float) -> None:
    shapes = [(), (20, 10), (1,)]
    scale, matrix, bias = layer_sizes(shapes, density)
    assert (scale, bias) == (1, 1)
    assert matrix == (200 if density == 1 else round(202 * density - 2))
    assert layer_sizes([(), (1,)], density) == [1, 1]
    assert layer_sizes([(20, 10), (0, 3), (1,)], 0.5) == [100, 0, 1]


def test_a_mask_moves_within_its_layer() -> None:
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1])
    w = torch.tensor([3.0, -1, 2, 6, 4, 0, 5, 4])
    g = torch.tensor([0.0, 9, 0, 1, 7, 2, 0, 0])
    shapes, density = [(2, 3), (2,)], 7 / 8
    assert layer_sizes(shapes, density) == [5, 2]
    new = next_mask(mask, w, shapes, density, 0.4, g)
    # n = ceil(0.4 * 5) = 2: -1 and 2 leave, then the largest of 9, 0, 2 come; the other layer is
    # dense, so what leaves returns
    assert new.tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert mask.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("value", [3e38, -1.0, 0.5])
def test_what_a_node_sends_as_its_mask_is_bounded(value: float) -> None:
    """Finite values end no round, and make no finite model infinite."""
    network, nodes = Network(torch.full((3, 3), 1 / 3), 1), torch.ones(3, 4)
    masks = torch.ones(3, 4)
    masks[1] = value
    half = S.DisPFL(plugins=(Gossip(topology="full"),))
    cohort = SimpleNamespace(mean=lambda v: v)
    w, _ = half.aggregate_nodes(nodes, Up(2 * nodes, masks), None, cohort, network)  # type: ignore[arg-type]
    assert w.abs().max() <= 2 + 1e-6
    assert 0 < float(network.sent) < 100


def test_several_gossip_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 with dispfl, got 2"):
        S.DisPFL(plugins=(Gossip(steps=2),))
    with pytest.raises(ValueError, match="max-client-norm: expected 0 with dispfl, got 20: its"):
        S.DisPFL(max_client_norm=20.0)
    with pytest.raises(ValueError, match="max-update-norm: expected 0 with dispfl, got 20: para"):
        S.DisPFL(max_update_norm=20.0)

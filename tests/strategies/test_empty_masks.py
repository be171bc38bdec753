"""DisPFL where the density is so small that layers, or whole masks, are empty."""

import math

import pytest
import torch
from torch import nn

from fedaccord import simulate
from fedaccord.strategies.dispfl import DisPFL, first_mask, layer_sizes, lowest, next_mask

SHAPES = ((2, 3), (2,))  # a linear layer with its bias


def test_a_small_density_leaves_nothing() -> None:
    assert layer_sizes(SHAPES, 1e-6) == [0, 0]
    assert first_mask(SHAPES, 1e-6, seed=0, client=0).count_nonzero() == 0
    empty, w = torch.zeros(8), torch.randn(8)
    assert torch.equal(next_mask(empty, w, SHAPES, 1e-6, kappa=0.5, score=w.abs()), empty)
    assert lowest(w, 0).count_nonzero() == 0


@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("density", [1e-6, 0.2])
def test_a_federation_with_empty_masks_runs(density: float, regrow: str) -> None:
    """No client trains a coordinate outside all masks: it is zero, not 0 / 0."""
    assert 0 in layer_sizes(SHAPES, density)
    torch.manual_seed(0)
    clients = [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(4)]
    strategy = DisPFL(density=density, regrow=regrow, local_steps=2, batch_size=0, lr=0.1)
    history = simulate(
        strategy,
        clients=clients,
        test=clients[0],
        model=nn.Linear(3, 2),
        loss=nn.functional.mse_loss,
        rounds=3,
        record="weights",
    )
    assert history.weights.isfinite().all()
    assert history.metrics["replies"].tolist()[1:] == [4, 4, 4]
    assert all(math.isfinite(loss) for loss in history.metrics["test-loss"])
    for state in history.clients:
        assert state.mask.count_nonzero() == sum(layer_sizes(SHAPES, density))
        assert torch.equal(state.w.isfinite(), torch.ones(8, dtype=torch.bool))
    if density == 1e-6:
        assert history.weights[1:].count_nonzero() == 0

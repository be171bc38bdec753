"""Defaults that train: what a default multiplies or adds up to over a round stays bounded."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaccord import strategies as S
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import first_state, server_round
from fedaccord.core.rule import Model
from fedaccord.strategies.fedadam import Adaptive
from fedaccord.task import models
from fedaccord.task.flat_model import FlatModel
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import federate


@pytest.mark.parametrize("kind", [S.FedAdam, S.FedYogi, S.FedAdagrad])
def test_an_adaptive_server_multiplies_small_updates_by_at_most_ten(kind: type[Adaptive]) -> None:
    """server_lr / tau, reached as v forgets its start; by 100 a LeNet on CIFAR-10 diverges.

    D is the 3e-4 a coordinate of such a network's updates.
    """
    method = kind()
    half = method.client_half()
    s = first_state(method, torch.zeros(5, dtype=torch.float64), num_clients=1)
    D, ratios = 3e-4, []
    for _ in range(500):
        s_next = server_round(
            method, half, s, [Reply(0, Model(s.w + D), steps=1, examples=1)]
        ).state
        ratios.append(((s_next.w - s.w) / D).max())
        s = s_next
    assert 1 < max(ratios) <= 10


def test_feddeper_is_bounded_where_few_clients_take_part() -> None:
    """At the papers' 50 local steps, 5 epochs of 500 samples; rho 0.03 ends at 2e4 here."""
    least_squares = LeastSquares(8, seed=3)
    w0 = np.random.default_rng(1).normal(size=least_squares.dim)
    method = S.FedDeper(local_steps=50, batch_size=0, lr=0.01, precision="float64")
    history = federate(method, least_squares, w0, problem.cohorts(8, 2, 40, seed=5))
    assert history.weights.norm(dim=1).max() < 2 * history.weights[0].norm()


def test_mofedsams_radius_keeps_the_direction_of_a_fresh_network() -> None:
    """The clients' mean gradient after their ascents, beside that before, in the hidden layers.

    Each client has one class. With a radius of 0.1 the cosine is 0.28, and a LeNet on CIFAR-10
    stays at chance.
    """
    model = FlatModel(models.build("lenet", (3, 16, 16), classes=10))
    *_, weight, bias = model.module.parameters()
    hidden = len(model.w) - weight.numel() - bias.numel()
    generator = torch.Generator().manual_seed(0)

    def gradient(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
        model.g.zero_()
        with torch.enable_grad(), model.at(at):
            cross_entropy(model.module(x), y).backward()
        return model.g.clone()

    before, after = torch.zeros_like(model.w), torch.zeros_like(model.w)
    for label in range(10):
        picture = torch.randn(3, 4, 4, generator=generator)
        x = picture.repeat_interleave(4, 1).repeat_interleave(4, 2)
        x = x + torch.randn(8, 3, 16, 16, generator=generator)
        y = torch.full((8,), label)
        g = gradient(x, y, model.w.clone())
        before += g
        after += gradient(x, y, model.w + S.MoFedSAM().rho * g / g.norm())
    assert torch.cosine_similarity(before[:hidden], after[:hidden], dim=0) > 0.8

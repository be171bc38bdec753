"""Defaults that train: what a default multiplies or adds up to over a round stays bounded."""

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import first_state, server_round
from fedaccord.core.rule import Model
from fedaccord.strategies.fedadam import Adaptive
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
    """At the papers' 50 local steps, 5 epochs of 500 samples; rho 0.03 ends at 1e15 here."""
    least_squares = LeastSquares(8, seed=3)
    w0 = np.random.default_rng(1).normal(size=least_squares.dim)
    method = S.FedDeper(local_steps=50, batch_size=0, lr=0.01, precision="float64")
    history = federate(method, least_squares, w0, problem.cohorts(8, 2, 100, seed=5))
    assert history.weights.norm(dim=1).max() < 2 * history.weights[0].norm()

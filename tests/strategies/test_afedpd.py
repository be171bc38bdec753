"""A-FedPD without a table of duals: what is kept and sent, and the duals it stands for."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.strategies import AFedPD, RelaxedInit
from tests.federation import run
from tests.reference import afedpd, problem
from tests.reference.problem import LeastSquares

C, T, K, RHO = 12, 40, 5, 0.4
LEAST_SQUARES = LeastSquares(C, seed=6)
W0 = np.random.default_rng(8).normal(size=LEAST_SQUARES.dim)
SETTINGS: dict[str, Any] = {"lr": 0.04, "lr_decay": 0.99, "weight_decay": 0.02, "clip_norm": 6.0}


@pytest.mark.parametrize("beta", [0.0, 0.08])
@pytest.mark.parametrize("active", [1, 4, C])
def test_its_duals_are_those_of_the_dense_table(active: int, beta: float) -> None:
    """A client's dual and the virtual steps it missed make its row of the listing's table."""
    schedule = problem.cohorts(C, active, T, seed=3)
    expected = afedpd.run(
        *(LEAST_SQUARES, W0, schedule), local_steps=K, rho=RHO, ri_beta=beta, **SETTINGS
    )
    strategy = AFedPD(
        rho=RHO,
        precision="float64",
        local_steps=K,
        batch_size=0,
        plugins=(RelaxedInit(beta=beta),) if beta else (),
        **SETTINGS,
    )
    found = run(strategy, LEAST_SQUARES, W0, schedule)
    last_round = {i: max(t for t in range(T) if i in schedule[t]) for i in range(C)}
    duals = []
    for i, state in enumerate(found.clients):
        missed = strategy.state.lam_bar - strategy.state.seen[last_round[i]]
        duals.append(getattr(state, "base", state).lam + missed)
    np.testing.assert_allclose(torch.stack(duals), expected.clients["lam"], atol=1e-10)
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-10)
    np.testing.assert_allclose(found.averages, expected.averages, atol=1e-10)


def test_the_server_keeps_a_vector_per_distinct_last_round_and_no_more() -> None:
    schedule = [[0, 1, 2, 3], [0, 1], [2], [0], [0]]
    strategy = AFedPD(rho=RHO, precision="float64", local_steps=K, batch_size=0)
    run(strategy, LEAST_SQUARES, W0, schedule)
    assert sorted(strategy.state.seen) == [0, 1, 2, 4]  # client 3; 1; 2; 0


def test_what_was_missed_is_sent_only_where_something_was() -> None:
    schedule = [[0], [0], [1], [0]]
    found = run("afedpd", LEAST_SQUARES, W0, schedule, local_steps=K)
    assert list(found.metrics["down-vectors"][1:]) == [1, 1, 2, 2]


def test_the_headline_is_the_average_of_local_models() -> None:
    schedule = problem.cohorts(C, 4, T, seed=3)
    found = run("afedpd", LEAST_SQUARES, W0, schedule, local_steps=K)
    headline = found.model["weight"].reshape(-1)
    np.testing.assert_allclose(headline, found.averages[-1], atol=1e-12)
    assert not torch.allclose(headline, found.weights[-1])

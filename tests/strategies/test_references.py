"""Every method equals its dense reference: models, averages and client states, to 1e-10."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.engine import History
from fedaccord.strategies import AFedPD, FedAvg, FedDyn, FedInit, RelaxedInit, Scaffold
from fedaccord.strategies.base import FederatedStrategy
from tests.federation import run, run_on_batches
from tests.reference import afedpd, fedavg, feddyn, fedinit, problem, scaffold
from tests.reference.problem import LeastSquares

C, T, K = 8, 32, 7
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
CLIP = 4.0  # between the gradient norms of early and late rounds
SETTINGS = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05, "clip_norm": CLIP}

# method, its reference, its hyper-parameters, the client states to compare
METHODS: list[tuple[type[FederatedStrategy], ModuleType, dict[str, Any], list[str]]] = [
    (FedAvg, fedavg, {"server_lr": 0.7}, []),
    (Scaffold, scaffold, {"server_lr": 0.8}, ["c_i"]),
    (FedDyn, feddyn, {"alpha": 0.3}, ["lam"]),
    (AFedPD, afedpd, {"rho": 0.4}, []),  # its duals: test_afedpd.py
]
IDS = [kind.__name__ for kind, *_ in METHODS]


@pytest.mark.parametrize("batched", [False, True], ids=["full-batch", "minibatch"])
@pytest.mark.parametrize("beta", [0.0, 0.08], ids=["plain", "relaxed"])
@pytest.mark.parametrize("active", [C, 3], ids=["all", "some"])
@pytest.mark.parametrize(("kind", "reference", "hyper", "states"), METHODS, ids=IDS)
def test_equals_the_dense_reference(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    hyper: dict[str, Any],
    states: list[str],
    active: int,
    beta: float,
    batched: bool,
) -> None:
    schedule = problem.cohorts(C, active, T, seed=5)
    batches = problem.minibatches(LEAST_SQUARES, T, K, 5, seed=7) if batched else None
    expected = reference.run(
        *(LEAST_SQUARES, W0, schedule),
        local_steps=K,
        batches=batches,
        ri_beta=beta,
        **SETTINGS,
        **hyper,
    )
    plugins = (RelaxedInit(beta=beta),) if beta else ()
    strategy = kind(precision="float64", plugins=plugins, **_local(batched), **hyper)
    if batches is None:
        found = run(strategy, LEAST_SQUARES, W0, schedule)
    else:
        found = run_on_batches(strategy, LEAST_SQUARES, W0, schedule, batches)

    close(found.weights, expected.weights)
    close(found.averages, expected.averages)
    for name in states:
        close(client_vectors(found, name, beta), expected.clients[name])
    if beta:
        close(client_vectors(found, "last", 0.0), expected.clients["last"])


@pytest.mark.parametrize("first_visit", ["initial", "current"])
def test_fedinit_equals_the_posters_algorithm(first_visit: str) -> None:
    schedule = problem.cohorts(C, 3, T, seed=2)
    expected = fedinit.run(
        *(LEAST_SQUARES, W0, schedule),
        local_steps=K,
        ri_first_visit=first_visit,
        ri_beta=0.1,
        **SETTINGS,
    )
    strategy = FedInit(
        precision="float64",
        plugins=(RelaxedInit(beta=0.1, first_visit=first_visit),),
        **_local(batched=False),
    )
    found = run(strategy, LEAST_SQUARES, W0, schedule)
    close(found.weights, expected.weights)
    close(client_vectors(found, "last", 0.0), expected.clients["last"])


def test_the_clip_is_active_in_some_steps_only() -> None:
    """Else the comparisons above would not see it."""
    norms = [np.linalg.norm(LEAST_SQUARES.grad(i, W0)) for i in range(C)]
    near = LEAST_SQUARES.optimum()
    norms += [np.linalg.norm(LEAST_SQUARES.grad(i, near)) for i in range(C)]
    assert min(norms) < CLIP < max(norms)


def _local(batched: bool) -> dict[str, Any]:
    steps = {"local_epochs": 1} if batched else {"local_steps": K, "batch_size": 0}
    return {**SETTINGS, **steps}


def client_vectors(history: History, name: str, beta: float) -> torch.Tensor:
    """(C, d) of one field of the clients' states; inside relaxed initialisation's own for beta."""
    states = [state.base if beta else state for state in history.clients]
    return torch.stack([getattr(state, name) for state in states])


def close(found: torch.Tensor | None, expected: np.ndarray) -> None:
    assert found is not None
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)

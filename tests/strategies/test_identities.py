"""The identities between methods, and which of them reach the optimum. float64, 1e-10."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.engine import History
from fedaccord.strategies import AFedPD, FedAvg, FedDyn, FedInit, RelaxedInit, Scaffold
from fedaccord.strategies.base import FederatedStrategy
from tests.federation import run
from tests.reference import problem
from tests.reference.problem import LeastSquares

C, K = 8, 10
LEAST_SQUARES = LeastSquares(C, seed=11)
W0 = np.random.default_rng(4).normal(size=LEAST_SQUARES.dim)
LOCAL: dict[str, Any] = {
    "precision": "float64",
    "lr": 0.05,
    "lr_decay": 1.0,
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "local_steps": K,
    "batch_size": 0,
}


def history(
    kind: type[FederatedStrategy], schedule: list[list[int]], **settings: Any
) -> tuple[History, FederatedStrategy]:
    strategy = kind(**{**LOCAL, **settings})
    return run(strategy, LEAST_SQUARES, W0, schedule), strategy


def same(a: torch.Tensor | None, b: Any) -> None:
    assert a is not None
    np.testing.assert_allclose(a.numpy(), np.asarray(b), rtol=1e-10, atol=1e-10)


def some(T: int, P: int = 3) -> list[list[int]]:
    return problem.cohorts(C, P, T, seed=9)


def everyone(T: int) -> list[list[int]]:
    return problem.everyone(C, T)


def test_fedinit_with_beta_0_is_fedavg_bit_for_bit() -> None:
    fedavg, _ = history(FedAvg, some(30))
    fedinit, _ = history(FedInit, some(30), plugins=(RelaxedInit(beta=0.0),))
    moved, _ = history(FedInit, some(30))
    assert torch.equal(fedavg.weights, fedinit.weights)
    assert not torch.equal(fedavg.weights, moved.weights)


def test_relaxed_starts_average_to_the_model_at_full_participation() -> None:
    """Mean of w_{i,0} = w^t, as the mean of the last local models is then w^t."""
    found, _ = history(FedInit, everyone(6))
    for w, states in zip(found.weights[1:], found.states[1:], strict=True):
        last = torch.stack([state.last for state in states])
        same((w + 0.1 * (w - last)).mean(0), w)


def test_one_full_batch_step_of_all_clients_is_gradient_descent() -> None:
    for kind in (FedAvg, Scaffold):
        found, _ = history(kind, everyone(30), local_steps=1)
        w = W0
        for t in range(30):
            same(found.weights[t], w)
            w = w - LOCAL["lr"] * LEAST_SQUARES.full_grad(w)


def test_scaffold_round_1_is_fedavg() -> None:
    same(history(Scaffold, some(1))[0].weights, history(FedAvg, some(1))[0].weights)
    assert not torch.allclose(
        history(Scaffold, everyone(2))[0].weights[2], history(FedAvg, everyone(2))[0].weights[2]
    )


@pytest.mark.parametrize("active", [1, 3, C])
@pytest.mark.parametrize("beta", [0.0, 0.08])
def test_scaffold_mean_of_c_i_is_c_at_any_participation(active: int, beta: float) -> None:
    plugins = (RelaxedInit(beta=beta),) if beta else ()
    found, strategy = history(Scaffold, some(8, active), plugins=plugins)
    c_i = [getattr(s, "base", s).c_i for s in found.clients]
    same(torch.stack(c_i).mean(0), strategy.state.c)
    assert strategy.state.c.norm() > 1e-3


def test_feddyn_is_afedpd_at_full_participation() -> None:
    feddyn, _ = history(FedDyn, everyone(30), alpha=0.3)
    afedpd, _ = history(AFedPD, everyone(30), rho=0.3)
    same(feddyn.weights, afedpd.weights)
    for a, b in zip(feddyn.clients, afedpd.clients, strict=True):
        same(a.lam, b.lam)
    partial = [history(kind, some(30))[0].weights for kind in (FedDyn, AFedPD)]
    assert not torch.allclose(*partial)


@pytest.mark.parametrize("active", [1, 3, C])
def test_afedpd_broadcasts_the_extrapolation_of_two_averages(active: int) -> None:
    """w^t = 2 w_bar^t - w_bar^{t-1} and lam_bar^t = rho (w_bar^t - w_bar^{t-1})."""
    found, strategy = history(AFedPD, some(30, active), rho=0.3)
    assert found.averages is not None
    same(found.weights[1:], 2 * found.averages[1:] - found.averages[:-1])
    same(strategy.state.lam_bar, 0.3 * (found.averages[-1] - found.averages[-2]))


@pytest.mark.parametrize("active", [3, C])
def test_feddyn_lam_bar_is_the_mean_of_all_duals(active: int) -> None:
    found, strategy = history(FedDyn, some(30, active), alpha=0.3)
    same(strategy.state.lam_bar, torch.stack([s.lam for s in found.clients]).mean(0))
    same(found.weights[-1], found.averages[-1] + strategy.state.lam_bar / 0.3)


EXACT = [(Scaffold, {}), (FedDyn, {"alpha": 1.0}), (AFedPD, {"rho": 1.0})]


@pytest.mark.parametrize("active", [4, C])
@pytest.mark.parametrize(("kind", "hyper"), EXACT, ids=[k.__name__ for k, _ in EXACT])
def test_exact_methods_reach_the_optimum(
    kind: type[FederatedStrategy], hyper: dict[str, float], active: int
) -> None:
    found, strategy = history(kind, some(400, active), **hyper)
    same(found.model["weight"].reshape(-1), LEAST_SQUARES.optimum())
    same(strategy.headline(found.weights[-1], strategy.state), LEAST_SQUARES.optimum())


@pytest.mark.parametrize("kind", [FedAvg, FedInit])
def test_fedavg_and_fedinit_keep_a_bias(kind: type[FederatedStrategy]) -> None:
    found, _ = history(kind, everyone(250))
    same(found.weights[-1], found.weights[-2])  # it has converged
    gap = np.linalg.norm(found.weights[-1].numpy() - LEAST_SQUARES.optimum())
    assert gap > 1e-3


def test_exact_methods_hold_the_optimum_once_there() -> None:
    """Duals and control variates at the optimum are the negative and positive local gradients."""
    found, _ = history(FedDyn, everyone(250), alpha=1.0)
    optimum = LEAST_SQUARES.optimum()
    for i, state in enumerate(found.clients):
        same(state.lam, -LEAST_SQUARES.grad(i, optimum))
    found, _ = history(Scaffold, everyone(250))
    for i, state in enumerate(found.clients):
        same(state.c_i, LEAST_SQUARES.grad(i, optimum))

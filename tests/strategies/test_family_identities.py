"""The identities of the wider family: limits in which one method is another. float64, 1e-10."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.strategies import SAM
from fedaccord.strategies.base import FederatedStrategy
from tests.reference import problem
from tests.strategies.test_identities import LEAST_SQUARES, LOCAL, C, everyone, history, same, some

FEDAVG_LIMITS: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedProx, mu 0": (S.FedProx, {"mu": 0.0}),
    "FedSAM, rho 0": (S.FedSAM, {"plugins": (SAM(rho=0.0),)}),
    "FedLESAM, radius 0": (S.FedLESAM, {"radius": 0.0}),
    "FedCM, alpha 1": (S.FedCM, {"alpha": 1.0}),
    "FedDeper, rho 0": (S.FedDeper, {"rho": 0.0, "lam": 0.8}),
    "FedAvgM, beta 0": (S.FedAvgM, {"beta": 0.0}),
    "FedNova, equal steps": (S.FedNova, {}),
}
SETTING = {"weight_decay": 0.03, "clip_norm": 3.0, "lr_decay": 0.99}


@pytest.mark.parametrize("limit", FEDAVG_LIMITS)
def test_limits_that_are_fedavg(limit: str) -> None:
    kind, settings = FEDAVG_LIMITS[limit]
    fedavg, _ = history(S.FedAvg, some(30), **SETTING)
    found, _ = history(kind, some(30), **SETTING, **settings)
    same(found.weights, fedavg.weights)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (S.FedProx, {}),
        (S.FedSAM, {}),
        (S.FedLESAM, {}),
        (S.FedCM, {}),
        (S.FedDeper, {}),
        (S.FedAvgM, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_away_from_the_limit_they_are_not(kind: type[FederatedStrategy], settings: Any) -> None:
    fedavg, _ = history(S.FedAvg, some(30), **SETTING)
    found, _ = history(kind, some(30), **SETTING, **settings)
    assert not torch.allclose(found.weights, fedavg.weights, atol=1e-4)


def test_fedlesam_round_1_is_fedavg() -> None:
    same(history(S.FedLESAM, everyone(1))[0].weights, history(S.FedAvg, everyone(1))[0].weights)


@pytest.mark.parametrize("kind", [S.FedAdam, S.FedYogi, S.FedAdagrad])
def test_adaptive_methods_with_large_tau_are_fedavg(kind: type[FederatedStrategy]) -> None:
    """beta1 = 0 and server_lr = tau: the step m / (sqrt(v) / tau + 1) tends to D."""
    tau = 1e9
    fedavg, _ = history(S.FedAvg, some(20))
    found, _ = history(kind, some(20), beta1=0.0, tau=tau, v0=0.0, server_lr=tau)
    np.testing.assert_allclose(found.weights, fedavg.weights, rtol=1e-7, atol=1e-7)


def test_fedadam_without_memory_steps_along_the_sign() -> None:
    fedavg, _ = history(S.FedAvg, everyone(1))
    hyper = {"beta1": 0.0, "beta2": 0.0, "v0": 0.0, "tau": 1e-14, "server_lr": 0.3}
    found, _ = history(S.FedAdam, everyone(1), **hyper)
    D = fedavg.weights[1] - fedavg.weights[0]
    same(found.weights[1], found.weights[0] + 0.3 * torch.sign(D))


@pytest.mark.parametrize(
    ("kind", "base"), [(S.MoFedSAM, S.FedCM), (S.FedGamma, S.Scaffold), (S.AFedPDSAM, S.AFedPD)]
)
def test_sam_methods_with_radius_0_are_their_base(
    kind: type[FederatedStrategy], base: type[FederatedStrategy]
) -> None:
    zero, _ = history(kind, some(20), **SETTING, plugins=(SAM(rho=0.0),))
    bare, _ = history(base, some(20), **SETTING)
    with_sam, _ = history(kind, some(20), **SETTING)
    same(zero.weights, bare.weights)
    assert not torch.allclose(with_sam.weights, bare.weights, atol=1e-5)


PRIMAL_DUAL: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedPD": (S.FedPD, {"rho": 0.3, "fraction_train": 1.0}),
    "FedADMM": (S.FedADMM, {"rho": 0.3}),
    "FedADMM active": (S.FedADMM, {"rho": 0.3, "variant": "active"}),
    "A-FedPD": (S.AFedPD, {"rho": 0.3}),
    "FedSpeed, r 0": (S.FedSpeed, {"rho": 0.3, "plugins": (SAM(rho=0.0),)}),
    "FedSMOO, r 0": (S.FedSMOO, {"rho": 0.3, "radius": 0.0}),
}


@pytest.mark.parametrize("name", PRIMAL_DUAL)
def test_primal_dual_methods_are_one_at_full_participation(name: str) -> None:
    kind, settings = PRIMAL_DUAL[name]
    feddyn, _ = history(S.FedDyn, everyone(30), alpha=0.3, **SETTING)
    found, _ = history(kind, everyone(30), **SETTING, **settings)
    same(found.weights, feddyn.weights)
    for a, b in zip(found.clients, feddyn.clients, strict=True):
        same(a.lam, b.lam)


def test_fedspeed_without_ascent_under_partial_participation() -> None:
    off = {"rho": 0.3, "plugins": (SAM(rho=0.0),), **SETTING}
    authors, _ = history(S.FedSpeed, some(30), **off)
    feddyn, _ = history(S.FedDyn, some(30), alpha=0.3, **SETTING)
    same(authors.weights, feddyn.weights)
    paper, _ = history(S.FedSpeed, some(30), variant="paper", **off)
    active, _ = history(S.FedADMM, some(30), rho=0.3, variant="active", **SETTING)
    same(paper.weights, active.weights)
    assert not torch.allclose(authors.weights, paper.weights, atol=1e-3)


def test_fedadmm_tracking_keeps_the_mean_of_all_clients() -> None:
    found, _ = history(S.FedADMM, problem.cohorts(C, 3, 30, seed=9), rho=0.3)
    same(found.weights[-1], torch.stack([s.w_hat for s in found.clients]).mean(0))


def test_a_relaxed_centre_moves_with_the_start() -> None:
    """center = start is the same method seen from w_{i,0}: for FedAvg it changes nothing."""
    ri = S.RelaxedInit(beta=0.08, center="start")
    server = S.RelaxedInit(beta=0.08)
    fedavg = [history(S.FedAvg, some(10), plugins=(p,))[0].weights for p in (ri, server)]
    same(fedavg[0], fedavg[1])
    fedprox = [history(S.FedProx, some(10), plugins=(p,))[0].weights for p in (ri, server)]
    assert not torch.allclose(*fedprox)


# limits of many rounds


def test_fedcm_has_the_limit_of_fedavg_at_alpha_times_the_rate() -> None:
    fedcm, _ = history(S.FedCM, everyone(400), alpha=0.5)
    fedavg, _ = history(S.FedAvg, everyone(400), lr=0.5 * LOCAL["lr"])
    same(fedcm.weights[-1], fedavg.weights[-1])


def test_fedavgm_has_the_limit_of_fedavg() -> None:
    fedavgm, _ = history(S.FedAvgM, everyone(200), beta=0.5)
    fedavg, _ = history(S.FedAvg, everyone(200))
    same(fedavgm.weights[-1], fedavg.weights[-1])


def test_fedcm_amplifies_weight_decay_outside_the_mixture() -> None:
    """With one step the limit is the ridge optimum of wd / alpha, and of wd inside."""
    settings = {"alpha": 0.5, "weight_decay": 0.2, "local_steps": 1}
    outside, _ = history(S.FedCM, everyone(700), **settings)
    inside, _ = history(S.FedCM, everyone(700), decay="inside", **settings)
    same(outside.weights[-1], LEAST_SQUARES.optimum(weight_decay=0.4))
    same(inside.weights[-1], LEAST_SQUARES.optimum(weight_decay=0.2))


def test_feddyn_does_not_amplify_weight_decay() -> None:
    found, _ = history(S.FedDyn, everyone(250), alpha=1.0, weight_decay=0.2)
    same(found.weights[-1], LEAST_SQUARES.optimum(weight_decay=0.2))


def distance(
    kind: type[FederatedStrategy], active: int, rounds: int = 300, **settings: Any
) -> float:
    found, _ = history(kind, some(rounds, active), **settings)
    return float(np.linalg.norm(found.weights[-1].numpy() - LEAST_SQUARES.optimum()))


def test_fedadmm_tracking_is_exact_and_active_is_not() -> None:
    assert distance(S.FedADMM, 4, rho=1.0) < 1e-10
    assert distance(S.FedADMM, C, rho=1.0, variant="active") < 1e-10
    assert distance(S.FedADMM, 4, rho=1.0, variant="active") > 0.1


BIASED: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedProx": (S.FedProx, {}),
    "FedCM": (S.FedCM, {"alpha": 0.5}),
    "FedDeper": (S.FedDeper, {}),
    "FedSAM": (S.FedSAM, {}),
    "FedLESAM": (S.FedLESAM, {}),
    "FedGamma": (S.FedGamma, {"plugins": (SAM(rho=0.1),)}),
    "FedSpeed": (S.FedSpeed, {"rho": 1.0}),
    "FedSMOO": (S.FedSMOO, {"rho": 1.0}),
    "A-FedPDSAM": (S.AFedPDSAM, {"rho": 1.0}),
}


@pytest.mark.parametrize("name", BIASED)
def test_these_keep_a_bias_at_full_participation(name: str) -> None:
    kind, settings = BIASED[name]
    assert distance(kind, C, rounds=80, **settings) > 1e-3

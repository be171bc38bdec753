"""Every method equals its dense reference: models, averages and client states, to 1e-10."""

import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.engine import History
from fedaccord.strategies import FedInit, RelaxedInit
from fedaccord.strategies.base import FederatedStrategy
from fedaccord.strategies.fedpd import is_silent
from tests.federation import run, run_on_batches
from tests.reference import (
    afedpd,
    afedpdsam,
    fedadagrad,
    fedadam,
    fedadmm,
    fedavg,
    fedavgm,
    fedcm,
    feddeper,
    feddyn,
    fedgamma,
    fedinit,
    fedlesam,
    fednova,
    fedpd,
    fedprox,
    fedsam,
    fedsmoo,
    fedspeed,
    fedyogi,
    mofedsam,
    problem,
    scaffold,
)
from tests.reference.problem import LeastSquares

C, T, K = 8, 32, 7
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
CLIP = 4.0  # between the gradient norms of early and late rounds
SETTINGS = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05, "clip_norm": CLIP}

# method, its reference, its options, the reference's, the client states to compare
Case = tuple[type[FederatedStrategy], ModuleType, dict[str, Any], dict[str, Any], list[str]]
METHODS: list[Case] = [
    (S.FedAvg, fedavg, {"server_lr": 0.7}, {}, []),
    (S.FedProx, fedprox, {"mu": 0.3, "server_lr": 0.9}, {}, []),
    (S.FedAvgM, fedavgm, {"beta": 0.6, "server_lr": 0.8}, {}, []),
    (S.FedAdam, fedadam, {"tau": 0.1, "beta2": 0.9}, {}, []),
    (S.FedYogi, fedyogi, {"tau": 0.1, "beta2": 0.9, "v0": 0.2}, {"v_0": 0.2}, []),
    (S.FedAdagrad, fedadagrad, {"tau": 0.1}, {}, []),
    (S.FedAdagrad, fedadagrad, {"tau": 0.1, "beta1": 0.3}, {}, []),
    (S.FedNova, fednova, {"server_lr": 0.9}, {}, []),
    (S.FedCM, fedcm, {"alpha": 0.3, "server_lr": 0.9}, {}, []),
    (S.FedCM, fedcm, {"alpha": 0.3, "decay": "inside"}, {"wd_mode": "inside"}, []),
    (S.FedLESAM, fedlesam, {"radius": 0.2}, {"sam_rho": 0.2}, ["w_old"]),
    (S.FedDeper, feddeper, {"rho": 0.04, "lam": 0.7, "server_lr": 0.9}, {}, ["v"]),
    (S.FedADMM, fedadmm, {"rho": 0.4}, {}, ["lam", "w_hat"]),
    (S.FedADMM, fedadmm, {"rho": 0.4, "variant": "active"}, {}, ["lam"]),
    (S.FedSMOO, fedsmoo, {"rho": 0.4, "radius": 0.2}, {"sam_rho": 0.2}, ["lam", "mu"]),
    (S.Scaffold, scaffold, {"server_lr": 0.8}, {}, ["c_i"]),
    (S.FedDyn, feddyn, {"alpha": 0.3}, {}, ["lam"]),
    (S.AFedPD, afedpd, {"rho": 0.4}, {}, []),  # its duals: test_afedpd.py
]
THEIR_NAME = {"v": "v_i", "w_hat": "theta_hat"}  # of a client state, where it is another one
NOT_SENT = (S.FedADMM,)  # local models, so the server knows no average of them
IDS = ["-".join([kind.__name__, *map(str, own.values())]) for kind, _, own, *_ in METHODS]


@pytest.mark.parametrize("batched", [False, True], ids=["full-batch", "minibatch"])
@pytest.mark.parametrize("beta", [0.0, 0.08], ids=["plain", "relaxed"])
@pytest.mark.parametrize("active", [C, 3], ids=["all", "some"])
@pytest.mark.parametrize(("kind", "reference", "own", "theirs", "states"), METHODS, ids=IDS)
def test_equals_the_dense_reference(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    own: dict[str, Any],
    theirs: dict[str, Any],
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
        **(theirs | {k: v for k, v in own.items() if k in _arguments(reference)}),
    )
    plugins = (RelaxedInit(beta=beta),) if beta else ()
    strategy = kind(precision="float64", plugins=plugins, **_local(batched), **own)
    if batches is None:
        found = run(strategy, LEAST_SQUARES, W0, schedule)
    else:
        found = run_on_batches(strategy, LEAST_SQUARES, W0, schedule, batches)

    close(found.weights, expected.weights)
    if kind not in NOT_SENT:
        close(found.averages, expected.averages)
    for name in states:
        close(client_vectors(found, name, beta), expected.clients[THEIR_NAME.get(name, name)])
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


SAM_METHODS: list[Case] = [
    (S.FedSAM, fedsam, {}, {}, []),
    (S.MoFedSAM, mofedsam, {"alpha": 0.3}, {}, []),
    (S.FedGamma, fedgamma, {}, {}, ["c_i"]),
    (S.FedSpeed, fedspeed, {"rho": 0.4}, {}, ["lam"]),
    (S.FedSpeed, fedspeed, {"rho": 0.4, "mix": 0.6}, {"a": 0.6}, ["lam"]),
    (
        *(S.FedSpeed, fedspeed, {"rho": 0.4, "mix": 0.6, "variant": "paper"}),
        {"a": 0.6, "variant": "PP", "ascent_form": "plain"},
        ["lam"],
    ),
    (S.AFedPDSAM, afedpdsam, {"rho": 0.4}, {}, []),
    # the plug-in on methods that have none of their own
    (S.FedAdam, fedadam, {"tau": 0.1}, {}, []),
    (S.FedDeper, feddeper, {"rho": 0.04}, {}, ["v"]),
    (S.FedADMM, fedadmm, {"rho": 0.4}, {}, ["lam"]),
]
SAM_IDS = ["-".join([k.__name__, *map(str, own.values())]) for k, _, own, *_ in SAM_METHODS]


@pytest.mark.parametrize("beta", [0.0, 0.08], ids=["plain", "relaxed"])
@pytest.mark.parametrize("active", [C, 3], ids=["all", "some"])
@pytest.mark.parametrize(("kind", "reference", "own", "theirs", "states"), SAM_METHODS, ids=SAM_IDS)
def test_with_sam_equals_the_dense_reference(
    kind: type[FederatedStrategy],
    reference: ModuleType,
    own: dict[str, Any],
    theirs: dict[str, Any],
    states: list[str],
    active: int,
    beta: float,
) -> None:
    schedule = problem.cohorts(C, active, T, seed=5)
    batches = problem.minibatches(LEAST_SQUARES, T, K, 5, seed=7)
    radius = 0.05
    expected = reference.run(
        *(LEAST_SQUARES, W0, schedule),
        local_steps=K,
        batches=batches,
        ri_beta=beta,
        sam_rho=radius,
        **SETTINGS,
        **({k: v for k, v in own.items() if k in _arguments(reference)} | theirs),
    )
    plugins: tuple[Any, ...] = (S.SAM(rho=radius),)
    plugins += (RelaxedInit(beta=beta),) if beta else ()
    strategy = kind(precision="float64", plugins=plugins, **_local(batched=True), **own)
    found = run_on_batches(strategy, LEAST_SQUARES, W0, schedule, batches)
    close(found.weights, expected.weights)
    for name in states:
        close(client_vectors(found, name, beta), expected.clients[THEIR_NAME.get(name, name)])


def test_fednova_with_unequal_local_steps() -> None:
    steps = [2, 9, 4, 7, 1, 3, 6, 5]
    schedule = problem.cohorts(C, 3, T, seed=5)
    batches = problem.minibatches(LEAST_SQUARES, T, steps, 5, seed=7)
    expected = fednova.run(
        *(LEAST_SQUARES, W0, schedule), local_steps=steps, batches=batches, **SETTINGS
    )
    strategy = S.FedNova(precision="float64", **_local(batched=True))
    found = run_on_batches(strategy, LEAST_SQUARES, W0, schedule, batches)
    close(found.weights, expected.weights)
    plain = S.FedAvg(precision="float64", **_local(batched=True))
    other = run_on_batches(plain, LEAST_SQUARES, W0, schedule, batches)
    assert not torch.allclose(found.weights, other.weights)


@pytest.mark.parametrize("beta", [0.0, 0.08], ids=["plain", "relaxed"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("local_init", ["server", "own"])
def test_fedpd_equals_the_dense_reference(local_init: str, p: float, beta: float) -> None:
    if local_init == "own" and beta:
        with pytest.raises(ValueError, match="no start to move"):
            S.FedPD(fraction_train=1.0, local_init="own", plugins=(RelaxedInit(beta=beta),))
        return
    skip = [is_silent(p, 0, t) for t in range(T)]
    assert p == 0 or 0 < sum(skip) < T
    everyone = problem.everyone(C, T)
    expected = fedpd.run(
        *(LEAST_SQUARES, W0, everyone),
        local_steps=K,
        rho=0.4,
        local_init=local_init,
        skip=skip,
        ri_beta=beta,
        **SETTINGS,
    )
    strategy = S.FedPD(
        precision="float64",
        fraction_train=1.0,
        rho=0.4,
        p=p,
        local_init=local_init,
        plugins=(RelaxedInit(beta=beta),) if beta else (),
        **_local(batched=False),
    )
    found = run(strategy, LEAST_SQUARES, W0, everyone)
    close(found.weights, expected.weights)
    close(client_vectors(found, "lam", beta), expected.clients["lam"])
    assert list(found.metrics["up-vectors"][1:] == 0) == skip


@pytest.mark.parametrize("server", ["models", "updates"])
def test_fedinit_with_either_server_rule(server: str) -> None:
    schedule = problem.cohorts(C, 3, T, seed=2)
    expected = fedinit.run(
        *(LEAST_SQUARES, W0, schedule), local_steps=K, ri_beta=0.1, ri_server=server, **SETTINGS
    )
    plugins = (RelaxedInit(beta=0.1, server=server),)
    strategy = FedInit(precision="float64", plugins=plugins, **_local(batched=False))
    close(run(strategy, LEAST_SQUARES, W0, schedule).weights, expected.weights)


@pytest.mark.parametrize(
    ("kind", "reference", "own", "states"),
    [
        (S.FedProx, fedprox, {"mu": 0.3}, []),
        (S.FedDyn, feddyn, {"alpha": 0.3}, ["lam"]),
        (S.FedADMM, fedadmm, {"rho": 0.4}, ["lam", "w_hat"]),
        (S.FedCM, fedcm, {"alpha": 0.3}, []),  # has no anchor: the start is all that moves
        (S.Scaffold, scaffold, {}, ["c_i"]),
    ],
)
def test_relaxed_initialisation_may_move_the_anchor_too(
    kind: type[FederatedStrategy], reference: ModuleType, own: dict[str, Any], states: list[str]
) -> None:
    schedule = problem.cohorts(C, 3, T, seed=5)
    expected = reference.run(
        *(LEAST_SQUARES, W0, schedule),
        local_steps=K,
        ri_beta=0.08,
        **({"ri_center": "start"} if "ri_center" in _arguments(reference) else {}),
        **SETTINGS,
        **own,
    )
    plugins = (RelaxedInit(beta=0.08, center="start"),)
    strategy = kind(precision="float64", plugins=plugins, **_local(batched=False), **own)
    found = run(strategy, LEAST_SQUARES, W0, schedule)
    close(found.weights, expected.weights)
    for name in states:
        close(client_vectors(found, name, 0.08), expected.clients[THEIR_NAME.get(name, name)])


def _arguments(reference: ModuleType) -> list[str]:
    return list(inspect.signature(reference.run).parameters)


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

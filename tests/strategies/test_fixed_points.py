"""Where methods stay: exact ones at the optimum, the others elsewhere. float64, 1e-10.

A method is exact if the optimum, with the duals or control variates that belong to it, is a fixed
point: one round from there leads nowhere, whoever takes part. That says what hundreds of rounds
would say, in one; one long run for each family shows that it also gets there.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaccord import strategies as S
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import Compress
from fedaccord.strategies import (
    SAM,
    Gossip,
    RelaxedInit,
    fedadmm,
    fedavgm,
    fedcm,
    feddyn,
    fedpd,
    scaffold,
)
from fedaccord.strategies import afedpd as afedpd_file
from fedaccord.strategies import fedsmoo as fedsmoo_file
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Federation, History, close, federate

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
}
EXAMPLES = [5, 40, 12, 3, 25, 8, 17, 30]
EVERYONE, SOME, ONE = [list(range(C))], [[1, 4, 5]], [[6]]
RHO = 0.6


class Optimum(NamedTuple):
    """The optimum and the gradients there, which sum to zero."""

    w: Tensor  # (d,)
    gradients: list[Tensor]  # of f_i + wd/2 ||w||^2

    @classmethod
    def of(cls, weight_decay: float = 0.0, examples: Any = None) -> "Optimum":
        w = LEAST_SQUARES.optimum(weight_decay, examples)
        gradients = [LEAST_SQUARES.grad(i, w) + weight_decay * w for i in range(C)]
        return cls(torch.from_numpy(w), [torch.from_numpy(g) for g in gradients])


def zero() -> Tensor:
    return torch.zeros(LEAST_SQUARES.dim, dtype=torch.float64)


def at(optimum: Optimum, method: FederatedStrategy) -> dict[str, Any]:
    """Client states and server state of a method that has arrived: lam_i = -grad f_i = -c_i."""
    w = optimum.w
    states: list[Any] = [None] * C
    server = None
    if isinstance(method, S.Scaffold):
        states = [scaffold.ClientState(c_i=g) for g in optimum.gradients]
        server = scaffold.ServerState(c=zero())
    elif isinstance(method, S.FedPD):
        states = [fedpd.ClientState(w, -g, w) for g in optimum.gradients]
    elif isinstance(method, S.FedADMM) or getattr(method, "variant", "") == "paper":
        states = [fedadmm.ClientState(-g, w - g / RHO) for g in optimum.gradients]
    elif isinstance(method, (S.FedDyn, S.FedSpeed)):
        states = [feddyn.ClientState(lam=-g) for g in optimum.gradients]
    elif isinstance(method, S.FedSMOO):
        states = [fedsmoo_file.ClientState(-g, zero()) for g in optimum.gradients]
    elif isinstance(method, S.AFedPD):
        states = [afedpd_file.ClientState(lam=-g) for g in optimum.gradients]
    for plugin in method.active_plugins:
        if isinstance(plugin, RelaxedInit):
            states = [plugin.init(w, w, state) for state in states]
    return {"states": {i: s for i, s in enumerate(states) if s is not None}, "server": server}


def move(
    kind: type[FederatedStrategy], cohort: list[list[int]], examples: Any = None, **settings: Any
) -> float:
    """How far two rounds of a cohort lead away from the optimum."""
    method = kind(**{**LOCAL, **settings})
    optimum = Optimum.of(method.weight_decay, examples)
    history = federate(
        *(method, LEAST_SQUARES, optimum.w.numpy(), cohort * 2),
        **at(optimum, method),
        examples=examples,
    )
    return float((history.weights - optimum.w).norm(dim=1).max())


EXACT: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "Scaffold": (S.Scaffold, {"server_lr": 0.8}),
    "FedADMM": (S.FedADMM, {"rho": RHO}),
    "FedDyn": (S.FedDyn, {"alpha": RHO}),
    "FedSpeed, r 0": (S.FedSpeed, {"rho": RHO, "plugins": (SAM(rho=0.0),)}),
    "FedSMOO, r 0": (S.FedSMOO, {"rho": RHO, "radius": 0.0}),
    "A-FedPD": (S.AFedPD, {"rho": RHO}),
}
EXACT_AT_FULL: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedPD": (S.FedPD, {"rho": RHO, "fraction_train": 1.0}),
    "FedADMM, active": (S.FedADMM, {"rho": RHO, "variant": "active"}),
    "FedSpeed, paper, r 0": (
        S.FedSpeed,
        {"rho": RHO, "variant": "paper", "plugins": (SAM(rho=0.0),)},
    ),
}
cohorts = pytest.mark.parametrize("cohort", [EVERYONE, SOME, ONE], ids=["all", "some", "one"])


@cohorts
@pytest.mark.parametrize("more", ["plain", "weight decay", "relaxed"])
@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_stay_at_the_optimum(name: str, more: str, cohort: list[list[int]]) -> None:
    """Weight decay is not amplified: it is the optimum of f + wd/2 ||w||^2."""
    kind, settings = EXACT[name]
    settings = dict(settings)
    if more == "weight decay":
        settings["weight_decay"] = 0.2
    elif more == "relaxed":
        settings["plugins"] = (*settings.get("plugins", ()), RelaxedInit(beta=0.1))
    assert move(kind, cohort, **settings) < 1e-10


@pytest.mark.parametrize("name", EXACT_AT_FULL)
def test_others_stay_at_full_participation_alone(name: str) -> None:
    """A mean of duals over the active clients is not zero at the optimum."""
    kind, settings = EXACT_AT_FULL[name]
    assert move(kind, EVERYONE, **settings) < 1e-10
    if kind is not S.FedPD:
        assert move(kind, SOME, **settings) > 0.1


BIASED: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedAvg": (S.FedAvg, {}),
    "FedInit": (S.FedInit, {}),
    "FedProx": (S.FedProx, {}),
    "FedAvgM": (S.FedAvgM, {}),
    "FedAdam": (S.FedAdam, {}),
    "FedYogi": (S.FedYogi, {}),
    "FedAdagrad": (S.FedAdagrad, {}),
    "FedNova": (S.FedNova, {}),
    "FedCM": (S.FedCM, {"alpha": 0.5}),
    "FedDeper": (S.FedDeper, {}),
    "FedSAM": (S.FedSAM, {}),
    "FedLESAM": (S.FedLESAM, {}),
    "MoFedSAM": (S.MoFedSAM, {"alpha": 0.5}),
    # exact ones, away from the optimum by the radius of SAM
    "FedGamma": (S.FedGamma, {"rho": 0.1}),
    "FedSpeed": (S.FedSpeed, {"rho": RHO}),
    "FedSMOO": (S.FedSMOO, {"rho": RHO}),
    "A-FedPDSAM": (S.AFedPDSAM, {"rho": RHO}),
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_methods_leave_the_optimum(name: str) -> None:
    """At full participation already, and further where few take part."""
    kind, settings = BIASED[name]
    everyone = move(kind, EVERYONE, **settings)
    assert everyone > 1e-3
    assert move(kind, SOME, **settings) > 1.1 * everyone


def test_silent_rounds_lead_fedpd_away_from_the_optimum() -> None:
    """In them clients start from anchors of their own, w* - grad f_i / rho."""
    kind, settings = EXACT_AT_FULL["FedPD"]
    assert move(kind, EVERYONE, **settings, p=0.5, seed=1) > 1e-3  # round 0 is silent, 1 is not


@pytest.mark.parametrize("name", ["FedGamma", "FedSpeed", "FedSMOO", "A-FedPDSAM"])
def test_the_bias_of_sam_shrinks_with_its_radius(name: str) -> None:
    kind, settings = BIASED[name]
    option = "rho" if name == "FedGamma" else "radius"
    large, small = (move(kind, EVERYONE, **{**settings, option: r}) for r in (0.1, 0.001))
    assert small < 0.02 * large


# --- the fixed point of FedAvg --------------------------------------------------------------------


def fedavg_fixed_point(lr: float) -> np.ndarray:
    """w with mean of w_{i,K} = w, where w_{i,K} = w_i* + (I - lr H_i)^K (w - w_i*)."""
    d = LEAST_SQUARES.dim
    shrink, minima = [], []
    for i in range(C):
        H = LEAST_SQUARES.hessian(i)
        shrink.append(np.linalg.matrix_power(np.eye(d) - lr * H, K))
        minima.append(np.linalg.solve(H, LEAST_SQUARES.A[i].T @ LEAST_SQUARES.b[i]))
    pull = [(np.eye(d) - M) @ w for M, w in zip(shrink, minima, strict=True)]
    w: np.ndarray = np.linalg.solve(np.eye(d) - np.mean(shrink, axis=0), np.mean(pull, axis=0))
    return w


SERVER_OPTIMISERS: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedAvg": (S.FedAvg, {"server_lr": 0.7}),
    "FedNova": (S.FedNova, {"server_lr": 0.7}),
    "FedAvgM": (S.FedAvgM, {}),
    "FedAdam": (S.FedAdam, {}),
    "FedYogi": (S.FedYogi, {}),
    "FedAdagrad": (S.FedAdagrad, {"beta1": 0.5}),
    "FedCM": (S.FedCM, {"alpha": 1.0}),
}


@pytest.mark.parametrize("name", SERVER_OPTIMISERS)
def test_server_optimisers_have_the_fixed_point_of_fedavg(name: str) -> None:
    kind, settings = SERVER_OPTIMISERS[name]
    w = fedavg_fixed_point(LOCAL["lr"])
    history = federate(kind(**{**LOCAL, **settings}), LEAST_SQUARES, w, EVERYONE * 2)
    close(history.weights, np.tile(w, (3, 1)))
    assert np.linalg.norm(w - LEAST_SQUARES.optimum()) > 1e-2  # its bias


def test_fedcm_has_the_fixed_point_of_fedavg_at_alpha_times_the_rate() -> None:
    """There delta = 0, so that the local rate is alpha lr."""
    w = fedavg_fixed_point(0.4 * LOCAL["lr"])
    history = federate(S.FedCM(alpha=0.4, **LOCAL), LEAST_SQUARES, w, EVERYONE * 2)
    close(history.weights, np.tile(w, (3, 1)))
    other = federate(S.FedCM(alpha=0.5, **LOCAL), LEAST_SQUARES, w, EVERYONE)
    assert not np.allclose(other.weights[1], w, atol=1e-5)


def test_fedcm_amplifies_weight_decay_outside_the_mixture() -> None:
    """With one step the fixed point is the ridge optimum of wd / alpha, and of wd inside."""
    settings = {**LOCAL, "alpha": 0.5, "weight_decay": 0.2, "local_steps": 1}
    for decay, ridge in (("outside", 0.4), ("inside", 0.2)):
        w = LEAST_SQUARES.optimum(weight_decay=ridge)
        history = federate(S.FedCM(decay=decay, **settings), LEAST_SQUARES, w, EVERYONE * 2)
        close(history.weights, np.tile(w, (3, 1)))


def test_memories_that_are_not_those_of_the_fixed_point_lead_away() -> None:
    """Else the tests above would not see the memory at all."""
    w = fedavg_fixed_point(LOCAL["lr"])
    ones = torch.ones_like(zero())
    for method, memory in (
        (S.FedAvgM(**LOCAL), fedavgm.ServerState(v=ones)),
        (S.FedCM(alpha=0.5, **LOCAL), fedcm.ServerState(delta=ones)),
    ):
        history = federate(method, LEAST_SQUARES, w, EVERYONE, server=memory)
        assert (history.weights[1] - history.weights[0]).norm() > 0.1


# --- weights by examples --------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [EVERYONE, SOME], ids=["all", "some"])
@pytest.mark.parametrize("kind", [S.AFedPD, S.FedPD])
def test_with_weights_the_fixed_point_is_the_weighted_optimum(
    kind: type[FederatedStrategy], cohort: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"rho": RHO, "weighting": "examples"}
    if kind is S.FedPD:
        if cohort is SOME:
            return
        settings["fraction_train"] = 1.0
    assert move(kind, cohort, EXAMPLES, **settings) < 1e-10
    plain = LEAST_SQUARES.optimum()
    assert np.linalg.norm(LEAST_SQUARES.optimum(examples=EXAMPLES) - plain) > 0.1


# --- without a server -----------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["ring", "exponential-directed", "random"])
@pytest.mark.parametrize("cohort", [EVERYONE, [[0, 1, 2, 4, 5, 7]]], ids=["all", "some"])
@pytest.mark.parametrize("name", ["Scaffold", "FedDyn"])
def test_nodes_with_memory_stay_at_the_optimum(
    name: str, cohort: list[list[int]], topology: str
) -> None:
    """With c_i = grad f_i, c^(i) = 0, or lam_i = -grad f_i, lam_bar^(i) = 0, on any graph."""
    kind, settings = EXACT[name]
    method = kind(plugins=(Gossip(topology=topology, peers=2),), **{**LOCAL, **settings})
    optimum = Optimum.of()
    states = at(optimum, method)["states"]
    history = federate(method, LEAST_SQUARES, optimum.w.numpy(), cohort * 2, states=states)
    close(history.weights, optimum.w.expand(3, C, -1))
    plain = S.DFedAvg(**LOCAL)
    biased = federate(plain, LEAST_SQUARES, optimum.w.numpy(), cohort)
    assert (biased.weights[1] - optimum.w).norm() > 0.01


# --- long runs ------------------------------------------------------------------------------------


def long(kind: type[FederatedStrategy], active: int, rounds: int, **settings: Any) -> History:
    schedule = problem.cohorts(C, active, rounds, seed=9)
    return federate(kind(**{**LOCAL, "local_steps": 6, **settings}), LEAST_SQUARES, W0, schedule)


def gap(history: History) -> float:
    return float((history.headline - torch.from_numpy(LEAST_SQUARES.optimum())).norm())


def test_scaffold_gets_to_the_optimum_under_partial_participation() -> None:
    history = long(S.Scaffold, 4, 260)
    assert gap(history) < 1e-8
    for i, state in enumerate(history.clients):
        close(state.c_i, LEAST_SQUARES.grad(i, LEAST_SQUARES.optimum()), 1e-6)


@pytest.mark.parametrize(("kind", "name"), [(S.FedDyn, "alpha"), (S.AFedPD, "rho")])
def test_the_primal_dual_family_gets_to_the_optimum(
    kind: type[FederatedStrategy], name: str
) -> None:
    assert gap(long(kind, 4, 260, **{name: 1.0})) < 1e-8


@pytest.mark.parametrize(
    ("name", "clients", "dim", "lr", "rho", "rounds", "near"),
    [
        ("Scaffold", 4, 5, 0.1, 0.0, 150, 1e-8),
        ("FedDyn", 4, 5, 0.1, 2.0, 200, 1e-5),
        ("A-FedPD", 4, 5, 0.1, 2.0, 280, 1e-5),
        *(
            pytest.param(name, 8, 20, 0.05, 1.0, 12_000, 1e-9, marks=pytest.mark.slow)
            for name in ("Scaffold", "FedDyn", "A-FedPD")
        ),
    ],
)
def test_a_part_of_each_upload_is_enough_for_the_optimum(
    name: str, clients: int, dim: int, lr: float, rho: float, rounds: int, near: float
) -> None:
    """Top-k, one number of 5 or two of 20, at half participation: what clients remember follows
    what the server reads."""
    kind, own = {
        "Scaffold": (S.Scaffold, {}),
        "FedDyn": (S.FedDyn, {"alpha": rho}),
        "A-FedPD": (S.AFedPD, {"rho": rho}),
    }[name]
    settings = {**LOCAL, "local_steps": 4, "lr": lr, "plugins": (Compress(share=0.1),), **own}
    method, squares = kind(**settings), LeastSquares(clients, num_rows=40, dim=dim, seed=11)
    f = Federation(method, squares, np.zeros(dim), rounds)
    for active in problem.cohorts(clients, clients // 2, rounds, seed=1):
        f.take(active)
    optimum = torch.from_numpy(squares.optimum())
    assert (method.output_model(f.s.w, f.s.server) - optimum).norm() < near < optimum.norm()


def test_fedavg_gets_to_its_biased_fixed_point() -> None:
    history = long(S.FedAvg, C, 40, local_steps=K)
    close(history.weights[-1], fedavg_fixed_point(LOCAL["lr"]), 1e-6)
    assert gap(history) > 1e-2


def test_nodes_with_memory_get_to_the_optimum() -> None:
    history = long(S.Scaffold, C, 120, plugins=(Gossip(topology="exponential"),))
    assert gap(history) < 1e-6
    assert gap(long(S.DFedAvg, C, 40, plugins=(Gossip(topology="exponential"),))) > 1e-2

"""The identities between methods: limits in which one method is another. float64, 1e-10."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.core.rounds import broadcast
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import SAM, Gossip, RelaxedInit
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Federation, History, client_vectors, close, federate

C, K, T = 8, 4, 8
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
SETTING = {"weight_decay": 0.03, "clip_norm": 5.0, "lr_decay": 0.95}
NO_SAM = (SAM(rho=0.0),)
EVERYONE = problem.everyone(C, T)
SOME = problem.cohorts(C, 3, T, seed=9)
ALONE = problem.cohorts(C, 1, T, seed=9)
schedules = pytest.mark.parametrize("schedule", [ALONE, SOME, EVERYONE], ids=["one", "some", "all"])


def run(kind: type[FederatedStrategy], schedule: list[list[int]], **settings: Any) -> History:
    return federate(kind(**{**LOCAL, **settings}), LEAST_SQUARES, W0, schedule)


def differ(a: History, b: History, by: float = 1e-3) -> bool:
    return bool((a.weights[-1] - b.weights[-1]).abs().max() > by)


# --- FedAvg, and what must be FedAvg --------------------------------------------------------------

FEDAVG_LIMITS: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedInit, beta 0": (S.FedInit, {"beta": 0.0}),
    "FedProx, mu 0": (S.FedProx, {"mu": 0.0}),
    "FedSAM, rho 0": (S.FedSAM, {"rho": 0.0}),
    "FedLESAM, radius 0": (S.FedLESAM, {"radius": 0.0}),
    "FedCM, alpha 1": (S.FedCM, {"alpha": 1.0}),
    "FedDeper, rho 0": (S.FedDeper, {"rho": 0.0, "lam": 0.8}),
    "FedAvgM, beta 0": (S.FedAvgM, {"beta": 0.0}),
    "FedNova, equal steps": (S.FedNova, {}),
}


@pytest.mark.parametrize("limit", FEDAVG_LIMITS)
def test_limits_that_are_fedavg(limit: str) -> None:
    kind, settings = FEDAVG_LIMITS[limit]
    fedavg = run(S.FedAvg, SOME, **SETTING)
    close(run(kind, SOME, **SETTING, **settings).weights, fedavg.weights)
    if kind is not S.FedNova:  # and away from the limit it is not
        assert differ(run(kind, SOME, **SETTING), fedavg, 1e-4)


@pytest.mark.parametrize("kind", [S.FedAdam, S.FedYogi, S.FedAdagrad])
def test_adaptive_methods_with_large_tau_are_fedavg(kind: type[FederatedStrategy]) -> None:
    """beta1 = 0 and server_lr = tau: the step m / (sqrt(v) / tau + 1) tends to D."""
    tau = 1e9
    history = run(kind, SOME, beta1=0.0, tau=tau, v0=0.0, server_lr=tau)
    close(history.weights, run(S.FedAvg, SOME).weights, 1e-7)


@pytest.mark.parametrize("kind", [S.FedAdam, S.FedYogi])
def test_adaptive_methods_without_memory_step_along_the_sign(kind: type[FederatedStrategy]) -> None:
    fedavg = run(S.FedAvg, EVERYONE[:1])
    hyper = {"beta1": 0.0, "beta2": 0.0, "v0": 0.0, "tau": 1e-14, "server_lr": 0.3}
    history = run(kind, EVERYONE[:1], **hyper)
    D = fedavg.weights[1] - fedavg.weights[0]
    close(history.weights[1], history.weights[0] + 0.3 * torch.sign(D))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(S.FedAvg, {}), (S.Scaffold, {}), (S.FedProx, {}), (S.FedNova, {}), (S.FedCM, {"alpha": 1.0})],
)
def test_one_full_batch_step_of_all_clients_is_gradient_descent(
    kind: type[FederatedStrategy], settings: dict[str, Any]
) -> None:
    history = run(kind, EVERYONE, local_steps=1, **settings)
    w = W0
    for t in range(T):
        close(history.weights[t], w)
        w = w - LOCAL["lr"] * LEAST_SQUARES.full_grad(w)


def test_round_1_of_scaffold_and_of_fedlesam_is_fedavg() -> None:
    for kind in (S.Scaffold, S.FedLESAM):
        close(run(kind, SOME[:1]).weights, run(S.FedAvg, SOME[:1]).weights)
        assert differ(run(kind, EVERYONE[:2]), run(S.FedAvg, EVERYONE[:2]))


def test_relaxed_starts_average_to_the_model_at_full_participation() -> None:
    """Mean of w_{i,0} = w^t, as the mean of the last local models is then w^t."""
    history = run(S.FedInit, EVERYONE)
    for w, states in zip(history.weights[1:], history.states[1:], strict=True):
        last = client_vectors(states, "last")
        close((w + 0.1 * (w - last)).mean(0), w)


def test_both_server_rules_of_relaxed_initialisation_are_one_at_full_participation() -> None:
    for schedule in (EVERYONE, SOME):
        models, updates = (
            run(S.FedInit, schedule, server=server) for server in ("models", "updates")
        )
        assert differ(models, updates, 1e-10) == (schedule is SOME)


# --- control variates -----------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize("beta", [0.0, 0.08])
@pytest.mark.parametrize("kind", [S.Scaffold, S.FedGamma])
def test_mean_of_c_i_is_c_at_any_participation(
    kind: type[FederatedStrategy], beta: float, schedule: list[list[int]]
) -> None:
    history = run(kind, schedule, plugins=(RelaxedInit(beta=beta),), **SETTING)
    assert all(state is not None for state in history.clients)
    close(client_vectors(history.clients, "c_i").mean(0), history.server[-1].c)
    assert history.server[-1].c.norm() > 1e-3


# --- SAM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "base"), [(S.MoFedSAM, S.FedCM), (S.FedGamma, S.Scaffold), (S.AFedPDSAM, S.AFedPD)]
)
def test_sam_methods_with_radius_0_are_their_base(
    kind: type[FederatedStrategy], base: type[FederatedStrategy]
) -> None:
    bare = run(base, SOME, **SETTING)
    assert torch.equal(run(kind, SOME, **SETTING, plugins=NO_SAM).weights, bare.weights)
    assert differ(run(kind, SOME, **SETTING), bare, 1e-5)


def test_where_the_gradient_is_zero_the_perturbation_is() -> None:
    flat = LeastSquares(C, seed=11)
    flat.A[:], flat.b[:] = 0.0, 0.0
    for kind in (S.FedSAM, S.FedLESAM, S.FedSMOO, S.AFedPDSAM):
        history = federate(kind(**LOCAL), flat, W0, SOME)
        close(history.weights, np.tile(W0, (T + 1, 1)))


@pytest.mark.parametrize("name", S.METHODS)
def test_the_training_loss_is_that_before_a_step(name: str) -> None:
    """At w, not beside it, whatever gradients a step takes; at w + e where it takes that one."""
    kind = S.METHODS[name]
    method = kind(**{**LOCAL, **SETTING, "fraction_train": 1.0, "local_steps": 1})
    f = Federation(method, LEAST_SQUARES, W0, 2, local_steps=1)
    f.take(range(C))
    for i in range(C):
        visit = f.train(i, broadcast(method, f.s, i))
        w = visit.result.w_i0
        if hasattr(f.states[i], "w_old"):
            old = f.states[i].w_old
            w = w + method.radius * (old - w) / (old - w).norm()  # type: ignore[attr-defined]
        loss = 0.5 * (f.A[i] @ w - f.b[i]).square().sum()
        close(visit.result.loss, loss)


# --- the primal-dual family -----------------------------------------------------------------------

PRIMAL_DUAL: dict[str, tuple[type[FederatedStrategy], dict[str, Any]]] = {
    "FedPD": (S.FedPD, {"rho": 0.3, "fraction_train": 1.0}),
    "FedADMM": (S.FedADMM, {"rho": 0.3}),
    "FedADMM active": (S.FedADMM, {"rho": 0.3, "variant": "active"}),
    "A-FedPD": (S.AFedPD, {"rho": 0.3}),
    "FedSpeed, r 0": (S.FedSpeed, {"rho": 0.3, "plugins": NO_SAM}),
    "FedSpeed paper, r 0": (S.FedSpeed, {"rho": 0.3, "plugins": NO_SAM, "variant": "paper"}),
    "FedSMOO, r 0": (S.FedSMOO, {"rho": 0.3, "radius": 0.0}),
}


@pytest.mark.parametrize("beta", [0.0, 0.08])
@pytest.mark.parametrize("name", PRIMAL_DUAL)
def test_primal_dual_methods_are_one_at_full_participation(name: str, beta: float) -> None:
    kind, settings = PRIMAL_DUAL[name]
    ri = (RelaxedInit(beta=beta),)
    feddyn = run(S.FedDyn, EVERYONE[:4], alpha=0.3, plugins=ri, **SETTING)
    settings = {**settings, "plugins": (*settings.get("plugins", ()), *ri)}
    history = run(kind, EVERYONE[:4], **SETTING, **settings)
    close(history.weights, feddyn.weights)
    close(client_vectors(history.clients, "lam"), client_vectors(feddyn.clients, "lam"))
    if kind not in (S.FedPD, S.FedSMOO, S.FedSpeed):  # they part under partial participation
        partial = run(kind, SOME, **SETTING, **settings)
        assert differ(partial, run(S.FedDyn, SOME, alpha=0.3, plugins=ri, **SETTING), 1e-4)


def test_fedspeed_without_ascent_under_partial_participation() -> None:
    off = {"rho": 0.3, "plugins": NO_SAM, **SETTING}
    authors = run(S.FedSpeed, SOME, **off)
    close(authors.weights, run(S.FedDyn, SOME, alpha=0.3, **SETTING).weights)
    paper = run(S.FedSpeed, SOME, variant="paper", **off)
    close(paper.weights, run(S.FedADMM, SOME, rho=0.3, variant="active", **SETTING).weights)
    assert differ(authors, paper)


def test_fedsmoo_without_radius_is_feddyn_at_any_participation() -> None:
    for schedule in (SOME, EVERYONE):
        smoo = run(S.FedSMOO, schedule, rho=0.3, radius=0.0, **SETTING)
        close(smoo.weights, run(S.FedDyn, schedule, alpha=0.3, **SETTING).weights)


@schedules
@pytest.mark.parametrize("sam", [0.0, 0.2])
@pytest.mark.parametrize("beta", [0.0, 0.08])
def test_afedpd_broadcasts_the_extrapolation_of_two_averages(
    schedule: list[list[int]], sam: float, beta: float
) -> None:
    """w^t = 2 w_bar^t - w_bar^{t-1} and lam_bar^t = rho (w_bar^t - w_bar^{t-1}), whatever is in
    the local steps."""
    plugins = (SAM(rho=sam), RelaxedInit(beta=beta))
    history = run(S.AFedPD, schedule, rho=0.3, plugins=plugins, **SETTING)
    w_bar = history.averages
    close(history.weights[1:], 2 * w_bar[1:] - w_bar[:-1])
    for t in range(T):
        lam_bar, before = history.server[t + 1].lam_bar, history.server[t].lam_bar
        close(lam_bar, 0.3 * (w_bar[t + 1] - w_bar[t]))
        close(lam_bar, before + 0.3 * (w_bar[t + 1] - history.weights[t]))
    close(history.headline, w_bar[-1])


@schedules
@pytest.mark.parametrize("center", ["server", "start"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(S.FedDyn, {"alpha": 0.3}), (S.FedSpeed, {"rho": 0.3}), (S.FedSMOO, {"rho": 0.3})],
)
def test_lam_bar_is_the_mean_of_all_duals(
    kind: type[FederatedStrategy], settings: Any, center: str, schedule: list[list[int]]
) -> None:
    """At any participation, around the relaxed start too: lam_bar moves by P/C of the mean step."""
    ri = (RelaxedInit(beta=0.08, center=center),)
    history = run(kind, schedule, plugins=ri, **settings, **SETTING)
    lam_bar = history.server[-1].lam_bar
    close(lam_bar, client_vectors(history.clients, "lam").mean(0))
    close(history.weights[-1], history.averages[-1] + lam_bar / 0.3)


@schedules
def test_fedadmm_tracking_keeps_the_mean_of_all_clients(schedule: list[list[int]]) -> None:
    history = run(S.FedADMM, schedule, rho=0.3, **SETTING)
    close(history.weights[-1], client_vectors(history.clients, "w_hat").mean(0))


def test_exact_local_solves_give_duals_that_are_negative_gradients() -> None:
    """Many steps: w_i minimises its augmented Lagrangian, and lam_i = -grad f_i(w_i)."""
    for kind, rho in ((S.FedDyn, {"alpha": 0.8}), (S.AFedPD, {"rho": 0.8})):
        schedule = SOME[:2]
        history = run(kind, schedule, local_steps=150, lr=0.2, plugins=(RelaxedInit(),), **rho)
        for i in schedule[-1]:
            gradient = LEAST_SQUARES.grad(i, history.clients[i].last.numpy())
            close(history.clients[i].base.lam, -gradient, 1e-9)


# --- without a server -----------------------------------------------------------------------------

SAME: dict[str, tuple[Any, Any]] = {
    "a full graph is a server": (
        S.DFedAvg(plugins=(Gossip(topology="full"),), **LOCAL | SETTING),
        S.FedAvg(**LOCAL | SETTING),
    ),
    "with SAM too": (
        S.DFedSAM(rho=0.2, plugins=(Gossip(topology="full"),), **LOCAL | SETTING),
        S.FedSAM(rho=0.2, **LOCAL | SETTING),
    ),
    "no radius, no SAM": (S.DFedSAM(rho=0.0, **LOCAL | SETTING), S.DFedAvg(**LOCAL | SETTING)),
    "no momentum": (S.DFedAvgM(momentum=0.0, **LOCAL | SETTING), S.DFedAvg(**LOCAL | SETTING)),
    "one step of many": (S.DFedSAMMGS(steps=1, **LOCAL | SETTING), S.DFedSAM(**LOCAL | SETTING)),
    "adapt, then combine": (
        S.DPSGD(variant="atc", **LOCAL | SETTING | {"local_steps": 1}),
        S.DFedAvg(**LOCAL | SETTING | {"local_steps": 1}),
    ),
    "masks of ones on a full graph": (
        S.DisPFL(density=1.0, plugins=(Gossip(topology="full"),), **LOCAL | SETTING),
        S.FedAvg(**LOCAL | SETTING),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_identities_without_a_server(name: str) -> None:
    a, b = (federate(method, LEAST_SQUARES, W0, EVERYONE) for method in SAME[name])
    expected = b.weights if b.weights.ndim == 3 else b.weights[:, None].expand(-1, C, -1)
    close(a.weights, expected)


def test_many_gossip_steps_are_a_step_of_the_matrix_power() -> None:
    """MGS (W, Q) is DFedSAM (W^Q): on a ring of Q = C steps all nodes hear of all others."""
    W = Gossip(topology="grid").matrix(C, 0, 0)
    many = run(S.DFedSAMMGS, EVERYONE[:1], plugins=(Gossip(topology="grid", steps=3),))
    plain = run(S.DFedSAM, EVERYONE[:1], plugins=(Gossip(topology="full"),))
    alone = [run(S.FedSAM, [[i]], rho=0.01).weights[1] for i in range(C)]
    close(plain.weights[1].mean(0), torch.stack(alone).mean(0))
    close(many.weights[1], W @ W @ W @ torch.stack(alone))


LINEAR = [kind for kind in S.METHODS.values() if kind.linear and not issubclass(kind, S.DFedAvg)]


@pytest.mark.parametrize("kind", LINEAR)
def test_many_steps_on_a_connected_graph_are_a_server(kind: type[FederatedStrategy]) -> None:
    """For every method that takes gossip, memory of the server included."""
    star = run(kind, EVERYONE[:4], **SETTING)
    mixed = run(kind, EVERYONE[:4], **SETTING, plugins=(Gossip(topology="grid", steps=2000),))
    close(mixed.weights, star.weights[:, None].expand(-1, C, -1))
    for name in star.clients[0]._fields:
        if isinstance(getattr(star.clients[0], name), torch.Tensor):
            close(client_vectors(mixed.clients, name), client_vectors(star.clients, name))
    for name in getattr(star.server[-1], "_fields", ()):
        close(getattr(mixed.server[-1], name)[0], getattr(star.server[-1], name))


@pytest.mark.parametrize(
    ("kind", "memory", "own"), [(S.Scaffold, "c", "c_i"), (S.FedDyn, "lam_bar", "lam")]
)
def test_copies_of_the_server_memory_have_the_mean_of_the_clients(
    kind: type[FederatedStrategy], memory: str, own: str
) -> None:
    history = run(kind, EVERYONE, plugins=(Gossip(),), **SETTING)
    copies = getattr(history.server[-1], memory)
    close(copies.mean(0), client_vectors(history.clients, own).mean(0))
    assert copies.std(0).min() > 1e-6  # the nodes' own

"""The limits in which newer methods are older ones, and what they return. float64, 1e-10."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.core.optimizer import AdamW, Muon
from fedaccord.core.vectors import norm
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import RelaxedInit
from fedaccord.strategies import scaffold as scaffold_file
from tests import federation
from tests.reference import diloco, ditto, fedexp, fedgloss, fedmuon, problem
from tests.reference import optimizers as dense
from tests.reference.problem import LeastSquares
from tests.strategies.federate import History, client_vectors, close, federate
from tests.strategies.test_identities import (
    EVERYONE,
    LEAST_SQUARES,
    LOCAL,
    SETTING,
    SOME,
    W0,
    differ,
    run,
    schedules,
)

# --- a method that is another one, bit for bit ----------------------------------------------------

LIMITS: dict[str, tuple[type[FederatedStrategy], dict[str, Any], type[FederatedStrategy]]] = {
    "FedExP, updates far below epsilon": (S.FedExP, {"epsilon": 1e9}, S.FedAvg),
    "FedLESAM-S, radius 0": (S.FedLESAMS, {"radius": 0.0}, S.Scaffold),
    "FedLESAM-D, radius 0": (S.FedLESAMD, {"radius": 0.0}, S.FedDyn),
    "FedGloSS, radius 0": (S.FedGloSS, {"radius": 0.0}, S.FedDyn),
    "Ditto's global model": (S.Ditto, {}, S.FedAvg),
}


@schedules
@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit: str, schedule: list[list[int]]) -> None:
    kind, settings, base = LIMITS[limit]
    expected = run(base, schedule, **SETTING)
    close(run(kind, schedule, **SETTING, **settings).weights, expected.weights)
    if settings and schedule is EVERYONE:  # and away from the limit it is not
        assert differ(run(kind, schedule, **SETTING), expected, 1e-5)


# --- FedExP ---------------------------------------------------------------------------------------


def rates(schedule: list[list[int]], problem: LeastSquares, **own: Any) -> np.ndarray:
    """eta_g of every round."""
    common = {"lr": LOCAL["lr"], "local_steps": LOCAL["local_steps"]}
    return fedexp.run(problem, W0, schedule, **common, **own).traces["eta_g"][1:, 0]


def test_fedexp_returns_the_mean_of_the_last_two_models() -> None:
    history = run(S.FedExP, SOME, epsilon=1e-3)
    close(history.headline, (history.weights[-1] + history.weights[-2]) / 2)
    common = {"lr": LOCAL["lr"], "local_steps": LOCAL["local_steps"]}
    expected = fedexp.run(LEAST_SQUARES, W0, SOME, epsilon=1e-3, **common)
    close(history.headline, expected.extra["output"])


def test_fedexp_goes_further_where_updates_disagree_and_no_less_far_than_fedavg() -> None:
    values = rates(EVERYONE, LEAST_SQUARES, epsilon=1e-3)
    assert values.min() >= 1
    assert values.max() > 1.5
    history, fedavg = (run(kind, EVERYONE) for kind in (S.FedExP, S.FedAvg))
    assert differ(history, fedavg)


def test_fedexp_with_equal_updates_is_fedavg() -> None:
    """One client, or all alike: the mean square is the square of the mean."""
    close(run(S.FedExP, [[2]] * 5, epsilon=1e-12).weights, run(S.FedAvg, [[2]] * 5).weights)
    alike = LeastSquares(LEAST_SQUARES.num_clients, seed=11)
    alike.A[:], alike.b[:] = alike.A[0], alike.b[0]
    history, fedavg = (
        federate(kind(**LOCAL), alike, W0, EVERYONE) for kind in (S.FedExP, S.FedAvg)
    )
    close(history.weights, fedavg.weights)


# --- FedLESAM-S, FedLESAM-D -----------------------------------------------------------------------


@schedules
def test_memories_of_fedlesam_s_and_d_have_the_mean_of_their_clients(
    schedule: list[list[int]],
) -> None:
    scaffold, feddyn = (run(kind, schedule, **SETTING) for kind in (S.FedLESAMS, S.FedLESAMD))
    close(client_vectors(scaffold.clients, "c_i").mean(0), scaffold.server[-1].c)
    close(client_vectors(feddyn.clients, "lam").mean(0), feddyn.server[-1].lam_bar)
    assert min(scaffold.server[-1].c.norm(), feddyn.server[-1].lam_bar.norm()) > 1e-3


@pytest.mark.parametrize("kind", [S.FedLESAM, S.FedLESAMS, S.FedLESAMD, S.FedGloSS])
def test_where_the_gradient_is_zero_the_perturbation_is(kind: type[FederatedStrategy]) -> None:
    flat = LeastSquares(LEAST_SQUARES.num_clients, seed=11)
    flat.A[:], flat.b[:] = 0.0, 0.0
    history = federate(kind(**LOCAL), flat, W0, SOME)
    close(history.weights, np.tile(W0, (len(SOME) + 1, 1)))


# --- FedGloSS -------------------------------------------------------------------------------------


@schedules
def test_fedgloss_broadcasts_a_model_at_its_radius_from_the_one_it_returns(
    schedule: list[list[int]],
) -> None:
    """Uphill: along the last displacement of the mean, backwards. lam_bar is the mean of lam_i."""
    history = run(S.FedGloSS, schedule, radius=0.2, alpha=0.3, **SETTING)
    for t, state in enumerate(history.server[1:], start=1):
        close(norm(state.e), [0.2])
        D = history.weights[t - 1] - history.averages[t]
        close(state.e, 0.2 * D / norm(D))
    close(history.headline, history.weights[-1] - history.server[-1].e)
    close(history.server[-1].lam_bar, client_vectors(history.clients, "lam").mean(0))
    common = {"lr": 0.05, "local_steps": LOCAL["local_steps"], **SETTING}
    expected = fedgloss.run(LEAST_SQUARES, W0, schedule, radius=0.2, alpha=0.3, **common)
    close(history.headline, expected.extra["output"])


# --- Scaffnew -------------------------------------------------------------------------------------


def scaffnew(T: int, **more: Any) -> History:
    settings = {**LOCAL, "local_steps": 0, "fraction_train": 1.0, **more}
    schedule = problem.everyone(LEAST_SQUARES.num_clients, T)
    return federate(S.Scaffnew(**settings), LEAST_SQUARES, W0, schedule)


def h_of(history: History, t: int, p: float) -> torch.Tensor:
    """(C, d), h_i as round t begins: what clients keep, and the model that they receive."""
    return client_vectors(history.states[t], "h") + p / LOCAL["lr"] * history.weights[t]


@pytest.mark.parametrize(("p", "T"), [(0.2, 80), (1.0, 250)])
def test_scaffnews_h_sums_to_zero_and_ends_at_the_clients_gradients(p: float, T: int) -> None:
    """Exact on least squares: h_i = grad f_i(w*) is where it stays."""
    history = scaffnew(T, p=p)
    for t in range(1, T + 1):
        close(h_of(history, t, p).sum(0), np.zeros(LEAST_SQUARES.dim))
    optimum = LEAST_SQUARES.optimum()
    close(history.headline, optimum, 1e-8)
    gradients = [LEAST_SQUARES.grad(i, optimum) for i in range(LEAST_SQUARES.num_clients)]
    close(h_of(history, T, p), gradients, 1e-6)
    fedavg = federate(S.FedAvg(**LOCAL), LEAST_SQUARES, optimum, EVERYONE)
    assert np.linalg.norm(fedavg.headline.numpy() - optimum) > 1e-2  # which drifts away


def test_scaffnew_with_a_round_a_step_is_gradient_descent() -> None:
    history, w = scaffnew(8, p=1.0), W0
    for t in range(8):
        close(history.weights[t], w)
        w = w - LOCAL["lr"] * LEAST_SQUARES.full_grad(w)


def test_scaffnews_steps_are_geometric_and_one_draw_for_all_clients() -> None:
    """Mean 1 / p, share p of single steps; the seed and the round decide, the server sends K."""
    method = S.Scaffnew(p=0.25, seed=3, fraction_train=1.0)
    draws = np.array([method.steps_of_round(t) for t in range(4000)])
    assert draws.min() == 1
    assert abs(draws.mean() - 4) < 0.25
    assert abs((draws == 1).mean() - 0.25) < 0.03
    assert [method.steps_of_round(t) for t in range(9)] == draws[:9].tolist()
    assert [S.Scaffnew(p=0.25, fraction_train=1.0).steps_of_round(t) for t in range(9)] != draws[
        :9
    ].tolist()
    rows: list[dict[str, Any]] = []
    federation.run(
        *(S.Scaffnew(p=0.25, seed=3, fraction_train=1.0, batch_size=0), LEAST_SQUARES, W0),
        *(EVERYONE[:3],),
        on_round=lambda round: rows.extend(round.clients),
    )
    C = LEAST_SQUARES.num_clients
    assert [row["steps"] for row in rows] == [int(k) for k in draws[:3] for _ in range(C)]


def test_scaffnew_needs_all_clients_and_a_constant_rate() -> None:
    with pytest.raises(ValueError, match=r"^Scaffnew: expected all clients in every round, got"):
        S.Scaffnew(fraction_train=0.5)
    keys = {"algo": "scaffnew", "fraction-train": 1.0, "lr-decay": 0.9, "local-steps": 3}
    lines = RunConfig.make(keys).unread()
    assert "lr-decay=0.9 has no effect: the rate of scaffnew is constant" in lines
    assert any(line.startswith("local-steps=3 has no effect: scaffnew draws") for line in lines)
    assert {S.Scaffnew(fraction_train=1.0).rate(t) for t in range(5)} == {0.1}


# --- FedMoSWA -------------------------------------------------------------------------------------


def test_fedmoswa_at_full_participation_is_scaffold_with_falling_rates() -> None:
    """gamma = 1: c is the mean of the clients' c_i, as SCAFFOLD's; with fewer clients it is not."""
    for rho, schedule in ((0.0, "linear"), (1.0, "constant")):
        own = {"gamma": 1.0, "server_lr": 0.8, "rho": rho}
        scaffold = {"lr_schedule": schedule, "server_lr": 0.8}
        everyone = run(S.FedMoSWA, EVERYONE, **own, **SETTING)
        close(everyone.weights, run(S.Scaffold, EVERYONE, **scaffold, **SETTING).weights)
        close(everyone.server[-1].c, client_vectors(everyone.clients, "c_i").mean(0))
        assert differ(run(S.FedMoSWA, SOME, **own), run(S.Scaffold, SOME, **scaffold))


def test_fedmoswa_is_exact_at_full_participation_alone() -> None:
    optimum = LEAST_SQUARES.optimum()
    gradients = [LEAST_SQUARES.grad(i, optimum) for i in range(LEAST_SQUARES.num_clients)]
    states = {i: scaffold_file.ClientState(torch.from_numpy(g)) for i, g in enumerate(gradients)}
    method = S.FedMoSWA(**LOCAL)
    for schedule, exact in ((EVERYONE, True), (SOME, False)):
        history = federate(method, LEAST_SQUARES, optimum, schedule, states=states)
        assert (float((history.headline - torch.from_numpy(optimum)).norm()) < 1e-10) == exact


def test_the_rates_of_fedmoswa_fall_whatever_is_set() -> None:
    keys = {"algo": "fedmoswa", "lr-schedule": "cosine"}
    assert RunConfig.make(keys).strategy.client_half().schedule == ("linear", 0.1)
    (line,) = RunConfig.make(keys).unread()
    assert line.startswith('lr-schedule="cosine" has no effect: the rates of fedmoswa fall')


# --- DiLoCo ---------------------------------------------------------------------------------------


@schedules
def test_diloco_with_sgd_and_without_momentum_is_fedavg(schedule: list[list[int]]) -> None:
    sgd = run(S.DiLoCo, schedule, inner="sgd", mu=0.0, server_lr=1.0, **SETTING)
    close(sgd.weights, run(S.FedAvg, schedule, **SETTING).weights)
    adamw = {"mu": 0.0, "server_lr": 1.0, "optimizer_state": "keep"}
    fedavg = run(S.FedAvg, schedule, optimizer="adamw", optimizer_state="keep", **SETTING)
    close(run(S.DiLoCo, schedule, **adamw, **SETTING).weights, fedavg.weights)
    assert differ(fedavg, sgd)


@pytest.mark.parametrize(("inner", "state"), [("sgd", "reset"), ("adamw", "keep")])
def test_diloco_equals_the_dense_reference(inner: str, state: str) -> None:
    own: dict[str, Any] = {"mu": 0.6, "server_lr": 0.5, "inner": inner}
    common = {"lr": 0.05, "local_steps": LOCAL["local_steps"], **SETTING}
    expected = diloco.run(LEAST_SQUARES, W0, SOME, state=state, **own, **common)
    history = run(S.DiLoCo, SOME, optimizer_state=state, **own, **SETTING)
    close(history.weights, expected.weights)


# --- Ditto ----------------------------------------------------------------------------------------


def personal(history: History) -> torch.Tensor:
    return client_vectors(history.clients, "v")


@schedules
def test_ditto_without_a_pull_is_local_training(schedule: list[list[int]]) -> None:
    local = run(S.Local, schedule, **SETTING)
    close(personal(run(S.Ditto, schedule, lam=0.0, **SETTING)), client_vectors(local.clients, "w"))


def test_ditto_with_a_large_pull_is_the_model_received() -> None:
    """lam = 1 / lr, both to their limits: each step lands an lr of the gradient away from w^t."""
    tiny = {"lr": 1e-12, "lam": 1e12}
    history = run(S.Ditto, EVERYONE, **tiny)
    close(personal(history), history.weights[-2].expand(len(EVERYONE[0]), -1))
    half = run(S.Ditto, EVERYONE, lam=0.5)
    between = personal(half) - personal(run(S.Ditto, EVERYONE, lam=0.0))
    assert between.norm() > 1e-2


def test_dittos_centre_may_be_the_relaxed_start() -> None:
    relaxed = {"ri_beta": 0.1, "ri_center": "start"}
    common = {"lr": 0.05, "local_steps": LOCAL["local_steps"], **SETTING}
    expected = ditto.run(LEAST_SQUARES, W0, SOME, lam=0.7, **relaxed, **common)
    start = (RelaxedInit(beta=0.1, center="start"),)
    history = run(S.Ditto, SOME, lam=0.7, plugins=start, **SETTING)
    close(personal(history), expected.clients["v"])


# --- FedMuon, FedPAC ------------------------------------------------------------------------------

MATRIX = ((2, 2), (1, 1))  # shapes of a model: a hidden matrix, and the output layer


def run_on_a_matrix(kind: type[FederatedStrategy], schedule: list[list[int]], **more: Any) -> Any:
    method = kind(**(LOCAL | SETTING | more))
    return federate(method, LEAST_SQUARES, W0, schedule, shapes=MATRIX)


@schedules
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_fedpac_without_correction_is_fedavg_with_averaged_moments(
    inner: str, schedule: list[list[int]]
) -> None:
    aligned = {"optimizer": inner, "optimizer_state": "average"}
    fedavg = run_on_a_matrix(S.FedAvg, schedule, **aligned)
    bare = run_on_a_matrix(S.FedPAC, schedule, inner=inner, beta=0.0)
    close(bare.weights, fedavg.weights)
    assert differ(run_on_a_matrix(S.FedPAC, schedule, inner=inner), fedavg)
    assert differ(run_on_a_matrix(S.FedAvg, schedule, optimizer=inner), fedavg)


@schedules
def test_fedpac_with_sgd_is_fedcm(schedule: list[list[int]]) -> None:
    history = run(S.FedPAC, schedule, inner="sgd", beta=0.7, **SETTING)
    close(history.weights, run(S.FedCM, schedule, alpha=0.3, decay="inside", **SETTING).weights)


def test_fedpac_that_follows_the_mean_direction_alone_stays() -> None:
    """beta = 1: G begins at zero, and every displacement is K lr G."""
    assert torch.equal(run(S.FedPAC, SOME, beta=1.0).weights[-1], torch.from_numpy(W0))


def test_fedmuon_is_fedpac_with_muon() -> None:
    history = run_on_a_matrix(S.FedMuon, SOME)
    assert torch.equal(history.weights, run_on_a_matrix(S.FedPAC, SOME, inner="muon").weights)
    assert differ(history, run_on_a_matrix(S.FedPAC, SOME))


@schedules
def test_fedmuon_of_a_matrix_equals_the_dense_reference(schedule: list[list[int]]) -> None:
    def make() -> Any:
        return dense.Muon((2, 2))

    common = {"lr": 0.05, "local_steps": LOCAL["local_steps"], **SETTING}
    expected = fedmuon.run(LEAST_SQUARES, W0, schedule, beta=0.4, make=make, **common)
    close(run_on_a_matrix(S.FedMuon, schedule, beta=0.4).weights, expected.weights)


@pytest.mark.parametrize("algo", ["diloco", "fedpac"])
def test_the_options_of_an_optimizer_of_its_own_are_read(algo: str) -> None:
    keys = {"algo": algo, f"{algo}.inner": "muon", "muon.mu": 0.8, "optimizer": "momentum"}
    config = RunConfig.make(keys | {"momentum.mu": 0.5})
    assert config.strategy.own_optimizer() == Muon(mu=0.8)
    lines = {line.partition("=")[0] for line in config.unread()}
    assert lines == {"optimizer", "momentum.mu"}
    assert RunConfig.make({"algo": algo, "optimizer-state": "average"}).strategy.own_state() == (
        "average"
    )
    with pytest.raises(ValueError, match=r"^local_optimizer: expected one called adamw, as \w+ is"):
        S.METHODS[algo](local_optimizer=Muon())
    assert S.METHODS[algo](local_optimizer=AdamW(beta1=0.8)).own_optimizer() == AdamW(beta1=0.8)

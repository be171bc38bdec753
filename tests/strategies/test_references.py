"""Every method equals its dense reference: models, averages and client states, to 1e-10."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.core import Client
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import SAM, RelaxedInit
from fedaccord.strategies.fedpd import is_silent
from tests import federation
from tests.reference import (
    adaptive,
    afedpd,
    fedadmm,
    fedavg,
    fedavgm,
    fedcm,
    feddeper,
    feddyn,
    fedgloss,
    fedinit,
    fedlesam,
    fednova,
    fedpd,
    fedprox,
    fedsmoo,
    fedspeed,
    problem,
    scaffold,
)
from tests.reference.problem import Batches, Cohorts, LeastSquares
from tests.strategies.federate import client_vectors, close, federate
from tests.strategies.test_decentralised import METHODS as DECENTRALISED

C, T, K = 8, 10, 3
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
CLIP = 5.0  # between the gradient norms of early and late rounds
SETTINGS: dict[str, Any] = {"lr": 0.05, "lr_decay": 0.95, "weight_decay": 0.05, "clip_norm": CLIP}
SOME = problem.cohorts(C, 3, T, seed=5)
EVERYONE = problem.everyone(C, T)
BATCHES = problem.minibatches(LEAST_SQUARES, T, K, 5, seed=7)
BETA, RADIUS = 0.15, 0.3


class Case(NamedTuple):
    """A method and its reference."""

    kind: type[FederatedStrategy]
    reference: ModuleType
    own: Mapping[str, Any] = {}  # options of the method, and of the reference under the same name
    theirs: Mapping[str, Any] = {}  # of the reference alone
    states: tuple[str, ...] = ()  # client states to compare

    def __repr__(self) -> str:
        return "-".join([self.kind.__name__, *map(str, self.own.values())])

    @property
    def schedule(self) -> Cohorts:
        return EVERYONE if self.kind.all_clients else SOME

    def method(self, *plugins: Any, **more: Any) -> FederatedStrategy:
        common = {"precision": "float64", "local_steps": K, "batch_size": 0, "fraction_train": 1.0}
        common |= {"eval_every": T}
        return self.kind(plugins=plugins, **(common | SETTINGS | self.own | more))

    def expected(self, schedule: Cohorts, **more: Any) -> problem.History:
        takes = inspect.signature(self.reference.run).parameters
        own = {name: value for name, value in self.own.items() if name in takes}
        keys = {"local_steps": K, **SETTINGS, **own, **self.theirs, **more}
        history: problem.History = self.reference.run(LEAST_SQUARES, W0, schedule, **keys)
        return history

    def compare(self, history: Any, expected: problem.History, *more: str) -> None:
        close(history.weights, expected.weights)
        if "w" in self.method().rule().sends._fields:  # else the server knows no average of them
            close(history.averages, expected.averages)
        for name in (*self.states, *more):
            close(client_vectors(history.clients, name), expected.clients[name])


ADAPTIVE = {"tau": 0.1, "server_lr": 0.1}
PAPER = {"rho": 0.4, "mix": 0.6, "variant": "paper"}

CASES = [
    Case(S.FedAvg, fedavg, {"server_lr": 0.7}),
    Case(S.FedProx, fedprox, {"mu": 0.3, "server_lr": 0.9}),
    Case(S.FedAvgM, fedavgm, {"beta": 0.6, "server_lr": 0.8}),
    Case(S.FedAdam, adaptive, {**ADAPTIVE, "beta2": 0.9}),
    Case(S.FedYogi, adaptive, {**ADAPTIVE, "beta2": 0.9, "v0": 0.2}, {"rule": "yogi", "v_0": 0.2}),
    Case(S.FedAdagrad, adaptive, ADAPTIVE, {"rule": "adagrad", "beta1": 0.0}),
    Case(S.FedAdagrad, adaptive, {**ADAPTIVE, "beta1": 0.3}, {"rule": "adagrad"}),
    Case(S.FedNova, fednova, {"server_lr": 0.9}),
    Case(S.FedCM, fedcm, {"alpha": 0.3, "server_lr": 0.9}),
    Case(S.FedCM, fedcm, {"alpha": 0.3, "decay": "inside"}, {"wd_mode": "inside"}),
    Case(S.FedLESAM, fedlesam, {"radius": 0.2}, {"path_rho": 0.2}, ("w_old",)),
    Case(S.FedDeper, feddeper, {"rho": 0.04, "lam": 0.7, "server_lr": 0.9}, {}, ("v",)),
    Case(S.FedADMM, fedadmm, {"rho": 0.4}, {}, ("lam", "w_hat")),
    Case(S.FedADMM, fedadmm, {"rho": 0.4, "variant": "active"}, {}, ("lam",)),
    Case(S.FedSMOO, fedsmoo, {"rho": 0.4, "radius": 0.2}, {"sam_rho": 0.2}, ("lam", "mu")),
    Case(S.Scaffold, scaffold, {"server_lr": 0.8}, {}, ("c_i",)),
    Case(S.FedDyn, feddyn, {"alpha": 0.3}, {}, ("lam",)),
    Case(S.AFedPD, afedpd, {"rho": 0.4}),  # its duals: test_afedpd.py
    Case(S.FedPD, fedpd, {"rho": 0.4}, {}, ("lam",)),
]
WITH_SAM = [
    Case(S.FedSAM, fedavg),
    Case(S.MoFedSAM, fedcm, {"alpha": 0.3}),
    Case(S.FedGamma, scaffold, {}, {}, ("c_i",)),
    Case(S.FedSpeed, fedspeed, {"rho": 0.4}, {}, ("lam",)),
    Case(S.FedSpeed, fedspeed, {"rho": 0.4, "mix": 0.6}, {"a": 0.6}, ("lam",)),
    Case(
        *(S.FedSpeed, fedspeed, PAPER),
        {"a": 0.6, "variant": "PP", "ascent_form": "plain"},
        ("lam",),
    ),
    Case(S.AFedPDSAM, afedpd, {"rho": 0.4}),
    # the plug-in on methods that have none of their own
    Case(S.FedAdam, adaptive, ADAPTIVE),
    Case(S.FedNova, fednova),
    Case(S.FedDeper, feddeper, {"rho": 0.04}, {}, ("v",)),
    Case(S.FedADMM, fedadmm, {"rho": 0.4}, {}, ("lam",)),
    Case(S.FedPD, fedpd, {"rho": 0.4}, {}, ("lam",)),
    Case(S.FedGloSS, fedgloss, {"radius": 0.2, "alpha": 0.3}, {}, ("lam",)),
]
for _name, _kind in S.METHODS.items():  # those that a reference declares itself
    _file = f"tests.reference.{_name.replace('-', '_')}"
    _reference = import_module(_file) if find_spec(_file) else ModuleType(_file)
    CASES += [Case(_kind, _reference, **case) for case in getattr(_reference, "CASES", [])]
cases = pytest.mark.parametrize("case", CASES, ids=repr)
sam_cases = pytest.mark.parametrize("case", WITH_SAM, ids=repr)
betas = pytest.mark.parametrize("beta", [0.0, BETA], ids=["plain", "relaxed"])


ELSEWHERE = {S.FedInit, S.Local}  # below, test_local.py
NODES = {kind for kind, *_ in DECENTRALISED.values()} | {S.DFedSAM, S.DFedSAMMGS, S.DisPFL}


@pytest.mark.parametrize("name", S.METHODS)
def test_every_method_is_compared_with_a_reference(name: str) -> None:
    kind = S.METHODS[name]
    if issubclass(kind, S.DFedAvg):
        assert kind in NODES, "add it to METHODS in tests/strategies/test_decentralised.py"
        return
    kinds = ELSEWHERE | {case.kind for case in (*CASES, *WITH_SAM)}
    assert kind in kinds, f"declare CASES in tests/reference/{name.replace('-', '_')}.py"


def test_the_schedule_has_first_visits_absences_and_returns() -> None:
    rounds = {i: [t for t in range(T) if i in SOME[t]] for i in range(C)}
    first = [requests[0] for requests in rounds.values()]
    gaps = [b - a for requests in rounds.values() for a, b in pairwise(requests)]
    assert len(set(first)) >= 3  # rounds in which a client is visited for the first time
    assert {1, 2} < set(gaps)  # again at once, after one round, after more


def test_the_clip_is_active_in_some_steps_only() -> None:
    """Else the comparisons would not see it."""
    norms = [np.linalg.norm(LEAST_SQUARES.grad(i, W0)) for i in range(C)]
    near = LEAST_SQUARES.optimum()
    norms += [np.linalg.norm(LEAST_SQUARES.grad(i, near)) for i in range(C)]
    assert min(norms) < CLIP < max(norms)


@pytest.mark.parametrize(
    ("beta", "schedule", "batches"),
    [(0.0, SOME, None), (BETA, SOME, BATCHES), (0.0, EVERYONE[:5], BATCHES)],
    ids=["plain-some-full-batch", "relaxed-some-minibatch", "plain-all-minibatch"],
)
@cases
def test_equals_the_dense_reference(
    case: Case, beta: float, schedule: Cohorts, batches: Batches | None
) -> None:
    if case.kind.all_clients:
        schedule = EVERYONE[:5]
    expected = case.expected(schedule, batches=batches, ri_beta=beta)
    plugins = (RelaxedInit(beta=beta),) if beta else ()
    history = federate(case.method(*plugins), LEAST_SQUARES, W0, schedule, batches=batches)
    case.compare(history, expected, *(["last"] if beta else []))


@pytest.mark.parametrize(
    ("beta", "schedule", "batches"),
    [(0.0, SOME, BATCHES), (BETA, SOME, BATCHES), (0.0, EVERYONE[:5], None)],
    ids=["plain-some", "relaxed-some", "plain-all"],
)
@sam_cases
def test_with_sam_equals_the_dense_reference(
    case: Case, beta: float, schedule: Cohorts, batches: Batches | None
) -> None:
    if case.kind.all_clients:
        schedule = EVERYONE[:5]
    expected = case.expected(schedule, batches=batches, ri_beta=beta, sam_rho=RADIUS)
    plugins = (SAM(rho=RADIUS), *((RelaxedInit(beta=beta),) if beta else ()))
    history = federate(case.method(*plugins), LEAST_SQUARES, W0, schedule, batches=batches)
    case.compare(history, expected)


@pytest.mark.parametrize("case", [*CASES, *WITH_SAM], ids=repr)
def test_through_messages_equals_the_dense_reference(case: Case) -> None:
    """The same numbers after records, messages, modules and autograd."""
    schedule, batches = case.schedule[:6], [BATCHES[t] for t in range(6)]
    states = () if len({i for active in schedule for i in active}) < C else case.states
    more: dict[str, Any] = {"sam_rho": RADIUS} if case in WITH_SAM else {}
    sam = (SAM(rho=RADIUS),) if case in WITH_SAM else ()
    if case in WITH_SAM:
        method = case.method(*sam, local_steps=0, local_epochs=1, batch_size=50)
        history = federation.run_on_batches(method, LEAST_SQUARES, W0, schedule, batches)
        expected = case.expected(schedule, batches=batches, **more)
    else:
        method = case.method(RelaxedInit(beta=BETA))
        history = federation.run(method, LEAST_SQUARES, W0, schedule)
        expected = case.expected(schedule, ri_beta=BETA, **more)
    case._replace(states=states).compare(history, expected)


# --- options of relaxed initialisation ------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, *WITH_SAM[:7]], ids=repr)
def test_a_first_visit_may_start_at_w_t(case: Case) -> None:
    """The start alone: what a method itself remembers begins at w^0 all the same."""
    radius = {"sam_rho": RADIUS} if case in WITH_SAM else {}
    initial, current = (
        case.expected(case.schedule, ri_beta=BETA, ri_first_visit=first, **radius)
        for first in ("initial", "current")
    )
    ri = RelaxedInit(beta=BETA, first_visit="current")
    plugins = (SAM(rho=RADIUS), ri) if radius else (ri,)
    history = federate(case.method(*plugins), LEAST_SQUARES, W0, case.schedule)
    case.compare(history, current, "last")
    apart = np.abs(initial.weights - current.weights).max()
    assert (apart > 1e-5) == (case.schedule is SOME)  # all together visit first in round 1


ANCHORS = [
    Case(S.FedProx, fedprox, {"mu": 0.3}),
    Case(S.FedDyn, feddyn, {"alpha": 0.3}, {}, ("lam",)),
    Case(S.FedADMM, fedadmm, {"rho": 0.4}, {}, ("lam", "w_hat")),
    Case(S.FedADMM, fedadmm, {"rho": 0.4, "variant": "active"}, {}, ("lam",)),
    Case(S.FedSMOO, fedsmoo, {"rho": 0.4, "radius": 0.2}, {"sam_rho": 0.2}, ("lam", "mu")),
    Case(S.FedPD, fedpd, {"rho": 0.4}, {}, ("lam",)),
    Case(S.FedDeper, feddeper, {"rho": 0.04, "lam": 0.7}, {}, ("v",)),
    Case(S.FedGloSS, fedgloss, {"radius": 0.2, "alpha": 0.3}, {}, ("lam",)),
]
NO_ANCHOR = [case for case in CASES if case.kind in (S.FedAvg, S.FedCM, S.Scaffold, S.FedNova)]


@pytest.mark.parametrize("case", ANCHORS, ids=repr)
def test_the_relaxed_start_may_be_the_anchor(case: Case) -> None:
    batches = BATCHES if case.schedule is SOME else None
    expected = {
        center: case.expected(case.schedule, batches=batches, ri_beta=BETA, ri_center=center)
        for center in ("server", "start")
    }
    assert not np.allclose(expected["server"].weights, expected["start"].weights, atol=1e-4)
    method = case.method(RelaxedInit(beta=BETA, center="start"))
    history = federate(method, LEAST_SQUARES, W0, case.schedule, batches=batches)
    case.compare(history, expected["start"], "last")


@pytest.mark.parametrize("mix", [1.0, 0.6])
@pytest.mark.parametrize("variant", ["authors", "paper"])
def test_fedspeed_around_the_relaxed_start(variant: str, mix: float) -> None:
    """authors with mix=1 is FedDyn with SAM; without the ascent paper is FedADMM, active."""
    start = RelaxedInit(beta=BETA, center="start")
    radius = RADIUS if variant == "authors" and mix == 1 else 0.0
    reference, own = (feddyn, {"alpha": 0.4})
    if variant == "paper":
        reference, own = (fedadmm, {"rho": 0.4, "variant": "active"})
    own = own | {"local_steps": K, "sam_rho": radius, "ri_beta": BETA, "ri_center": "start"}
    expected = reference.run(LEAST_SQUARES, W0, SOME, **(SETTINGS | own))
    case = Case(S.FedSpeed, fedspeed, {"rho": 0.4, "variant": variant, "mix": mix})
    history = federate(case.method(SAM(rho=radius), start), LEAST_SQUARES, W0, SOME)
    close(history.weights, expected.weights)
    close(client_vectors(history.clients, "lam"), expected.clients["lam"])


@pytest.mark.parametrize("case", NO_ANCHOR, ids=repr)
def test_without_an_anchor_the_centre_changes_nothing(case: Case) -> None:
    history = [
        federate(case.method(RelaxedInit(beta=BETA, center=center)), LEAST_SQUARES, W0, SOME)
        for center in ("server", "start")
    ]
    assert torch.equal(history[0].weights, history[1].weights)


@pytest.mark.parametrize("first_visit", ["initial", "current"])
@pytest.mark.parametrize("server", ["models", "updates"])
def test_fedinit_equals_the_posters_algorithm(server: str, first_visit: str) -> None:
    more = {"ri_first_visit": first_visit, "ri_server": server}
    case = Case(S.FedInit, fedinit, {"server": server}, {"ri_beta": 0.1, **more}, ("last",))
    ri = RelaxedInit(beta=0.1, first_visit=first_visit)
    case.compare(federate(case.method(ri), LEAST_SQUARES, W0, SOME), case.expected(SOME))
    if (server, first_visit) == ("models", "initial"):  # the default
        case.compare(federate(case.method(), LEAST_SQUARES, W0, SOME), case.expected(SOME))


# --- unequal work ---------------------------------------------------------------------------------

STEPS = [2, 6, 4, 1, 3, 5, 2, 4]  # K_i
UNEQUAL = problem.minibatches(LEAST_SQUARES, T, STEPS, 5, seed=7)


@betas
@pytest.mark.parametrize("case", [c for c in CASES if c.kind is not S.Scaffnew], ids=repr)
def test_with_unequal_local_steps(case: Case, beta: float) -> None:
    """Of all methods but Scaffnew, which draws K for all clients."""
    schedule = case.schedule
    expected = case.expected(schedule, local_steps=STEPS, batches=UNEQUAL, ri_beta=beta)
    plugins = (RelaxedInit(beta=beta),) if beta else ()
    history = federate(case.method(*plugins), LEAST_SQUARES, W0, schedule, batches=UNEQUAL)
    case.compare(history, expected)


def test_unequal_steps_through_messages() -> None:
    for case in (Case(S.FedNova, fednova), Case(S.FedCM, fedcm, {"alpha": 0.3})):
        method = case.method(RelaxedInit(beta=BETA), local_steps=0, local_epochs=1, batch_size=50)
        history = federation.run_on_batches(method, LEAST_SQUARES, W0, SOME[:5], UNEQUAL)
        expected = case.expected(SOME[:5], local_steps=STEPS, batches=UNEQUAL, ri_beta=BETA)
        case.compare(history, expected)


def test_fednova_with_equal_steps_adds_up_displacements() -> None:
    """So it is FedInit with the server rule of the authors' simulator."""
    nova = federate(
        Case(S.FedNova, fednova).method(RelaxedInit(beta=BETA)), LEAST_SQUARES, W0, SOME
    )
    updates = Case(S.FedInit, fedinit, {"beta": BETA, "server": "updates"})
    init = federate(updates.method(), LEAST_SQUARES, W0, SOME)
    close(nova.weights, init.weights)
    models = federate(Case(S.FedInit, fedinit).method(), LEAST_SQUARES, W0, SOME)
    assert not torch.allclose(nova.weights, models.weights, atol=1e-4)


# --- FedPD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["functions", "messages"])
@pytest.mark.parametrize("plugin", ["plain", "relaxed", "around the start"])
@pytest.mark.parametrize("local_init", ["server", "own"])
@pytest.mark.parametrize(("p", "seed"), [(0.0, 0), (0.5, 0), (0.5, 1)])
def test_fedpd_equals_the_dense_reference(
    p: float, seed: int, local_init: str, plugin: str, through: str
) -> None:
    """After a silent round too, when every client continues from its own anchor."""
    skip = [is_silent(p, seed, t) for t in range(T)]
    assert p == 0 or skip != [is_silent(p, 1 - seed, t) for t in range(T)]
    assert is_silent(0.5, 1, -1)  # before round 0 no coin is tossed
    assert p == 0 or 0 < sum(skip[:-1]) < T - 1
    center = "start" if plugin == "around the start" else "server"
    ri = () if plugin == "plain" else (RelaxedInit(beta=BETA, center=center),)
    case = Case(S.FedPD, fedpd, {"rho": 0.4, "p": p, "local_init": local_init}, {}, ("lam",))
    if local_init == "own" and ri:
        with pytest.raises(ValueError, match="no start to move"):
            case.method(*ri)
        return
    method = case.method(*ri, seed=seed)
    relaxed = {"ri_beta": BETA, "ri_center": center} if ri else {}
    expected = case.expected(EVERYONE, skip=skip, **relaxed)
    if through == "functions":
        history: Any = federate(method, LEAST_SQUARES, W0, EVERYONE)
        assert [m["up"] == 0 for m in history.metrics] == skip
    elif plugin == "plain" or (p, seed) == (0.5, 0):
        return  # p and center both pass through messages with the others
    else:
        history = federation.run(method, LEAST_SQUARES, W0, EVERYONE)
        assert list(history.metrics["up-vectors"][1:] == 0) == skip
    case.compare(history, expected)


def test_fedpd_goes_on_after_a_failed_round_as_after_the_last_that_counted() -> None:
    """The clients went back to their states of that round: its coin says what they were sent."""
    method = S.FedPD(p=0.5, fraction_train=1.0)
    coins = [is_silent(0.5, 0, t) for t in range(T)]
    assert {(True, False), (False, True)} <= {*pairwise(coins)}
    for t in range(1, T):  # round t failed
        down = method.broadcast(torch.zeros(2), None, Client(0, t + 1, t - 1))
        assert (down.w is None) == coins[t - 1]

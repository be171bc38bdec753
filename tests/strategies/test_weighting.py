"""weighting=examples: who takes it, what it means, and that the others refuse it."""

from typing import Any

import pytest
import torch

from fedaccord import strategies as S
from fedaccord.core.cohort import Reply
from fedaccord.core.rule import Model
from fedaccord.core.topology import RoundInfo, Star
from fedaccord.core.vectors import map_vectors
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import METHODS, RelaxedInit
from tests.reference import afedpd, diloco, fedavg, fedcm, fedexp, fednova, fedpac, fedpd, problem
from tests.reference.optimizers import AdamW
from tests.strategies.federate import close, federate
from tests.strategies.test_references import (
    BETA,
    EVERYONE,
    LEAST_SQUARES,
    SOME,
    STEPS,
    UNEQUAL,
    W0,
    Case,
)
from tests.strategies.test_stacks import close_values

EXAMPLES = [5, 40, 12, 3, 25, 8, 17, 30]
UNIFORM_ALONE = {
    *("scaffold", "fedgamma", "feddyn", "fedadmm", "fedspeed", "fedsmoo"),
    *("local", "dpsgd", "dfedavg", "dfedavgm", "dfedsam", "dfedsam-mgs", "dispfl"),
}


@pytest.mark.parametrize("beta", [0.0, BETA], ids=["plain", "relaxed"])
@pytest.mark.parametrize(
    "case",
    [
        Case(S.FedAvg, fedavg, {"server_lr": 0.7}),
        Case(S.FedNova, fednova, {"server_lr": 0.9}),
        Case(S.FedCM, fedcm, {"alpha": 0.3}),
        Case(S.AFedPD, afedpd, {"rho": 0.4}),
        Case(S.FedPD, fedpd, {"rho": 0.4}, {}, ("lam",)),
        Case(S.FedExP, fedexp, {"epsilon": 1e-3}),
        Case(S.DiLoCo, diloco, {"mu": 0.6, "server_lr": 0.5}),
        Case(S.FedPAC, fedpac, {"beta": 0.4}),
        Case(
            *(S.FedAvg, fedavg, {"optimizer": "adamw", "optimizer_state": "average", "lr": 0.05}),
            {"make": AdamW, "state": "average", "lr": 0.05},
        ),
    ],
    ids=repr,
)
def test_weighted_methods_equal_their_references(case: Case, beta: float) -> None:
    """With unequal K_i too: FedNova weighs its tau as it weighs its directions."""
    schedule = EVERYONE if case.kind is S.FedPD else SOME
    more: dict[str, Any] = {"local_steps": STEPS, "batches": UNEQUAL, "ri_beta": beta}
    expected = case.expected(schedule, examples=EXAMPLES, **more)
    ri = RelaxedInit(beta=beta)
    method = case.method(ri, weighting="examples")
    history = federate(*(method, LEAST_SQUARES, W0, schedule), batches=UNEQUAL, examples=EXAMPLES)
    case.compare(history, expected)
    uniform = federate(
        *(case.method(ri), LEAST_SQUARES, W0, schedule), batches=UNEQUAL, examples=EXAMPLES
    )
    assert not torch.allclose(uniform.weights, history.weights, atol=1e-3)
    close(uniform.weights, case.expected(schedule, **more).weights)


def test_afedpdsam_takes_weights_as_afedpd_does() -> None:
    settings = {"local_steps": 3, "rho": 0.4, "sam_rho": 0.3, "lr": 0.05}
    expected = afedpd.run(LEAST_SQUARES, W0, SOME, examples=EXAMPLES, **settings)
    method = S.AFedPDSAM(
        **{"rho": 0.4, "radius": 0.3, "lr": 0.05, "lr_decay": 1.0, "weight_decay": 0.0},
        **{"clip_norm": 0.0, "local_steps": 3, "precision": "float64", "weighting": "examples"},
    )
    history = federate(method, LEAST_SQUARES, W0, SOME, examples=EXAMPLES)
    close(history.weights, expected.weights)
    plain = afedpd.run(LEAST_SQUARES, W0, SOME, **settings)
    assert abs(plain.weights - expected.weights).max() > 1e-3


def make(kind: type[FederatedStrategy], **more: Any) -> FederatedStrategy:
    return kind(precision="float64", fraction_train=1.0, **more)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *(pytest.param(name, {}, id=name) for name in METHODS if METHODS[name].takes_weights),
        pytest.param("fedcm", {"optimizer": "adamw"}, id="fedcm-mean-direction"),
    ],
)
def test_a_client_with_n_examples_counts_for_n_clients(name: str, own: dict[str, Any]) -> None:
    """For every method that takes weights: model, server state and all."""
    kind, g = METHODS[name], torch.Generator().manual_seed(2)
    weights = [1, 3, 2]

    def draw(like: Any = None) -> torch.Tensor:
        return torch.rand(6, generator=g, dtype=torch.float64) + 0.1

    w, sends = draw(), make(kind, **own).rule().sends
    state = map_vectors(draw, make(kind, **own).init(w))
    replies = [
        Reply(i, sends(*(draw() for _ in sends._fields)), 2 + i, n, draw())
        for i, n in enumerate(weights)
    ]
    twins = [reply for reply in replies for _ in range(reply.examples)]

    def step(weighting: str, replies: list[Reply]) -> Any:
        method = make(kind, weighting=weighting, **own)
        accepted, weighted = torch.tensor([2, 2, 2, 0, 0]), weighting == "examples"
        info = RoundInfo(2, 0.1, 5, accepted, weighted, anchored_at_starts=False)
        rows, cohort = Star().gather(w, replies, info)
        return method.aggregate(w, rows, state, cohort)

    (w_next, next_state), (expected, expected_state) = (
        step("examples", replies),
        step("uniform", twins),
    )
    close(w_next, expected, 1e-12)
    close_values(next_state, expected_state)
    uniform, _ = step("uniform", replies)
    assert not torch.allclose(uniform, w_next, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_the_others_refuse_weights_in_one_line(name: str) -> None:
    kind = METHODS[name]
    assert not (kind.takes_weights and name in UNIFORM_ALONE)
    if kind.takes_weights:
        assert make(kind, weighting="examples").weighting == "examples"
        return
    line = rf"^weighting: expected uniform with {kind.__name__}, got 'examples': [^\n]+$"
    with pytest.raises(ValueError, match=line):
        make(kind, weighting="examples")


def test_gossip_refuses_weights() -> None:
    line = r"^weighting: expected uniform with gossip, got 'examples': [^\n]+$"
    with pytest.raises(ValueError, match=line):
        S.FedAvg(weighting="examples", plugins=(S.Gossip(),))


def test_the_plain_sum_and_the_share_of_a_cohort_count_clients() -> None:
    """Whatever the weights of its mean: a method's own sums over clients are as written."""
    replies = [Reply(i, Model(torch.full((2,), float(i + 1))), 1, n) for i, n in ((0, 1), (2, 3))]
    info = RoundInfo(0, 0.1, 8, torch.zeros(8), True, anchored_at_starts=False)
    rows, cohort = Star().gather(torch.zeros(2), replies, info)
    assert cohort.mean(rows.w).tolist() == [2.5, 2.5]  # (1 + 3 * 3) / 4
    assert cohort.sum(rows.w).tolist() == [4, 4]
    assert cohort.participation == 2 / 8


def test_weights_of_one_cohort_sum_to_one() -> None:
    """Equal examples are uniform weights, whatever their number."""
    a, b = (
        federate(
            S.FedAvg(weighting=weighting, precision="float64", local_steps=3),
            *(LEAST_SQUARES, W0, problem.cohorts(8, 3, 4, seed=1)),
            examples=[7] * 8,
        )
        for weighting in ("uniform", "examples")
    )
    close(a.weights, b.weights, 1e-12)

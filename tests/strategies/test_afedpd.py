"""A-FedPD without a table of duals: what is kept and sent, and the duals it stands for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import simulate
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import RoundState, broadcast, first_state, server_round
from fedaccord.core.rule import Model
from fedaccord.core.vectors import Vector, length
from fedaccord.federation import round as round_module
from fedaccord.federation.session import Session
from fedaccord.storage import mapped
from fedaccord.storage.mapped import in_file
from fedaccord.strategies import AFedPD, RelaxedInit
from tests import federation
from tests.reference import afedpd, problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import base, close, federate

C, T, K, RHO = 8, 12, 4, 0.4
LEAST_SQUARES = LeastSquares(C, seed=6)
W0 = np.random.default_rng(8).normal(size=LEAST_SQUARES.dim)
SETTINGS: dict[str, Any] = {"lr": 0.04, "lr_decay": 0.99, "weight_decay": 0.02, "clip_norm": 6.0}


def method(**more: Any) -> AFedPD:
    return AFedPD(**{"rho": RHO, "precision": "float64", "local_steps": K, **SETTINGS, **more})


@pytest.mark.parametrize("beta", [0.0, 0.08])
@pytest.mark.parametrize("active", [1, 3, C])
def test_its_duals_are_those_of_the_dense_table(active: int, beta: float) -> None:
    """A client's dual and the virtual steps it missed make its row of the listing's table."""
    schedule = problem.cohorts(C, active, T, seed=3)
    expected = afedpd.run(
        *(LEAST_SQUARES, W0, schedule), local_steps=K, rho=RHO, ri_beta=beta, **SETTINGS
    )
    history = federate(method(plugins=(RelaxedInit(beta=beta),)), LEAST_SQUARES, W0, schedule)
    close(history.weights, expected.weights)
    close(history.averages, expected.averages)
    server = history.server[-1]
    for i, state in enumerate(history.clients):
        last_round = max(t for t in range(T) if i in schedule[t])
        missed = server.lam_bar - server.lam_bar_after[last_round]
        close(base(state).lam + missed, expected.clients["lam"][i])


def test_the_server_keeps_a_vector_per_distinct_last_round_and_no_more() -> None:
    history = federate(method(), LEAST_SQUARES, W0, [[0, 1, 2, 3], [0, 1], [2], [0], [0]])
    assert sorted(history.server[-1].lam_bar_after) == [0, 1, 2, 4]  # client 3; 1; 2; 0
    assert sorted(history.server[3].lam_bar_after) == [0, 1, 2]
    assert (
        history.server[-1].lam_bar is history.server[-1].lam_bar_after[4]
    )  # no copy of the newest


def test_a_run_has_its_oldest_vectors_in_files_of_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it look again at what it has moved to one."""
    schedule = [[0, 1, 2, 3], [0, 1, 2], [0, 1], [2], [0], [3]]
    states: list[RoundState] = []

    def history() -> federation.History:
        states.clear()
        data, initial = LEAST_SQUARES.clients(), federation.linear(W0)
        return simulate(
            method(batch_size=0),
            clients=data,
            model=initial,
            loss=federation.half_square,
            rounds=len(schedule),
            participation=schedule,
            record="weights",
            on_round=lambda round: states.append(round.state),
        )

    vectors: list[Vector] = []
    plain = history()
    assert not any(in_file(v) for s in states for v in s.server.lam_bar_after.values())
    last = states[-1].server.lam_bar_after

    def spy(v: Vector) -> Vector:
        vectors.append(v)
        return length(v)

    monkeypatch.setattr(mapped, "PAST", 2 * 8 * LEAST_SQUARES.dim)
    monkeypatch.setattr(round_module, "length", spy)
    other = history()
    after = states[-1].server.lam_bar_after
    assert sorted(after) == [2, 3, 4, 5]
    assert {t for t, v in after.items() if in_file(v)} == {2, 3}
    assert all(torch.equal(v, last[t]) for t, v in after.items())
    assert torch.equal(plain.weights, other.weights)
    assert len(vectors) >= 2 * len(schedule)  # w and lam_bar of every round
    assert not any(map(in_file, vectors))


def test_memory_is_bounded_over_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector for each of 60 rounds, all of which are sent to clients that return."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr(mapped, "PAST", 2**22)
    strategy, spill, w = AFedPD(rho=RHO), mapped.SpillPast(), torch.ones(2**20)

    def resident() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    half, s, start = strategy.client_half(), first_state(strategy, w, 1000), 0
    for t in range(60):
        s = server_round(strategy, half, s, [Reply(t, Model(s.w + 1), 1, 1)]).state
        s = s._replace(server=spill(s.server))
        start = resident() if t == 9 else start
    for t in range(60):
        down = broadcast(strategy, s, t)
        spill.release(s.server)
        assert (down.missed is None) == (t == 59)
    assert sorted(s.server.lam_bar_after) == [*range(60)]
    assert resident() - start < 0.5 * 50 * w.nbytes  # all of it without files


def test_what_was_missed_is_sent_only_where_something_was() -> None:
    schedule = [[0], [0], [1], [0]]
    history = federate(method(), LEAST_SQUARES, W0, schedule)
    assert [m["down"] for m in history.metrics] == [1, 1, 2, 2]
    through = federation.run("afedpd", LEAST_SQUARES, W0, schedule, local_steps=K)
    assert list(through.metrics["down-vectors"][1:]) == [1, 1, 2, 2]


def test_clients_of_one_last_visit_share_what_they_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[dict[int, Any]] = []
    whole = Session.pending

    def pending(session: Session, s: RoundState, cohort: Any) -> Any:
        requests = whole(session, s, cohort)
        rounds.append({request.client: request.down.missed for request in requests})
        return requests

    monkeypatch.setattr(Session, "pending", pending)
    schedule = [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    federation.run("afedpd", LEAST_SQUARES, W0, schedule, local_steps=K)
    missed = rounds[2]
    assert missed[0] is missed[3] is None
    assert missed[1] is missed[2] is not None


def test_the_headline_is_the_average_of_local_models() -> None:
    schedule = problem.cohorts(C, 3, 4, seed=3)
    history = federation.run("afedpd", LEAST_SQUARES, W0, schedule, local_steps=K)
    headline = history.model["weight"].reshape(-1)
    close(headline, history.averages[-1], 1e-12)
    assert not torch.allclose(headline, history.weights[-1])

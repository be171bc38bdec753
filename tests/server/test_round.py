"""The end of a round: what the server's own result must be, and who is far from the others."""

from statistics import median
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedaccord.core.vectors import length
from fedaccord.engine import quiet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import AFedPD, DFedAvg, FedAdam, FedAvg, Scaffold
from fedaccord.wire.instruction import read_instruction
from tests.grid import InProcessGrid
from tests.server.runs import C, Spoil, broken, client_app, federation, run_over, strategy
from tests.server.test_bad_replies import early
from tests.server.test_replies import with_w


def overflowing() -> Spoil:
    """A local model that is finite, whose mean with others of its kind is not."""
    return early(with_w(lambda w: torch.full_like(w, 1.7e308)))


def test_a_result_that_is_not_finite_fails_the_round(warnings: list[str]) -> None:
    run = strategy(FedAdam, min_replies=6)
    rounds = federation(run, 3, overflowing())
    assert [r.metrics["counted"] for r in rounds[1:]] == [0, 0, 1]
    assert [r.metrics["replies"] for r in rounds[1:]] == [6, 6, 6]
    assert torch.equal(rounds[2].w, rounds[0].w)
    assert not torch.equal(rounds[3].w, rounds[0].w)
    line = "round 1 failed: the replies are finite, but the server's 'v' would hold NaN or Inf; the"
    assert any(w.startswith(line) for w in warnings)


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, DFedAvg])
def test_a_round_that_goes_too_far_fails(
    kind: type[FederatedStrategy], warnings: list[str]
) -> None:
    """The good clients of a failed round go back, as if it had never been."""
    away = early(with_w(lambda w: w + 1e15))
    more: dict[str, Any] = {} if kind is DFedAvg else {"server_lr": 1.0}
    rounds = federation(strategy(kind, max_update_norm=5.0, min_replies=C, **more), 3, away)
    good = federation(strategy(kind, lr_decay=1.0, **more), 1)
    assert [r.metrics["counted"] for r in rounds[1:]] == [0, 0, 1]
    assert torch.equal(rounds[2].w, rounds[0].w)
    step = rounds[3].w - rounds[2].w
    assert torch.allclose(step, good[1].w - good[0].w, rtol=1e-2)
    line = "round 1 failed: max-update-norm: expected a step of the model of at most 5, got "
    assert any(w.startswith(line) for w in warnings)


def test_the_traffic_of_a_failed_round_counts() -> None:
    *_, failed, counted = federation(strategy(min_replies=C), 3, early(broken))
    assert [r.metrics["counted"] for r in (failed, counted)] == [0, 1]
    assert failed.metrics["down-bytes"] == counted.metrics["down-bytes"] > 0
    assert failed.metrics["up-bytes"] / (C - 1) == counted.metrics["up-bytes"] / C
    assert "train-loss" not in failed.metrics


def test_the_broadcast_to_a_dropped_client_counts() -> None:
    """Its upload does not."""
    last = federation(strategy(), 1, broken)[-1].metrics
    assert (last["down-vectors"], last["up-vectors"]) == (C, C - 1)
    assert last["down-bytes"] / C == last["up-bytes"] / (C - 1) > 0


def test_what_the_server_keeps_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-FedPD's memory grows with the rounds in which clients were last seen; the look does not."""
    looks, each = 0, list[int]()

    def count(vector: torch.Tensor) -> torch.Tensor:
        nonlocal looks
        looks += 1
        return length(vector)

    def end(round: Round) -> None:
        nonlocal looks
        each.append(looks)
        looks = 0

    monkeypatch.setattr("fedaccord.federation.round.length", count)
    method = strategy(AFedPD, fraction_train=0.25, rho=0.1)
    with InProcessGrid(client_app(), C) as grid, quiet():
        run = run_over(grid, method, 6, on_round=end)
        run.play()
    assert len(run.state.server.lam_bar_after) > 1
    assert each[1] > 0
    assert set(each[1:]) == {each[1]}


def test_too_many_such_rounds_end_the_run() -> None:
    line = r"^2 rounds in a row failed \(see above\), the last one: .*\bnorm\b"
    with pytest.raises(FederationError, match=line):
        federation(strategy(max_update_norm=1e-9, max_failed_rounds=2), 5)


@pytest.mark.parametrize("kind", [FedAvg, DFedAvg])
def test_who_is_far_from_the_others_is_named(
    kind: type[FederatedStrategy], warnings: list[str]
) -> None:
    federation(strategy(kind), 1, early(with_w(lambda w: w + 1e15)))
    (line,) = warnings
    assert line.startswith("round 1: the model of client 2 is 2.24e+15 from the last one, the med")


def test_a_round_of_many_clients_computes_one_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n distances, in n log n steps; for each client anew it is n times as long."""
    sizes = []

    def count(distances: list[float]) -> float:
        sizes.append(len(distances))
        return median(distances)

    monkeypatch.setattr("fedaccord.federation.round.median", count)
    federation(strategy(FedAvg), 2)
    assert sizes == [C, C]


def test_small_steps_of_unequal_length_are_no_matter(warnings: list[str]) -> None:
    """Far for the cohort, though not for the length of the model: 10 in the second round."""
    jumps = [10.0, 1e-3]

    def jump(message: Message, reply: Message) -> Message:
        t = read_instruction(message).round
        return with_w(lambda w: w + jumps[t])(message, reply)

    federation(strategy(lr=1e-12), 2, jump)
    assert [w[:36] for w in warnings] == ["round 1: the model of client 2 is 22"]

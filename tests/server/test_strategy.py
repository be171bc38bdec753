"""The round loop: failing rounds, nodes that come and go, settings, metrics, evaluation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import nn

from fedaccord import simulate
from fedaccord.compat.flower import TensorArray
from fedaccord.core.rounds import RoundState
from fedaccord.engine import History, quiet
from fedaccord.federation.errors import FederationError, last_line
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.roster import Roster
from fedaccord.federation.round import Round
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies import AFedPD, FedAvg, FedDyn, FedInit, FedPD, Scaffold
from fedaccord.wire.instruction import read_instruction
from fedaccord.wire.messages import write_requests
from fedaccord.wire.tensor_array import to_tensor
from tests.federation import run
from tests.grid import InProcessGrid
from tests.server.net import Clock, Net
from tests.server.runs import (
    INITIAL,
    LEAST_SQUARES,
    W0,
    C,
    broken,
    client_app,
    federation,
    run_over,
    strategy,
)
from tests.strategies.federate import base


def raising(message: Message, reply: Message) -> Message:
    raise RuntimeError("the disk is full")


# --- between two rounds everything is in a value --------------------------------------------------


def test_the_state_between_rounds_is_a_value() -> None:
    rounds = federation(strategy(Scaffold), 3, cohorts=[[0, 1], [1, 2], [3]])
    states: list[RoundState] = [round.state for round in rounds]
    assert [s.t for s in states] == [0, 1, 2, 3]
    assert [s.accepted.tolist() for s in states] == [
        [-1, -1, -1, -1, -1, -1],
        [0, 0, -1, -1, -1, -1],
        [0, 1, 1, -1, -1, -1],
        [0, 1, 1, 2, -1, -1],
    ]
    assert len({s.w.sum().item() for s in states}) == 4  # no round changed an earlier state
    assert torch.equal(states[0].w, torch.from_numpy(W0))
    assert states[3].w_init is None  # SCAFFOLD's clients do not read it


def test_a_strategy_starts_afresh() -> None:
    scaffold = strategy(Scaffold)
    first, second = federation(scaffold, 2), federation(scaffold, 2)
    assert torch.equal(first[-1].w, second[-1].w)
    assert torch.equal(second[0].w, torch.from_numpy(W0))


def test_the_number_of_rounds_may_be_numpys() -> None:
    with InProcessGrid(client_app(), C) as grid, quiet():
        result = strategy(Scaffold).start(grid, INITIAL, np.int64(2), timeout=np.float64(60))  # type: ignore[arg-type]
        assert [*result.train_metrics_clientapp] == [1, 2]
        for number in (2.5, -1, True):
            with pytest.raises(ValueError, match=rf"^num_rounds: expected .* got {number}$"):
                strategy(Scaffold).start(grid, INITIAL, number)  # type: ignore[arg-type]
        for timeout in (0, -1.0, math.nan, "5", True):
            with pytest.raises(ValueError, match=r"^timeout: expected seconds above 0, or None, g"):
                strategy(Scaffold).start(grid, INITIAL, 1, timeout=timeout)  # type: ignore[arg-type]
        for arrays in ({"w": torch.zeros(3)}, None, [torch.zeros(3)]):
            with pytest.raises(ValueError, match=r"^initial_arrays: expected an ArrayRecord, Arr"):
                strategy(Scaffold).start(grid, arrays, 1)  # type: ignore[arg-type]


def test_functions_of_metrics_may_return_none() -> None:
    def none(*_: Any) -> None:
        return None

    functions: Any = {"train_metrics_aggr_fn": none, "evaluate_metrics_aggr_fn": none}
    with InProcessGrid(client_app(), C) as grid, quiet():
        result = strategy(Scaffold, **functions).start(grid, INITIAL, 2, evaluate_fn=none)
    assert [*result.train_metrics_clientapp] == [1, 2]
    assert not result.evaluate_metrics_serverapp


# --- failing rounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, AFedPD])
def test_a_second_start_over_the_same_clients_is_a_first_one(kind: Any) -> None:
    """As a warm start by another method, in one ServerApp: the clients forget the first."""
    with InProcessGrid(client_app(), C) as grid, quiet():
        strategy(Scaffold).start(grid, INITIAL, 3)
        second = strategy(kind).start(grid, INITIAL, 2)
    with InProcessGrid(client_app(), C) as grid, quiet():
        alone = strategy(kind).start(grid, INITIAL, 2)
    assert [m["replies"] for m in second.train_metrics_clientapp.values()] == [C, C]
    assert torch.equal(to_tensor(second.arrays["weight"]), to_tensor(alone.arrays["weight"]))


def test_too_many_failed_rounds_stop_the_run_and_keep_the_model() -> None:
    failing = strategy(min_replies=6, max_failed_rounds=2)
    with InProcessGrid(client_app(raising), C) as grid, quiet():
        run = run_over(grid, failing, 5)
        with pytest.raises(FederationError, match="2 rounds in a row failed"):
            run.play()
    assert torch.equal(run.state.w, torch.from_numpy(W0))
    assert run.state.failed == run.state.t == 2
    assert run.state.accepted.tolist() == [-1] * C


def test_the_error_has_the_model_of_the_last_round_that_counted() -> None:
    rounds, calls = 2, []

    def fails(message: Message, reply: Message) -> Message:
        calls.append(0)
        return broken(message, reply) if len(calls) > rounds * C else reply

    with InProcessGrid(client_app(fails, None), C) as grid, quiet():
        expected = strategy(Scaffold).start(grid, INITIAL, rounds).arrays
    calls.clear()
    with (
        InProcessGrid(client_app(fails, None), C) as grid,
        quiet(),
        pytest.raises(FederationError, match="2 rounds in a row failed") as error,
    ):
        strategy(Scaffold, max_failed_rounds=2).start(grid, INITIAL, 9)
    assert error.value.arrays is not None
    assert torch.equal(to_tensor(error.value.arrays["weight"]), to_tensor(expected["weight"]))


def test_every_failed_round_is_reported_also_the_one_that_stops_the_run() -> None:
    failing, reports = strategy(min_replies=6, max_failed_rounds=2), list[Round]()
    with (
        InProcessGrid(client_app(raising), C) as grid,
        quiet(),
        pytest.raises(FederationError, match="2 rounds in a row"),
    ):
        run_over(grid, failing, 5, on_round=reports.append).play()
    assert [(r.metrics["dropped"], r.metrics["counted"]) for r in reports[1:]] == [(1, 0)] * 2


def test_a_failed_round_is_forgotten_after_a_good_one() -> None:
    calls = []

    def every_second(message: Message, reply: Message) -> Message:
        calls.append(1)
        return raising(message, reply) if len(calls) % 2 else reply

    rounds = federation(strategy(min_replies=6, max_failed_rounds=2), 4, every_second)
    assert [r.metrics["replies"] for r in rounds[1:]] == [5, 6, 5, 6]
    assert torch.equal(rounds[0].w, rounds[1].w)
    assert not torch.equal(rounds[1].w, rounds[2].w)


def test_a_client_that_diverges_answers_with_an_error_and_keeps_its_state() -> None:
    diverging, replies = strategy(Scaffold, lr=3e38, local_steps=9, max_failed_rounds=9), []
    with InProcessGrid(client_app(), C) as grid, quiet():
        note = lambda round: replies.append(round.metrics.get("replies"))  # noqa: E731
        run_over(grid, diverging, 2, on_round=note).play()
        assert not any(context.state for context in grid.contexts.values())
    assert replies[1:] == [0, 0]


def test_fedpd_does_not_count_a_round_that_lost_a_reply(warnings: list[str]) -> None:
    with pytest.raises(FederationError, match="rounds in a row failed"):
        federation(strategy(FedPD, max_failed_rounds=1), 2, raising)
    line = "round 1 failed: expected at least 6 good replies, got 5; the model does not change"
    assert line in warnings


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (None, "no reason given"),
        ("", "no reason given"),
        (" \n ", "no reason given"),
        ("Traceback:\n  File\nValueError: too small\n", "ValueError: too small"),
        ("KeyError: 'no such column'", "KeyError: 'no such column'"),
        ("<class 'ValueError'>:<'expected \"x\"'>", 'expected "x"'),
        ("<class 'a.B'>:<'one\ntwo'>", "two"),
        ("<class 'a.B'>:<'no rows in a.csv\n'>", "no rows in a.csv"),
        ("Traceback\n\nException ClientAppException occurred. Message: no data'>", "no data"),
        ("x" * 301, "x" * 300 + "..."),
        ("\x1b[0m" * 10_000 + "x", "..."),  # not all of it is looked at
    ],
)
def test_the_last_line_of_a_reason(reason: str | None, line: str) -> None:
    """In process it is the error itself; on a device and in a simulation Flower wraps it."""
    assert last_line(reason) == line


# --- nodes that come and go -----------------------------------------------------------------------


def come_and_go(plan: Any, monkeypatch: pytest.MonkeyPatch, rounds: int = 5) -> list[Any]:
    """The replies of every round; ``plan(net, number)`` changes the nodes after each."""
    clock = Clock()
    monkeypatch.setattr("fedaccord.federation.message_fleet.Roster", lambda **_: Roster(clock))
    replies: list[Any] = []
    with Net(client_app()) as net, quiet():
        for i in range(3):
            net.join(100 + i, i, 3)

        def report(round: Round) -> None:
            replies.append(round.metrics.get("replies"))
            clock.now += 60
            plan(net, round.number)

        run_over(net, strategy(FedDyn), rounds, on_round=report).play()
    return replies[1:]


def test_a_client_that_was_away_trains_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(net: Net, number: int) -> None:
        if number == 1:
            net.leave(101)
        if number == 2:
            net.join(101, 1, 3)  # the same node id, as with a registered key; its state is lost
        if number == 3:
            net.leave(102)
        if number == 4:
            net.join(77, 2, 3)  # a new node id and an empty Context

    # round 3: client 1 reports that its state is lost, so all start afresh, client 2 too
    assert come_and_go(plan, monkeypatch, rounds=6) == [3, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        ((None, 3), "in time"),
        ((0, None), "in time"),
        ((0, 9), "late"),
        ((3, 3), "late"),
        ((None, None), "never"),
    ],
)
def test_a_newcomer_with_a_wrong_config_neither_ends_nor_blocks_a_run(
    config: tuple[Any, Any], answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(net: Net, number: int) -> None:
        if number == 1:
            net.join(7, *config)
            {"late": net.late, "never": net.lost, "in time": set()}[answers].add(7)
        if number == 2:
            net.late.clear()

    assert come_and_go(plan, monkeypatch, 4) == [3, 3, 3, 3]


def test_clients_that_do_not_come_are_named(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.federation.message_fleet.Roster", lambda **_: Roster(clock))
    with Net() as net, quiet():
        net.join(100, 0, 3)
        net.join(102, 2, 3)
        with pytest.raises(FederationError, match=r"expected 3 clients .* partition-ids: \[1\]"):
            strategy(wait_timeout=25.0).start(net, INITIAL, 1)
    assert 25 <= clock.now < 26


# --- messages -------------------------------------------------------------------------------------


def test_a_callers_own_keys_reach_the_client_beside_ours() -> None:
    calls: list[tuple[Any, float]] = []

    def note(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        calls.append((config["temperature"], read_instruction(message).lr))
        return reply

    with InProcessGrid(client_app(note), C) as grid, quiet():
        config = ConfigRecord({"temperature": 0.5})
        strategy(lr=0.25, lr_decay=0.5).start(grid, INITIAL, 2, train_config=config)
    assert calls == [(0.5, 0.25), (0.5, 0.125)]


@pytest.mark.parametrize("key", ["instruction", "client", "accepted-round", "hello"])
def test_a_key_of_ours_is_refused_in_one_line(key: str) -> None:
    config = ConfigRecord({"mine": 1, key: 1})
    line = f"^train_config, evaluate_config: expected keys of your own, got '{key}', which the "
    with (
        InProcessGrid(client_app(), C) as grid,
        quiet(),
        pytest.raises(ValueError, match=line) as e,
    ):
        strategy().start(grid, INITIAL, 1, train_config=config)
    assert "\n" not in str(e.value)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "most", "words"),
    [
        ({"fraction_train": 0.5}, 3, "clients of a round (of 6 in all)"),
        ({"fraction_train": 0.5, "sampling": "bernoulli"}, 3, "clients of a round on average"),
        ({"fraction_train": 0.1, "plugins": (Gossip(),)}, 6, "clients of a round (of 6 in all)"),
    ],
    ids=["fixed", "bernoulli", "gossip"],
)
def test_more_replies_than_a_round_has_clients_are_refused_before_it(
    settings: dict[str, Any], most: int, words: str
) -> None:
    FedAvg(min_replies=most, **settings).check_clients(6)
    with pytest.raises(ValueError, match=r"^min-replies: expected at most") as error:
        FedAvg(min_replies=most + 1, **settings).check_clients(6)
    assert f"at most {most}, the {words}" in str(error.value)
    assert ("raise fraction-train" in str(error.value)) == (most < 6)
    messages: list[Message] = []

    def count(message: Message, reply: Message) -> Message:
        messages.append(message)
        return reply

    with pytest.raises(ValueError, match="min-replies"):
        federation(strategy(min_replies=most + 1, **settings), 1, count)
    assert messages == []


def test_explicit_cohorts_are_as_large_as_they_are() -> None:
    FedAvg(min_replies=5, fraction_train=0.1).check_clients(6, [range(6)])


def test_a_schedule_that_is_too_short_or_names_strangers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="a cohort for each of 3 rounds, got 2"):
        federation(strategy(), 3, cohorts=[[0], [1]])
    monkeypatch.setattr(MessageFleet, "train", None)  # it is refused before
    with pytest.raises(ValueError, match=r"expected clients 0..5 in round 2, got \[6\]"):
        federation(strategy(), 2, cohorts=[[0], [0, 6]])


def test_fedpd_refuses_a_schedule_that_leaves_a_client_out() -> None:
    with pytest.raises(ValueError, match=r"got round 2 without \[4, 5\]"):
        federation(strategy(FedPD), 2, cohorts=[range(6), range(4)])


def test_an_array_that_is_no_parameter_is_refused() -> None:
    counter = ArrayRecord({"n": TensorArray(torch.zeros(1, dtype=torch.int64))})
    with InProcessGrid(client_app(), 1) as grid, quiet():
        for arrays in (counter, ArrayRecord()):
            with pytest.raises(ValueError, match="expected the floating-point parameters"):
                strategy().start(grid, arrays, 1)


# --- metrics --------------------------------------------------------------------------------------


def test_weighting_by_examples() -> None:
    """One step from w = 0 on (w . (1, 1) - y)^2: each client's own model is known."""
    clients = [(torch.ones(1, 2), torch.zeros(1, 1)), (torch.ones(3, 2), torch.ones(3, 1))]
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    own = [torch.zeros(2), torch.full((2,), 0.2)]  # -lr * 2 (0 - y) x with lr = 0.1

    def average(weighting: str) -> torch.Tensor:
        history = simulate(
            "fedavg",
            clients=clients,
            model=model,
            loss=lambda p, y: ((p - y) ** 2).mean(),
            rounds=1,
            participation=1.0,
            record="weights",
            local_steps=1,
            lr=0.1,
            weight_decay=0.0,
            clip_norm=None,
            weighting=weighting,
        )
        return history.weights[1]

    torch.testing.assert_close(average("uniform"), (own[0] + own[1]) / 2)
    torch.testing.assert_close(average("examples"), (own[0] + 3 * own[1]) / 4)


def check_drift(history: History, local: torch.Tensor, number: int) -> None:
    """The metrics of a round against its local models (P, d)."""
    torch.testing.assert_close(history.averages[number], local.mean(0), rtol=1e-12, atol=1e-12)
    row = history.metrics.iloc[number]
    centres = {
        "drift": history.weights[number - 1],
        "consistency": history.weights[number],
        "spread": local.mean(0),
    }
    for name, centre in centres.items():
        assert row[name] == pytest.approx(float(((local - centre) ** 2).sum(1).mean())), name


@pytest.mark.parametrize("plugins", [(), (Compress(method="topk", share=0.4),)], ids=["", "topk"])
def test_metrics_are_what_they_are_called(plugins: tuple[Compress, ...]) -> None:
    """Of the local models as the server reads them, and of the bytes as they are sent."""
    rho = 0.1
    method = strategy(AFedPD, rho=rho, local_steps=4, batch_size=0, lr=0.02, plugins=plugins)
    ours = run(method, LEAST_SQUARES, W0, [[0, 1, 2], [2, 3]])
    # the local models from the dual step: lam_i+ = lam_i + rho (w_{i,K} - w^t), where client 3
    # missed round 0: its dual took the virtual step rho (w_bar - w)
    lam_2, lam_3 = base(ours.states[1][2]).lam, rho * (ours.averages[1] - ours.weights[0])
    steps = [base(ours.states[2][2]).lam - lam_2, base(ours.states[2][3]).lam - lam_3]
    check_drift(ours, torch.stack([ours.weights[1] + step / rho for step in steps]), 2)
    row = ours.metrics.iloc[2]
    assert row["consistency"] > row["spread"]
    nbytes = 2 * 8 + 1 if plugins else 5 * 8  # two numbers and a bit for each, or five
    assert row["up-bytes"] == 2 * nbytes
    assert row["down-bytes"] == 3 * 5 * 8  # client 3 receives what it missed
    assert (row["up-vectors"], row["down-vectors"]) == (2 * nbytes / 40, 3)


def test_with_added_displacements_the_averages_are_those_of_the_true_local_models() -> None:
    """server=updates: w^{t+1} = w^t + mean(w_{i,K} - w_{i,0}), by hand."""
    beta, lr, K, schedule = 0.1, 0.05, 3, [[0, 1, 2], [2, 3], [0, 3, 5]]
    settings: dict[str, Any] = {"local_steps": K, "lr": lr, "fedinit.server": "updates"}
    ours = run("fedinit", LEAST_SQUARES, W0, schedule, **settings, **{"relaxed-init.beta": beta})
    last, w = np.tile(W0, (C, 1)), W0
    for t, cohort in enumerate(schedule):
        moves = []
        for i in cohort:
            w_i0 = w_k = w + beta * (w - last[i])
            for _ in range(K):
                w_k = w_k - lr * LEAST_SQUARES.grad(i, w_k)
            moves.append(w_k - w_i0)
            last[i] = w_k
        w = w + np.mean(moves, axis=0)
        np.testing.assert_allclose(ours.weights[t + 1], w, rtol=1e-12, atol=1e-12)
        check_drift(ours, torch.from_numpy(last[cohort]), t + 1)
    for i in range(C):
        if ours.clients[i] is not None:
            np.testing.assert_allclose(ours.clients[i].last, last[i], rtol=1e-12, atol=1e-12)


def test_evaluation_every_n_rounds_and_after_the_last() -> None:
    calls: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append(server_round)
        assert list(arrays) == ["weight"]
        return MetricRecord({"norm": float(to_tensor(arrays["weight"]).norm())})

    def start(kind: Any, rounds: int) -> Any:
        with InProcessGrid(client_app(), C) as grid, quiet():
            return strategy(kind, eval_every=2).start(grid, INITIAL, rounds, evaluate_fn=evaluate)

    result = start(FedAvg, 5)
    assert calls == [0, 2, 4, 5]
    assert list(result.arrays) == ["weight"]
    assert result.arrays["weight"].shape == (1, 5)
    last = start(AFedPD, 2).evaluate_metrics_serverapp[2]
    assert last["norm"] != last["norm-broadcast"]


def test_the_log_has_a_line_a_round(lines: list[str]) -> None:
    with InProcessGrid(client_app(), C) as grid:
        strategy().start(grid, INITIAL, 2)
    rounds = [line for line in lines if line.startswith("[round")]
    assert [line.partition("]")[0] for line in rounds] == ["[round 0/2", "[round 1/2", "[round 2/2"]
    assert [line.endswith("0:00:00 left") for line in rounds] == [False, True, False]
    assert "6 clients connected, 6 a round" in lines


def test_w_0_is_sent_only_if_it_is_not_the_broadcast_model() -> None:
    contents: list[list[str]] = []

    def note(message: Message, reply: Message) -> Message:
        contents.append(sorted(message.content))
        return reply

    with InProcessGrid(client_app(note, client=None), 3) as grid, quiet():
        run_over(grid, strategy(FedInit), 2, cohorts=[[0], [0, 1]]).play()
    assert contents == [["config", "down"], ["config", "down"], ["config", "down", "initial"]]


def test_clients_that_missed_the_same_rounds_share_the_vectors_of_their_messages() -> None:
    """A message's vectors are packed once for all of them."""
    with InProcessGrid(client_app(), C) as grid, quiet():
        run = run_over(grid, strategy(AFedPD), 3, cohorts=[[0, 1, 2], [0, 3], range(C)])
        run.begin()
        run.train_round()
        run.train_round()
        downs = [request.down for request in run.session.requests(run.state, range(C))]
    assert downs[1].missed is downs[2].missed is not None
    assert downs[1].missed.norm() > 0
    contents = write_requests(run.session.requests(run.state, [1, 2]))
    assert contents[0]["down"] is contents[1]["down"]

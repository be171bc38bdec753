"""A client that uploads finite but huge vectors is the absence of that client."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedaccord.core.cohort import Decoded
from fedaccord.core.rule import Model
from fedaccord.engine import quiet
from fedaccord.federation import bounds
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.strategies import (
    AFedPD,
    DFedAvg,
    FedAdam,
    FedADMM,
    FedAvg,
    FedDyn,
    FedInit,
    FedNova,
    FedPD,
    FedSMOO,
    Local,
    Scaffold,
)
from fedaccord.wire.instruction import is_handshake, read_instruction
from tests.federation import linear, state_in
from tests.grid import InProcessGrid
from tests.server.runs import C, Spoil, client_app, federation, run_over, strategy
from tests.server.test_replies import vectors, with_vectors

METHODS: dict[str, Any] = {
    "fedavg": FedAvg,
    "fedinit": FedInit,
    "fedadam": FedAdam,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "afedpd": AFedPD,
    "fedsmoo": FedSMOO,
    "fedadmm": FedADMM,
    "fedadmm-active": partial(FedADMM, variant="active"),
    "dfedavg": DFedAvg,
}
ROUNDS, CLIENT = 4, 2
OTHERS = [i for i in range(C) if i != CLIENT]
ABSENT = [OTHERS, OTHERS, range(C), range(C)]


def huge(by: float, *names: str) -> Spoil:
    """These vectors, or all, longer by far in the first two rounds."""

    def change(message: Message, reply: Message) -> Message:
        if read_instruction(message).round >= 2:
            return reply
        fields = names or [*vectors(reply)]
        return with_vectors(
            lambda up: {name: v + by if name in fields else v for name, v in up.items()}
        )(message, reply)

    return change


@cache
def absent(method: str) -> list[torch.Tensor]:
    """The models of the run in which the client was not there, and which needs no bounds."""
    if METHODS[method] is DFedAvg:  # every node takes part, whatever is scheduled
        return [r.w for r in federation(strategy(METHODS[method]), ROUNDS, lost)]
    return [r.w for r in federation(strategy(METHODS[method]), ROUNDS, cohorts=ABSENT)]


def lost(message: Message, reply: Message) -> Message:
    if read_instruction(message).round < 2:
        raise RuntimeError("offline")
    return reply


def dropped(rounds: list[Round]) -> list[str]:
    return [row["status"] for r in rounds for row in r.clients if row["client"] == CLIENT]


def check_absent(method: str, rounds: list[Round]) -> None:
    assert [r.metrics["counted"] for r in rounds[1:]] == [1] * ROUNDS
    assert [r.metrics["dropped"] for r in rounds[1:]] == [1, 1, 0, 0]
    for with_it, without in zip(rounds, absent(method), strict=True):
        assert torch.equal(with_it.w, without)


@pytest.mark.parametrize("method", METHODS)
def test_a_huge_reply_is_dropped_and_the_round_counts(method: str) -> None:
    """Without any setting: no server vector grows beyond all bounds."""
    rounds = federation(strategy(METHODS[method]), ROUNDS, huge(1e30))
    check_absent(method, rounds)
    assert dropped(rounds)[0].startswith("expected the server's ")
    assert dropped(rounds)[0].endswith(", because of this reply")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedadam"])
def test_the_reply_that_passes_max_update_norm_is_dropped(method: str) -> None:
    """FedAdam's step is as long as its server rate says, whatever comes."""
    bound = {"max_update_norm": 5.0}
    rounds = federation(strategy(METHODS[method], **bound), ROUNDS, huge(1e3))
    check_absent(method, rounds)
    line = "max-update-norm: expected a step of the model of at most 5, got "
    assert [status.startswith(line) for status in dropped(rounds)] == [True, True, False, False]


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_beyond_max_client_norm_is_dropped(method: str) -> None:
    bound = {"max_client_norm": 100.0}
    rounds = federation(strategy(METHODS[method], **bound), ROUNDS, huge(1e3))
    check_absent(method, rounds)
    assert [s.startswith("max-client-norm: expected ") for s in dropped(rounds)[:2]] == [True] * 2


@pytest.mark.parametrize(
    ("method", "field"), [("scaffold", "dc_i"), ("fedsmoo", "mu"), ("fedinit", "w")]
)
def test_max_client_norm_bounds_every_vector(method: str, field: str, warnings: list[str]) -> None:
    rounds = federation(strategy(METHODS[method], max_client_norm=100.0), ROUNDS, huge(1e3, field))
    check_absent(method, rounds)
    what = "an update" if field == "w" else f"'{field}'"
    line = f"round 1: dropped client 2: max-client-norm: expected {what} of norm at most 100, got 2"
    assert any(w.startswith(line) for w in warnings)


def test_control_variates_still_add_up() -> None:
    """The mean of all c_i is c after rounds that were repeated without a client, and later."""
    with InProcessGrid(client_app(huge(1e30)), C) as grid, quiet():
        run = run_over(grid, strategy(Scaffold), ROUNDS)
        run.play()
        states = [state_in(run.session, grid, i, ROUNDS - 1).c_i for i in range(C)]
    assert torch.allclose(torch.stack(states).mean(0), run.state.server.c, atol=1e-12)
    assert run.state.server.c.norm() > 0.1


def test_two_of_six_are_found_and_the_others_stay() -> None:
    reports: list[Round] = []
    with InProcessGrid(some_bad(), C) as grid, quiet():
        run_over(grid, strategy(FedAvg, max_update_norm=5.0), 1, on_round=reports.append).play()
    status = {row["client"]: row["status"] for row in reports[1].clients}
    assert [i for i in status if status[i] == "ok"] == [0, 3, 4, 5]


def test_a_step_of_nodes_that_is_tried_again_warns_once(warnings: list[str]) -> None:
    """All nodes answered, and two replies do not count."""
    bounded = strategy(DFedAvg, max_update_norm=5.0)
    with InProcessGrid(some_bad(), C) as grid, quiet():
        run_over(grid, bounded, 1).play()
    lines = [line for line in warnings if "did not answer and keep" in line]
    assert len(lines) == 1
    assert "nodes [1, 2]" in lines[0]


def test_at_most_half_of_the_replies_are_found() -> None:
    """Of six, four huge ones are no outliers: the round fails, and nobody is blamed."""
    reports: list[Round] = []
    with InProcessGrid(some_bad((1, 2, 3, 4)), C) as grid, quiet():
        run_over(grid, strategy(FedAvg, max_update_norm=5.0), 1, on_round=reports.append).play()
    assert (reports[1].metrics["counted"], reports[1].metrics["dropped"]) == (0, 0)


def some_bad(clients: Sequence[int] = (1, 2)) -> ClientApp:
    """These clients upload huge vectors."""
    one, app = client_app(), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = one(message, context)
        bad = not is_handshake(message) and context.node_config["partition-id"] in clients
        return huge(1e3)(message, reply) if bad else reply

    return app


def test_a_round_that_all_spoil_fails_and_nobody_is_blamed(warnings: list[str]) -> None:
    """A bound below every client's own update: lr is too large for it, and no client is bad."""
    rounds = federation(strategy(max_update_norm=1e-9), 2)
    assert [r.metrics["counted"] for r in rounds[1:]] == [0, 0]
    assert [r.metrics["dropped"] for r in rounds[1:]] == [0, 0]
    assert all("max-update-norm" in line for line in warnings)


def test_the_order_is_by_what_is_usual_for_each_vector() -> None:
    """Control variates a thousand times longer than updates do not hide a long update."""
    norms = {
        0: {"w": 1.0, "c": 1000.0},
        1: {"w": 1.0, "c": 1500.0},
        2: {"w": 9.0, "c": 1000.0},
        3: {"w": 1.0, "c": float("inf")},
    }
    assert bounds.largest_first(norms) == [3, 2, 1, 0]
    zeros = {0: {"w": 0.0}, 1: {"w": 0.0}, 2: {"w": 1e-3}}
    assert bounds.largest_first(zeros)[0] == 2


def test_models_are_measured_from_the_model_that_the_client_received() -> None:
    """Fields that the rule names and w by their distance from it, others by their length."""
    base, D = torch.ones(4), torch.full((4,), 3.0)
    decoded = Decoded(Both(base + D, D), w_i0=base - D)
    assert bounds.sizes(decoded, ["anchor"], base) == dict.fromkeys(("anchor", "dual", "w_i0"), 6.0)
    assert bounds.sizes(Decoded(Model(base + D)), [], base) == {"w": 6.0}


class Both(NamedTuple):
    anchor: torch.Tensor
    dual: torch.Tensor


def test_models_are_measured_by_their_update() -> None:
    """The fields that a rule names as `models` count from w: a client that stays sends nothing."""
    still = {"lr": 1e-12, "max_client_norm": 1e-3}
    w0 = torch.full((5,), 100.0, dtype=torch.float64)
    kinds = [k for name, k in METHODS.items() if name not in ("fedadmm", "scaffold", "fedsmoo")]
    for kind in [*kinds, FedPD, Local]:  # without those that upload more than models
        reports: list[Round] = []
        initial = ArrayRecord(linear(w0.numpy()).state_dict())
        with InProcessGrid(client_app(), C) as grid, quiet():
            fleet = MessageFleet(grid)
            Run(strategy(kind, **still), fleet, initial, 1, on_round=reports.append).play()
        assert reports[-1].metrics["dropped"] == 0, kind


def test_an_update_of_a_node_counts_from_its_own_model() -> None:
    """However far the nodes' models are from each other."""
    with InProcessGrid(client_app(), C) as grid, quiet():
        run = run_over(grid, strategy(DFedAvg, lr=1e-6, max_client_norm=1.0), 1)
        s = run.begin()
        run.begin(s._replace(w=s.w + 10 * torch.arange(C)[:, None]))
        assert run.train_round().metrics["replies"] == C


@pytest.mark.parametrize(
    ("bounds", "warned"), [({}, True), ({"local_steps": 5}, False), ({"max_examples": 600}, False)]
)
def test_the_steps_that_clients_report_to_fednova_have_no_bound(
    bounds: dict[str, int], warned: bool, warnings: list[str]
) -> None:
    FedNova(**{"local_steps": 0} | bounds, max_client_norm=1.0).summary()
    FedNova().summary()
    assert sum(line.startswith("fednova: the model's step grows") for line in warnings) == warned


@pytest.mark.parametrize(("buffers", "warned"), [("mean", True), ("local", False)])
def test_averaged_buffers_have_no_bound(buffers: str, warned: bool, warnings: list[str]) -> None:
    FedAvg(buffers=buffers, max_client_norm=1.0).summary()
    FedAvg(buffers=buffers).summary()
    assert sum(line.startswith("buffers=mean: their norms") for line in warnings) == warned

"""Whole rounds with secure sums, in process and by messages, beside plain rounds."""

import logging
import struct
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedaccord import simulate, train_locally
from fedaccord import strategies as S
from fedaccord.client import secure as client_secure
from fedaccord.compat.crypto import encrypt
from fedaccord.core.rule import LocalConfig
from fedaccord.engine import History, Recorder, fleet, quiet
from fedaccord.engine.fleet import InProcessFleet, LocalFleet
from fedaccord.federation import message_fleet, roster, secure
from fedaccord.federation.errors import FederationError
from fedaccord.federation.run import Run
from fedaccord.federation.settings import ROUND_TIMEOUT
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.dp import DP
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.robust import Robust
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.secure import client
from fedaccord.strategies import FederatedStrategy
from fedaccord.wire.instruction import is_handshake, read_instruction
from fedaccord.wire.records import CONFIG, METRICS, SECURE, UP
from fedaccord.wire.tensor_array import to_tensor
from tests import federation
from tests.cli.shell import invoke
from tests.engine.test_faults import gap
from tests.federation import half_square, linear
from tests.grid import FIRST_NODE, InProcessGrid
from tests.reference.problem import LeastSquares, cohorts

C, ROUNDS, BITS = 6, 3, 40
PLAIN: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "batch_size": 0, "clip_norm": 0.0}
MASKED = SecureSum(bits=BITS, range=64.0)
TIMEOUT = 80.0  # seconds of a round
PROBLEM, W0 = LeastSquares(C), np.ones(5)


def method(name: str, *plugins: Any, **keys: Any) -> FederatedStrategy:
    keys = {"precision": "float64", "lr": 0.02, "local_steps": 3, **PLAIN, **keys}
    return S.METHODS[name](plugins=plugins, **keys)


def run(strategy: FederatedStrategy, rounds: int = ROUNDS, **keys: Any) -> Any:
    return federation.run(strategy, PROBLEM, W0, cohorts(C, 4, rounds, 0), **keys)


@pytest.mark.parametrize(
    ("name", "vectorize"),
    [
        *((name, "off") for name in ("fedavg", "scaffold", "feddyn", "afedpd", "fedcm")),
        *((name, "on") for name in ("scaffold", "afedpd")),
    ],
)
def test_a_run_is_the_plain_run_to_the_quantisation_step(name: str, vectorize: str) -> None:
    plain, masked = (run(method(name, *p), vectorize=vectorize) for p in ((), (MASKED,)))
    difference = (plain.state.w - masked.state.w).abs().max()
    assert 0 < difference < 1e4 * MASKED.step


@pytest.mark.parametrize(
    ("name", "bits"), [("scaffold", 6), ("scaffold", 24), ("feddyn", 6), ("afedpd", 6)]
)
def test_the_servers_memory_is_the_clients(name: str, bits: int) -> None:
    """At any number of bits: clients remember what the server reads of them."""
    history = run(method(name, SecureSum(bits=bits, range=64.0)), 4)
    assert gap(name, history) < 1e-9


def test_a_round_waits_for_as_many_clients_as_a_sum_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    least = list[int]()

    def wait_for(fleet: InProcessFleet, needed: int, *_: Any) -> Any:
        least.append(needed)
        return fleet.available(), ""

    monkeypatch.setattr(InProcessFleet, "wait_for", wait_for)
    for plugins in ((), (MASKED,)):
        run(method("fedavg", *plugins), 1)
    assert least == [1, 3]


def test_rounding_is_unbiased_and_within_a_step() -> None:
    plugin, u = SecureSum(bits=4, range=1.0), torch.linspace(-1, 1, 50_001)
    q = plugin.quantised(u, torch.Generator().manual_seed(0))
    errors = q.double() * plugin.step - 1 - u
    assert errors.abs().max() < plugin.step * 1.001
    for x in (-0.99, -0.41, 0.013, 0.2, 0.777):  # of each number alone
        sample = plugin.quantised(torch.full((50_001,), x), torch.Generator().manual_seed(1))
        mean = float((sample.double() * plugin.step - 1).mean())
        assert abs(mean - x) < 5 * plugin.step / 2 / len(u) ** 0.5
    assert torch.equal(q, plugin.quantised(u, torch.Generator().manual_seed(0)))
    far = plugin.quantised(torch.tensor([-9.0, 9.0]), torch.Generator())
    assert far.tolist() == [0, 15]
    with pytest.raises(ValueError, match="NaN or Inf"):
        plugin.quantised(torch.tensor([1.0, float("nan")]), torch.Generator())


def test_each_round_and_each_client_draws_its_own_rounding() -> None:
    """Equal uploads: else their errors would add up instead of averaging out."""
    plugin, d = SecureSum(bits=4, range=1.0, models="w"), 200
    kind: Any = S.METHODS["fedavg"]().rule().sends
    up, down = kind(torch.full((2, d), 0.3)), SimpleNamespace(w=torch.zeros(d))
    samples = []
    for t, seed in ((0, 0), (1, 0), (0, 1)):
        result: Any = SimpleNamespace(config=LocalConfig(t, 3, 0.1, 0.0, 0.0, [4, 7], seed, ()))
        samples += [*plugin.encode(up, down, None, result)[0][0]]
    for a, b in combinations(samples, 2):  # each number is rounded up with probability 3/4
        assert 0.2 < float((a != b).double().mean()) < 0.55


@pytest.mark.parametrize(("inside", "lines"), [(98, 1), (99, 0)])
def test_a_range_that_clips_more_than_a_hundredth_is_warned_of_once(
    inside: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    u = torch.cat([torch.full((inside,), 0.001), torch.full((100 - inside,), -0.002)])
    plugin = SecureSum(range=0.001 + lines * 1e-6)  # of its own: no run began
    for _ in range(2):
        plugin.quantised(u, torch.Generator())
    assert warnings(caplog) == lines * [
        "secure-sum.range: more than 1% of an upload's numbers were clipped to 0.001001: raise it"
    ]


def test_every_run_warns_of_its_range(caplog: pytest.LogCaptureFixture) -> None:
    strategy = method("fedavg", replace(MASKED, range=1e-6))
    for _ in range(2):
        federation.run(strategy, PROBLEM, W0, [[0, 1, 2, 3]] * 2)
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(("share", "lines"), [(0.5, 1), (0.95, 0)])
def test_cohorts_that_are_likely_to_be_too_small_are_warned_of(
    share: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = method("fedavg", MASKED, sampling="bernoulli", fraction_train=share)
    clients, model = PROBLEM.clients(), linear(W0)
    simulate(strategy, clients=clients, model=model, loss=half_square, rounds=1)
    assert [line for line in warnings(caplog) if "failed rounds" in line] == lines * [
        "sampling: 33% of the rounds will have fewer than the 3 clients that they need, and 3 "
        "failed rounds in a row end the run: raise fraction-train, or max-failed-rounds"
    ]


def test_a_small_share_of_failed_rounds_is_not_0_percent(caplog: pytest.LogCaptureFixture) -> None:
    more: dict[str, Any] = {"sampling": "bernoulli", "fraction_train": 0.92}
    strategy = method("fedavg", MASKED, max_failed_rounds=1, **more)
    clients, model = PROBLEM.clients(), linear(W0)
    with suppress(RuntimeError):  # if a cohort is too small
        simulate(strategy, clients=clients, model=model, loss=half_square, rounds=20)
    (line,) = [line for line in warnings(caplog) if "failed rounds" in line]
    assert line.startswith("sampling: 0.")


def test_gossip_draws_no_cohorts_that_could_be_too_small(caplog: pytest.LogCaptureFixture) -> None:
    strategy = S.DFedAvg(sampling="bernoulli", fraction_train=0.1, min_replies=3)
    clients, model = PROBLEM.clients(), linear(W0)
    simulate(strategy, clients=clients, model=model, loss=half_square, rounds=1)
    assert not [line for line in warnings(caplog) if "failed rounds" in line]


def test_lost_replies_are_absent_clients() -> None:
    """Of the bits of a run whose cohorts never had them."""
    whole = [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 1, 3, 4, 5]]
    present = [[0, 1, 2, 4], [1, 2, 3, 5], [0, 1, 4, 5]]
    strategy = method("scaffold", MASKED)

    def faults(t: int, i: int) -> str | None:
        is_absent = i in whole[t] and i not in present[t]
        return ("lost-reply", "lost-message", "late")[t] if is_absent else None

    one = federation.run(strategy, PROBLEM, W0, whole, faults=faults)
    other = federation.run(strategy, PROBLEM, W0, present)
    assert torch.equal(one.state.w, other.state.w)
    assert torch.equal(one.state.server.c, other.state.server.c)
    assert gap("scaffold", one) < 1e-9


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]


def test_too_few_clients_fail_a_round_in_one_line_and_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    strategy = method("scaffold", MASKED)
    history = federation.run(strategy, PROBLEM, W0, few)
    assert warnings(caplog) == [
        "round 2 failed: secure-sum: expected at least 3 clients after the stage setup, got 2: a "
        "sum of fewer would reveal uploads; the model does not change"
    ]
    assert torch.equal(history.weights[2], history.weights[1])
    assert not torch.equal(history.weights[3], history.weights[2])
    assert history.state.failed == 0
    assert gap("scaffold", history) < 1e-9
    last = r"^1 rounds in a row failed .*, the last one: secure-sum: expected at least 3 clients"
    with pytest.raises(FederationError, match=last):
        federation.run(method("scaffold", MASKED, max_failed_rounds=1), PROBLEM, W0, few)


def test_a_slow_machine_makes_no_client_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `round-timeout` of one's own, whatever the seconds of the local rounds in it."""
    late = SimpleNamespace(seconds=0.0)
    late.monotonic = lambda: late.seconds
    train = LocalFleet._round

    def slow(self: LocalFleet, *part: Any) -> Any:
        late.seconds += ROUND_TIMEOUT / 3
        return train(self, *part)

    monkeypatch.setattr(LocalFleet, "_round", slow)
    monkeypatch.setattr(secure, "time", late)
    monkeypatch.setattr(fleet, "time", late)
    metrics = run(method("fedavg", MASKED)).metrics
    assert (metrics["dropped"][1:] == 0).all()
    assert late.seconds > ROUND_TIMEOUT


def test_a_lost_client_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def faults(t: int, i: int) -> str | None:
        return "late" if (t, i) == (1, 3) else None

    federation.run(method("fedavg", MASKED), PROBLEM, W0, [[*range(C)]] * 2, faults=faults)
    assert warnings(caplog) == ["round 2: dropped client 3: no reply in time"]


def test_cohorts_that_are_too_small_for_any_sum_are_refused_before_a_round() -> None:
    with pytest.raises(ValueError, match=r"at least 3 clients a round .*, got 2; raise fraction-t"):
        method("fedavg", MASKED, fraction_train=0.3).check_clients(C)
    method("fedavg", MASKED, fraction_train=0.5).check_clients(C)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_rounded_broadcast_composes(name: str) -> None:
    """To the quantisation step; the server reads w^t and the mean update from what was sent."""
    plain, masked = (run(method(name, Broadcast(dtype="int8"), *p)) for p in ((), (MASKED,)))
    bare = run(method(name))
    difference = (plain.state.w - masked.state.w).abs().max()
    assert 0 < difference < 1e4 * MASKED.step < (plain.state.w - bare.state.w).abs().max()
    assert name == "fedavg" or gap(name, masked) < 1e-9


@pytest.mark.parametrize(
    ("name", "plugins", "keys", "line"),
    [
        ("fednova", (), {}, "reads the number of steps of each client: use fedavg"),
        ("fedexp", (), {}, "reads the norm of each client's update"),
        ("dfedavg", (), {}, "gossip"),
        ("fedpd", (), {"fraction_train": 1.0, "p": 0.3}, "p: expected 0 with SecureSum, got 0.3"),
        ("fedcm", (RelaxedInit(),), {"local_steps": 2}, "FedCM, for which clients send their star"),
        ("fedavg", (Robust(),), {}, "Robust, which reads single uploads"),
        ("fedavg", (Compress(),), {}, "compress.method: masked numbers are not compressible"),
        (
            *("fedavg", (DP(epsilon=4, adaptive_clip=True),), {"sampling": "bernoulli"}),
            "dp.adaptive-clip, which counts single uploads",
        ),
        (
            *("fedavg", (DP(epsilon=4, where="client"),), {"local_steps": 2}),
            "dp.where=client, whose single uploads are private already",
        ),
        ("fedavg", (), {"weighting": "examples"}, "weighting: expected uniform with secure-sum"),
        ("fedavg", (), {"buffers": "mean"}, "buffers: expected refuse, freeze or local"),
        ("fedavg", (), {"max_client_norm": 1.0}, "max-client-norm: expected 0 with secure-sum"),
        ("fedavg", (), {"device_profile": "lognormal"}, "device-profile: expected none"),
        (
            "fedavg",
            (),
            {"device_profile": "none", "schedule": "buffered"},
            "schedule: expected synchronous with secure-sum",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    name: str, plugins: Any, keys: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        method(name, MASKED, *plugins, **keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        ("compress.method=topk", "compress.method: masked numbers are not compressible"),
        ("num-clients=4", "expected at least 3 clients a round"),
    ],
)
def test_the_command_refuses_before_a_run_directory_is_made(
    pair: str, line: str, tmp_path: Path
) -> None:
    result = invoke("run", "secure-sum.method=secagg+", f"out-dir={tmp_path}/runs", pair)
    assert result.exit_code != 0
    assert line in " ".join(result.output.split())
    assert not [*tmp_path.iterdir()]


class Clock:
    """In the place of the module `time`: sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Watched(InProcessGrid):
    """A grid that keeps every message that the server gets. Each takes a second; no error comes:
    a client that raises is silent."""

    def __init__(self, app: ClientApp, clock: Clock) -> None:
        super().__init__(app, C)
        self.clock, self.replies, self.pushed = clock, list[Message](), dict[str, float]()

    def push_messages(self, messages: Any) -> Any:
        ids = [*super().push_messages(messages)]
        self.pushed |= dict.fromkeys(ids, self.clock.now)
        return ids

    def pull_messages(self, message_ids: Any) -> Any:
        ids = [i for i in message_ids if self.clock.now >= self.pushed[i] + 1]
        replies = [it for it in super().pull_messages(ids) if not it.has_error()]
        self.replies += replies
        return replies


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (message_fleet, roster, secure):
        monkeypatch.setattr(module, "time", clock)
    return clock


def by_messages(
    strategy: FederatedStrategy, clock: Clock, lost: dict[int, str] | None = None, T: int = ROUNDS
) -> tuple[Any, Watched]:
    """The run through Flower's messages; lost: client -> stage in which it is lost, in round 2."""
    data, app = PROBLEM.clients(), ClientApp()
    lost = lost or {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        batches: Any = []
        payload: Any = message.content.get(SECURE, {})
        i = context.node_id - FIRST_NODE
        if not is_handshake(message):
            if payload.get("stage") == client.SETUP:
                rounds[i] = rounds.get(i, 0) + 1
            if rounds.get(i) == 2 and lost.get(i) == payload.get("stage", ""):
                raise RuntimeError("lost")
            if CONFIG in message.content and payload.get("stage", client.MASKED) == client.MASKED:
                batches = [data[read_instruction(message).client]]
        model = federation.linear(W0)
        loss = federation.half_square
        return train_locally(message, context, model=model, batches=batches, loss=loss)

    rounds: dict[int, int] = {}
    with Watched(app, clock) as grid, quiet():
        recorder = Recorder(
            lambda i, t: federation.state_in(own_run.session, grid, i, t), weights=True
        )
        initial = ArrayRecord(federation.linear(W0).state_dict())
        everyone = [[*range(C)]] * T
        own_fleet = message_fleet.MessageFleet(grid)
        own_run = Run(
            strategy, own_fleet, initial, T, cohorts=everyone, on_round=recorder, timeout=TIMEOUT
        )
        own_run.play()
    return recorder.history(own_run.output(), {}), grid


@cache
def in_process(with_4: bool) -> History:
    """Three rounds of all; with_4: whether client 4 has a part in the second."""
    second = [i for i in range(C) if with_4 or i != 4]
    rounds = [[*range(C)], second, [*range(C)]]
    return federation.run(method("scaffold", MASKED), PROBLEM, W0, rounds)


@pytest.mark.parametrize("stage", ["", client.SETUP, client.SHARE, client.MASKED, client.UNMASK])
def test_by_messages_as_in_process_whichever_stage_loses_a_client(stage: str, clock: Clock) -> None:
    """One that is silent leaves time for the stages that follow, within that of the round."""
    strategy = method("scaffold", MASKED)
    history, _ = by_messages(strategy, clock, {4: stage} if stage else {})
    assert clock.now < TIMEOUT  # for all three rounds: two of them take seconds
    expected = in_process(with_4=stage in ("", client.UNMASK))
    assert torch.equal(history.state.w, expected.state.w)
    assert torch.equal(history.state.server.c, expected.state.server.c)
    assert gap("scaffold", history) < 1e-9


@cache
def without_4() -> History:
    """Two rounds in which client 4 has no part."""
    others = [i for i in range(C) if i != 4]
    return federation.run(method("scaffold", MASKED), PROBLEM, W0, [others] * 2)


@pytest.mark.parametrize("receivers", [{0}, {*range(C)}])
def test_a_client_whose_shares_are_unreadable_for_others_is_absent(
    receivers: set[int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seal(key: bytes, text: bytes) -> bytes:
        _, sender, receiver = struct.unpack_from(client.HEADER, text)
        return b"garbage" if sender == 4 and receiver in receivers else encrypt(key, text)

    strategy, absent = method("scaffold", MASKED), without_4()
    monkeypatch.setattr(client, "encrypt", seal)
    for history in (
        by_messages(strategy, clock, T=2)[0],
        federation.run(strategy, PROBLEM, W0, [range(C)] * 2),
    ):
        assert torch.equal(history.state.w, absent.state.w)
        assert torch.equal(history.state.server.c, absent.state.server.c)


@pytest.mark.parametrize(
    ("field", "value"), [("sealed", [1] * (C - 1)), ("sealed", ["x"] * (C - 1)), ("digest", 1)]
)
def test_shares_of_another_type_are_those_of_an_absent_client(
    field: str,
    value: Any,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = client._share

    def share(payload: Any, memory: Any) -> Any:
        answer, next_memory = right(payload, memory)
        return answer | ({field: value} if memory["client"] == 4 else {}), next_memory

    absent = without_4()
    monkeypatch.setattr(client, "_share", share)
    caplog.clear()
    history, _ = by_messages(method("scaffold", MASKED), clock, T=2)
    assert torch.equal(history.state.w, absent.state.w)
    line = "dropped client 4: secure-sum: expected keys, then shares for its neighbours, got others"
    assert warnings(caplog) == [f"round {number}: {line}" for number in (1, 2)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((client.OPENED, senders) for senders in ([], [99], [0, 1], 3)),  # whose shares it read
        *(("num-examples", 0), ("steps", 99), ("train-loss", 1e30)),
    ],
)
def test_impossible_numbers_beside_an_upload_remove_nobody_else_from_the_sum(
    field: str, value: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = client_secure.masked_reply

    def masked(message: Message, context: Context, train: Any) -> Message:
        reply = right(message, context, train)
        if METRICS in reply.content and context.node_id == FIRST_NODE + 4:
            reply.content[METRICS][field] = value  # type: ignore[index]
        return reply

    absent = without_4()
    monkeypatch.setattr(client_secure, "masked_reply", masked)
    history, _ = by_messages(method("scaffold", MASKED), clock, T=2)
    assert torch.equal(history.state.w, absent.state.w)


def test_no_message_to_the_server_holds_an_upload(clock: Clock) -> None:
    """Of a run with 24 bits, whose plain integers are within 2^24 of 2^32."""
    _, grid = by_messages(method("scaffold", SecureSum(bits=24)), clock)
    contents = [message.content for message in grid.replies if not message.has_error()]
    records = {tuple(sorted(content)) for content in contents}
    assert (SECURE,) in records
    assert (METRICS, UP) in records
    uploads = [content[UP] for content in contents if UP in content]
    assert len(uploads) == 3 * C
    values = [to_tensor(array) for up in uploads for array in up.values()]  # type: ignore[union-attr]
    assert {v.dtype for v in values} == {torch.int32}
    numbers = torch.cat(values).double() / 2**32 + 0.5
    assert abs(float(numbers.mean()) - 0.5) < 5 * (1 / 12 / len(numbers)) ** 0.5
    # in plain all would be below 2^24, a share of 1/256
    assert (
        float((torch.cat(values) < 2**24).logical_and(torch.cat(values) >= 0).double().mean()) < 0.1
    )
    for content in contents:
        if SECURE in content:
            assert {*content[SECURE]} in (  # type: ignore[arg-type]
                {"cipher-key", "mask-key"},
                {"receivers", "sealed", "digest"},
                {"seeds", "keys"},
            )


def test_a_step_that_is_too_large_blames_no_single_client(caplog: Any) -> None:
    strategy = replace(method("fedavg", MASKED), max_update_norm=1e-6, max_failed_rounds=9)
    with pytest.raises(FederationError, match="none of 2 rounds counted"):
        run(strategy, 2)
    assert "because of this reply" not in caplog.text
    assert "round 2 failed: max-update-norm" in caplog.text

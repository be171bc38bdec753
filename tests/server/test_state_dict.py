"""A whole state_dict as initial_arrays, as Flower's apps send it: parameters, buffers, the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedaccord import simulate, train_locally
from fedaccord.engine import quiet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.strategies import FedAvg, Scaffold
from fedaccord.wire.instruction import is_handshake
from fedaccord.wire.records import BUFFERS
from fedaccord.wire.tensor_array import to_record, to_tensor
from tests.grid import InProcessGrid
from tests.server.runs import Spoil
from tests.server.test_replies import with_records

C = 3
SETTINGS: dict[str, Any] = {"fraction_train": 1.0, "local_steps": 3, "lr": 0.05, "batch_size": 0}
GENERATOR = torch.Generator().manual_seed(0)
DATA = [
    (torch.randn(12, 4, generator=GENERATOR) + i, torch.randint(3, (12,), generator=GENERATOR))
    for i in range(C)
]


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for nodes that may come when all have been refused."""
    monkeypatch.setattr("fedaccord.federation.roster.GRACE", 0.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def frozen_net() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def app(
    model: Any = net, calls: list[str] | None = None, batches: tuple[int, ...] = (1, 1, 1)
) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if calls is not None:
            calls.append("train")
        client = int(str(context.node_config["partition-id"]))
        own = [DATA[client]] * batches[client]
        return train_locally(message, context, model=model(), batches=own)

    return app


def start(strategy: Any, rounds: int = 2, initial: nn.Module | None = None, **more: Any) -> Any:
    arrays = ArrayRecord((initial or net()).state_dict())
    client_app = more.pop("client_app", None) or app()
    with InProcessGrid(client_app, C) as grid, quiet():
        return strategy.start(grid, arrays, rounds, **more)


@pytest.mark.parametrize("policy", ["mean", "freeze", "local"])
@pytest.mark.parametrize("kind", [FedAvg, Scaffold])
def test_a_model_with_batchnorm_is_trained_as_in_process(kind: Any, policy: str) -> None:
    states: list[dict[str, Tensor]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        state = arrays.to_torch_state_dict()
        net().load_state_dict(state)  # nothing missing, nothing unknown
        states.append(state)
        return MetricRecord({"accuracy": 0.5})

    strategy = kind(buffers=policy, **SETTINGS)
    result = start(strategy, evaluate_fn=evaluate)
    state, before = result.arrays.to_torch_state_dict(), net().state_dict()
    assert list(state) == list(before)
    assert {n: x.dtype for n, x in state.items()} == {n: x.dtype for n, x in before.items()}
    expected = simulate(kind(buffers=policy, **SETTINGS), clients=DATA, model=net(), rounds=2).model
    for name in state:
        if policy == "mean" or name.partition(".")[0] != "1" or "running" not in name:
            continue
        assert torch.equal(state[name], before[name]), name
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    assert len(states) == 3
    if policy == "mean":  # three batches a round
        assert int(state["1.num_batches_tracked"]) == 6
        assert not torch.equal(state["1.running_mean"], before["1.running_mean"])


def test_the_mean_of_counters_is_rounded() -> None:
    """Of 1, 2 and 2 batches; the clients' next round begins with it."""
    strategy = FedAvg(buffers="mean", **SETTINGS | {"local_steps": 0, "local_epochs": 1})
    for rounds, counted in ((1, 2), (2, 4)):
        result = start(strategy, rounds, client_app=app(batches=(1, 2, 2)))
        assert int(result.arrays.to_torch_state_dict()["1.num_batches_tracked"]) == counted


def buffers_of(reply: Message) -> Tensor:
    return to_tensor(reply.content.array_records[BUFFERS]["buffers"]).clone()


def sent(change: Callable[[Tensor], Tensor]) -> Spoil:
    return lambda message, reply: with_records(
        **{BUFFERS: to_record({"buffers": change(buffers_of(reply))})}
    )(message, reply)


@pytest.mark.parametrize(
    ("policy", "spoil", "line"),
    [
        ("mean", with_records(buffers=None), "expected buffers beside the model, got none: set"),
        ("mean", sent(lambda v: v[:1]), "expected 'buffers' of shape (11,) and torch.float32, got"),
        ("mean", sent(lambda v: v.double()), "expected 'buffers' of shape (11,) and torch.float32"),
        ("mean", sent(lambda v: v / 0), "expected finite numbers, got NaN or Inf in 'buffers'"),
        (
            "freeze",
            with_records(buffers=to_record({"buffers": torch.zeros(11)})),
            "expected no buffers beside the model, got some: set the same buffers on",
        ),
    ],
)
def test_buffers_that_cannot_be_averaged_are_those_of_an_absent_client(
    policy: str, spoil: Spoil, line: str
) -> None:
    one, spoilt = app(), ClientApp()

    @spoilt.train()
    def train(message: Message, context: Context) -> Message:
        reply = one(message, context)
        is_bad = context.node_config["partition-id"] == 2 and not is_handshake(message)
        return spoil(message, reply) if is_bad else reply

    reports: list[Round] = []
    method, initial = FedAvg(buffers=policy, **SETTINGS), ArrayRecord(net().state_dict())
    for client_app, cohorts in ((spoilt, None), (app(), [[0, 1]])):
        with InProcessGrid(client_app, C) as grid, quiet():
            of = {"on_round": reports.append, "cohorts": cohorts}
            Run(method, MessageFleet(grid), initial, 1, **of).play()
    _, round, _, expected = reports
    assert [row["status"] for row in round.clients[:2]] == ["ok", "ok"]
    assert round.clients[2]["status"].startswith(line)
    assert torch.equal(round.w, expected.w)
    if policy == "mean":
        assert torch.equal(round.state.buffers, expected.state.buffers)


def test_a_model_with_batchnorm_is_refused_before_any_message() -> None:
    calls = list[str]()
    with pytest.raises(ValueError, match=r"^initial_arrays: expected a model without buffers") as e:
        start(Scaffold(**SETTINGS), client_app=app(calls=calls))
    assert calls == []
    assert "'1.running_mean', and 2 more" in str(e.value)
    assert "buffers='mean'" in str(e.value)
    assert len(str(e.value)) < 400


def test_local_parameters_stay_where_they_are() -> None:
    strategy = FedAvg(buffers="freeze", local_parameters="3.*", **SETTINGS)
    state, before = start(strategy).arrays.to_torch_state_dict(), net().state_dict()
    assert list(state) == list(before)
    names = [name for name in state if not torch.equal(state[name], before[name])]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(ValueError, match=r"'head' matches none; the model has 0.weight, 0.bias"):
        start(FedAvg(buffers="freeze", local_parameters="head", **SETTINGS))


def test_a_part_that_is_frozen_by_its_name_stays() -> None:
    strategy = FedAvg(buffers="freeze", frozen_parameters="0.*,1.*", **SETTINGS)
    state, before = start(strategy).arrays.to_torch_state_dict(), net().state_dict()
    names = [name for name in state if not torch.equal(state[name], before[name])]
    assert names == ["3.weight", "3.bias"]


def test_a_part_that_is_frozen_at_the_clients_alone_is_named() -> None:
    strategy = FedAvg(buffers="freeze", **SETTINGS)
    with pytest.raises(FederationError, match="no client could start") as e:
        start(strategy, client_app=app(frozen_net))
    assert "expected a shared tensor '0.weight', got a frozen one" in str(e.value)
    own = {n: p for n, p in frozen_net().named_parameters() if p.requires_grad}
    with InProcessGrid(app(frozen_net), C) as grid, quiet():
        result = strategy.start(grid, ArrayRecord(own), 1)
    assert list(result.arrays) == list(own)


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ({"img": DATA[0][0], "target": DATA[0][1]}, "batch: expected the targets under 'label'"),
        ({"a": DATA[0][0], "label": DATA[0][1]}, "batch: expected"),
        (DATA[0][0], "batch: expected (inputs, targets) or a dict, got a tensor"),
    ],
)
def test_batches_of_another_form_are_one_line_before_round_1(batch: Any, line: str) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return train_locally(message, context, model=net(), batches=[batch])

    with pytest.raises(FederationError, match=r"^no client could start: ") as e:
        start(FedAvg(buffers="mean", **SETTINGS), client_app=app)
    assert line in str(e.value)

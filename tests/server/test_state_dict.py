"""A whole state_dict as initial_arrays, as Flower's apps send it: parameters, buffers, the rest."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedaccord import simulate, train_locally
from fedaccord.engine import quiet
from fedaccord.federation.errors import FederationError
from fedaccord.strategies import FedAvg, Scaffold
from tests.grid import InProcessGrid

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

"""What a user of Flower's own FedAvg writes: the same where it means the same, else one line."""

import inspect
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers

from fedaccord import evaluate_locally
from fedaccord.engine import quiet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.method import LEAST
from fedaccord.strategies import METHODS, FedAvg, FedDeper, FedProx, Scaffold
from tests.federation import half_square, linear
from tests.grid import InProcessGrid
from tests.server.runs import INITIAL, LEAST_SQUARES, W0, C, broken, client_app, strategy


@pytest.mark.parametrize(
    ("kind", "arguments", "line"),
    [
        (Scaffold, {"fraction_fit": 0.5}, "fraction_fit=0.5: it is called fraction_train here"),
        (FedProx, {"proximal_mu": 1.0}, "proximal_mu=1.0: it is called mu here"),
        (Scaffold, {"proximal_mu": 1.0}, "proximal_mu=1.0: help(Scaffold) lists the arguments"),
        (FedAvg, {"num_rounds": 3}, "num_rounds=3: give num_rounds to FedAvg.start"),
        (FedAvg, {"on_fit_config_fn": 3}, "give train_config to FedAvg.start"),
        (FedAvg, {"fraction_trian": 1}, "did you mean 'fraction_train'?"),
    ],
)
def test_an_unknown_argument_is_one_line(kind: Any, arguments: Any, line: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}: unknown argument") as error:
        kind(**arguments)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_arguments_go_by_name() -> None:
    with pytest.raises(TypeError, match=r"expected keyword arguments, got 0.5: e.g. Scaffold\("):
        Scaffold(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"weighted_by_key": "size"}, "weighted_by_key: expected 'num-examples', got 'size': give"),
        ({"min_train_nodes": -1}, "min_train_nodes: expected an integer of at least 0, got -1"),
        ({"min_train_nodes": 2, "sampling": "bernoulli"}, "min_train_nodes: expected sampling="),
        ({"min_available_nodes": "2"}, "min_available_nodes: expected an integer of at least 0"),
    ],
)
def test_a_wrong_value_is_one_line(arguments: Any, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        FedAvg(**arguments)


def test_weights_by_examples_go_to_methods_that_take_them() -> None:
    assert FedAvg(weighted_by_key="num-examples") == FedAvg(
        weighted_by_key="num-examples", weighting="examples"
    )
    with pytest.raises(ValueError, match="weighted_by_key: expected none with Scaffold, whose"):
        Scaffold(weighted_by_key="num-examples")


@pytest.mark.parametrize(("fraction", "least", "size"), [(0.5, 1, 3), (0.5, 5, 5), (1.0, 2, 6)])
def test_a_round_has_at_least_min_train_nodes(fraction: float, least: int, size: int) -> None:
    method = FedAvg(fraction_train=fraction, min_train_nodes=least)
    assert method.cohort_size(6) == size
    assert {len(method.draw(t, range(6), 6)) for t in range(5)} == {size}


@pytest.mark.parametrize("name", LEAST)
def test_more_nodes_than_there_are_is_one_line_before_training(name: str) -> None:
    with InProcessGrid(client_app(), C) as grid, quiet():
        strategy(**{name: C}).start(grid, INITIAL, 1)
        with pytest.raises(ValueError, match=f"^{name}: expected at most {C}, the clients of"):
            strategy(**{name: C + 1}).start(grid, INITIAL, 1)


def test_metrics_of_training_are_aggregated_by_a_function_of_the_users() -> None:
    calls = []

    def largest(replies: list[RecordDict], key: str) -> MetricRecord:
        records = [reply.metric_records["metrics"] for reply in replies]
        calls.append([record[key] for record in records])
        return MetricRecord({"largest": max(float(str(r["train-loss"])) for r in records)})

    with InProcessGrid(client_app(), C) as grid, quiet():
        result = strategy(train_metrics_aggr_fn=largest).start(grid, INITIAL, 2)
    assert [len(weights) for weights in calls] == [C, C]
    for number, metrics in result.train_metrics_clientapp.items():
        assert number in (1, 2)
        assert float(str(metrics["largest"])) >= float(str(metrics["train-loss"])) > 0


def test_a_function_of_the_users_sees_the_replies_that_count() -> None:
    def count(replies: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"clients": len(replies)})

    with InProcessGrid(client_app(broken), C) as grid, quiet():
        result = strategy(train_metrics_aggr_fn=count).start(grid, INITIAL, 1)
    assert result.train_metrics_clientapp[1]["clients"] == C - 1


@pytest.mark.parametrize("key", ["config", "settings"])
def test_a_config_arrives_under_its_name_with_every_message(key: str) -> None:
    calls: list[Any] = []
    inner, app = client_app(), ClientApp()

    @app.train()
    def look(message: Message, context: Context) -> Message:
        record = message.content.config_records[key]
        calls.append((record["server-round"], record["temperature"]))
        return inner(message, context)

    with InProcessGrid(app, C) as grid, quiet():
        config = ConfigRecord({"temperature": 0.5})
        strategy(configrecord_key=key).start(grid, INITIAL, 2, train_config=config)
    assert calls == [(0, 0.5)] * C + [(1, 0.5)] * C + [(2, 0.5)] * C  # 0: the handshake


@pytest.mark.parametrize("kind", [FedDeper, FedAvg])
def test_the_config_of_an_evaluation_and_its_timeout_are_those_of_every_evaluation(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of personal models, and of a model that clients evaluate by `evaluate_locally`."""
    records: list[Any] = []
    timeouts: list[float] = []
    app, right = client_app(), MessageFleet.evaluate

    @app.evaluate()
    def look(message: Message, context: Context) -> Message:
        record = message.content.config_records["config"]
        records.append((record["server-round"], record["threshold"]))
        i = int(str(context.node_config["partition-id"]))
        data: Any = [LEAST_SQUARES.clients()[i]]
        return evaluate_locally(message, context, model=linear(W0), batches=data, loss=half_square)

    def evaluate(self: Any, requests: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        return right(self, requests, timeout)

    monkeypatch.setattr(MessageFleet, "evaluate", evaluate)
    own = {} if kind is FedDeper else {"evaluation": "clients"}
    with InProcessGrid(app, C) as grid, quiet():
        config = ConfigRecord({"threshold": 0.5})
        strategy(kind, **own).start(grid, INITIAL, 1, timeout=7.0, evaluate_config=config)
    first = [] if kind is FedDeper else [(0, 0.5)] * C  # nothing is personal before round 1
    assert records == [*first, *[(1, 0.5)] * C]
    assert {*timeouts} == {7.0}


def test_a_metric_of_the_servers_own_may_be_a_list() -> None:
    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"per-class": [0.1, 0.2], "all": 0.15})

    with InProcessGrid(client_app(), C) as grid, quiet():
        result = strategy().start(grid, INITIAL, 1, evaluate_fn=evaluate)
    assert result.evaluate_metrics_serverapp[1]["per-class"] == [0.1, 0.2]


def test_what_applies_is_one_line_at_the_start(lines: list[str]) -> None:
    with InProcessGrid(client_app(), C) as grid:
        FedAvg(fraction_train=1.0, precision="float64").start(grid, INITIAL, 1)
    (line,) = (line for line in lines if line.startswith("each round:"))
    for part in ("5 epochs", "clip norm 10", "weight decay 0.001", "lr 0.1 x 0.998 a round"):
        assert part in line


@pytest.mark.parametrize(
    ("algo", "part"),
    [
        ("fedmuon", "5 epochs of muon, lr 0.1 x 0.998 a round (constant within one)"),
        ("diloco", "5 epochs of adamw"),
        ("dfedavgm", "5 epochs of momentum"),
        ("fedmoswa", "(linear within one)"),
        (
            "scaffnew",
            "10 steps on average of sgd, lr 0.1 and 0.1 in the first two rounds (constant",
        ),
        ("dpsgd", "1 step of sgd"),
    ],
)
def test_the_line_is_of_the_methods_own_steps(algo: str, part: str) -> None:
    assert part in METHODS[algo](fraction_train=1.0).local_training()


def test_the_line_says_who_trains() -> None:
    assert METHODS["fedavg"](fraction_train=0.25).local_training().startswith("0.25 of the clients")
    assert METHODS["dfedavg"](fraction_train=0.25).local_training().startswith("all clients, 5")


def test_every_strategy_accepts_what_flowers_fedavg_accepts() -> None:
    names = {*inspect.signature(flowers.FedAvg).parameters}
    for kind in METHODS.values():
        assert names <= {*inspect.signature(kind).parameters}, kind

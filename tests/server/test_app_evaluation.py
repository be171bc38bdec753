"""The app's own @app.evaluate(), which is called as by Flower's strategies."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Result

from fedaccord.engine import quiet
from fedaccord.federation.app_evaluation import weighted_means
from fedaccord.plugins import DP
from fedaccord.strategies import AFedPD, FedAvg, Scaffold
from fedaccord.wire.tensor_array import to_tensor
from tests.grid import InProcessGrid
from tests.server.runs import INITIAL, C, client_app, strategy

Metrics = Callable[[int, Message], dict[str, Any]]  # (client, message) -> what it reports


def app(metrics: Metrics) -> ClientApp:
    app = client_app()

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        content = RecordDict({"metrics": MetricRecord(metrics(client, message))})
        return Message(content, reply_to=message)

    return app


def norm(client: int, message: Message) -> dict[str, Any]:
    """What a client can compute from the message alone, weighted by its number."""
    w = to_tensor(message.content.array_records["arrays"]["weight"])
    return {"norm": float(w.norm()), "place": [client, 2 * client], "num-examples": client + 1}


def start(metrics: Metrics, method: Any = None, rounds: int = 2, **more: Any) -> Result:
    with InProcessGrid(app(metrics), C) as grid, quiet():
        result: Result = (method or strategy()).start(grid, INITIAL, rounds, **more)
    return result


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, AFedPD])
def test_clients_evaluate_the_output_model(kind: Any) -> None:
    def at_server(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"norm": float(to_tensor(arrays["weight"]).norm())})

    result = start(norm, strategy(kind), evaluate_fn=at_server)
    assert result.evaluate_metrics_clientapp.keys() == {1, 2}
    for number, metrics in result.evaluate_metrics_clientapp.items():
        expected = result.evaluate_metrics_serverapp[number]["norm"]
        assert metrics["norm"] == pytest.approx(expected, rel=1e-12)
        mean = sum(i * (i + 1) for i in range(C)) / sum(i + 1 for i in range(C))
        assert metrics["place"] == pytest.approx([mean, 2 * mean])
        assert "num-examples" not in metrics


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("where", ["server", "client"])
def test_a_guarantee_of_privacy_does_not_cover_what_clients_measure(
    where: str, write: bool, caplog: pytest.LogCaptureFixture
) -> None:
    private = DP(clip=1.0, noise_multiplier=0.0, where=where, write_client_metrics=write)
    method = strategy(sampling="bernoulli", local_steps=1, plugins=(private,))
    with InProcessGrid(app(norm), C) as grid, caplog.at_level(logging.INFO, logger="flwr"):
        result = method.start(grid, INITIAL, 2)
    assert [*result.evaluate_metrics_clientapp] == ([1, 2] if write else [])
    assert ("the guarantee of dp does not cover their numbers" in caplog.text) != write


def test_a_name_that_looks_like_a_list_is_another_metric(caplog: pytest.LogCaptureFixture) -> None:
    def lists(client: int, message: Message) -> dict[str, Any]:
        value = {"hist": [1.0, 2.0, 3.0]} if client else {"hist (3 numbers)": 1.0}
        return {"num-examples": 1} | value

    result = start(lists)
    assert result.evaluate_metrics_clientapp[1] == {"hist": [1.0, 2.0, 3.0]}
    assert f"1 of {C} clients did not evaluate" in caplog.text


def test_the_means_are_those_of_flowers_strategies() -> None:
    rows = [{"a": 1.0, "b": [1, 2], "n": 3}, {"a": 5.0, "b": [0, 7], "n": 1}]
    contents = [RecordDict({"m": MetricRecord(row)}) for row in rows]
    theirs = FlowersFedAvg().evaluate_metrics_aggr_fn(contents, "n")
    ours = weighted_means(contents, "n")
    assert ours == theirs == {"a": 2.0, "b": [0.75, 3.25]}


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({"fraction_evaluate": 0.5}, [3, 3, 3]),
        ({"fraction_evaluate": 0.5, "min_evaluate_nodes": 5}, [5, 5, 5]),
        ({"fraction_evaluate": 0.0, "min_evaluate_nodes": 5}, []),
        ({"eval_every": 2}, [C, C]),
        ({"fraction_train": 0.5}, [C, C, C]),
    ],
)
def test_as_many_clients_as_the_arguments_say(arguments: Any, sizes: list[int]) -> None:
    clients_of: dict[int, list[int]] = {}

    def note(client: int, message: Message) -> dict[str, Any]:
        number = int(str(message.content.config_records["config"]["server-round"]))
        clients_of.setdefault(number, []).append(client)
        return norm(client, message)

    start(note, strategy(**arguments), rounds=3)
    assert [len(clients) for clients in clients_of.values()] == sizes
    if sizes and sizes[0] < C:
        assert len({tuple(clients) for clients in clients_of.values()}) > 1


def test_records_and_configs_have_the_names_that_the_user_gives() -> None:
    def look(client: int, message: Message) -> dict[str, Any]:
        assert {*message.content} == {"model", "settings"}
        assert message.content.config_records["settings"]["temperature"] == 0.5
        return {"accuracy": 0.5, "num-examples": 1}

    with pytest.raises(
        ValueError, match=r"configrecord_key: expected two names, got 'model' twice$"
    ):
        strategy(arrayrecord_key="model", configrecord_key="model")
    method = strategy(arrayrecord_key="model", configrecord_key="settings")
    config = ConfigRecord({"temperature": 0.5})
    result = start(look, method, evaluate_config=config)
    assert result.evaluate_metrics_clientapp[2] == {"accuracy": 0.5}


def test_a_function_of_the_users_takes_the_place_of_means() -> None:
    def best(replies: list[RecordDict], key: str) -> MetricRecord:
        rows = [next(iter(reply.metric_records.values())) for reply in replies]
        return MetricRecord({"clients": len(rows), "most": max(int(str(r[key])) for r in rows)})

    result = start(norm, strategy(evaluate_metrics_aggr_fn=best))
    assert result.evaluate_metrics_clientapp[1] == {"clients": C, "most": C}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"num-examples": 0, "norm": 1.0, "place": [0, 0]}, "expected num-examples above 0"),
        ({"num-examples": 1, "norm": math.nan, "place": [0, 0]}, "expected finite numbers"),
        ({"num-examples": 10**12, "norm": 1.0, "place": [0, 0]}, "expected num-examples above 0"),
        ({"num-examples": 1, "other": 1.0}, "expected the metrics ['norm', 'num-examples'"),
        ({"num-examples": 1, "norm": 1.0, "place": 0.0}, "expected the metrics ['norm', 'num-"),
        ({"num-examples": 1, "norm": 1.0, "place": [0]}, "got ['norm', 'num-examples', 'place (1 "),
        (None, "RuntimeError: no data"),
    ],
)
def test_a_bad_answer_is_left_out(bad: Any, line: str, warnings: list[str]) -> None:
    def spoilt(client: int, message: Message) -> dict[str, Any]:
        if client == 1 and bad is None:
            raise RuntimeError("no data")
        return bad if client == 1 else norm(client, message)

    with InProcessGrid(app(spoilt), C) as grid:
        result = strategy().start(grid, INITIAL, 1)
    (warning,) = (text for text in warnings if "did not evaluate" in text)
    assert warning.startswith(f"round 1: 1 of {C} clients did not evaluate: ")
    assert line in warning
    weights = [i + 1 for i in range(C) if i != 1]
    places = [i for i in range(C) if i != 1]
    mean = sum(w * i for w, i in zip(weights, places, strict=True)) / sum(weights)
    assert result.evaluate_metrics_clientapp[1]["place"] == pytest.approx([mean, 2 * mean])


class Silent(InProcessGrid):
    """The first client replies to no request to evaluate; asked: the nodes with one, by round."""

    def __init__(self, app: ClientApp, clients: int) -> None:
        super().__init__(app, clients)
        self.asked: list[set[int]] = []

    def push_messages(self, messages: Any) -> Any:
        messages = [*messages]
        if messages and messages[0].metadata.message_type == "evaluate":
            self.asked.append({message.metadata.dst_node_id for message in messages})
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        replies = super().pull_messages(message_ids)
        kinds = ((reply, reply.metadata.message_type) for reply in replies)
        first = min(self.contexts)
        return [r for r, k in kinds if k != "evaluate" or r.metadata.src_node_id != first]


def test_a_silent_client_does_not_delay_the_others() -> None:
    with Silent(app(norm), C) as grid, quiet():
        result = strategy().start(grid, INITIAL, 1, timeout=0.3)
    assert grid.asked == [{*grid.contexts}]
    assert result.evaluate_metrics_clientapp[1]["norm"] > 0


def test_an_app_without_the_function_is_asked_once_though_a_client_is_silent() -> None:
    with Silent(client_app(), C) as grid, quiet():
        result = strategy().start(grid, INITIAL, 3, timeout=0.3)
    assert grid.asked == [{*grid.contexts}]
    assert result.evaluate_metrics_clientapp == {}


def test_an_app_without_the_function_is_asked_once(lines: list[str]) -> None:
    calls = []

    class Counting(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = [*messages]
            calls.extend(m for m in messages if m.metadata.message_type == "evaluate")
            return super().push_messages(messages)

    with Counting(client_app(), C) as grid:
        result = strategy().start(grid, INITIAL, 3)
    assert len(calls) == C
    assert result.evaluate_metrics_clientapp == {}
    assert [line for line in lines if line.startswith("clients evaluate nothing")]
    assert torch.isfinite(to_tensor(result.arrays["weight"])).all()


@pytest.mark.parametrize("value", [-0.1, 1.1, "all"])
def test_a_wrong_share_is_one_line(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^fraction_evaluate: expected a.* got {value!r}"):
        FedAvg(fraction_evaluate=value)

"""Personal models are evaluated at their clients, whatever these answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict

from fedaccord import evaluate_locally, simulate
from fedaccord.config import RunConfig
from fedaccord.core.metrics import STD, WORST
from fedaccord.core.request import ModelSettings
from fedaccord.engine import quiet
from fedaccord.federation import evaluation, metrics, replies
from fedaccord.federation.round import Round
from fedaccord.runs.metrics import METRIC, METRICS, SHARE_UNIT, TABLES
from fedaccord.storage import store
from fedaccord.strategies import DFedAvg, FedDeper
from fedaccord.task import load_task
from fedaccord.wire.tensor_array import to_tensor
from tests.federation import half_square, linear
from tests.grid import InProcessGrid
from tests.server.net import Net, through
from tests.server.runs import LEAST_SQUARES, W0, C, client_app, federation, run_over, strategy


def test_personal_models_are_evaluated_at_their_clients() -> None:
    """FedDeper's v, on each client's share of the test samples, once it has one."""
    keys: dict[str, Any] = {"num_clients": 6, "local_epochs": 1, "threads": 1, "model": "linear"}
    history = simulate("feddeper", rounds=3, participation=[[0], [1, 2], [0]], **keys)
    metrics = history.metrics["personal-accuracy"]
    assert metrics.isna().tolist() == [True, False, False, False]
    task = load_task(RunConfig.make({"model": "linear"}).task, num_clients=6)
    own = []
    for i in (0, 1, 2):
        samples = task.client_test(i)
        model = task.model(ModelSettings("float32"))
        model.w.copy_(history.clients[i].v)
        right = total = 0
        with torch.no_grad():
            for x, y in task.batches(samples, torch.float32):
                right += int((model.module(x).argmax(1) == y).sum())
                total += len(y)
        own.append(right / total)
    assert metrics.iloc[-1] == pytest.approx(np.mean(own))
    assert "personal-accuracy" not in simulate("fedavg", rounds=1, **keys).metrics


def test_metrics_of_nodes_are_their_mean_and_deviation() -> None:
    def evaluate(t: int, w: torch.Tensor, buffers: Any) -> dict[str, Any]:
        return {"test-loss": float(w[0]), "test-accuracy": float(w[1] ** 2), "labels": [1]}

    first, *later = federation(strategy(DFedAvg), 2, evaluate=evaluate)
    assert not any("nodes" in name for name in first.metrics)  # all are equal
    for round in later:
        for name, values in (("loss", round.w[:, 0]), ("accuracy", round.w[:, 1] ** 2)):
            assert round.metrics[f"test-{name}-nodes"] == pytest.approx(float(values.mean()))
            deviation = float(values.std(correction=0))
            assert round.metrics[f"test-{name}-nodes-std"] == pytest.approx(deviation)
            assert deviation > 1e-3
        assert round.metrics["test-accuracy"] == pytest.approx(float(round.w[:, 1].mean() ** 2))
        assert "labels-nodes" not in round.metrics


def rounds(evaluate: Callable[[Message, Context], Message] | None) -> list[Round]:
    """Two rounds of FedDeper with a foreign ClientApp."""
    app, reports = client_app(), []
    if evaluate:
        app.evaluate()(evaluate)
    with InProcessGrid(app, C) as grid, quiet():
        run_over(grid, strategy(FedDeper), 2, on_round=reports.append).play()
    return reports


def own_loss(message: Message, context: Context) -> Message:
    i = int(str(context.node_config["partition-id"]))
    data: Any = [LEAST_SQUARES.clients()[i]]
    return evaluate_locally(message, context, model=linear(W0), batches=data, loss=half_square)


def test_a_foreign_client_app_evaluates_its_personal_model() -> None:
    v: dict[int, torch.Tensor] = {}

    def evaluate(message: Message, context: Context) -> Message:
        i = int(str(context.node_config["partition-id"]))
        v[i] = to_tensor(context.state.array_records[store.STATE]["v"])
        return own_loss(message, context)

    last = rounds(evaluate)[-1].metrics
    losses = [half_square(x @ v[i][:, None], y).item() for i, (x, y) in enumerate_clients()]
    assert last["personal-loss"] == pytest.approx(np.mean(losses))
    assert "personal-accuracy" not in last  # a regression


def test_a_client_that_is_offline_is_not_asked_for_its_personal_model() -> None:
    with Net(client_app()) as net, quiet():
        for i in range(C):
            net.join(10 + i, i, C)
        run = run_over(net, strategy(FedDeper), 1)
        run.begin()
        run.train_round()
        net.leave(12)
        requests = run.session.evaluate_requests(run.state)
    assert [request.instruction.client for request in requests] == [0, 1, 3, 4, 5]


def enumerate_clients() -> Any:
    return enumerate(LEAST_SQUARES.clients())


def test_names_are_those_of_the_columns() -> None:
    """What the server writes itself, what it squares, and the range of a share."""
    of_the_server = {column.name for column in TABLES["clients.csv"] if column.source == "server"}
    assert of_the_server == replies.TAKEN
    squared = {column.name for column in METRICS if column.unit == "squared L2"}
    assert set(metrics.SQUARED) == {name for name in squared if not name.startswith("consensus")}
    for name, (low, high) in evaluation.RANGES.items():
        unit = METRIC[f"personal-{name}"].unit
        assert (unit == SHARE_UNIT) == ((low, high) == (0, 1))


def test_clients_that_cannot_evaluate_are_one_line(warnings: list[str]) -> None:
    """A foreign ClientApp without an evaluate function trains all the same."""
    last = rounds(None)[-1].metrics
    line = "6 of 6 clients did not evaluate their personal model: "
    assert [w.startswith(line) for w in warnings] == [True, True]
    assert last["replies"] == 6
    assert not [name for name in last if name.startswith("personal")]


def reply(metrics: MetricRecord | None) -> Callable[[Message, Context], Message]:
    def evaluate(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] != 2:
            return own_loss(message, context)
        return Message(RecordDict({"metrics": metrics} if metrics else {}), reply_to=message)

    return evaluate


def test_an_answer_without_metrics_is_one_line_and_the_others_count(warnings: list[str]) -> None:
    last = rounds(reply(None))[-1].metrics
    assert "personal-loss" in last
    line = "1 of 6 clients did not evaluate their personal model: expected the record 'metrics', go"
    assert [w.startswith(line) for w in warnings] == [True, True]


@pytest.mark.parametrize(
    "metrics",
    [
        MetricRecord({"num-examples": 3}),
        MetricRecord({"num-examples": 3, "loss": [1.0, 2.0]}),
        MetricRecord({"num-examples": 3, "loss": float("nan")}),
        MetricRecord({"num-examples": 3, "loss": 1e308}),
        MetricRecord({"num-examples": 3, "loss": -1e16}),
        MetricRecord({"num-examples": 3, "loss": 1.0, "more": 1.0}),
    ],
)
def test_an_answer_unlike_the_others_is_one_line(
    metrics: MetricRecord, warnings: list[str]
) -> None:
    last = rounds(reply(metrics))[-1].metrics
    assert np.isfinite(last["personal-loss"])
    assert "personal-more" not in last
    line = "1 of 6 clients did not evaluate their personal model: expected "
    assert [w.startswith(line) for w in warnings] == [True, True]


@pytest.mark.parametrize("accuracy", [1e9, -5.0, 1.001])
def test_an_accuracy_is_a_share(accuracy: float, warnings: list[str]) -> None:
    def evaluate(message: Message, context: Context) -> Message:
        i = context.node_config["partition-id"]
        return replied(message, accuracy=accuracy if i == 2 else 0.5)

    assert rounds(evaluate)[-1].metrics["personal-accuracy"] == 0.5
    line = (
        "1 of 6 clients did not evaluate their personal model: expected accuracy from 0 to 1, got"
    )
    assert [w.startswith(line) for w in warnings] == [True, True]


def test_huge_numbers_of_all_clients_do_not_end_the_run(warnings: list[str]) -> None:
    """Their mean would overflow."""
    last = rounds(lambda message, _: replied(message, f1=1.7e308))[-1].metrics
    assert "personal-f1" not in last
    assert warnings[0].startswith("6 of 6 clients did not evaluate their personal model: expected")


def test_names_that_a_client_makes_up_are_no_columns(warnings: list[str]) -> None:
    """All clients answer the same: the mean of a plain name is taken, that of another is not."""
    names = {"=1+1": 1.0, "f1": 0.5, "\x1b[31m": 3.0, **{f"n{k}": 1.0 for k in range(1000)}}

    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(names)}), reply_to=message)

    last = rounds(evaluate)[-1].metrics
    columns = [name for name in last if name.startswith("personal-")]
    columns = [name for name in columns if not name.endswith((WORST, STD))]
    assert last["personal-f1"] == 0.5
    assert len(columns) == 32
    assert all(name.isprintable() and "=" not in name for name in columns)


def test_what_a_client_says_of_its_evaluation_is_cleaned(warnings: list[str]) -> None:
    def evaluate(message: Message, context: Context) -> Message:
        records = {"\x1b[31m" + "x" * 100_000: MetricRecord({"a": 1})}
        return Message(RecordDict(records), reply_to=message)

    last = rounds(evaluate)[-1]
    assert len(warnings) == 2
    for line in (*warnings, *(row["evaluation"] for row in last.evaluations)):
        assert line.isprintable()
        assert len(line) < 500


def test_second_answers_count_once_and_missing_ones_are_told(warnings: list[str]) -> None:
    def change(messages: list[Message], replies: list[Message]) -> list[Message]:
        """Of the evaluation's replies the first comes twice, and the last does not come."""
        evaluated = messages[0].metadata.message_type == MessageType.EVALUATE
        return [replies[0], *replies[:-1]] if evaluated else replies

    app, reports = client_app(), []
    app.evaluate()(lambda message, context: replied(message, loss=context.node_id))
    with through(change)(app, C) as grid, quiet():
        run_over(grid, strategy(FedDeper, round_timeout=0.1), 1, on_round=reports.append).play()
    nodes = sorted(grid.contexts)[:-1]
    assert reports[-1].metrics["personal-loss"] == pytest.approx(np.mean(nodes))
    line = "1 of 6 clients did not evaluate their personal model: no reply in time"
    assert warnings == [line]


def replied(message: Message, **numbers: float) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({**numbers})}), reply_to=message)

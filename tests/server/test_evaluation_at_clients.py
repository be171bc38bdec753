"""The output model and personal models on the clients' own samples: the same in every runtime."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict

from fedaccord import client_app, evaluate_locally, recorded_run, server_app, simulate
from fedaccord.cli.settings import read_begun, read_settings
from fedaccord.config import RunConfig
from fedaccord.core.metrics import over_clients
from fedaccord.core.request import ModelSettings
from fedaccord.engine import quiet, run
from fedaccord.federation.errors import FederationError
from fedaccord.federation.round import Round
from fedaccord.runs import load_model
from fedaccord.strategies import Ditto, FedAvg
from fedaccord.task import load_task
from fedaccord.task.evaluation import evaluate
from tests.federation import half_square, linear
from tests.grid import InProcessGrid
from tests.server.net import through
from tests.server.runs import INITIAL, LEAST_SQUARES, W0, C, run_over, strategy
from tests.server.runs import client_app as trained

SMALL: dict[str, Any] = {
    **{"num-clients": 6, "num-server-rounds": 3, "model": "linear", "local-epochs": 1},
    **{"threads": 1, "device": "cpu", "eval-every": 2},
}


def preset(name: str) -> dict[str, Any]:
    """What makes it another method than FedAvg, on a small model with the names of a ResNet."""
    values = read_settings([], read_begun(None, name))
    own = {key: values[key] for key in ("algo", "local-parameters", "buffers") if key in values}
    return {"model": "tests.own:pocket", "buffers": "mean", **own}


PERSONAL = {name: preset(name) for name in ("fedper", "fedbn", "lg-fedavg")}
RUNS: dict[str, dict[str, Any]] = {
    "a server's and the clients'": {"algo": "scaffold", "evaluation": "both"},
    "some clients": {"algo": "afedpd", "evaluation": "clients", "fraction-evaluate": 0.5},
    "personal models too": {"algo": "ditto", "evaluation": "clients"},
    "personal models alone": {"algo": "ditto"},
    "a local part beside the model": {"local-parameters": "1.bias", "evaluation": "clients"},
    "a local part, and the server's": {"algo": "scaffold", "local-parameters": "1.bias"},
    "without a server": {"algo": "dfedavg", "evaluation": "clients"},
    **{name: settings | {"evaluation": "clients"} for name, settings in PERSONAL.items()},
}
each_run = pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)


def in_process(folder: Path, **settings: Any) -> Path:
    config = RunConfig.make(SMALL | settings | {"out-dir": str(folder)})
    with quiet():
        return run(config).path


def tables(path: Path) -> list[str]:
    """metrics.csv and clients.csv as texts, which are exact, without seconds."""
    frames = (pd.read_csv(path / f"{name}.csv", dtype=str) for name in ("metrics", "clients"))
    return [table.drop(columns="seconds").to_csv() for table in frames]


@each_run
def test_messages_give_the_numbers_of_the_engine(settings: Any, tmp_path: Path) -> None:
    expected = in_process(tmp_path, name="here", **settings)
    config = RunConfig.make(SMALL | settings | {"out-dir": str(tmp_path), "name": "there"})
    with InProcessGrid(client_app.app, 6, config.flat) as grid, quiet():
        vars(grid)["pull_interval"] = 0.1
        for client in grid.contexts.values():
            client.node_config["allowed-imports"] = "tests"
        server_app.main(grid, Context(1, 0, {}, RecordDict(), config.flat))
    assert tables(tmp_path / "there") == tables(expected)


def test_a_wrong_metric_of_the_best_model_is_one_line_before_any_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without data at the server the usual metric is known as soon as a client is connected."""
    settings = {"evaluation": "clients", "keep-best": "client-mae", "out-dir": str(tmp_path)}
    config = RunConfig.make(SMALL | settings)
    monkeypatch.setattr(recorded_run, "run_of", None)
    with (
        InProcessGrid(client_app.app, 6, config.flat) as grid,
        quiet(),
        pytest.raises(ValueError, match=r"got 'client-mae': choose another or set metrics=mae$"),
    ):
        server_app.main(grid, Context(1, 0, {}, RecordDict(), config.flat))


@pytest.mark.flower
@pytest.mark.slow  # it starts Ray
@pytest.mark.parametrize("name", ["personal models too", "a local part beside the model"])
def test_workers_give_the_numbers_of_the_engine(name: str, tmp_path: Path) -> None:
    expected, path = (
        in_process(tmp_path, name=f"of-{workers}", workers=workers, **RUNS[name])
        for workers in (0, 2)
    )
    assert tables(path) == tables(expected)


def test_the_means_and_the_spread_are_those_of_a_dense_computation(tmp_path: Path) -> None:
    path = in_process(tmp_path, evaluation="clients", **{"num-clients": 15})
    task = load_task(RunConfig.make({"model": "linear"}).task, num_clients=15)
    model = load_model(path)
    w = torch.cat([model[name].reshape(-1) for name in ("1.weight", "1.bias")])
    metrics = []
    for i in range(15):
        x, y = task.client_test(i) or (w, w)
        batches = task.batches((x, y), torch.float32)
        metrics.append(evaluate(task.model(ModelSettings()), w, batches, task.loss) | {"n": len(y)})
    own = pd.DataFrame(metrics)
    last = pd.read_csv(path / "metrics.csv").iloc[-1]
    for name, worst in (
        ("accuracy", own["accuracy"].nsmallest(2)),
        ("loss", own["loss"].nlargest(2)),
    ):
        assert last[f"client-{name}"] == pytest.approx(np.average(own[name], weights=own["n"]))
        assert last[f"client-{name}-worst-tenth"] == pytest.approx(worst.mean())
        assert last[f"client-{name}-std"] == pytest.approx(own[name].std(ddof=0))
    assert last["evaluation-replies"] == 15
    rows = pd.read_csv(path / "clients.csv").query("round == 3").sort_values("client")
    assert rows["client-accuracy"].tolist() == pytest.approx(own["accuracy"].tolist())
    assert rows["evaluation-examples"].tolist() == own["n"].tolist()
    assert set(rows["status"]) == {"ok", "evaluated"}


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (30, 3)])
def test_the_worst_tenth_has_at_least_one_client(clients: int, worst: int) -> None:
    values = np.random.default_rng(0).permutation(clients).astype(float)
    loss = over_clients("client-loss", [*values], [1] * clients)
    share = over_clients("personal-accuracy", [*values], None)
    assert loss["client-loss-worst-tenth"] == np.mean(sorted(values)[-worst:])
    assert share["personal-accuracy-worst-tenth"] == np.mean(sorted(values)[:worst])
    assert share["personal-accuracy"] == np.mean(values)
    assert over_clients("client-own", [1.0, 2.0], [1, 3]) == {"client-own": 1.75}


def test_who_evaluates_depends_on_seed_and_round_alone(tmp_path: Path) -> None:
    def who(**more: Any) -> list[list[int]]:
        settings = {"evaluation": "clients", "fraction-evaluate": 0.34, "eval-every": 1}
        rows = pd.read_csv(in_process(tmp_path, **settings | more) / "clients.csv")
        rounds = rows[rows["evaluation"] == "ok"].sort_values("client").groupby("round")["client"]
        return [[*clients] for _, clients in rounds]

    cohorts = who()
    assert [len(clients) for clients in cohorts] == [2, 2, 2, 2]
    assert len({*map(tuple, cohorts)}) > 1
    assert who(algo="scaffold", **{"fraction-train": 1.0}) == cohorts != who(seed=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "linear", "local-parameters": "1.bias"},
        {"model": "linear", "local-parameters": "1.bias", "algo": "ditto"},
        *PERSONAL.values(),
    ],
    ids=["a bias", "ditto", *PERSONAL],
)
def test_a_local_part_is_evaluated_beside_the_output_model(settings: dict[str, Any]) -> None:
    """As its own model, once the client has trained; the output model has the initial part."""
    keys: dict[str, Any] = {"num-clients": 4, "local-epochs": 1, "threads": 1}
    keys |= {"evaluation": "both", "algo": "fedavg", "rounds": 2} | settings
    rows: list[Round] = []
    history = simulate(participation=[[0, 1], [1, 2]], on_round=rows.append, **underscored(keys))
    config = RunConfig.make({"model": settings["model"]}).task
    task = load_task(config, num_clients=4)
    roles = {key: settings[key] for key in ("buffers", "local-parameters") if key in settings}
    model = task.model(ModelSettings(**underscored(roles)))
    if history.state.buffers is not None:
        model.write_buffers(history.state.buffers)
    for row in rows[-1].evaluations:
        samples = task.client_test(row["client"])
        state = history.clients[row["client"]]
        assert ("personal-loss" in row) == (row["client"] != 3) == (state is not None)
        assert row["evaluation-examples"] == len(samples[1])
        w, initial = history.state.w, model.initial_local
        own = state and (getattr(state.base, "v", w), state.local)  # Ditto has a w of its own
        for name, parts in (("client", (w, initial)), ("personal", own)):
            if parts is not None:
                model.write_local(parts[1])
                batches = task.batches(samples, torch.float32)
                expected = evaluate(model, parts[0], batches, task.loss)
                assert {k: row[f"{name}-{k}"] for k in expected} == expected
    last = history.metrics.iloc[-1]
    assert last["personal-loss"] != last["client-loss"]
    own = [row["personal-accuracy"] for row in rows[-1].evaluations if row["client"] != 3]
    assert last["personal-accuracy"] == pytest.approx(np.mean(own), rel=1e-12)
    assert last["evaluation-replies"] == 4


def underscored(keys: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in keys.items()}


# --- what clients reply ---------------------------------------------------------------------------


def rounds(
    evaluate: Callable[[Message, Context], Message] | None,
    change: Any = lambda messages, replies: replies,
    kind: Any = FedAvg,
    **settings: Any,
) -> list[Round]:
    """A round on least squares with a foreign ClientApp."""
    app, reports = trained(), []
    if evaluate:
        app.evaluate()(evaluate)
    settings = {"evaluation": "clients", **settings}
    with through(change)(app, C) as grid, quiet():
        run_over(grid, strategy(kind, **settings), 1, on_round=reports.append).play()
    return reports


def number(context: Context) -> int:
    return int(str(context.node_config["partition-id"]))


def samples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """The first samples of the client: as many as its number, and one."""
    i = number(context)
    x, y = LEAST_SQUARES.clients()[i]
    return x[: i + 1], y[: i + 1]


def of_samples(message: Message, context: Context) -> Message:
    data = [samples(context)]
    return evaluate_locally(message, context, model=linear(W0), batches=data, loss=half_square)


def joined(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    predictions: torch.Tensor = model(torch.cat([batch["a"], batch["b"]], 1))
    return predictions


DICTS: list[tuple[Any, dict[str, Any]]] = [
    (lambda x, y: {"img": x, "label": y}, {}),
    (
        lambda x, y: {"a": x[:, :1], "b": x[:, 1:], "name": ["row"] * len(y), "y": y},
        {"forward": joined, "targets": "y"},
    ),
]


@pytest.mark.parametrize(("form", "arguments"), DICTS)
def test_batches_in_dicts_are_evaluated_as_pairs(form: Any, arguments: dict[str, Any]) -> None:
    """Also for a personal model, which needs a second pass."""

    def evaluate(message: Message, context: Context) -> Message:
        data = [form(*samples(context))]
        more = {"batches": data, "loss": half_square, **arguments}
        return evaluate_locally(message, context, model=linear(W0), **more)

    for kind in (FedAvg, Ditto):
        as_pairs, as_dicts = rounds(of_samples, kind=kind)[-1], rounds(evaluate, kind=kind)[-1]
        assert as_dicts.evaluations == as_pairs.evaluations
        assert ("personal-loss" in as_pairs.metrics) == (kind is Ditto)
    own = [row["personal-loss"] for row in as_pairs.evaluations]  # clients count equally
    assert as_pairs.metrics["personal-loss"] == pytest.approx(np.mean(own), rel=1e-12)


def answer(message: Message, **numbers: float) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({**numbers})}), reply_to=message)


def losses_at(w: torch.Tensor) -> list[float]:
    clients = enumerate(LEAST_SQUARES.clients())
    return [half_square(x[: i + 1] @ w[:, None], y[: i + 1]).item() for i, (x, y) in clients]


def test_the_mean_is_over_the_clients_that_reply(warnings: list[str]) -> None:
    def change(messages: list[Message], replies: list[Message]) -> list[Message]:
        evaluated = messages[0].metadata.message_type == MessageType.EVALUATE
        return [replies[0], *replies[2:-1]] if evaluated else replies

    last = rounds(of_samples, change, round_timeout=0.1)[-1]
    weights = [1, 3, 4, 5]
    values = [losses_at(last.w)[n - 1] for n in weights]
    assert last.metrics["client-loss"] == pytest.approx(np.average(values, weights=weights))
    counts = [last.metrics[f"evaluation-{x}"] for x in ("replies", "dropped", "empty")]
    assert counts == [4, 2, 0]
    assert last.metrics["replies"] == 6
    assert warnings == ["2 of 6 clients did not evaluate the model: no reply in time"] * 2
    words = [row["evaluation"] for row in last.evaluations]
    assert words == ["ok", "no reply in time", "ok", "ok", "ok", "no reply in time"]


def test_a_client_without_samples_is_left_out_and_counted(warnings: list[str]) -> None:
    def evaluate(message: Message, context: Context) -> Message:
        if number(context) in (1, 4):
            none: Any = []
            return evaluate_locally(message, context, model=linear(W0), batches=none)
        return of_samples(message, context)

    last = rounds(evaluate)[-1].metrics
    assert [last[f"evaluation-{x}"] for x in ("replies", "dropped", "empty")] == [4, 0, 2]
    assert warnings == []


def test_if_no_client_has_samples_it_shows_before_round_1() -> None:
    trained_ones = []

    def change(messages: list[Message], replies: list[Message]) -> list[Message]:
        trained_ones.extend(m for m in messages if m.metadata.message_type == MessageType.TRAIN)
        return replies

    with pytest.raises(FederationError) as refusal:
        rounds(lambda message, _: answer(message, **{"num-examples": 0}), change)
    assert str(refusal.value).startswith("evaluation: expected held-out samples at some of the")
    assert "\n" not in str(refusal.value)
    assert trained_ones == []
    with pytest.raises(FederationError, match="none has any"):  # in process too
        simulate(
            strategy(FedAvg, evaluation="clients"),
            clients=LEAST_SQUARES.clients(),
            test=[None] * len(LEAST_SQUARES.clients()),
            model=linear(W0),
            loss=half_square,
        )


def test_if_the_drawn_clients_have_no_samples_it_is_a_warning(warnings: list[str]) -> None:
    """Others may have some: whether the run starts does not depend on the draw."""
    first, last = rounds(
        lambda message, _: answer(message, **{"num-examples": 0}), fraction_evaluate=1 / C
    )
    assert first.metrics["evaluation-empty"] == last.metrics["evaluation-empty"] == 1
    (line,) = warnings
    assert re.fullmatch(r"evaluation: the drawn clients \[\d\] have no samples", line)


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ({"loss": 1.0}, "expected num-examples to be an integer from 0 to 10000000, got None"),
        ({"num-examples": 10**8, "loss": 1.0}, "expected num-examples to be"),
        ({"num-examples": -1, "loss": 1.0}, "expected num-examples to be"),
        ({"num-examples": 2.5, "loss": 1.0}, "expected num-examples to be"),
        ({"num-examples": 3, "personal-loss": 1e16}, "expected personal-loss from"),
        ({"num-examples": 3}, "expected the metrics ['client-loss'], as in the other"),
    ],
)
def test_a_reply_that_cannot_be_averaged_is_one_line(
    numbers: Any, line: str, warnings: list[str]
) -> None:
    def evaluate(message: Message, context: Context) -> Message:
        if number(context) == 2:
            return answer(message, **numbers)
        return of_samples(message, context)

    last = rounds(evaluate)[-1].metrics
    assert [last[f"evaluation-{x}"] for x in ("replies", "dropped", "empty")] == [5, 1, 0]
    assert all(w.startswith(f"1 of 6 clients did not evaluate the model: {line}") for w in warnings)
    assert len(warnings) == 2


def test_a_function_of_the_users_sees_the_clients_that_evaluated() -> None:
    def evaluate(message: Message, context: Context) -> Message:
        return of_samples(message, context) if number(context) != 2 else answer(message)

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        return MetricRecord({"clients": len(replies)})

    app = trained()
    app.evaluate()(evaluate)
    method = strategy(FedAvg, evaluation="clients", evaluate_metrics_aggr_fn=count)
    with InProcessGrid(app, C) as grid, quiet():
        result = method.start(grid, INITIAL, 1)
    assert result.evaluate_metrics_clientapp[1]["clients"] == C - 1


def test_a_loss_of_nan_shows_before_other_metrics_that_the_model_diverged() -> None:
    nan = {"num-examples": 1, "brier": math.nan, "loss": math.nan}
    last = rounds(lambda message, _: answer(message, **nan))[-1].metrics
    assert last["client-loss"] == math.inf


def test_personal_models_that_all_diverge_say_nothing_of_the_output_model() -> None:
    diverged = lambda message, _: answer(message, loss=1e16)  # noqa: E731
    last = rounds(diverged, kind=Ditto, evaluation="server")[-1].metrics
    assert last["evaluation-dropped"] == C
    assert "client-loss" not in last


def test_flowers_result_has_the_clients_metrics_and_a_users_own() -> None:
    def own(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        parts = [reply["metrics"] for reply in replies]
        assert all(isinstance(record, MetricRecord) and "client-loss" in record for record in parts)
        return MetricRecord({"examples": sum(int(record[weighted_by]) for record in parts)})  # type: ignore[index]

    app = trained()
    app.evaluate()(of_samples)
    method = strategy(FedAvg, evaluation="clients", evaluate_metrics_aggr_fn=own)
    with InProcessGrid(app, C) as grid, quiet():
        result = method.start(grid, INITIAL, 1)
    assert [*result.evaluate_metrics_clientapp] == [0, 1]
    assert result.evaluate_metrics_clientapp[1]["examples"] == 21
    assert result.evaluate_metrics_clientapp[1]["evaluation-replies"] == 6
    assert result.evaluate_metrics_serverapp == {}

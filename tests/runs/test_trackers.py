"""Trackers, with the real packages and without a network: what a run writes to them."""

import logging
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.runs import trackers
from fedaccord.runs.trackers import Tracker

TINY = {"model": "linear", "num-clients": 4, "local-epochs": 1, "threads": 1, "algo": "fedavg"}


def run(folder: Path, rounds: int = 2, **more: Any) -> Path:
    settings = TINY | {"out-dir": str(folder), "name": "tracked", "num-server-rounds": rounds}
    with engine.quiet():
        engine.run(RunConfig.make(settings | more))
    return folder / "tracked"


def written(path: Path, key: str) -> dict[int, float]:
    column = pd.read_csv(path / "metrics.csv").set_index("round")[key].dropna()
    return {int(str(number)): float(value) for number, value in column.items()}


def test_tensorboard_has_every_metric_also_of_a_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, tracker="tensorboard")
    path = run(tmp_path, rounds=4, tracker="tensorboard", resume=True)
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    for key in ("test-accuracy", "train-loss", "drift"):
        values = {event.step: event.value for event in events.Scalars(key)}
        assert values == pytest.approx(written(path, key), rel=1e-6)
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_mlflow_has_settings_metrics_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path, tracker="mlflow")
    path = run(tmp_path, rounds=3, tracker="mlflow", resume=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(trackers.PROJECT)
    (record,) = client.search_runs([experiment.experiment_id])  # one run, which was resumed
    assert (record.info.status, record.info.run_name) == ("FINISHED", "tracked")
    assert record.data.params["algo"] == "fedavg"
    history = client.get_metric_history(record.info.run_id, "test-accuracy")
    assert {point.step: point.value for point in history} == written(path, "test-accuracy")


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = run(tmp_path, tracker="wandb")
    (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while b"test-accuracy" not in file.read_bytes():  # its own process writes it
        assert time.monotonic() < end
        time.sleep(0.05)
    assert b"num-server-rounds" in file.read_bytes()


def test_a_new_wandb_run_continues_none_of_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    package = SimpleNamespace(init=lambda **words: started.append(words), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for after in (0, 2):
        trackers._wandb(tmp_path, {}, after)
    shutil.rmtree(tmp_path / "wandb")
    for after in (0, 3, 4):
        trackers._wandb(tmp_path, {}, after)
    first, resumed, second, *others = (words["id"] for words in started)
    assert first == resumed != second
    assert others == [second] * 2
    shutil.copytree(tmp_path / "wandb", tmp_path / "copy" / "wandb")
    for _ in range(2):
        trackers._wandb(tmp_path / "copy", {}, 4)
    shutil.move(tmp_path / "copy", tmp_path / "moved")
    for folder in (tmp_path / "moved", tmp_path):
        trackers._wandb(folder, {}, 4)
    copied, *again, original = (words["id"] for words in started[5:])
    assert again == [copied] * 2
    assert copied != second == original
    shutil.rmtree(tmp_path / "wandb")
    trackers._wandb(tmp_path, {}, 5)  # begun by a version that stored no id
    assert started[-1]["id"] == trackers._id(tmp_path)


def test_a_package_that_is_missing_is_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^tracker: .* `uv sync --extra mlflow --inexact`"):
        run(tmp_path, tracker="mlflow")
    assert not [*tmp_path.iterdir()]


def test_a_tracker_that_fails_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers: list[int] = []

    def start(*_: Any) -> Tracker:
        def record(number: int, metrics: Any) -> None:
            numbers.append(number)
            if number == 1:
                raise ConnectionError("no route\nto host")

        return Tracker(record, lambda good: numbers.append(-1))

    monkeypatch.setattr(trackers, "_wandb", start)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    run(tmp_path, rounds=3, tracker="wandb")
    assert numbers == [0, 1]
    assert [r.getMessage() for r in caplog.records if "wandb" in r.getMessage()] == [
        "wandb: no route to host; it is left out"
    ]


def test_what_cannot_begin_is_a_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Tracker:
        raise RuntimeError("no such experiment")

    monkeypatch.setattr(trackers, "_tensorboard", refuse)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert (run(tmp_path, tracker="tensorboard") / "model.safetensors").exists()
    assert "tensorboard: no such experiment; it is left out" in caplog.messages

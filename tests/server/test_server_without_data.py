"""With evaluation=clients a server needs no data: clients report how their model is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from fedaccord import client_app, server_app
from fedaccord.config import RunConfig
from fedaccord.engine import quiet
from fedaccord.experiments.analysis.saved_model import load
from fedaccord.federation.errors import FederationError
from fedaccord.runs import load_model
from fedaccord.task.config import TaskConfig
from fedaccord.task.load import task_of_card
from fedaccord.wire.handshake import CARD, read_handshake
from tests.grid import InProcessGrid

SETTINGS: dict[str, Any] = {
    **{"algo": "scaffold", "dataset": "npz", "model": "linear", "evaluation": "clients"},
    **{"fraction-train": 1.0, "local-epochs": 1, "threads": 1, "device": "cpu"},
    **{"num-server-rounds": 2, "wait-timeout": 3.0, "num-clients": 3},
}

SOON = {"wait-timeout": 0.2}  # all nodes have replied at once


def site(file: Path, features: int = 3, classes: int = 2, samples: int = 10) -> Path:
    rng, y = np.random.default_rng(samples), np.arange(samples) % classes
    x = rng.normal(size=(samples, features)).astype(np.float32)
    np.savez(file, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return file


def federate(folder: Path, files: list[Path], online: int | None = None, **settings: Any) -> Path:
    """A run over nodes that name their data, by the ServerApp's own main; its directory."""
    run = SETTINGS | {"out-dir": str(folder), "num-clients": len(files)} | settings
    config = RunConfig.make(run)
    with InProcessGrid(client_app.app, 0) as grid, quiet():
        for i, file in enumerate(files[:online]):
            node = {"data-path": str(file), "partition-id": i, "num-partitions": len(files)}
            grid.contexts[20 + i] = Context(1, 20 + i, node, RecordDict(), config.flat)
        server_app.main(grid, Context(1, 0, {}, RecordDict(), config.flat))
    return folder / str(settings["name"])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [site(tmp_path / f"{i}.npz", samples=10 + 4 * i) for i in range(3)]


def test_the_model_and_the_numbers_are_those_of_a_server_with_data(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"data-dir": str(files[0]), "evaluation": "both"}
    full = federate(tmp_path, files, name="with", **more)
    monkeypatch.setattr(server_app, "load_task", None)  # of the server alone
    bare = federate(tmp_path, files, name="without")
    with_data, without = load_model(full), load_model(bare)
    assert all(torch.equal(with_data[name], tensor) for name, tensor in without.items())
    one, other = (pd.read_csv(path / "metrics.csv", dtype=str) for path in (full, bare))
    own = [name for name in one if not name.startswith("test-") and name != "seconds"]
    pd.testing.assert_frame_equal(one[own], other[own])
    assert "client-accuracy" in own
    assert not [name for name in other if name.startswith("test-")]
    assert load(bare)(torch.zeros(5, 3)).shape == (5, 2)  # from Python, without any data
    federate(tmp_path, files, name="without", **{"num-server-rounds": 3, "resume": True})
    assert json.loads((bare / "summary.json").read_text())["rounds"] == 3


def test_a_run_resumes_without_a_site_that_is_gone(tmp_path: Path, files: list[Path]) -> None:
    path = federate(tmp_path, files, name="short")
    more = {"num-server-rounds": 3, "resume": True, "wait-timeout": 0.2}
    federate(tmp_path, files, name="short", online=2, **more)
    assert json.loads((path / "summary.json").read_text())["rounds"] == 3


def test_a_site_with_another_number_of_features_is_left_out(
    tmp_path: Path, files: list[Path]
) -> None:
    files[2] = site(tmp_path / "2.npz", features=5)
    with pytest.raises(FederationError) as refusal:
        federate(tmp_path, files, name="x", **SOON)
    line = "expected samples of shape (3,), got (5,), for another model (expected shared tensor "
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["status"] == "failed"


def test_a_site_whose_labels_are_floats_is_left_out(tmp_path: Path, files: list[Path]) -> None:
    with np.load(files[2]) as arrays:
        floats = {k: v.astype(np.float32) if k[0] == "y" else v for k, v in arrays.items()}
    np.savez(files[2], **floats)
    with pytest.raises(FederationError) as refusal:
        federate(tmp_path, files, name="x", **SOON)
    line = "expected targets that are classes, got numbers to predict: labels of classes are int"
    assert line in str(refusal.value)


def without_test(file: Path) -> None:
    with np.load(file) as arrays:
        train = {name: arrays[name] for name in ("x_train", "y_train")}
    np.savez(file, **train)


def test_a_site_without_test_samples_trains_and_evaluates_nothing(
    tmp_path: Path, files: list[Path]
) -> None:
    without_test(files[1])
    metrics = pd.read_csv(federate(tmp_path, files, name="x") / "metrics.csv")
    assert metrics["evaluation-empty"].tolist() == [1, 1, 1]
    assert metrics["replies"].tolist()[1:] == [3, 3]
    assert metrics["client-accuracy"].notna().all()


@pytest.mark.parametrize("evaluation", ["server", "both"])
def test_a_server_that_evaluates_needs_test_samples(
    tmp_path: Path, files: list[Path], evaluation: str
) -> None:
    without_test(files[1])
    more = {"evaluation": evaluation, "data-dir": str(files[1])}
    line = (
        f"evaluation={evaluation}: expected test samples for the server, but the data set has none"
    )
    with pytest.raises(ValueError, match=line):
        federate(tmp_path, files, name="x", **more)


def test_sites_whose_labels_mean_other_classes_are_left_out(
    tmp_path: Path, files: list[Path]
) -> None:
    """Also if their names are numbers, as of folders of images."""
    for file, names in zip(files, (["0", "1"], ["0", "1"], ["0", "2"]), strict=True):
        with np.load(file) as arrays:
            np.savez(file, **arrays, classes=np.array(names))
    with pytest.raises(FederationError) as refusal:
        federate(tmp_path, files, name="x", **SOON)
    line = "expected the classes ['0', '1'] in this order, got ['0', '2']"
    assert line in str(refusal.value)


def spoil(card: Any) -> Callable[..., Any]:
    """The ClientApp's handshake with another card; None: without one."""

    def read(reply: Any) -> Any:
        config = reply.content["config"]
        assert isinstance(config, ConfigRecord)
        del config[CARD]
        if card is not None:
            config[CARD] = card if isinstance(card, str) else json.dumps(card)
        return read_handshake(reply)

    return read


GOOD = {"arguments": {"shape": [3], "classes": 2}, "class-names": ["a"], "mean": [], "std": []}


@pytest.mark.parametrize(
    ("card", "line"),
    [
        (None, "expected clients that report the shape of a sample and the number of classes, got"),
        ("no JSON", "expected how to build a model, got 'no JSON'"),
        (GOOD | {"arguments": {"shape": [10**10], "classes": 2}}, "expected how to build"),
        (GOOD | {"arguments": {"shape": [3], "classes": 10**10}}, "expected how to build"),
        (GOOD | {"arguments": {"shape": [10**6], "classes": 10**6}}, "evaluation=clients: expec"),
        (GOOD | {"arguments": {"shape": [-3], "classes": 2}}, "expected how to build a model"),
        (GOOD | {"arguments": {"shape": [3.0], "classes": 2}}, "expected how to build a model"),
        (GOOD | {"arguments": {"shape": [3], "classes": 2, "vocabulary": 10**13}}, "expected how"),
        (GOOD | {"class-names": ["a"] * 3}, "expected how to build a model"),
        (GOOD | {"class-names": ["a" * 1000]}, "expected how to build a model"),
        (GOOD | {"mean": ["0"]}, "expected how to build a model"),
        ({}, "expected how to build a model"),
        (GOOD | {"arguments": {"shape": [3], "classes": 2, "more": 1}}, "model: expected argument"),
        (GOOD | {"arguments": {"shape": [4], "classes": 2}}, "the server's model is not the clie"),
    ],
)
def test_what_nodes_report_is_checked(
    card: Any, line: str, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.federation.roster.read_handshake", spoil(card))
    monkeypatch.setattr("fedaccord.federation.roster.GRACE", -1)
    with pytest.raises((FederationError, ValueError)) as refusal:
        federate(tmp_path, files, name="x")
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_beyond_this_machines_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=RuntimeError("not enough memory: you tried to allocate"))
    monkeypatch.setattr("fedaccord.task.models.build", full)
    with pytest.raises(ValueError, match=r"^model: expected arguments of cnn, got "):
        task_of_card(TaskConfig(model="cnn"), GOOD).module()


def test_what_was_measured_on_a_sites_own_data_stays_there(tmp_path: Path) -> None:
    """Of images the mean and the deviation; of known data sets the server has them too."""
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    y = np.arange(6) % 2
    np.savez(tmp_path / "x.npz", x_train=images, y_train=y, x_test=images, y_test=y)
    path = federate(tmp_path, [tmp_path / "x.npz"], name="x", **{"min-replies": 1})
    assert json.loads((path / "model.json").read_text())["mean"] == []

"""Float targets in a .npz file are numbers to predict; the array `client` names clients."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord import simulate
from fedaccord.data.datasets import load
from fedaccord.data.kind import Dataset
from fedaccord.data.partition import partition, report
from fedaccord.task import TaskConfig, load_task

X, Y = np.random.default_rng(0).normal(size=(12, 3)), np.arange(12) / 8


def write(path: Path, **changes: Any) -> Path:
    arrays = {"x_train": X[:8], "y_train": Y[:8], "x_test": X[8:], "y_test": Y[8:]} | changes
    np.savez(
        path / "data.npz", **{key: value for key, value in arrays.items() if value is not None}
    )
    return path / "data.npz"


def read(path: Path, **changes: Any) -> Dataset:
    return load("npz", str(write(path, **changes)))


@pytest.mark.parametrize("columns", [1, 2])
def test_targets_are_float32_in_columns(columns: int, tmp_path: Path) -> None:
    y = Y if columns == 1 else np.stack([Y, -Y], 1)
    data = read(tmp_path, y_train=y[:8], y_test=y[8:])
    assert (data.classes, data.outputs, data.class_names) == (0, columns, ())
    assert data.y_train.dtype == data.y_test.dtype == torch.float32
    assert data.y_train.tolist() == y[:8].reshape(8, columns).tolist()
    assert data.owners is None


def test_whole_numbers_as_floats_are_predicted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        assert read(tmp_path, y_train=Y[:8] * 8, y_test=Y[8:] * 8).classes == 0
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "store integers if they are labels" in caplog.text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"y_test": np.arange(4)}, "as .n,. integers from 0 on, or names .*got .8,. float64"),
        ({"classes": 3}, "without an array `classes`; got y_train"),
        ({"y_test": Y[8:, None]}, "without an array `classes`; got y_train"),
        (
            {"y_train": Y[:8, None, None], "y_test": Y[8:, None, None]},
            "got y_train .8, 1, 1. float64",
        ),
        ({"y_train": np.float64(1), "y_test": np.float64(1)}, "got y_train .. float64"),
        ({"y_train": np.full(8, np.nan)}, "finite float32 numbers in y_train"),
        ({"y_train": np.full(8, 1e300)}, "finite float32 numbers in y_train"),
        ({"y_train": Y[:7]}, "one for each of y_train"),
        ({"client": np.arange(7)}, r"a name for each of y_train \(8,\), got \(7,\) int64"),
        ({"client": np.ones(8)}, r"a name for each of y_train \(8,\), got \(8,\) float64"),
        ({"client": np.array(["a"] * 7 + [""])}, "a client for every training sample"),
    ],
)
def test_an_invalid_file_is_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^npz: .*{line}") as error:
        read(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("client", "expected"),
    [([7, 7, 2, 10, 2, 2, 7, 10], [[2, 4, 5], [0, 1, 6], [3, 7]]), (list("bbaaccbc"), None)],
)
def test_a_natural_partition_is_the_datas_own(client: Any, expected: Any, tmp_path: Path) -> None:
    owners = read(tmp_path, client=np.array(client)).owners
    parts = partition(Y[:8], 3, "natural", owners=owners.numpy())
    expected = expected or [[2, 3], [0, 1, 6], [4, 5, 7]]
    assert [part.tolist() for part in parts] == expected
    assert "no classes" in str(report(parts, Y[:8]))


@pytest.mark.parametrize(
    ("owners", "num_clients", "line"),
    [
        (None, 3, "^partition: natural expects data that names a client for each"),
        (np.array([0, 1]), 3, "^num-clients: expected 2, as the data names .*, got 3: set"),
        (np.array([0, 2]), 3, "^partition: natural expects samples for every client, client 1 has"),
    ],
)
def test_a_natural_partition_fits_the_clients(owners: Any, num_clients: int, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        partition(Y[:2], num_clients, "natural", owners=owners)


@pytest.mark.parametrize("samples_per_client", [0, 5])
def test_numbers_are_dealt_iid(samples_per_client: int) -> None:
    parts = partition(Y, 3, "iid", samples_per_client=samples_per_client)
    sizes = [5] * 3 if samples_per_client else [4] * 3
    assert [len(part) for part in parts] == sizes
    if not samples_per_client:
        assert sorted(np.concatenate([*parts]).tolist()) == [*range(12)]


def test_the_task_of_numbers(tmp_path: Path) -> None:
    """The loss is the mean squared error, the metric the mean absolute error, over all outputs."""
    config = TaskConfig(
        dataset="npz", data_dir=str(write(tmp_path)), partition="iid", model="linear"
    )
    task = load_task(config, num_clients=2)
    module = task.module().double()
    w = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    error = module(torch.tensor(X[8:]).float().double()) - torch.tensor(Y[8:, None])
    assert task.evaluate(w) == {
        "test-loss": pytest.approx(float((error**2).mean().detach()), rel=1e-6),
        "test-mae": pytest.approx(float(error.abs().mean()), rel=1e-6),
    }
    assert [*task.evaluate_train(w)] == ["train-loss-of-model", "train-mae"]
    assert task.class_counts() is None
    shares = [task.client_test(i) or () for i in range(2)]
    assert [len(y) for _, y in shares] == [2, 2]
    assert sorted(torch.cat([y for _, y in shares]).tolist()) == task.test[1].tolist()


def test_personal_models_of_numbers_are_measured_by_the_same_metric(tmp_path: Path) -> None:
    history = simulate(
        "ditto",
        dataset="npz",
        data_dir=str(write(tmp_path)),
        partition="iid",
        model="linear",
        num_clients=2,
        rounds=1,
        participation=1.0,
        threads=1,
    )
    last = history.metrics.iloc[-1]
    assert 0 < last["personal-mae"] < 10
    assert "personal-accuracy" not in last

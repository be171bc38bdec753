"""Three rounds on some of CIFAR-10's images, dealt as in FedInit's experiments."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.task.models import build

SETTING: dict[str, Any] = {
    "algo": "fedinit",
    "num-server-rounds": 3,
    "eval-every": 3,
    "dataset": "cifar10",
    "num-clients": 20,
    "fraction-train": 0.15,
    "partition": "dirichlet",
    "dirichlet-alpha": 0.6,  # with 0.1 a cohort of 3 lacks classes, and 3 rounds only learn which
    "replacement": "cyclic",
    "model": "lenet",
    "local-steps": 10,
    "batch-size": 20,
    "lr": 0.1,
    "device": "cpu",
}


@pytest.mark.data
def test_three_rounds_on_cifar10_lower_the_loss(some_of_cifar10: Path, tmp_path: Path) -> None:
    folders = {"data-dir": str(some_of_cifar10), "out-dir": str(tmp_path), "name": "run"}
    with engine.quiet():
        directory = engine.run(RunConfig.make(SETTING | folders))
    assert directory.path == tmp_path / "run"
    rows = pd.read_csv(directory.path / "metrics.csv")
    assert rows["round"].tolist() == [0, 1, 2, 3]
    assert rows["replies"].tolist()[1:] == [3, 3, 3]
    assert rows["test-loss"].notna().tolist() == [True, False, False, True]
    before, after = rows["test-loss"].iloc[[0, 3]]
    assert before == pytest.approx(2.303, abs=0.02)  # log 10: it knows nothing yet
    assert after < before - 0.03  # half of what was seen
    model = load_file(directory.path / "model.safetensors")
    net = build("lenet", (3, 32, 32), 10)
    net.load_state_dict(model)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
    assert pd.read_csv(directory.path / "clients.csv")["steps"].tolist() == [10] * 9

"""A model, a tokenizer and data of the user's own under `flwr run`."""

import os
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedaccord import engine, load
from fedaccord.config import RunConfig
from fedaccord.runs import load_model
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, running

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

OWN = """
from torch import nn
from torch.nn import functional as F


def smoothed(predictions, targets):
    return F.cross_entropy(predictions, targets, label_smoothing=0.1)


def sure(predictions, targets):
    return predictions.softmax(1).amax(1)


def tokens(text):
    return [1 + ord(letter) % 30 for letter in text]


tokens.vocab_size = 31


def net(vocabulary, classes):
    return nn.EmbeddingBag(vocabulary, classes, padding_idx=0)


def normed(shape, classes):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, classes))
"""
SETTINGS = {
    "algo": "scaffold",
    "dataset": "text",
    "tokenizer": "sites.own:tokens",
    "model": "sites.own:net",
    "labels": "below,above",
    "max-length": 12,
    "loss": "sites.own:smoothed",
    "metrics": "accuracy, f1, sites.own:sure",
    "fraction-train": 1.0,
    "num-server-rounds": 1,
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package `sites`, and CSV files: one of two sites, and all.csv with the rows of both."""
    folder, rng = tmp_path_factory.mktemp("sites"), random.Random(0)
    (folder / "sites").mkdir()
    (folder / "sites" / "own.py").write_text(OWN)
    rows: list[list[str]] = [[], []]
    for i in range(40):
        word = "".join(rng.choices("abcdefghij", k=8))
        label = "above" if word[0] > "e" else "below"
        rows[i % 2].append(f"{word},{label},{'train' if i < 30 else 'test'},{i % 2}")
    head = "text,label,split,client"
    for name, lines in (("0", rows[0]), ("1", rows[1]), ("all", rows[0] + rows[1])):
        (folder / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n")
    return folder


def reachable(flower: Flower, sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, for Flower's processes and this one."""
    flower.env["PYTHONPATH"] = os.pathsep.join([str(sites), flower.env.get("PYTHONPATH", "")])
    monkeypatch.syspath_prepend(sites)


def same_as_on_two_sites(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Path:
    """The folder of a run on two devices, each with its own file: bit for bit what one process with
    all rows does, dealt as the column `client` says."""
    flower = Flower(tmp_path / "home", simulation=False)
    reachable(flower, sites, monkeypatch)
    config: dict[str, Any] = SETTINGS | {"data-dir": str(sites / "all.csv")} | changes
    config |= {"partition": "natural", "out-dir": str(tmp_path)}
    try:
        flower.start()
        flower.start_supernodes(
            *(
                f"partition-id={i} num-partitions=2 data-path='{sites / f'{i}.csv'}' "
                "allowed-imports='sites'"
                for i in range(2)
            )
        )
        outcome = flower.run(REPOSITORY, config | {"name": "there"})
        assert outcome.status == "finished:completed", outcome.output
    finally:
        flower.stop()
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2}))
    assert_same_run(tmp_path / "there", tmp_path / "here")
    return tmp_path / "there"


@pytest.mark.slow
def test_each_device_trains_on_a_file_of_its_own(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = same_as_on_two_sites(sites, tmp_path, monkeypatch)
    columns = (run / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert {"test-f1", "test-sure"} <= {*columns}


PEFT = """
from fedaccord.task.transformer import Transformer
from peft import LoraConfig, get_peft_model


def net(vocabulary, shape, classes):
    model = Transformer(vocabulary, shape[0], classes)
    config = LoraConfig(r=2, target_modules=["query_key_value", "merge"], modules_to_save=["head"])
    return get_peft_model(model, config)
"""


@pytest.mark.slow
def test_each_device_trains_adapters_of_peft(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is neither sent nor saved."""
    pytest.importorskip("peft")
    (sites / "sites" / "lora.py").write_text(PEFT)
    more = {"model": "sites.lora:net", "optimizer": "adamw", "lr": 0.01, "num-server-rounds": 2}
    run = same_as_on_two_sites(sites, tmp_path, monkeypatch, **more)
    names = [*load_model(run)]
    assert len(names) > 4
    assert all("lora_" in name or "head" in name for name in names), names


@pytest.mark.slow
def test_functions_in_flowers_simulation(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tensors of every role."""
    monkeypatch.setenv("PYTHONPATH", str(sites))
    monkeypatch.syspath_prepend(sites)
    (sites / "sites" / "data.py").write_text(
        "import torch\n\n\n"
        "def numbers(data_dir):\n"
        "    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(len(data_dir)))\n"
        "    return (x[:30], x[:30].sum(1)), (x[30:], x[30:].sum(1))\n"
    )
    config: dict[str, Any] = {
        key: SETTINGS[key]
        for key in ("algo", "fraction-train", "num-server-rounds", "local-epochs", "threads")
    }
    config |= {"dataset": "sites.data:numbers", "data-dir": "/any"}
    config |= {"model": "sites.own:normed", "buffers": "mean"}
    config |= {"frozen-parameters": "0.*", "local-parameters": "3.*", "evaluation": "both"}
    config |= {"partition": "iid", "device": "cpu", "out-dir": str(tmp_path), "num-clients": 2}
    with running(tmp_path / "home", simulation=True) as flower:
        options = ("--federation-config", "num-supernodes=2")
        outcome = flower.run(REPOSITORY, config | {"name": "there"}, *options)
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")
    columns = (tmp_path / "there" / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert {"test-mae", "client-mae", "personal-mae"} <= {*columns}


RESNET = """
from torchvision.models import resnet18


def frozen_stem(classes):
    model = resnet18(num_classes=classes)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    return model
"""


def package(folder: Path) -> Path:
    """A package with a model of its own, as it is installed."""
    facts = folder / "nets-1.dist-info"
    facts.mkdir(parents=True)
    (folder / "nets.py").write_text(RESNET)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: nets\nVersion: 1\n")
    text = "[fedaccord.models]\nfrozen-resnet = nets:frozen_stem\n"
    (facts / "entry_points.txt").write_text(text)
    return folder


def images(folder: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    for split, label in product(("train", "test"), ("cat", "dog")):
        (folder / split / label).mkdir(parents=True)
        for i in range(4):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


@pytest.mark.slow
def test_a_resnet_on_folders_of_images_without_data_on_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three SuperNodes that name a data-path and nothing else."""
    flower = Flower(tmp_path / "home", simulation=False)
    reachable(flower, package(tmp_path / "site-packages"), monkeypatch)
    config = {
        **{"algo": "scaffold", "optimizer": "adamw", "lr": 0.001, "local-steps": 2},
        **{"model": "frozen-resnet", "buffers": "mean", "dataset": "image-folder"},
        **{"num-clients": 3, "fraction-train": 1.0, "num-server-rounds": 1, "threads": 1},
        **{"evaluation": "clients", "out-dir": str(tmp_path), "name": "x", "device": "cpu"},
    }
    try:
        flower.start()
        sites = [images(tmp_path / f"site-{i}", i) for i in range(3)]
        flower.start_supernodes(*(f"data-path='{site}'" for site in sites))
        outcome = flower.run(REPOSITORY, config)
        assert outcome.status == "finished:completed", outcome.output
    finally:
        flower.stop()
    metrics = pd.read_csv(tmp_path / "x" / "metrics.csv")
    assert metrics["evaluation-replies"].tolist() == [3, 3]
    assert metrics["client-accuracy"].notna().all()
    model = load(tmp_path / "x")
    assert model.class_names == ["cat", "dog"]
    assert model(torch.zeros(5, 3, 16, 16)).shape == (5, 2)

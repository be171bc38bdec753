"""What `import fedaccord` offers for run directories: `run`, `compare`, `report` and `load`."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fedaccord
from fedaccord.config import RunConfig
from fedaccord.runs import reader
from fedaccord.task import load_task, models
from tests.cli.shell import invoke

KEYS = {"num_server_rounds": 2, "threads": 1, "num_clients": 5, "local_steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for algo, seed in (("fedavg", 0), ("fedavg", 1), ("scaffold", 0)):
        fedaccord.run(algo, seed=seed, name=f"{algo}-{seed}", out_dir=str(folder), **KEYS)
    return folder


def test_run_writes_a_directory_without_a_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = fedaccord.run("fedprox", name="x", out_dir=str(tmp_path), **KEYS, **{"fedprox.mu": 0.5})
    assert path == tmp_path / "x"
    settings = reader.read(path).settings
    assert (settings["algo"], settings["fedprox.mu"], settings["local-steps"]) == (
        "fedprox",
        0.5,
        3,
    )
    assert not [record for record in caplog.records if record.levelno < logging.WARNING]
    with pytest.raises(ValueError, match=r"did you mean local_steps=\.\.\."):
        fedaccord.run(local_stepps=3)


def test_settings_without_effect_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    unread = {"fedprox.mu": 0.01, "optimizer": "momentum"}  # the first one is its default
    fedaccord.run("diloco", name="x", out_dir=str(tmp_path), **KEYS, **unread)
    assert {line.partition(" has no effect")[0] for line in caplog.messages} >= {
        "fedprox.mu=0.01",
        'optimizer="momentum"',
    }


def test_compare_is_the_commands_table_in_numbers(folder: Path) -> None:
    table = fedaccord.compare(folder).set_index("algo")
    assert set(table.index) == {"fedavg", "scaffold"}
    name = "test-accuracy-mean-of-last-10"
    ends = [reader.read(folder / f"fedavg-{seed}").summary[name] for seed in (0, 1)]
    assert table[name]["fedavg"] == pytest.approx(np.mean(ends))
    assert table[f"{name}-std"]["fedavg"] == pytest.approx(np.std(ends, ddof=1))
    rows = json.loads(invoke("compare", folder, "--json").stdout)
    assert [row["algo"] for row in rows] == list(table.index)
    one = fedaccord.compare(str(folder / "fedavg-0"), target=0.5)
    assert (list(one["algo"]), list(one["target"])) == (["fedavg"], [0.5])
    with pytest.raises(ValueError, match=r"nothing: expected a run directory"):
        fedaccord.compare(folder / "nothing")


def test_a_damaged_run_is_left_out_and_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(folder / "fedavg-0", tmp_path / name)
    (tmp_path / "bad" / "summary.json").write_text("{")
    assert list(fedaccord.compare(tmp_path)["runs"]) == [1]
    assert f"left out: {tmp_path / 'bad'}" in caplog.text
    shutil.copy(folder / "fedavg-0" / "summary.json", tmp_path / "bad")
    config = tmp_path / "bad" / "config.toml"
    config.write_text(config.read_text().partition("[used]")[0])
    fedaccord.compare(tmp_path)
    assert "(its config.toml, summary.json or metrics.csv is cut short: no 'used')" in caplog.text


def test_report_writes_the_commands_page_or_keeps_the_old_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bokeh")
    path = fedaccord.report([folder], tmp_path / "a.html")
    assert path == tmp_path / "a.html"
    before = path.read_text(encoding="utf-8")
    assert "scaffold" in before
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: .*a.html"):
        fedaccord.report([folder], path)
    assert path.read_text(encoding="utf-8") == before


def test_a_report_without_bokeh_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedaccord.experiments.analysis.report", None)
    with pytest.raises(ImportError, match=r"needs Bokeh: .*`uv sync --extra report --inexact`"):
        fedaccord.report(folder, folder / "a.html")
    result = invoke("report", folder, "--out", folder / "a.html")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "uv sync --extra report" in result.stderr


def outputs(path: Path, images: torch.Tensor) -> list[str]:
    model = fedaccord.load(path)
    assert not model.training
    return [model.class_names[k] for k in model(images).argmax(1)]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_loaded_model_gives_the_reported_accuracy(tmp_path: Path, precision: str) -> None:
    path = fedaccord.run(name="x", out_dir=str(tmp_path), precision=precision, **KEYS)
    run = reader.read(path)
    task = load_task(RunConfig.make(run.settings).task, num_clients=5)
    assert task.test
    images, labels = task.test
    hits = [name == str(int(y)) for name, y in zip(outputs(path, images), labels, strict=True)]
    assert np.mean(hits) == pytest.approx(run.summary["test-accuracy-last"], abs=1e-12)


ROLES = {"model": "tests.engine.test_resume:normed", "seed": 3, "num_server_rounds": 1}


@pytest.mark.parametrize("buffers", ["mean", "local", "freeze"])
def test_a_loaded_model_has_the_frozen_and_local_tensors_of_the_run(
    tmp_path: Path, buffers: str
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 6)).astype(np.float32), np.arange(30) % 3
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    keys = KEYS | ROLES | {"dataset": "npz", "data_dir": str(tmp_path / "data.npz")}
    more = {"buffers": buffers, "local_parameters": "4.*", "num_clients": 2, "partition": "iid"}
    path = fedaccord.run(name="x", out_dir=str(tmp_path), **keys | more)
    hits = [name == str(k) for name, k in zip(outputs(path, torch.from_numpy(x)), y, strict=True)]
    expected = reader.read(path).summary["test-accuracy-last"]
    assert np.mean(hits) == pytest.approx(expected, abs=1e-12)
    card = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(card | {"seed": 4}))
    with pytest.raises(
        ValueError, match=r"^model: expected '1\.\w+' with the frozen values of .*$"
    ):
        fedaccord.load(path)


@pytest.mark.parametrize(
    "more",
    [
        {"algo": "ditto"},
        {"algo": "dispfl"},
        {"algo": "scaffold", "local_parameters": "4.*", "buffers": "local"} | ROLES,
        {"algo": "ditto", "local_parameters": "4.*", "buffers": "mean"} | ROLES,
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_a_clients_own_model_is_the_one_that_it_evaluated(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = {"dataset": "npz", "data_dir": str(tmp_path / "data.npz"), "model": "mlp"}
    keys = KEYS | {"num_clients": 3, "fraction_train": 1.0, "lr": 0.5, "eval_every": 1} | data
    path = fedaccord.run(name="x", out_dir=str(tmp_path), **keys | more)
    run = reader.read(path)
    task, rows = load_task(RunConfig.make(run.settings).task, num_clients=3), run.clients
    for i in range(3):
        images, labels = task.client_test(i)
        row = rows[(rows["round"] == rows["round"].max()) & (rows["client"] == i)]
        model = fedaccord.load(path, client=i)
        right = model(images).argmax(1) == labels
        assert right.double().mean() == pytest.approx(row["personal-accuracy"].item(), abs=1e-12)
        others = fedaccord.load(path).parameters()
        assert not all(map(torch.equal, model.parameters(), others))


def test_a_client_without_a_model_of_its_own_is_one_line(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^client: expected a run whose clients have .* own, .*$"):
        fedaccord.load(folder / "scaffold-0", client=1)
    path = fedaccord.run("ditto", name="x", out_dir=str(tmp_path), **KEYS)
    with pytest.raises(ValueError, match=r"^client: expected one whose state is .*, got 5, .*$"):
        fedaccord.load(path, client=5)


def test_a_clients_own_model_needs_no_state_of_another(tmp_path: Path) -> None:
    path = fedaccord.run("ditto", name="x", out_dir=str(tmp_path), **KEYS | {"fraction_train": 1.0})
    (state,) = (path / "checkpoint" / "clients").glob("1-*")
    state.write_bytes(b"damaged")
    fedaccord.load(path, client=0)
    with pytest.raises(ValueError, match="expected a checkpoint, got a damaged one"):
        fedaccord.load(path, client=1)


@pytest.mark.parametrize("name", list(models.MODELS))
def test_every_model_is_loaded_for_its_smallest_images(tmp_path: Path, name: str) -> None:
    rng, side = np.random.default_rng(0), 32 if name == "vgg11" else 28
    x, y = rng.integers(0, 256, (8, side, side), dtype=np.uint8), np.arange(8) % 4
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "data.npz", **data, classes=np.array(["a", "b", "c", "d"]))
    settings = {"dataset": "npz", "data_dir": str(tmp_path / "data.npz"), "model": name}
    keys = KEYS | settings | {"num_clients": 1, "partition": "iid", "num_server_rounds": 1}
    path = fedaccord.run(name="x", out_dir=str(tmp_path), **keys | {"local_steps": 1})
    labels = outputs(path, torch.from_numpy(x)[:, None])
    assert set(labels) <= {"a", "b", "c", "d"}
    accuracy = np.mean([word == "abcd"[k] for word, k in zip(labels, y, strict=True)])
    assert accuracy == pytest.approx(reader.read(path).summary["test-accuracy-last"], abs=1e-12)


def test_invalid_inputs_are_refused(folder: Path) -> None:
    model = fedaccord.load(str(folder / "fedavg-0"))
    image = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert model(image).shape == (2, 10)
    with pytest.raises(ValueError, match=r"^inputs: expected \(n, 1, 8, 8\) .*, got \(1, 8, 8\)$"):
        model(image[0])
    with pytest.raises(ValueError, match=r"^inputs: expected a tensor .*, got a list$"):
        model(["a text"])
    with pytest.raises(ValueError, match=r"^inputs: expected uint8 images .*, got torch\.float32$"):
        model(image.float())


def test_a_folder_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a run directory with model\.safetensors"):
        fedaccord.load(tmp_path)
    for name in ("model.safetensors", "model.json"):
        (tmp_path / name).write_bytes((folder / "fedavg-0" / name).read_bytes())
    fedaccord.load(tmp_path)
    for text, reason in (("{", "damaged file"), ("{}", "expected architecture, .*, got others")):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(ValueError, match=f"model.json: .*{reason}"):
            fedaccord.load(tmp_path)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import fedaccord, sys; print(len([n for n in sys.modules if n[:9] == 'fedaccord']))"
    code += "; fedaccord.compare; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "1\nFalse\n"


def test_all_public_names_exist() -> None:
    assert [name for name in fedaccord.__all__ if not hasattr(fedaccord, name)] == []

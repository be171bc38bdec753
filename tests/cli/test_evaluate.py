"""A saved model reproduces the reported numbers: by the command, and in plain PyTorch."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedaccord import task
from fedaccord.config import RunConfig
from tests.cli.shell import REPOSITORY, invoke, refusal, run, success, summary

NAMES = ("bird", "cat", "dog")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose brightest channel is the class, with names as labels."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "own.npz"

    def some(n: int) -> tuple[Any, Any]:
        y = np.arange(n) % 3
        x = rng.integers(0, 200, (n, 32, 32, 3), dtype=np.uint8)
        x[np.arange(n), :, :, y] += 55
        return x, np.array(NAMES)[y]

    (x_train, y_train), (x_test, y_test) = some(60), some(30)
    np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return file


@pytest.fixture(scope="module")
def lenet(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a LeNet."""
    folder = tmp_path_factory.mktemp("lenet")
    keys = ("dataset=npz", f"data-dir={images}", "model=lenet", "local-steps=6", "batch-size=10")
    success(run(folder, *keys, "partition=iid", "algo=fedavg", "name=x", "num-server-rounds=1"))
    return folder / "runs" / "x"


@pytest.mark.parametrize(
    "words",
    [
        ("algo=afedpd", "eval-train=true"),
        ("algo=dfedavg", "precision=float64"),
        ("algo=scaffold", "precision=bfloat16", "eval-every=2"),
    ],
)
def test_the_reported_numbers_are_reproduced_to_the_digit(tmp_path: Path, words: Any) -> None:
    success(run(tmp_path, *words, "name=x"))
    path = tmp_path / "runs" / "x"
    report = summary(path)
    result = success(invoke("evaluate", path))
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert {line[0] for line in lines} >= {"test accuracy", "test loss"}
    assert ("train accuracy" in {line[0] for line in lines}) == ("eval-train=true" in words)
    for name, value, before in lines:
        assert before == f"reported: {value}"
        number = report[f"{name.replace(' ', '-')}-last"]
        assert value == (f"{number:.2%}" if "accuracy" in name else f"{number:.4f}")


def test_data_dir_names_a_file_that_was_moved(lenet: Path, images: Path) -> None:
    new_path = images.rename(images.with_name("moved.npz"))
    try:
        failure = invoke("evaluate", lenet)
        assert failure.exit_code == 2
        assert "own.npz" in failure.stderr
        success(invoke("evaluate", lenet, f"data-dir={new_path}", "device=cpu"))
    finally:
        new_path.rename(images)


def test_without_test_samples_there_is_nothing_to_evaluate(
    lenet: Path, images: Path, tmp_path: Path
) -> None:
    with np.load(images) as data:
        np.savez(tmp_path / "train.npz", x_train=data["x_train"], y_train=data["y_train"])
    result = invoke("evaluate", lenet, f"data-dir={tmp_path / 'train.npz'}")
    assert result.exit_code == 2
    assert "expected test samples, found none: add data-dir=FILE" in result.stderr


def test_a_key_of_another_version_is_named_with_its_run(lenet: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(lenet, tmp_path / "newer"))
    file = path / "config.toml"
    file.write_text(file.read_text().replace("[run]\n", "[run]\nnew-key = 1\n", 1))
    line = f"{path}: its config.toml has the key 'new-key', which this version does not know"
    for command in ("evaluate", "resume"):
        result = invoke(command, path)
        assert (result.exit_code, line in result.stderr) == (2, True)
    both = invoke("measure", path, lenet, "--samples", "2", "--probes", "1")
    assert "left out: newer: unknown key 'new-key'" in " ".join(both.stderr.split())


def test_the_model_card_has_classes_and_inputs(lenet: Path, images: Path) -> None:
    card = json.loads((lenet / "model.json").read_text())
    assert card["architecture"] == "lenet"
    assert card["arguments"] == {"shape": [3, 32, 32], "classes": 3}
    assert card["class-names"] == [*NAMES]
    x = np.load(images)["x_train"] / 255
    np.testing.assert_allclose(card["mean"], x.mean((0, 1, 2)))
    np.testing.assert_allclose(card["std"], x.std((0, 1, 2)))
    resnet = RunConfig.make({"model": "resnet18", "stem": "cifar"}).task
    assert task.load_task(resnet, num_clients=1).card["arguments"]["stem"] == "cifar"


def test_the_pytorch_code_of_the_documentation_uses_the_model(lenet: Path, images: Path) -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    module, lines = re.findall(r"```python\n(.*?)```", page, re.S)
    data = np.load(images)
    pixels = torch.from_numpy(data["x_test"]).permute(0, 3, 1, 2)
    names: dict[str, Any] = {"run": lenet, "images": pixels}
    exec(module + lines, names)
    assert "fedaccord" not in module + lines
    assert len(re.findall(r"^\w.*[=(]", lines.partition("card =")[2], re.M)) == 4
    accuracy = np.mean(np.array(names["names"]) == data["y_test"])
    assert accuracy == pytest.approx(summary(lenet)["test-accuracy-last"], abs=1e-12)
    assert accuracy > 0.5  # of three classes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a run directory with model.safetensors, found none"),
        (["lr=3"], "expected only data-dir, device, download, threads beside RUN_DIR, got lr"),
        (["threads=100000"], "threads: expected at most"),
    ],
)
def test_invalid_arguments_give_one_line(
    tmp_path: Path, lenet: Path, words: list[str], message: str
) -> None:
    result = invoke("evaluate", lenet if words else tmp_path, *words)
    assert message in refusal(tmp_path, result)


def test_a_damaged_model_and_data_of_another_model_give_one_line(
    tmp_path: Path, lenet: Path, images: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in filter(Path.is_file, lenet.iterdir()):
        (copy / file.name).write_bytes(file.read_bytes())
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "expected a model, got a damaged file" in refusal(tmp_path, invoke("evaluate", copy))
    data = dict(np.load(images))
    small = {key: value[..., :1] if key[0] == "x" else value for key, value in data.items()}
    np.savez(tmp_path / "grey.npz", **small)
    line = refusal(tmp_path, invoke("evaluate", lenet, f"data-dir={tmp_path / 'grey.npz'}"))
    assert "model.safetensors to hold '0.weight' of shape (64, 1, 5, 5), as the model" in line
    assert "got (64, 3, 5, 5): use the model's code and the data-dir of the run" in line


def test_values_that_are_not_as_reported_are_a_warning(tmp_path: Path) -> None:
    success(run(tmp_path, "model=linear", "name=x"))
    path = tmp_path / "runs" / "x"
    assert not success(invoke("evaluate", path)).stderr
    file = path / "model.safetensors"
    save_file({name: tensor.flip(0) for name, tensor in load_file(file).items()}, file)
    line = "test-loss, test-accuracy: not as reported; the data, or the code of the model"
    assert line in " ".join(success(invoke("evaluate", path)).stderr.split())
    written = summary(path)
    (path / "summary.json").write_text(json.dumps(written | {"status": "running"}))
    line = "not as reported; the run is dead, its model from another round"
    assert line in " ".join(success(invoke("evaluate", path)).stderr.split())


def test_other_data_and_code_than_those_of_the_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, data, code = np.random.default_rng(0), tmp_path / "data.npz", tmp_path / "its_model.py"
    x, y = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=y)
    code.write_text(
        "from torch import nn\n"
        "def net():\n"
        "    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))\n"
        "    layers[0].requires_grad_(False)\n"
        "    return layers\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    keys = ("dataset=npz", f"data-dir={data}", "model=its_model:net", "partition=iid", "name=x")
    success(run(tmp_path, *keys))
    path = tmp_path / "runs" / "x"
    assert not success(invoke("evaluate", path)).stderr
    config = (path / "config.toml").read_text()
    now = tomllib.loads(config)["used"]["contents"]["model"]
    resumed = config.replace(f'"{now}"', f'"00000000+{now}"')  # with changed code
    (path / "config.toml").write_text(resumed)
    assert not success(invoke("evaluate", path)).stderr
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=1 - y)
    code.write_text(code.read_text() + "# changed\n")
    task.load._load_task.cache_clear()  # of this process
    monkeypatch.delitem(sys.modules, "its_model")
    line = "samples, model: changed since the run, see [used.contents] in its config.toml"
    assert line in " ".join(success(invoke("evaluate", path)).stderr.split())
    card = json.loads((path / "model.json").read_text())
    card["frozen"]["0.weight"] = "0" * 16
    (path / "model.json").write_text(json.dumps(card))
    line = refusal(tmp_path / "none", invoke("evaluate", path))
    assert "model: expected '0.weight' with the frozen values of the run in its_model:net" in line


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("summary.json", "[]", "{run}/summary.json: expected the summary of a run, got a damaged"),
        (
            "summary.json",
            "null",
            "{run}/summary.json: expected the summary of a run, got a damaged",
        ),
        ("summary.json", '{"a', "{run}: summary.json: expected JSON, got a damaged file (Un"),
        ("summary.json", '{"test-loss-last": "much"}', "{run}/summary.json: expected numbers as"),
        ("summary.json", '{"best-model": 3}', "{run}/summary.json: expected numbers as metrics"),
        ("config.toml", "?", "{run}: expected a run directory; {run}/config.toml is not valid"),
        ("config.toml", "lr = 1", "{run}: expected a run directory with [run] in config.toml"),
        ("config.toml", "used = 3\n[run]", "{run}/config.toml: expected texts in [used.contents]"),
        ("config.toml", "[run]\n[used]\ncontents = 3", "{run}/config.toml: expected texts in [use"),
    ],
)
def test_a_damaged_run_is_one_line_before_the_data_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, line: str
) -> None:
    monkeypatch.setattr(task, "load_task", None)
    (tmp_path / "config.toml").write_text("[run]\n")
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / name).write_text(content)
    assert line.format(run=tmp_path) in refusal(tmp_path, invoke("evaluate", tmp_path))


def test_a_setting_without_effect_is_a_warning(tmp_path: Path, lenet: Path) -> None:
    words = ("download=true", f"data-dir={tmp_path}")
    result = invoke("evaluate", lenet, *words)
    line = "warning: download=true has no effect: it needs dataset=fashion-mnist|"
    assert result.stderr.startswith(line)
    assert "warning" not in result.stderr.partition("\n")[2]


def test_the_best_model_of_a_run_that_has_not_ended(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x", "keep-best=test-accuracy"))
    path = tmp_path / "runs" / "x"
    lines = success(invoke("evaluate", path, "--best")).stdout.split()
    content = summary(path)
    del content["best-model"]
    (path / "summary.json").write_text(json.dumps(content))
    words = success(invoke("evaluate", path, "--best")).stdout.split()
    at = [i + 1 for i, word in enumerate(lines) if word == "reported:"]
    assert [lines[i] for i in at] == [lines[i - 2] for i in at]  # of the best model's round
    assert words == ["none" if i in at else word for i, word in enumerate(lines)]


def test_a_run_with_a_graph_from_a_file(tmp_path: Path) -> None:
    """Its content is below a dotted key in config.toml."""
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps({"edges": [[0, 1], [1, 2]]}))
    keys = ("algo=dfedavg", "gossip.topology=file", f"gossip.file={graph}", "num-clients=3")
    success(run(tmp_path, *keys, "model=linear", "name=x", "fraction-train=1.0"))
    path = tmp_path / "runs" / "x"
    assert not success(invoke("evaluate", path)).stderr
    graph.write_text(json.dumps({"edges": [[0, 1], [0, 2]]}))
    assert "gossip.file: changed since the run" in success(invoke("evaluate", path)).stderr

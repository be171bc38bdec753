"""A method of another package: the example of CONTRIBUTING.md, installed and run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import get_fused_config_from_dir

from fedaccord.wire import codec

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parent / "fedgrow"


def install(folder: Path, project: Mapping[str, Any]) -> None:
    """Register a package's entry points, as pip would leave them, without building it."""
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")


BROKEN = {  # a package whose methods cannot be loaded
    "fedgone": "nowhere:Method",
    "fedavg": "json:JSONDecoder",
    "fedinit": "fedaccord:Ditto",
    "sam": "fedaccord.strategies:Ditto",
    "muon": "fedaccord.strategies:Ditto",
    "fast": "fast:Fast",
    "whole": "fast:Whole",
}
FAST = """
from dataclasses import dataclass
from fedaccord.core import option
from fedaccord.strategies import FedAvg

@dataclass(frozen=True, kw_only=True)
class Fast(FedAvg):
    lr: float = option(1.0, "a rate")

@dataclass(frozen=True, kw_only=True)
class Whole(FedAvg):
    mu: float = option(1, "a strength")
"""


def test_the_document_shows_these_files() -> None:
    blocks = re.findall(r"```\w+\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.S)
    for name in ("pyproject.toml", "fedgrow.py"):
        assert (PACKAGE / name).read_text() in blocks, f"copy {name} to CONTRIBUTING.md"


REPORT = """
import json, sys, torch
from torch import nn
from typer.testing import CliRunner
from fedaccord import cli, simulate
from fedaccord.strategies import METHODS
from fedaccord.wire import codec

def command(*words):
    result = CliRunner().invoke(cli.app, words)
    return result.exit_code, result.stdout, result.stderr

one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
model = nn.Linear(1, 1, bias=False).double()
model.weight.data.fill_(1.0)
words = "num-server-rounds=2", "num-clients=4", "threads=1", "name=run", f"out-dir={sys.argv[1]}"
gone = command("run", "algo=fedgone", *words)
history = simulate(
    "fedgrow", clients=[(one, 4 * one), (2 * one, zero)], model=model,
    loss=lambda y, target: 0.5 * ((y - target) ** 2).sum(),
    rounds=2, local_steps=3, batch_size=0, lr=0.1, lr_decay=1.0, weight_decay=0.0, clip_norm=None,
    participation=1.0, dtype=torch.float64, record="weights", **{"fedgrow.mu": 0.2},
)
print(json.dumps({
    "gone": gone,
    "run": command("run", "algo=fedgrow", "fedgrow.mu=0.2", *words),
    "table": command("methods"),
    "weights": history.weights[:, 0].tolist(),
    "message": codec.dumps(METHODS["fedgrow"](mu=0.2).client_half()),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages; a run is written into it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PACKAGE / "fedgrow.py", folder)
    install(folder, tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"])
    (folder / "fast.py").write_text(FAST)
    methods = {"fedaccord.methods": BROKEN}
    install(folder, {"name": "broken", "version": "1", "entry-points": methods})
    return folder


@pytest.fixture(scope="module")
def report(site: Path) -> dict[str, Any]:
    """Of a process that has the packages installed."""
    words = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", REPORT, str(site)]
    result = subprocess.run(command, env=os.environ | words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    content: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return content | {"stderr": result.stderr}


def test_it_runs_as_ours_do(report: dict[str, Any], site: Path) -> None:
    assert report["run"][0] == 0, report["run"]
    assert json.loads((site / "run" / "summary.json").read_text())["status"] == "completed"
    settings = tomllib.loads((site / "run" / "config.toml").read_text())["run"]
    assert settings["algo"] == "fedgrow"
    assert settings["fedgrow"]["mu"] == 0.2


def test_a_method_that_cannot_be_loaded_is_left_out(report: dict[str, Any]) -> None:
    code, _, stderr = report["gone"]
    assert code == 2
    text = " ".join((stderr + report["stderr"]).split())
    assert "Traceback" not in text
    for line in (
        "'fedgone' of nowhere:Method is left out (ModuleNotFoundError: No module named 'nowhere'",
        "'fedavg' of json:JSONDecoder is left out (TypeError: expected a subclass of Federated",
        "'fedinit' of fedaccord:Ditto is left out (",
        "'sam' of fedaccord.strategies:Ditto is left out (ValueError: expected a name that no",
        "'muon' of fedaccord.strategies:Ditto is left out (ValueError: expected a name that no",
        "'fast' of fast:Fast is left out (ValueError: expected options of its own, got lr, which",
        "'whole' of fast:Whole is left out (TypeError: Whole.mu: expected a float, an int, a str",
        "algo=fedgone: its package cannot be loaded (ModuleNotFoundError: No module named",
    ):
        assert line in text


def test_it_is_in_the_table(report: dict[str, Any]) -> None:
    lines = report["table"][1].splitlines()
    (row,) = (k for k, line in enumerate(lines) if "fedgrow" in line)
    line = lines[row]
    assert lines[row + 1].strip() == "FedAvg with a proximal term that grows over the run"
    assert line.split()[-6:] == ["1", "1", "1", "0", "1", "no"]  # costs, computed; buffered


def test_its_rounds_are_those_of_the_formula(report: dict[str, Any]) -> None:
    """Two clients with f(w) = (w - 4)^2 / 2 and (2 w)^2 / 2, mu 0.2, T = 2."""
    gradients = (lambda w: w - 4, lambda w: 4 * w)
    weights = [1.0]
    for mu_t in (0.1, 0.2):
        ends = []
        for gradient in gradients:
            w = anchor = weights[-1]
            for _ in range(3):
                w -= 0.1 * (gradient(w) + mu_t * (w - anchor))
            ends.append(w)
        weights.append(sum(ends) / 2)
    assert report["weights"] == pytest.approx(weights, rel=1e-14)


def test_a_client_without_the_package_refuses_its_messages(report: dict[str, Any]) -> None:
    """Nothing is imported because a message names it."""
    assert "fedgrow" not in sys.modules
    assert json.loads(report["message"])["rule"] == {"class": "fedgrow", "mu": 0.2}
    with pytest.raises(ValueError, match="a LocalRule that this client knows, got 'fedgrow'"):
        codec.loads(report["message"])
    assert "fedgrow" not in sys.modules


def test_flower_takes_its_keys_from_the_apps_pyproject(tmp_path: Path) -> None:
    """What CONTRIBUTING.md says of `flwr run`, by the function behind it."""
    override = {"algo": "fedgrow", "fedgrow.mu": 0.2}
    with pytest.raises(ValueError, match=r"'fedgrow.mu' is not present"):
        get_fused_config_from_dir(REPOSITORY, override)
    text = (REPOSITORY / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(f"{text}\n[tool.flwr.app.config.fedgrow]\nmu = 0.1\n")
    config = get_fused_config_from_dir(tmp_path, override)
    assert config["fedgrow.mu"] == 0.2

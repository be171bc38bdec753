"""A device needs Flower, PyTorch, NumPy and safetensors, and none of the other packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedaccord.process.extras import extra_of
from tests.own import save

OTHERS = [
    "PIL",
    "bokeh",
    "joblib",
    "matplotlib",
    "optuna",
    "pandas",
    "psutil",
    "ray",
    "scipy",
    "sklearn",
    "torchvision",
]
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

OTHERS = sys.argv[1].split()
sys.meta_path.insert(0, Absent())
"""
VISIT = """
folder = sys.argv[2]
from fedaccord import apps, recorded_run, train_locally
from fedaccord.config import RunConfig
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.task import load_task
from tests.grid import InProcessGrid

settings = {"algo": "scaffold", "dataset": "npz", "data-dir": f"{folder}/0.npz", "model": "mlp"}
config = RunConfig.make(settings | {"local-epochs": 1, "fraction-train": 1.0, "num-clients": 2})
task = load_task(config.task, num_clients=1, whole=True)
with InProcessGrid(apps.client_app, 2, config.flat) as grid:
    for i, context in enumerate(grid.contexts.values()):
        context.node_config |= {"data-dir": f"{folder}/{i}.npz", "dataset": "npz"}
    initial = recorded_run.initial_arrays(task, config.strategy.model_settings)
    rounds = []
    Run(config.strategy, MessageFleet(grid), initial, 2, on_round=rounds.append).play()
assert [round.metrics["replies"] for round in rounds[1:]] == [2, 2], rounds
loaded = [name for name in OTHERS if name in sys.modules]
"""
COMMANDS = (
    ("run dataset=npz data-dir={folder}/0.npz out-dir={folder} num-clients=2", "psutil"),
    ("compare {folder}", "pandas"),
    ("reproduce fedinit-table3 --dry-run", "pandas"),
)
REPORT = """
import json
from typer.testing import CliRunner
from fedaccord.cli import app

results = [CliRunner().invoke(app, words.split()) for words in sys.argv[3:]]
print(json.dumps([loaded, *([result.exit_code, result.output] for result in results)]))
"""


def test_a_device_makes_rounds_and_a_command_names_the_extra_that_it_lacks(tmp_path: Path) -> None:
    for i in range(2):
        save(tmp_path / f"{i}.npz", 20)
    words = [" ".join(OTHERS), tmp_path, *(line.format(folder=tmp_path) for line, _ in COMMANDS)]
    command = [sys.executable, "-c", ABSENT + VISIT + REPORT, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr[-2000:]
    loaded, *results = json.loads(result.stdout.splitlines()[-1])
    assert loaded == []
    for (_, module), outcome in zip(COMMANDS, results, strict=True):
        line = f"fedaccord: expected the package {module}, found none; in the clone of FedAccord"
        assert outcome == [2, f"{line} type `uv sync --extra run --inexact`\n"]
    assert {path.name for path in tmp_path.iterdir()} == {"0.npz", "1.npz"}


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("ray", "run"),
        ("sklearn.datasets", "data"),
        ("torchvision", "data"),
        ("scipy.stats", "sweep"),
        ("bokeh", "report"),
        ("cryptography.x509", "deploy"),
        ("torch", None),  # no extra: a device has it
        ("nothing", None),
    ],
)
def test_extras_are_those_of_the_project(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra

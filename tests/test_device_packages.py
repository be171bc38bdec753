"""A device needs Flower, PyTorch, NumPy and safetensors, and none of the other packages."""

import subprocess
import sys
from pathlib import Path

import numpy as np

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
CODE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

OTHERS, folder = sys.argv[1].split(), sys.argv[2]
sys.meta_path.insert(0, Absent())

from fedaccord import apps, server_app, train_locally
from fedaccord.config import RunConfig
from fedaccord.federation.fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.task import load_task
from tests.grid import InProcessGrid

settings = {"algo": "scaffold", "dataset": "npz", "data-dir": f"{folder}/0.npz", "model": "mlp"}
config = RunConfig.make(settings | {"local-epochs": 1, "fraction-train": 1.0, "num-clients": 2})
task = load_task(config.task, num_clients=1, whole=True)
with InProcessGrid(apps.client_app, 2, config.flat) as grid:
    for i, context in enumerate(grid.contexts.values()):
        context.node_config |= {"data-dir": f"{folder}/{i}.npz", "dataset": "npz"}
    initial = server_app.initial_arrays(task, "float32")
    rounds = []
    Run(config.strategy, MessageFleet(grid), initial, 2, on_round=rounds.append).play()
assert [round.metrics["replies"] for round in rounds[1:]] == [2, 2], rounds
print("absent:", not {name.partition(".")[0] for name in sys.modules} & {*OTHERS})
"""


def test_a_visit_without_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(2):
        x, y = rng.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
        np.savez(tmp_path / f"{i}.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(OTHERS), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "absent: True"

"""Whole runs of this package beside those of other simulators: same data, model, cohorts, steps.

    python benchmarks/peers.py pfl --pfl-python VENV/bin/python --results FOLDER
    python benchmarks/peers.py flower --blazefl-python VENV/bin/python --results FOLDER
    python benchmarks/peers.py fl-simulator-fedavg --fl-simulator CHECKOUT --results FOLDER
    python benchmarks/peers.py page --results FOLDER --markdown docs/results/peers.md

The peers are no dependency of this package: each has its own environment, with `pfl`, `blazefl`
and torchvision, or is a checkout that runs with this Python. Every contestant is a process of its
own that knows when a round is done; this one takes the time, and counts the CPU seconds of the
process and all its children. The contestants take turns, each repetition in another order, and
every ratio is taken within a repetition. Another call adds its repetitions to those in FOLDER.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import data
import numpy as np
import psutil
import timing
import torch
from peers_page import Results, page
from peers_settings import SETTINGS, THREADS, Setting

from fedaccord.config import RunConfig
from fedaccord.federation import sampling
from fedaccord.task import Clients, Task, load_task

HERE = Path(__file__).resolve().parent / "contestants"
# What FL-Simulator calls the methods, and its random state of round t.
METHODS = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "feddyn": "FedDyn", "fedsmoo": "FedSMOO"}
SEED = 20  # FL-Simulator's default


def main() -> None:
    options = arguments().parse_args()
    if options.setting == "page":
        text = page(options.results)
        print(text)
        if options.markdown:
            timing.rewrite(options.markdown, text, own=(f"## {name}" for name in SETTINGS))
        return
    if options.repetitions < 1:
        sys.exit(f"--repetitions: expected at least 1, got {options.repetitions}")
    try:
        names = able(SETTINGS[options.setting], options)
        measure(options.setting, names, options)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        sys.exit(str(error))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", choices=[*SETTINGS, "page"])
    parser.add_argument("contestants", nargs="*", help="default: all that the options allow")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="of each run")
    parser.add_argument("--results", type=Path, required=True, help="folder of results")
    parser.add_argument("--markdown", type=Path, help="page: write it to this file")
    parser.add_argument("--pfl-python", type=whole, help="a Python that has pfl and torchvision")
    parser.add_argument("--blazefl-python", type=whole, help="one that has blazefl and torchvision")
    parser.add_argument("--fl-simulator", type=whole, help="a checkout of FL-Simulator")
    return parser


def whole(path: str) -> Path:
    """For contestants, which start in another folder; a link stays, as it names an environment."""
    return Path(path).expanduser().absolute()


def able(setting: Setting, options: argparse.Namespace) -> list[str]:
    """The contestants asked for, or all that can run. Raises ValueError if one cannot."""
    needs = {"pfl": "pfl_python", "blazefl": "blazefl_python", "fl-simulator": "fl_simulator"}
    contestants = setting.contestants
    if unknown := [name for name in options.contestants if name not in contestants]:
        raise ValueError(f"expected contestants among {', '.join(contestants)}, got {unknown[0]!r}")
    names = []
    for name in options.contestants or contestants:
        need = needs.get(name.removesuffix(THREADS))
        if need is None:
            names.append(name)
            continue
        path, option = getattr(options, need), f"--{need.replace('_', '-')}"
        if path and not path.exists():
            raise ValueError(f"{option}: expected a path that exists, got {path}")
        if path:
            names.append(name)
        elif options.contestants:
            raise ValueError(f"{name}: expected {option}")
    return names


# --- measuring ------------------------------------------------------------------------------------


def measure(name: str, names: list[str], options: argparse.Namespace) -> None:
    setting = SETTINGS[name]
    rounds = options.rounds or setting.rounds
    file = options.results / f"{name}.json"
    begun = json.loads(file.read_text()) if file.exists() else {"rounds": rounds, "repetitions": []}
    if begun["rounds"] != rounds:
        raise ValueError(f"{file} holds runs of {begun['rounds']} rounds: use the same --rounds")
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(Path(folder), setting, rounds)
        for _ in range(options.repetitions):
            done = len(begun["repetitions"])
            k = done % len(names)
            repetition: Results = {}
            begun["repetitions"].append(repetition)
            for contestant in names[k:] + names[:k]:
                repetition[contestant] = contest(contestant, job, options)
                print(f"{name}, repetition {done + 1}, {contestant}: {repetition[contestant]}")
                begun["clients"] = [len(cohort) for cohort in job["cohorts"]]
                begun["versions"] = begun.get("versions", {}) | versions([contestant], options)
                begun["cores"] = os.cpu_count()
                file.write_text(json.dumps(begun, indent=1) + "\n")


def prepare(folder: Path, setting: Setting, rounds: int) -> dict[str, Any]:
    """The job of all contestants: data, partition, cohorts and initial parameters in ``folder``."""
    os.environ["FEDACCORD_CACHE"] = str(folder / "cache")
    shared = {"num-server-rounds": rounds, "threads": 1, "device": "cpu", "out-dir": str(folder)}
    keys = setting.keys | shared | {"data-dir": str(data.find())}
    config = RunConfig.make(keys | {"dataset": "cifar10"})
    task = load_task(config.task, num_clients=config.num_clients)
    assert task.clients.parts is not None
    parts = [np.asarray(part).tolist() for part in task.clients.parts]
    job = {
        "data": str(folder / "data.npz"),
        "partition": str(folder / "partition.json"),
        "initial": str(folder / "initial.npz"),
        "cohorts": cohorts(config, rounds),
        "model": config.task.model,
        "epochs": config.strategy.local_epochs,
        "batch-size": config.strategy.batch_size,
        "lr": config.strategy.lr,
        "eval-every": config.strategy.eval_every,
        "mean": task.card["mean"],
        "std": task.card["std"],
        "processes": 2,
        "folder": str(folder),
    }
    if keys["dataset"] == "npz":
        keys |= {"data-dir": job["data"]}
        write_images(Path(job["data"]), task)
    keys |= {"partition": "file", "partition-file": job["partition"]}
    for key in ("dirichlet-alpha", "replacement"):
        keys.pop(key, None)
    Path(job["partition"]).write_text(json.dumps(parts))
    parameters: dict[str, Any] = {
        f"{k:02}": p.detach().numpy() for k, p in enumerate(task.module().parameters())
    }
    np.savez(job["initial"], **parameters)
    if "fl-simulator" in setting.contestants:
        write_for_fl_simulator(folder, task, parts)
    return job | {"keys": keys}


def cohorts(config: RunConfig, rounds: int) -> list[list[int]]:
    """The clients of every round, for the settings of FL-Simulator those that it draws itself."""
    s, count = config.strategy, config.num_clients
    if config.eval_train:
        draws = [np.random.RandomState(t + SEED).uniform(size=count) for t in range(rounds)]
        return [np.flatnonzero(draw <= s.fraction_train).tolist() for draw in draws]
    own, size = range(count), s.cohort_size(count)
    generators = (sampling.generator("cohort", s.seed, t) for t in range(rounds))
    return [sampling.fixed(own, size, generator) for generator in generators]


def samples(task: Task) -> dict[str, np.ndarray]:
    """x_train (n, 3, 32, 32) uint8, y_train (n,), x_test, y_test."""
    assert isinstance(task.clients, Clients)
    assert isinstance(task.test, tuple)
    pairs = {"train": (task.clients.x, task.clients.y), "test": task.test}
    return {
        f"{letter}_{split}": np.asarray(part)
        for split, pair in pairs.items()
        for letter, part in zip("xy", pair, strict=True)
    }


def write_images(path: Path, task: Task) -> None:
    arrays: dict[str, Any] = {
        name: array.transpose(0, 2, 3, 1) if array.ndim == 4 else array
        for name, array in samples(task).items()
    }
    np.savez(path, **arrays)


def write_for_fl_simulator(folder: Path, task: Task, parts: list[list[int]]) -> None:
    """Its own cache of a partitioned data set, which it then takes as it is."""
    target = folder / "Data" / f"CIFAR10_{len(parts)}_{SEED}_Dirichlet_0.100"
    target.mkdir(parents=True)
    arrays, test = samples(task), task.test
    assert test is not None

    def ready(x: np.ndarray) -> np.ndarray:
        return task.prepare(torch.from_numpy(x), torch.float32).numpy()

    x = np.stack([ready(arrays["x_train"][part]) for part in parts])
    y = np.stack([arrays["y_train"][part][:, None] for part in parts])
    for name, array in {
        "client_x": x,
        "client_y": y.astype(np.int64),
        "test_x": ready(arrays["x_test"]),
        "test_y": arrays["y_test"][:, None].astype(np.int64),
    }.items():
        np.save(target / f"{name}.npy", array)


def contest(name: str, job: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run a contestant: seconds to its first round and per round, by clock, and its accuracies.

    Raises RuntimeError where it does not come to an end.
    """
    keys = dict(job["keys"])
    if name == "fedaccord-workers":
        keys["workers"] = 2
    number = 2 if name.endswith(THREADS) else 1
    own = job | {"keys": keys, "tensors": name == "flower-tensors", "threads": number}
    path = Path(job["folder"]) / f"{name}.json"
    path.write_text(json.dumps(own))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(number))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
    home = {"FLWR_HOME": str(Path(job["folder"]) / "flwr"), "CUDA_VISIBLE_DEVICES": ""}
    search = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    where = {"PYTHONPATH": search, "PEERS_JOB": str(path)}
    environment = os.environ | threads | quiet | home | where
    log = Path(job["folder"]) / f"{name}.log"
    theirs = name.removesuffix(THREADS) == "fl-simulator"
    began = time.perf_counter()
    marks = []  # (round, accuracy, wall seconds, CPU seconds)
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command(name, job, options),
            cwd=options.fl_simulator if theirs else job["folder"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        tell = FromFLSimulator() if theirs else from_line
        for line in process.stdout:
            if mark := tell(line):
                wall = time.perf_counter() - began
                marks.append((*mark, wall, cpu_seconds(process.pid)))
    if process.returncode or not marks or marks[-1][0] != len(job["cohorts"]):
        last = log.read_text().strip().splitlines()[-3:]
        raise RuntimeError(f"{name} ended with {process.returncode}: {' / '.join(last)}")
    (_, _, *first), (rounds, _, *final) = marks[0], marks[-1]
    return {
        "start": dict(zip(("wall", "cpu"), first, strict=True)),
        "round": {
            clock: (b - a) / rounds
            for clock, a, b in zip(("wall", "cpu"), first, final, strict=True)
        },
        "accuracy": [mark[:2] for mark in marks],
    }


def command(name: str, job: dict[str, Any], options: argparse.Namespace) -> list[str]:
    name = name.removesuffix(THREADS)
    if name == "fl-simulator":
        method = METHODS[job["keys"]["algo"]]
        folder = f"{job['folder']}/"
        return [
            *(sys.executable, "-u", str(HERE / "fl_simulator.py")),
            *("--dataset=CIFAR10", "--model=LeNet"),
            *("--non-iid", "--split-rule=Dirichlet", "--split-coef=0.1", f"--seed={SEED}"),
            *(f"--method={method}", f"--comm-rounds={len(job['cohorts'])}"),
            *(f"--data-file={folder}", f"--out-file={folder}out/"),
        ]
    script, python = {
        "pfl": ("pfl_research.py", options.pfl_python),
        "blazefl": ("blazefl_fedavg.py", options.blazefl_python),
        "flower": ("flower.py", None),
        "flower-tensors": ("flower.py", None),
    }.get(name, ("ours.py", None))
    return [str(python or sys.executable), str(HERE / script)]


def from_line(line: str) -> tuple[int, float] | None:
    """Round and accuracy from a line of contestants/common.report; None: another line."""
    if match := re.match(r"PEER (\d+) (\S+)$", line):
        return int(match[1]), float(match[2])
    return None


class FromFLSimulator:
    """The same from FL-Simulator's lines: its start, then an accuracy and the end of each round."""

    def __init__(self) -> None:
        self.round, self.accuracy = 0, float("nan")

    def __call__(self, line: str) -> tuple[int, float] | None:
        if match := re.match(r"\s*Test .* Accuracy: (\S+)", line):
            self.accuracy = float(match[1])
        if re.match(r"\s*---- *Time:", line):
            self.round += 1
            return self.round, self.accuracy
        return (0, self.accuracy) if "Training Process Starts" in line else None


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, also of those that it has waited for."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def versions(names: list[str], options: argparse.Namespace) -> dict[str, str]:
    """What each contestant is, with its PyTorch."""
    packages = {"pfl": "pfl", "blazefl": "blazefl"}
    pythons = {"pfl": options.pfl_python, "blazefl": options.blazefl_python}
    numbers = {}
    for name in {name.removesuffix(THREADS) for name in names}:
        if name == "fl-simulator":
            git = ["git", "-C", str(options.fl_simulator), "rev-parse", "--short", "HEAD"]
            numbers["FL-Simulator"] = "commit " + subprocess.check_output(git, text=True).strip()
            continue
        package = packages.get(name, "fedaccord" if name.startswith("fed") else "flwr")
        code = (
            "import platform; from importlib.metadata import version; "
            f"print(version({package!r}), 'with torch', version('torch'), 'and Python', "
            "platform.python_version())"
        )
        python = str(pythons.get(name) or sys.executable)
        numbers[package] = subprocess.check_output([python, "-c", code], text=True).strip()
    return numbers


if __name__ == "__main__":
    main()

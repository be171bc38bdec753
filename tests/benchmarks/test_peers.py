"""The plumbing of benchmarks/peers.py, on a run of a few samples and without any peer."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peers
import peers_page
import peers_settings
import pytest
import torch

from fedaccord.task import models

sys.path.append(str(peers.HERE))  # as a contestant finds it

import common


def job(folder: Path, rounds: int) -> dict[str, object]:
    """3 clients of 4 images for lenet5."""
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 2
    np.savez(
        folder / "data.npz",
        x_train=images[:12],
        y_train=labels[:12],
        x_test=images[12:],
        y_test=labels[12:],
    )
    parts = folder / "partition.json"
    parts.write_text(json.dumps([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]))
    keys = peers_settings.PLAIN | {
        "algo": "fedavg",
        "dataset": "npz",
        "data-dir": str(folder / "data.npz"),
        "partition": "file",
        "partition-file": str(parts),
        "model": "lenet5",
        "num-clients": 3,
        "num-server-rounds": rounds,
        "local-steps": 1,
        "out-dir": str(folder),
        "threads": 1,
    }
    return {"keys": keys, "cohorts": [[0, 2], [1, 2]][:rounds], "folder": str(folder)}


@pytest.mark.slow
def test_ours_is_timed_from_its_first_evaluation_to_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "cache"))
    options = argparse.Namespace(fl_simulator=None, pfl_python=None, blazefl_python=None)
    result = peers.contest("fedaccord", job(tmp_path, rounds=2), options)
    assert [round for round, _ in result["accuracy"]] == [0, 1, 2]
    assert all(0 <= accuracy <= 1 for _, accuracy in result["accuracy"])
    assert 0 < result["round"]["cpu"] < result["start"]["cpu"]  # imports are no part of a round
    assert 0 < result["round"]["wall"] < result["start"]["wall"]
    (run,) = tmp_path.glob("*/clients.csv")
    rows = [line.split(",")[:2] for line in run.read_text().splitlines()[1:]]
    assert rows == [["1", "0"], ["1", "2"], ["2", "1"], ["2", "2"]]  # the cohorts given


def test_a_contestant_that_stops_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('PEER 0 0.1'); import sys; sys.exit('no such file')"
    monkeypatch.setattr(peers, "command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(RuntimeError, match="flower ended with 1: no such file"):
        peers.contest("flower", {"keys": {}, "cohorts": [[0]], "folder": str(tmp_path)}, None)
    monkeypatch.setattr(peers, "command", lambda *_: [sys.executable, "-c", "print('PEER 0 0.1')"])
    with pytest.raises(RuntimeError, match="flower ended with 0"):
        peers.contest("flower", {"keys": {}, "cohorts": [[0]], "folder": str(tmp_path)}, None)


def test_contestants_with_threads_get_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os; job = json.load(open(os.environ['PEERS_JOB'])); "
        "print('PEER 1', job['threads'] + 10 * int(os.environ['OMP_NUM_THREADS']))"
    )
    monkeypatch.setattr(peers, "command", lambda *_: [sys.executable, "-c", program])
    fields = {"keys": {}, "cohorts": [[0]], "folder": str(tmp_path)}
    options = argparse.Namespace(fl_simulator=tmp_path)
    for name, numbers in {"pfl": 11, "pfl-threads": 22, "fl-simulator-threads": 22}.items():
        if name.startswith("fl-"):
            monkeypatch.setattr(peers, "FromFLSimulator", lambda: peers.from_line)
        assert peers.contest(name, fields, options)["accuracy"] == [(1, numbers)]


def test_a_contestant_uses_the_threads_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(common.torch, "set_num_threads", threads.append)
    (tmp_path / "job.json").write_text('{"threads": 3}')
    monkeypatch.setenv("PEERS_JOB", str(tmp_path / "job.json"))
    assert common.read_job() == {"threads": 3}
    assert threads == [3]


def test_flower_s_clients_read_the_images_once_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path, rounds=1)
    own = {"data": str(tmp_path / "data.npz"), "partition": str(tmp_path / "partition.json")}
    own |= {"mean": [0.5] * 3, "std": [0.2] * 3, "threads": torch.get_num_threads()}
    (tmp_path / "job.json").write_text(json.dumps(own))
    monkeypatch.setenv("PEERS_JOB", str(tmp_path / "job.json"))
    sys.modules.pop("flower_app", None)  # it reads its job when it is imported
    flower_app = importlib.import_module("flower_app")
    reads = []

    def counted(job: dict[str, Any]) -> dict[str, np.ndarray]:
        reads.append(job)
        return common.arrays(job)

    monkeypatch.setattr(flower_app, "arrays", counted)
    sizes = [len(flower_app.images(client)) for client in range(3)]
    assert sizes == [4, 4, 4]
    assert len(reads) == 1


def test_lines_of_fl_simulator() -> None:
    lines = [
        "##           Training Process Starts           ##",
        "============= Communication Round 1 =============",
        "   Train    ----    Loss: 2.2870,   Accuracy: 0.1511",
        "    Test    ----    Loss: 2.2868,   Accuracy: 0.1523",
        "            ----    Divergence: 0.4112",
        "            ----    Time: 81.40s",
    ]
    parser = peers.FromFLSimulator()
    marks = [parser(line) for line in lines]
    assert marks[0] is not None
    assert marks[0][0] == 0
    assert marks[1:-1] == [None] * 4
    assert marks[-1] == (1, 0.1523)


def test_the_networks_of_the_peers_are_this_package_s(tmp_path: Path) -> None:
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in common.NETWORKS:
        ours = models.build(name, (3, 32, 32), 10, seed=3).eval()
        parameters = {f"{k:02}": p.detach().numpy() for k, p in enumerate(ours.parameters())}
        np.savez(tmp_path / "initial.npz", **parameters)
        theirs = common.network({"model": name, "initial": tmp_path / "initial.npz"}).eval()
        torch.testing.assert_close(theirs(x), ours(x), atol=1e-5, rtol=1e-5)
        rates = [[m.p for m in net if isinstance(m, torch.nn.Dropout)] for net in (theirs, ours)]
        assert rates[0] == rates[1]


def test_images_are_normalised_equally_in_a_batch_and_one_by_one() -> None:
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3), dtype=np.uint8)
    settings = {"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]}
    one_by_one = torch.stack([common.transform(settings)(image) for image in images])
    torch.testing.assert_close(common.prepared(settings, images), one_by_one)


def test_cohorts_of_fl_simulator_are_those_that_it_draws() -> None:
    """The rule of its server: uniform numbers, drawn from round + seed, of at most 0.1."""
    strategy = SimpleNamespace(fraction_train=0.1, seed=0)
    config = SimpleNamespace(strategy=strategy, num_clients=100, eval_train=True)
    np.random.seed(1 + peers.SEED)
    cohort = np.where(np.random.uniform(size=100) <= 0.1)[0]
    assert peers.cohorts(config, 2)[1] == cohort.tolist()


def test_ratios_are_of_one_repetition_and_missed_targets_are_reported(tmp_path: Path) -> None:
    def result(wall: float, cpu: float, accuracy: float) -> dict[str, object]:
        seconds = {"wall": wall, "cpu": cpu}
        return {"start": seconds, "round": seconds, "accuracy": [[0, 0.1], [1, accuracy]]}

    repetitions = [
        {"fedaccord": result(1.0, 1.0, 0.5), "pfl": result(1.5, 3.0, 0.6)},
        {"fedaccord": result(2.0, 2.0, 0.5), "pfl": result(3.4, 3.0, 0.6)},
        {"fedaccord": result(9.0, 9.0, 0.5)},
        {"fedaccord-workers": result(1.0, 2.0, 0.5), "pfl-threads": result(2.5, 3.0, 0.6)},
    ]
    facts = {"rounds": 1, "clients": [50], "versions": {"pfl": "1"}, "cores": 2}
    (tmp_path / "pfl.json").write_text(json.dumps(facts | {"repetitions": repetitions}))
    page = peers_page.page(tmp_path)
    rows = [line for line in page.splitlines() if line.startswith("| pfl ")]
    assert rows[0].startswith("| pfl | 2 | ")
    assert rows[0].endswith(
        "| 60.0 (60.0 to 60.0) | 1.60 (1.50 to 1.70) | – | 2.25 (1.50 to 3.00) |"
    )
    both = next(line for line in page.splitlines() if line.startswith("| pfl-threads "))
    assert both.endswith("| – | 2.50 | – |")
    assert "at least 2 x as fast as pfl: missed by wall-clock with 1.60, met by CPU" in page
    assert (
        "Target: fedaccord-workers at least 2 x as fast as pfl-threads: met by wall-clock with "
        "2.50, missed by CPU seconds with 1.50." in page
    )
    assert "Not measured yet: flower, fl-simulator-fedavg, " in page
    with pytest.raises(SystemExit, match="found none"):
        peers_page.page(tmp_path / "empty")


def test_a_peer_without_its_environment_is_left_out_or_refused() -> None:
    setting = peers.SETTINGS["flower"]
    paths = {"pfl_python": None, "blazefl_python": None, "fl_simulator": None}
    every = argparse.Namespace(contestants=[], **paths)
    assert peers.able(setting, every) == [
        *("fedaccord", "fedaccord-workers", "flower", "flower-tensors")
    ]
    with pytest.raises(ValueError, match="blazefl: expected --blazefl-python"):
        peers.able(setting, argparse.Namespace(contestants=["blazefl"], **paths))
    with pytest.raises(ValueError, match="--blazefl-python: expected a path that exists, got /no"):
        peers.able(setting, argparse.Namespace(**vars(every) | {"blazefl_python": Path("/no")}))
    with pytest.raises(ValueError, match="got 'pfl'"):
        peers.able(setting, argparse.Namespace(contestants=["pfl"], **paths))


def test_peers_start_in_another_folder_from_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    words = ["pfl", "--results", "out", "--pfl-python", "python", "--fl-simulator", "~/simulator"]
    options = peers.arguments().parse_args(words)
    assert peers.command("pfl", {}, options)[0] == str(tmp_path / "python")  # the link itself
    assert options.fl_simulator == Path.home() / "simulator"

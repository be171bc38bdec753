"""Run directories as tables: the content of a run, and one line for other folders."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedaccord.experiments.analysis.groups import groups_of
from fedaccord.runs import reader
from fedaccord.runs.lock import Lock
from fedaccord.task import load_task
from fedaccord.task.config import TaskConfig
from tests.cli.shell import invoke, run, success, summary


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    success(run(folder, "algo=fedsam", "name=x", "fraction-train=0.5", "seed=3"))
    return folder / "runs" / "x"


def test_a_run_is_read_as_it_was_written(path: Path) -> None:
    result = reader.read(path)
    assert (result.settings["algo"], result.settings["seed"]) == ("fedsam", 3)
    assert result.settings["sam.rho"] == "auto"
    assert result.used["sam.rho"] == 0.1
    assert result.used["gradients-per-step"] == 2  # one to ascend, one to descend
    assert [*result.metrics["round"]] == [0, 1, 2]
    assert len(result.clients) == 4  # two of four clients in two rounds
    assert result.summary["partition.unused"] == 1438 % 4
    assert "torch" in result.versions


def test_the_clients_of_a_run_are_those_that_took_part(path: Path, tmp_path: Path) -> None:
    """Under Flower the nodes decide how many there are, not the setting."""
    for seed, clients in enumerate((2, 10, 10)):
        other = shutil.copytree(path, tmp_path / str(seed))
        config = other / "config.toml"
        config.write_text(re.sub(r"(?m)^seed = .*", f"seed = {seed}", config.read_text()))
        (other / "summary.json").write_text(json.dumps(summary(path) | {"clients": clients}))
    runs, _ = reader.read_all([tmp_path])
    labels = {group.label: len(group.runs) for group in groups_of(runs)}
    assert labels == {"fedsam num-clients=2": 1, "fedsam num-clients=10": 2}


def test_a_run_whose_process_is_gone_is_shown_as_dead(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "x")
    config = tmp_path / "x" / "config.toml"
    config.write_text(re.sub(r"(?m)^seed = .*", "seed = 7", config.read_text()))
    running = json.dumps(summary(path) | {"status": "running"})
    (tmp_path / "x" / "summary.json").write_text(running)
    with Lock(tmp_path / "x"):
        shows(path, tmp_path / "x", "running")
    shows(path, tmp_path / "x", "dead")


def shows(path: Path, other: Path, status: str) -> None:
    assert reader.read(other).summary["status"] == status
    output = invoke("compare", path, other).stdout
    assert f", 7), 1 {status}" in output


def test_the_classes_are_those_of_the_clients_samples(path: Path) -> None:
    classes = reader.read(path).classes
    assert [*classes.columns] == ["client", *map(str, range(10))]
    task = load_task(TaskConfig(model="linear", seed=3), num_clients=4)
    for i, row in enumerate(classes.drop(columns="client").to_numpy()):
        _, y = task.clients.samples(i)
        np.testing.assert_array_equal(row, np.bincount(y.numpy(), minlength=10))


def test_samples_that_are_not_dealt_have_no_counts() -> None:
    config = TaskConfig(model="linear")
    assert load_task(config, num_clients=2, whole=True).class_counts() is None


def test_runs_are_found_in_folders_and_each_once(path: Path, tmp_path: Path) -> None:
    assert reader.find([path.parent.parent, path]) == [path.resolve()]
    with pytest.raises(ValueError, match="or a folder with some, found none"):
        reader.find([tmp_path])


def test_a_run_without_permission_does_not_hide_the_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(path, tmp_path / "open")
    closed = tmp_path / "closed"
    closed.mkdir()
    listed = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    access = os.access
    monkeypatch.setattr(Path, "iterdir", iterdir)  # a superuser may read everything
    monkeypatch.setattr("os.access", lambda path, mode: path != closed and access(path, mode))
    runs, lines = reader.read_all([tmp_path])
    assert [run.path for run in runs] == [tmp_path / "open"]
    assert lines == [
        f"{closed}: expected a run directory with config.toml, found a folder without permission "
        "to read it"
    ]


def test_a_folder_that_may_be_listed_but_not_entered_does_not_hide_the_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(path, tmp_path / "open")
    (closed := tmp_path / "closed").mkdir()
    (closed / "inside").mkdir()
    access, is_dir = os.access, Path.is_dir

    def test(folder: Path) -> bool:
        if folder.parent == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return is_dir(folder)

    monkeypatch.setattr(Path, "is_dir", test)  # a superuser may read everything
    monkeypatch.setattr("os.access", lambda path, mode: path != closed and access(path, mode))
    runs, lines = reader.read_all([tmp_path])
    assert [run.path for run in runs] == [tmp_path / "open"]
    assert [line.partition(":")[0] for line in lines] == [str(closed)]


def test_a_folder_that_is_no_run_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a run directory with config"):
        reader.read(tmp_path)
    for name in ("config.toml", "summary.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    with pytest.raises(ValueError, match=r"\(metrics.csv: expected 2 rounds, found 0\)$"):
        reader.read(tmp_path)
    summary = tmp_path / "summary.json"
    summary.write_text(summary.read_text().replace("completed", "failed"))
    assert reader.read(tmp_path).metrics.empty  # a run before its first round


def test_a_table_of_clients_that_was_cut_short_is_refused(path: Path, tmp_path: Path) -> None:
    """Its gradients would be counted too few."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    whole = reader.read(copy)
    lines = (copy / "clients.csv").read_text().splitlines(keepends=True)
    (copy / "clients.csv").write_text("".join(lines[:-1]))
    replies = whole.summary["replies"]
    with pytest.raises(ValueError, match=rf"expected {replies} replies, found {replies - 1}\)$"):
        reader.read(copy)
    (copy / "clients.csv").unlink()  # as of a run with privacy
    assert reader.read(copy).clients.empty


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "classes.csv"])
def test_a_pipe_is_refused_without_waiting(name: str, path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    os.mkfifo(tmp_path / "x" / name)
    with pytest.raises(ValueError, match=rf"x: expected a run directory, .* \({name}: expected a"):
        reader.read(tmp_path / "x")


def test_reading_does_not_load_pytorch(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedaccord.runs import reader; "
        f"reader.read(Path({str(path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

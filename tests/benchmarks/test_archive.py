"""Archives of runs: what they contain and what they leave out."""

import sys
import tarfile
from pathlib import Path
from typing import Any

import archive
import pandas as pd
import pytest

from fedaccord.experiments.sweep import Plan, Sweep
from fedaccord.runs import RunDirectory, reader


def write_run(folder: Path, name: str, status: str = "completed", **settings: Any) -> None:
    run = RunDirectory(str(folder), name, {"algo": "fedavg"} | settings)
    client = {"round": 1, "client": 0, "status": "ok", "steps": 5, "train-loss": 0.1}
    run.record({"round": 1, "test-accuracy": 0.5, "up-bytes": 8}, [client])
    run.summarise(status, rounds=1)


def test_an_unpacked_run_has_no_paths(tmp_path: Path) -> None:
    place = {"data-dir": str(tmp_path / "data"), "out-dir": str(tmp_path)}
    write_run(tmp_path / "runs" / "a", "one", **place)
    write_run(tmp_path / "runs" / "a", "two", seed=7)
    write_run(tmp_path / "runs", "failed", status="failed")
    write_run(tmp_path / "runs", "left-out", status="interrupted")
    (tmp_path / "runs" / "a" / "one" / "model.safetensors").write_bytes(b"large")
    (tmp_path / "runs" / "beside.csv").write_text("round,accuracy\n1,0.5\n")
    tarball, back = tmp_path / "runs.tar.xz", tmp_path / "back"
    assert archive.pack(tmp_path / "runs", tarball) == 13
    assert archive.unpack(tarball, back) == 13
    assert (back / "beside.csv").read_text() == "round,accuracy\n1,0.5\n"

    assert str(tmp_path) not in "".join(file.read_text() for file in back.rglob("*.*"))
    runs, lines = reader.read_all([back])
    assert ([run.path.name for run in runs], lines) == (["one", "two", "failed"], [])
    for run in runs:
        before = reader.read(tmp_path / "runs" / run.path.relative_to(back))
        assert run.settings == {k: v for k, v in before.settings.items() if k not in place}
        assert (run.summary, run.versions) == (before.summary, before.versions)
        pd.testing.assert_frame_equal(run.metrics, before.metrics)
        pd.testing.assert_frame_equal(run.clients, before.clients.drop(columns="train-loss"))

    again = tmp_path / "again.tar.xz"
    archive.pack(back, again)
    assert again.read_bytes() == tarball.read_bytes()
    assert archive.unpack(tarball, back) == 0


def test_an_unpacked_sweep_is_complete(tmp_path: Path) -> None:
    run = {"dataset": "digits", "model": "linear", "num-clients": 4, "num-server-rounds": 2}
    options = {"tune": False, "seeds": [0], "fair": "none", "workers": 1}
    plan = Plan.make({"sweep": options, "run": run, "space": {"algo": ["fedavg", "fedinit"]}})
    before = Sweep(plan, tmp_path / "sweep", lambda step: None).run()
    archive.pack(tmp_path / "sweep", tmp_path / "sweep.tar.xz")
    archive.unpack(tmp_path / "sweep.tar.xz", tmp_path / "back")

    steps = []
    after = Sweep(plan, tmp_path / "back", steps.append).run()
    assert [step.is_earlier for step in steps] == [True, True]
    pd.testing.assert_frame_equal(after, before)
    other = Plan.make({"sweep": options, "run": run | {"lr": 0.2}, "space": {"algo": ["fedavg"]}})
    with pytest.raises(ValueError, match="as in its earlier trials"):
        Sweep(other, tmp_path / "back", steps.append).run()


def test_an_archive_is_replaced_whole_from_any_spelling_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs", "one")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    tarball = Path("kept.tar.xz")
    sizes = {
        archive.pack(folder, tarball) for folder in (tmp_path / "runs", Path("runs"), Path("link"))
    }
    assert sizes == {4}
    before = tarball.read_bytes()
    with pytest.raises(ValueError, match="found none"):
        archive.pack(tmp_path / "nothing", tarball)
    assert tarball.read_bytes() == before


def test_invalid_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "failed", status="failed")
    with pytest.raises(ValueError, match="expected completed runs, found none"):
        archive.pack(tmp_path / "runs", tmp_path / "kept.tar.xz")
    (tmp_path / "text.tar.xz").write_text("text")
    words = ["archive.py", "unpack", str(tmp_path / "text.tar.xz"), str(tmp_path / "back")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"^[^\n]*text\.tar\.xz: [^\n]+$"):
        archive.main()
    write_run(tmp_path / "whole", "run")
    archive.pack(tmp_path / "whole", tmp_path / "whole.tar.xz")
    (tmp_path / "text.tar.xz").write_bytes((tmp_path / "whole.tar.xz").read_bytes()[:-200])
    with pytest.raises(SystemExit, match=r"^[^\n]*text\.tar\.xz: [^\n]+$"):
        archive.main()

    with tarfile.open(tmp_path / "unsafe.tar.xz", "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(tarfile.TarError):
        archive.unpack(tmp_path / "unsafe.tar.xz", tmp_path / "back")
    assert not (tmp_path / "outside").exists()

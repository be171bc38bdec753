"""Worker processes give the rows of a single process, and a sweep survives the death of one."""

import sys
from multiprocessing import active_children
from pathlib import Path

import pandas as pd
import pytest
import tomli_w

from fedaccord.experiments.sweep import workers
from fedaccord.experiments.sweep.trial import Job, Row, execute
from tests.cli.shell import invoke, refusal
from tests.experiments.sweep.plans import content, finish, make, table
from tests.experiments.sweep.test_trial import job, without_seconds


@pytest.mark.usefixtures("forked")
def test_two_processes_give_the_table_of_one(tmp_path: Path) -> None:
    finish(make(workers=1), tmp_path / "one")
    finish(make(workers=2), tmp_path / "two")
    for name in ("table.csv", "winners.csv"):
        pd.testing.assert_frame_equal(table(tmp_path / "two", name), table(tmp_path / "one", name))
    assert not active_children()


def test_jobs_of_a_process_that_died_are_done(tmp_path: Path) -> None:
    """New processes, with spawn."""
    jobs = [job(tmp_path, seed=seed)._replace(name=f"x-seed{seed}") for seed in range(2)]
    rows: dict[str, Row] = {}

    def on_row(one: Job, row: Row) -> None:
        if not rows:
            for child in active_children():
                child.kill()
        rows[one.name] = row

    with workers.processes(1) as work:
        work(jobs, on_row)
    assert [*rows] == [each.name for each in jobs]
    for each in jobs:
        each.file.unlink()
        assert without_seconds(rows[each.name]) == without_seconds(execute(each))


def test_a_job_that_kills_its_process_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(pool: object, rest: dict[int, Job], on_row: workers.OnRow) -> None:
        for i, each in [*rest.items()]:
            if each.name == "bad":
                raise workers.BrokenProcessPool
            on_row(rest.pop(i), {"status": "completed"})

    monkeypatch.setattr(workers, "_each", die)
    rows: dict[str, Row] = {}
    jobs = [job(tmp_path)._replace(name=name) for name in ("good", "bad", "a", "b", "c")]
    with workers.processes(2) as work:
        work(jobs, lambda one, row: rows.update({one.name: row}))
    assert rows.pop("bad") == {"status": "failed", "reason": workers.DIED}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(
        ("good", "a", "b", "c"), "completed"
    )


@pytest.mark.parametrize(("package", "extra"), [("ray", "run"), ("optuna", "sweep")])
def test_a_sweep_without_a_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, "fedaccord.experiments.sweep.on_ray", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    own = {"search": "optuna"} if package == "optuna" else {"ray-address": "local"}
    file = tmp_path / "sweep.toml"
    file.write_text(tomli_w.dumps(content({"lr": [0.1, 0.2]}, **own)))
    line = refusal(tmp_path, invoke("sweep", file, "--out", tmp_path / "out"))
    assert f"expected the package {package}, found none; " in line
    assert f"`uv sync --extra {extra} --inexact`" in line

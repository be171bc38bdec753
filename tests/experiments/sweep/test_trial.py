"""A trial: it runs once, resumes, and always gives a row."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.experiments.sweep import trial
from fedaccord.experiments.sweep.plan import SweepOptions
from fedaccord.experiments.sweep.trial import (
    COMPLETED,
    FAILED,
    Job,
    execute,
    forget_failures,
    mean,
    row_of,
)
from fedaccord.runs import directory, named_contents
from fedaccord.runs.reader import read
from tests.experiments.sweep.plans import RUN


def job(folder: Path, **more: Any) -> Job:
    settings = RUN | {"algo": "fedsam", "validation": 0.1, "threads": 1, "seed": 1}
    settings |= {key.replace("_", "-"): value for key, value in more.items()}
    return Job(str(folder), "fedsam-x-seed1", settings)


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def test_a_model_that_other_processes_have_on_a_gpu_is_not_judged_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may work there alone; the data are checked."""
    model, options = job(tmp_path, model="tests.own:narrow"), SweepOptions(workers=2)
    with pytest.raises(ValueError, match=r"^model: "):
        trial.check_data([model], options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trial.check_data([model], options)
    with pytest.raises(ValueError, match=r"^num-clients: expected at least one sample"):
        trial.check_data([job(tmp_path, num_clients=5000)], options)


def test_a_trial_is_a_row_and_a_run_directory(tmp_path: Path) -> None:
    own = job(tmp_path)
    assert row_of(own) is None
    row = execute(own)
    assert row_of(own) == row
    run = read(own.path)
    assert run.settings["algo"] == "fedsam"
    assert (row["status"], row["reason"]) == ("completed", "")
    assert row["validation-accuracy-last"] == run.summary["validation-accuracy-last"]
    assert not any(key.startswith("test-") for key in row)
    assert row["gradients"] == 2 * run.clients["steps"].sum()  # of SAM
    assert all(isinstance(value, (int, float, str)) for value in row.values())


def test_a_trial_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = execute(job(tmp_path))
    monkeypatch.setattr(engine, "run", None)
    assert execute(job(tmp_path)) == row
    job(tmp_path).file.unlink()  # as if it was killed before its row was written
    assert execute(job(tmp_path)) == row


def test_a_trial_that_is_killed_while_its_row_is_written_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = job(tmp_path)
    row = execute(own)
    own.file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))  # its content is written
        with pytest.raises(KeyboardInterrupt):
            execute(own)
    assert row_of(own) is None
    assert execute(own) == row


def test_a_trial_resumes_from_its_rung_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = execute(job(tmp_path / "whole", num_server_rounds=5))
    execute(job(tmp_path / "rungs", num_server_rounds=2))
    rounds: list[int] = []
    run = engine.run

    def counted(config: RunConfig) -> object:
        return run(config, on_round=lambda round: rounds.append(round.number))

    monkeypatch.setattr(engine, "run", counted)
    later = execute(job(tmp_path / "rungs", num_server_rounds=5))
    assert without_seconds(later) == without_seconds(whole)
    assert rounds == [3, 4, 5]


def test_a_rung_at_simulated_seconds_reads_no_round_after_it(tmp_path: Path) -> None:
    """A sweep that is started again ranks it by the same number."""
    short, whole = (
        job(tmp_path, num_server_rounds=rounds, device_profile="lognormal")._replace(
            metric="accuracy-at-1000000"
        )
        for rounds in (1, 3)
    )
    row = execute(short)
    assert execute(whole)["validation-accuracy-at-1000000"] != row["validation-accuracy-at-1000000"]
    assert row_of(short) == row


def damage_checkpoints(path: Path) -> None:
    for file in (path / "checkpoint").glob("*.json"):
        file.write_text("{")
    (path / "summary.json").write_text('{"status": "running"}')


def leave_torn(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "config.toml").write_text("")


def say(path: Path, **what: Any) -> None:
    file = path / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | what))


@pytest.mark.parametrize(
    "harm", [damage_checkpoints, leave_torn, partial(say, rounds=9), partial(say, status="failed")]
)
def test_a_trial_that_cannot_resume_restarts(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    row = execute(job(tmp_path))
    job(tmp_path).file.unlink()
    harm(job(tmp_path).path)
    assert without_seconds(execute(job(tmp_path))) == without_seconds(row)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lr": 1e30, "clip-norm": 0.0}, "rounds in a row failed"),
        ({"num-clients": 1438}, "validation: expected samples left for every client"),
    ],
)
def test_a_trial_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    row = execute(job(tmp_path, **settings))
    assert row["status"] == "failed"
    assert reason in row["reason"]
    assert execute(job(tmp_path, **settings)) == row
    assert math.isnan(mean([row], "accuracy-last"))


def test_any_error_of_a_run_is_a_row_but_not_those_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [
        OSError(28, "No space left on device", "x"),
        RuntimeError("CUDA out of memory\nTried to"),
    ]
    monkeypatch.setattr(trial.engine, "run", Mock(side_effect=errors))
    with pytest.raises(OSError, match="No space left"):
        execute(job(tmp_path))
    assert row_of(job(tmp_path)) is None
    assert execute(job(tmp_path))["reason"] == "CUDA out of memory Tried to"


def test_a_run_directory_that_cannot_be_made_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk says nothing about the trial."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(directory, "replace", full)
    with pytest.raises(OSError, match=r"^out-dir: cannot write to .*No space left"):
        execute(job(tmp_path))
    assert row_of(job(tmp_path)) is None
    monkeypatch.undo()
    assert execute(job(tmp_path))["status"] == "completed"


def test_a_trial_has_no_warnings_and_leaves_the_level_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("flwr")

    def run(config: RunConfig) -> None:
        log.warning("a client was dropped")
        log.setLevel(logging.WARNING)  # as another thread may
        raise RuntimeError

    monkeypatch.setattr(trial.engine, "run", run)
    before = log.level
    try:
        execute(job(tmp_path))
        assert log.level == logging.WARNING
    finally:
        log.setLevel(before)
    assert caplog.messages == []


def test_a_better_score_is_larger() -> None:
    rows = [
        {"status": "completed", "validation-loss-last": loss, "validation-accuracy-last": accuracy}
        for loss, accuracy in ((1.0, 0.5), (2.0, 0.75), (6.0, 0.25))
    ]
    assert mean(rows, "loss-last") == -3  # the median is 2
    assert mean(rows, "accuracy-last") == 0.5
    assert math.isnan(mean([*rows, {"status": "failed"}], "loss-last"))
    diverged = {"status": "completed", "validation-loss-last": None}
    assert math.isnan(mean([*rows, diverged], "loss-last"))


def test_a_trial_of_other_code_than_the_sweep_named_it_by_fails(tmp_path: Path) -> None:
    of_today = named_contents.of_code("model", ["tests.own:tiny"])
    for code, status in (("0" * 64, FAILED), (of_today, COMPLETED)):
        row = execute(job(tmp_path, model="tests.own:tiny")._replace(code={"model": code}))
        assert row["status"] == status
        if status == FAILED:
            assert row["reason"].startswith("model: the code of tests.own:tiny has changed since")
            forget_failures(tmp_path)


def test_a_summary_that_is_no_table_is_none(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("[]")
    assert trial.summary_of(tmp_path) == {}

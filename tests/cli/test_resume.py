"""`fedaccord resume`: a run resumes, or the command gives one line."""

import json
import os
from pathlib import Path

from fedaccord.runs import origin
from fedaccord.runs.lock import Lock
from tests.cli.shell import invoke, refusal, run, success, summary


def test_a_run_resumes_for_more_rounds(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x", "algo=scaffold"))
    directory = tmp_path / "runs" / "x"
    result = success(invoke("resume", directory, "num-server-rounds=4"))
    rounds = [line.split("  ")[0] for line in result.stdout.splitlines() if "round " in line]
    assert rounds[:2] == ["round 3/4", "round 4/4"]
    assert (summary(directory)["status"], summary(directory)["rounds"]) == ("completed", 4)
    success(invoke("resume", directory, "num-server-rounds=3", "--round", "2"))
    assert summary(directory)["rounds"] == 3
    assert "found those of rounds 2, 3\n" in invoke("resume", directory, "--round", "4").stderr


def test_a_setting_without_effect_is_a_warning(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x", "sam.rho=0"))
    words = ("num-server-rounds=3", "download=true", "eval-train=true")
    lines = success(invoke("resume", tmp_path / "runs" / "x", *words)).stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: download=true has no effect: it needs dataset=")


def test_the_settings_of_a_run_that_resumed_make_it_anew(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x", "num-server-rounds=1"))
    file = tmp_path / "runs" / "x" / "config.toml"
    success(invoke("resume", file.parent, "num-server-rounds=2"))
    success(invoke("run", "--config", file, "name=again"))
    again = file.parents[1] / "again" / "model.safetensors"
    assert again.read_bytes() == file.with_name("model.safetensors").read_bytes()


def test_a_run_that_cannot_resume_gives_one_line(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "x"
    line = "expected a run directory with summary.json, found none"
    assert line in refusal(tmp_path, invoke("resume", directory))
    success(run(tmp_path, "name=x"))
    inside = directory / "config.toml" / "x"
    assert f"{line} (Not a directory)\n" in invoke("resume", inside).stderr
    for word, line in (
        ("lr=0.3", "resume: expected lr=0.1, as at the run's start, got 0.3"),
        ("num-server-rounds=2", "all 2 rounds are done"),
        ("lrr=1", "unknown key 'lrr'"),
        ("out-dir=elsewhere", f"resume: expected to resume {directory} in place, got out-dir="),
        (
            "name=y",
            f"resume: expected to resume {directory} in place, got name=y; leave it out, or copy",
        ),
    ):
        result = invoke("resume", directory, word)
        assert result.exit_code == 2
        assert line in result.stderr
        assert result.stderr.count("\n") == 1
    assert summary(directory)["status"] == "completed"
    for damage in ("{}", "[]", "{"):
        (directory / "summary.json").write_text(damage)
        result = invoke("resume", directory)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "expected a run directory, got a damaged summary.json (" in result.stderr


def test_a_config_toml_that_was_edited_is_refused_and_kept(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x", "num-server-rounds=1"))
    directory = tmp_path / "runs" / "x"
    file, line = directory / "config.toml", f"{directory}: expected a run directory"
    text = file.read_text()
    for now, message in (
        (
            text.replace("lr = 0.1\n", "lr = 0.2\n"),
            "expected lr=0.1, as at the run's start, got 0.2;",
        ),
        (
            text + "[run.sam]\nrho = 0.5\n",
            'expected sam.rho="auto", as at the run\'s start, got 0.5;',
        ),
        ("?", f"{line}; {file} is not valid TOML: "),
        (None, f"{line}; cannot read {file} (No such file or directory); check the path"),
    ):
        file.unlink() if now is None else file.write_text(now)
        result = invoke("resume", directory, "num-server-rounds=2")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr
        assert now is None or file.read_text() == now
    file.write_text(text)
    result = invoke("resume", directory, "--round", "-1")
    assert "expected a checkpoint of round -1, found the one of round 1\n" in result.stderr
    success(invoke("resume", directory, "num-server-rounds=2"))


def test_a_metric_that_is_no_longer_measured_has_no_last_value(tmp_path: Path) -> None:
    success(run(tmp_path, "name=x"))
    directory = tmp_path / "runs" / "x"
    success(invoke("resume", directory, "num-server-rounds=3", "metrics=f1"))
    keys = {key for key in summary(directory) if key.startswith("test-")}
    ends = ("last", "mean-of-last-10", "best")
    assert keys == {f"test-{name}-{end}" for name in ("f1", "loss") for end in ends}


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, "name=x", "resume=true", "vectorize=auto")
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert "expected the directory of a run, found none" in result.stderr


def test_a_run_that_another_process_writes_is_not_changed(tmp_path: Path) -> None:
    """A process of this machine or of another one; the status in the summary does not matter."""
    success(run(tmp_path, "name=x"))
    directory = tmp_path / "runs" / "x"
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with Lock(directory):
        result = invoke("resume", directory, "num-server-rounds=3")
        again = run(tmp_path, "name=x", "resume=true", "num-server-rounds=3")
    for each in (result, again):
        assert each.exit_code == 2, each.output
        assert each.stderr.count("\n") == 1
        assert f"{directory}: process {os.getpid()} on " in each.stderr
        assert "writes here; wait for it, or end it" in each.stderr
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert after == before
    away = origin.process() | {"host": "elsewhere", "boot": "another", "locked": True}
    (directory / ".lock").write_text(json.dumps(away))
    assert "--force" in invoke("resume", directory, "num-server-rounds=3").stderr
    success(invoke("resume", directory, "num-server-rounds=3", "--force"))
    assert not (directory / ".lock").exists()


def test_a_run_that_resumes_needs_a_name(tmp_path: Path) -> None:
    line = refusal(tmp_path, invoke("run", "resume=true", f"out-dir={tmp_path / 'runs'}"))
    assert line.startswith("fedaccord: resume: expected name=...")

"""`fedaccord compare`: its formats, and damaged runs."""

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedaccord.runs import lock
from fedaccord.runs.best import BEST
from fedaccord.runs.directory import FILES
from fedaccord.runs.logbook import ATTEMPT, SPENT
from tests.cli.shell import invoke, refusal, success
from tests.cli.test_console import HOSTILE
from tests.experiments.analysis.made import write

Damage = Callable[[Path], object]


def replaced(name: str, old: str, new: str) -> Damage:
    def damage(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return damage


def content(name: str, text: str) -> Damage:
    return lambda run: (run / name).write_text(text)


DAMAGES: dict[str, Damage] = {
    "no summary": lambda run: (run / "summary.json").unlink(),
    "cut summary": content("summary.json", '{"status": "comp'),
    "summary is a list": content("summary.json", "[]"),
    "deep summary": content("summary.json", "[" * 100_000),
    "status is a list": replaced("summary.json", '"completed"', "[1, 2]"),
    "no settings": content("config.toml", ""),
    "settings are a number": content("config.toml", "run = 3"),
    "deep settings": content("config.toml", "a = " + "[" * 100_000),
    "a list as a setting": replaced("config.toml", "lr = 0.1", "lr = [0.1]"),
    "metrics with zeros": content("metrics.csv", "\0" * 99),
    "no metrics": lambda run: (run / "metrics.csv").unlink(),
    "lost rounds": lambda run: (run / "metrics.csv").write_text("round,test-accuracy\n0,0.1\n"),
    "words for numbers": replaced("metrics.csv", "0.5", "much"),
    "another separator": replaced("metrics.csv", ",", ";"),
    "clients without rounds": replaced("clients.csv", "round", "turn"),
    "a folder for a table": lambda run: (
        (run / "metrics.csv").rename(run / "x"),
        (run / "metrics.csv").mkdir(),
    ),
}


@pytest.mark.parametrize(
    ("damage", "command"),
    [
        *((damage, "compare") for damage in DAMAGES.values()),
        *((DAMAGES[name], "report") for name in ("no summary", "no settings", "words for numbers")),
    ],
    ids=[*DAMAGES, *(f"report-{k}" for k in range(3))],
)
def test_a_damaged_run_gives_a_warning_and_the_others_are_compared(
    damage: Damage, command: str, tmp_path: Path
) -> None:
    good = write(tmp_path / "runs", [0.1, 0.5, 0.7])
    bad = write(tmp_path / "runs", [0.1, 0.5, 0.7], algo="scaffold")
    damage(bad)
    out = ["--out", tmp_path / "r.html"] if command == "report" else []
    result = success(invoke(command, good, bad, *out))
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"warning: left out: {bad}")
    assert len(result.stderr) < 1000
    text = (tmp_path / "r.html").read_text() if out else result.stdout
    assert "fedavg" in text
    alone = invoke(command, bad, *out)
    assert (alone.exit_code, alone.stdout, alone.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_folder_without_permission_is_left_out(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, closed = write(tmp_path / "runs", [0.1, 0.5, 0.7]), tmp_path / "closed"
    closed.mkdir()
    inside, access = Path.iterdir, os.access

    def iterdir(path: Path) -> Iterator[Path]:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return inside(path)

    def may(path: Any, mode: int) -> bool:
        return os.fspath(path) != str(closed) and access(path, mode)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(os, "access", may)
    out = ["--out", tmp_path / "r.html"] if command == "report" else []
    result = success(invoke(command, good, closed, *out))
    line = f"warning: left out: {closed}: expected a run directory with config.toml, found a folder"
    assert result.stderr == f"{line} without permission to read it\n"


def test_many_damaged_runs_give_few_lines(tmp_path: Path) -> None:
    first = write(tmp_path, [0.1, 0.5])
    for i in range(20):
        shutil.copytree(first, tmp_path / f"x{i}")
        (tmp_path / f"x{i}" / "config.toml").write_text("?")
    result = success(invoke("compare", tmp_path))
    assert result.stderr.count("\n") == 6
    assert "15 more" in result.stderr


def test_a_path_that_does_not_exist_and_an_unknown_format_end_the_command(tmp_path: Path) -> None:
    run = write(tmp_path / "runs", [0.1, 0.5])
    for words in ((run, tmp_path / "rums"), (run, "--format", "xml")):
        result = invoke("compare", *words)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("report {run} --out {run}/metrics.csv", "--out: expected a new file, got {run}/metrics"),
        ("report {run} --out {run}/page.csv", "--out: expected a file that ends in .html, got"),
        ("measure {run} --out {run}/summary.json", "--out: expected a new file, got {run}/summary"),
        ("measure {run} --landscape {run}/model.json", "--landscape: expected a new file, got"),
        ("measure {run} --radius nan", "--radius: expected a finite number, got nan"),
        (
            "fedscale-traces {run}/none --out {run}/classes.csv",
            "--out: expected a new file, got {run}/cl",
        ),
    ],
)
def test_no_command_replaces_a_file_of_a_run(words: str, line: str, tmp_path: Path) -> None:
    run = write(tmp_path, [0.1, 0.5])
    assert {BEST, ATTEMPT, SPENT, lock.FILE, *(file.name for file in run.iterdir())} <= FILES
    before = {file: file.read_bytes() for file in run.iterdir()}
    assert line.format(run=run) in refusal(tmp_path, invoke(*words.format(run=run).split()))
    assert {file: file.read_bytes() for file in run.iterdir()} == before


def test_figures_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    run = write(tmp_path, [0.1, 0.5])
    for folder in ("/proc/x", run / "metrics.csv"):
        line = refusal(tmp_path, invoke("compare", run, "--figures", folder))
        assert f"--figures: cannot write to {folder} (" in line


@pytest.mark.parametrize("form", ["table", "csv", "markdown", "latex", "json"])
def test_control_characters_in_a_run_directory_are_escaped(form: str, tmp_path: Path) -> None:
    for algo, seed in ((f"fed{HOSTILE}avg", 0), ("fedavg", 0), (f"fed{HOSTILE}avg", HOSTILE)):
        write(tmp_path, [0.1, 0.5], algo=algo, seed=seed, model=f"m{HOSTILE}")
    for i, run in enumerate(tmp_path.glob("*")):
        run.rename(tmp_path / f"{i}{HOSTILE}")
        path = tmp_path / f"{i}{HOSTILE}" / "summary.json"
        path.write_text(path.read_text().replace("completed", json.dumps(HOSTILE)[1:-1]))
    (tmp_path / f"damaged{HOSTILE}").mkdir()
    for name in ("config.toml", "summary.json"):
        (tmp_path / f"damaged{HOSTILE}" / name).write_text("?")
    result = success(invoke("compare", tmp_path, "--format", form))
    assert (result.stdout + result.stderr).replace("\n", "").isprintable()
    assert "fedavg" in result.stdout


def runs(folder: Path) -> None:
    for seed, last in enumerate((0.7, 0.9)):
        write(folder, [0.1, 0.5, last], seed=seed)
    write(folder, [0.1, 0.5, 0.6], algo="sca_ffold|x")


def test_programs_read_plain_numbers(tmp_path: Path) -> None:
    runs(tmp_path)
    result = invoke("compare", tmp_path, "--target", 0.8, "--json")
    assert result.stdout == invoke("compare", tmp_path, "--target", 0.8, "--format", "json").stdout
    best, other = json.loads(result.stdout)
    values = [best[key] for key in ("method", "seeds", "runs", "repeats")]
    assert values == ["fedavg", [0, 1], 2, 0]
    assert best["test-accuracy-last"] == pytest.approx(0.8)
    assert best["test-accuracy-last-std"] == pytest.approx(0.02**0.5)
    assert (best["metric"], best["target"], best["reached"]) == ("test-accuracy", 0.8, 1)
    assert best["bytes-to-target"] == 30
    assert (other["test-accuracy-last"], other["test-accuracy-last-std"]) == (0.6, None)
    assert (other["reached"], other["bytes-to-target"]) == (0, None)
    rows = [*csv.DictReader(invoke("compare", tmp_path, "--format", "csv").stdout.splitlines())]
    assert [row["method"] for row in rows] == ["fedavg", "sca_ffold|x"]
    assert (rows[0]["seeds"], float(rows[0]["test-accuracy-last"])) == ("0 1", pytest.approx(0.8))
    assert {*rows[0]} == {*best}


def test_two_formats_are_refused(tmp_path: Path) -> None:
    result = invoke("compare", write(tmp_path, [0.1, 0.5]), "--json", "--format", "csv")
    line = "--json: expected no other format beside it, got --format csv; leave one out"
    assert (result.exit_code, result.stdout) == (2, "")
    assert line in result.stderr


def test_markdown_and_latex_have_the_rounded_table(tmp_path: Path) -> None:
    runs(tmp_path)
    lines = invoke("compare", tmp_path, "--format", "markdown").stdout.splitlines()
    assert [line.replace("\\|", "").count("|") for line in lines] == [lines[0].count("|")] * 4
    assert "| 80.00 ± 14.14% |" in lines[2]
    text = invoke("compare", tmp_path, "--format", "latex").stdout
    assert r"80.00 ± 14.14\%" in text
    assert r"sca\_ffold|x" in text
    assert text.count(r"\\") == 3


def test_figures_without_matplotlib_give_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs(tmp_path / "runs")
    result = invoke("compare", tmp_path / "runs", "--figures", tmp_path / "figures")
    line = "expected the package matplotlib, found none; in the clone of FedAccord type "
    assert f"{line}`uv sync --extra report --inexact`" in result.stderr
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "figures").exists()


def test_repeats_of_a_seed_are_reported(tmp_path: Path) -> None:
    first = write(tmp_path, [0.1, 0.5])
    for i in range(3):
        shutil.copytree(first, tmp_path / f"copy{i}")
    result = invoke("compare", tmp_path)
    assert "3 of 4 runs repeat" in result.stderr
    assert "1 (0), 3 repeats" in result.stdout
    assert "±" not in result.stdout
    assert re.search(r"fedavg +50\.00% ", result.stdout)


def test_of_equal_runs_that_with_the_most_metrics_counts(tmp_path: Path) -> None:
    for name in ("first", "second"):
        path = write(tmp_path / name, [0.1, 0.5])
    table = path / "metrics.csv"
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head + ",test-f1", *(row + ",0.25" for row in rows)]))
    assert "25.00%" in success(invoke("compare", tmp_path)).stdout


def test_runs_of_several_data_sets_are_ranked_with_a_warning(tmp_path: Path) -> None:
    for dataset in ("digits", "cifar10"):
        write(tmp_path / dataset, [0.1, 0.5], dataset=dataset)
    line = "runs of cifar10, digits are ranked together: compare those of one dataset"
    assert line in " ".join(success(invoke("compare", tmp_path)).stderr.split())
    assert not success(invoke("compare", tmp_path / "digits")).stderr


def test_runs_are_ranked_by_a_metric_of_choice(tmp_path: Path) -> None:
    for name, accuracy, loss in (("a", 0.9, 0.5), ("b", 0.8, 0.4)):
        path = write(tmp_path / name, [0.1, accuracy], algo="fed" + {"a": "avg", "b": "init"}[name])
        table = path / "metrics.csv"
        head, *rows = table.read_text().splitlines()
        table.write_text("\n".join([head + ",personal-loss", *(f"{r},{loss}" for r in rows)]))

    def order(*words: str) -> list[str]:
        rows = json.loads(success(invoke("compare", tmp_path, "--json", *words)).stdout)
        assert {row["metric"] for row in rows} == {words[-1] if words else "test-accuracy"}
        return [row["method"] for row in rows]

    assert order() == order("--metric", "test-loss") == ["fedavg", "fedinit"]
    assert order("--metric", "personal-loss") == ["fedinit", "fedavg"]
    for command in (("compare",), ("report", "--out", tmp_path / "page.html")):
        line = refusal(tmp_path, invoke(*command, tmp_path, "--metric", "personal-los"))
        assert "--metric: expected one of the runs', test-loss, test-accuracy, p" in line
        assert line.endswith("got 'personal-los' (did you mean 'personal-loss'?)\n")
    write(tmp_path / "c", [0.1, 0.5], brier=0.25, lr=0.2)
    line = refusal(tmp_path, invoke("compare", tmp_path, "--metric", "test-brier"))
    assert line.endswith("for which it is unknown whether larger is better\n")


def test_runs_that_evaluate_in_other_rounds_are_ranked_with_a_warning(tmp_path: Path) -> None:
    for every in (1, 3):
        write(tmp_path / str(every), [0.1, None, None, 0.5], eval_every=every, seed=every)
    text = " ".join(success(invoke("compare", tmp_path)).stderr.split())
    assert "runs with eval-every=1, 3 are ranked together: the last 10 evaluations of one" in text
    assert not success(invoke("compare", tmp_path / "1")).stderr
    assert not success(invoke("compare", tmp_path, "--at", "round=3")).stderr
    page = tmp_path / "page.html"
    assert not success(invoke("report", tmp_path, "--at", "round=3", "--out", page)).stderr


def test_runs_of_different_losses_are_ranked_by_a_loss_with_a_warning(tmp_path: Path) -> None:
    def warnings(*names: str) -> str:
        folders = [tmp_path / name for name in names]
        return " ".join(
            success(invoke("compare", *folders, "--metric", "test-loss")).stderr.split()
        )

    for folder, loss, used in (("a", "auto", "cross-entropy"), ("b", "mine:focal", "")):
        write(tmp_path / folder, [0.1, 0.5], loss=loss, used={"loss": used} if used else {})
    write(tmp_path / "c", [0.1, 0.6], loss="cross-entropy")
    line = "test-loss: runs with different losses (cross-entropy, mine:focal) are ranked together"
    assert line in warnings("a", "b")
    assert not warnings("a", "c")
    assert not success(invoke("compare", tmp_path)).stderr


def test_a_model_with_untrained_parts_is_ranked_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "a", [0.1, 0.4])
    write(tmp_path / "b", [0.1, 0.5], buffers="local")
    write(tmp_path / "c", [0.1, 0.6], local_parameters="x")
    line = "fedavg buffers=refuse local-parameters=x and 1 more rows: test-accuracy is of a model"
    text = " ".join(success(invoke("compare", tmp_path)).stderr.split())
    assert line in text
    assert text.endswith("--metric personal-accuracy ranks by the clients' own models")
    assert not success(invoke("compare", tmp_path / "a")).stderr


@pytest.mark.parametrize("what", ["samples", "model", "loss", "partition-file"])
def test_runs_of_different_contents_are_ranked_with_a_warning(what: str, tmp_path: Path) -> None:
    for digest, algo in (("1", "fedavg"), ("2", "scaffold")):
        write(tmp_path / digest, [0.1, 0.5], algo=algo, contents={what: digest, "metrics": digest})
    line = f"runs with equal settings but different {what} are ranked together"
    assert line in " ".join(success(invoke("compare", tmp_path)).stderr.split())
    assert not success(invoke("compare", tmp_path / "1")).stderr
    write(tmp_path / "3", [0.1, 0.5], dataset="cifar10")
    both = success(invoke("compare", tmp_path)).stderr
    assert line in " ".join(both.split())
    assert both.count("are ranked together") == 2

"""Complete studies: they resume, also with more rounds."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedaccord.experiments.analysis.groups import DEFAULTS
from fedaccord.experiments.reproduce import Cell, Study, find
from fedaccord.experiments.reproduce.measures import TO_TARGET
from fedaccord.experiments.reproduce.study import Done
from fedaccord.experiments.sweep.plan import SweepOptions
from fedaccord.experiments.sweep.trial import summary_of
from fedaccord.runs.lock import Lock
from tests.experiments.reproduce.studies import TABLE, cell, finish


def study(
    cells: Sequence[Cell] = TABLE.cells,
    seeds: Sequence[int] = (0, 1),
    rounds: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Study:
    return Study.make(TABLE, cells, seeds, rounds, changes or {})


def test_every_cell_and_seed_is_a_run_with_its_settings(tmp_path: Path) -> None:
    whole = study()
    runs = whole.runs(tmp_path)
    assert [(run.seed, run.cell.name) for run in runs] == [
        (seed, cell.name) for seed in (0, 1) for cell in TABLE.cells
    ]
    results = finish(whole, tmp_path)
    assert [*results.status] == ["completed"] * 8
    assert [*results.rounds] == [4] * 8
    for run in runs:
        text = (run.job.path / "summary.json").read_text()
        (row,) = results[(results.cell == run.cell.name) & (results.seed == run.seed)].itertuples()
        summary = json.loads(text)
        assert row.best == pytest.approx(100 * summary["test-accuracy-best"], abs=0.005)
        assert row.last == pytest.approx(100 * summary["test-accuracy-last"], abs=0.005)
        assert row.device == "cpu"
        # half of 4 (8) clients take 2 epochs of their share of 1,437 samples in batches of 50
        clients, steps = (4, 2 * 4) if run.cell.column == "many" else (2, 2 * 8)
        share = 2 if run.cell.row == "fedsam" else 1
        assert row.gradients == 4 * clients * steps * share
        assert not (run.job.path / "checkpoint").exists()


def test_the_papers_measures_besides_the_accuracy(tmp_path: Path) -> None:
    """Costs to the target are those of the first round that reaches it; if none does they are
    absent."""
    settings = {"eval_train": True, "num_clients": 4}
    plain = cell("fedavg", **settings)
    cells = [replace(plain, column=f"to {target}", target=target) for target in (0.0, 40.0, 99.9)]
    own = Study.make(TABLE, cells, (0,), None, {})
    rows = finish(own, tmp_path).set_index("cell")
    table = pd.read_csv(own.runs(tmp_path)[0].job.path / "metrics.csv")
    last = table.iloc[-1]
    first = table[(table["test-accuracy"] >= 0.4) & (table["round"] > 0)].iloc[0]
    for target, number in ((0.0, 1), (40.0, first["round"])):
        row = rows.loc[f"fedavg/to {target}"]
        part = table[(table["round"] <= number) & (table["round"] > 0)]
        assert row["rounds-to-target"] == number
        traffic = (part["up-bytes"] + part["down-bytes"]).sum()
        assert row["bytes-to-target"] == traffic
        assert row["gradients-to-target"] == number * row["gradients"] / 4
        assert row["seconds-to-target"] == pytest.approx(part["seconds"].sum(), abs=1e-3)
        assert row["consistency"] == pytest.approx(last["consistency"], abs=1e-4)
        assert row["train-accuracy"] == pytest.approx(100 * last["train-accuracy"], abs=1e-3)
        gap = 100 * (last["train-accuracy"] - last["test-accuracy"])
        assert row["generalisation-gap"] == pytest.approx(gap, abs=1e-3)
    assert rows.loc["fedavg/to 99.9"][list(TO_TARGET)].isna().all()


def test_a_second_start_runs_only_new_seeds(tmp_path: Path) -> None:
    first = finish(study(seeds=(0,)), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*.csv")}
    assert finish(study(seeds=(0,)), tmp_path).equals(first)
    defaults = (tmp_path / DEFAULTS).rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"of an earlier version, .* choose another --out"):
        finish(study(seeds=(0,)), tmp_path)
    defaults.rename(tmp_path / DEFAULTS)
    more = finish(study(seeds=(0, 1)), tmp_path)
    assert more[more.seed == 0].reset_index(drop=True).equals(first)
    assert len(more) == 8
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_more_rounds_resume_from_the_last_round(tmp_path: Path) -> None:
    cells = TABLE.cells[:2]
    short = finish(study(cells=cells, seeds=(0,), rounds=2), tmp_path)
    assert [*short.rounds] == [2, 2]
    runs = study(cells=cells, seeds=(0,)).runs(tmp_path)
    tables = [pd.read_csv(run.job.path / "metrics.csv") for run in runs]
    whole = finish(study(cells=cells, seeds=(0,)), tmp_path)
    assert [*whole.rounds] == [4, 4]
    for run, before in zip(runs, tables, strict=True):
        after = pd.read_csv(run.job.path / "metrics.csv")
        assert after["seconds"][1:3].equals(before["seconds"][1:3])  # not run again
    fresh = finish(study(cells=cells, seeds=(0,)), tmp_path / "fresh")
    assert whole.equals(fresh)
    # and fewer are there already
    assert finish(study(cells=cells, seeds=(0,), rounds=1), tmp_path).equals(whole)


def test_fewer_rounds_than_an_unfinished_run_has_are_refused(tmp_path: Path) -> None:
    more = study(cells=TABLE.cells[:1], seeds=(0,), rounds=3)
    finish(more, tmp_path)
    for row in (tmp_path / "rows").iterdir():  # as if it had been stopped on its way to 4
        row.unlink()
    fewer = study(cells=TABLE.cells[:1], seeds=(0,), rounds=2)
    with pytest.raises(ValueError, match=r"--rounds: .* has 3 already; expected .*, got 2"):
        finish(fewer, tmp_path)
    assert summary_of(more.runs(tmp_path)[0].job.path)["rounds"] == 3


def test_a_method_that_anneals_over_its_rounds_restarts() -> None:
    cells = [cell("dispfl"), cell("fedavg")]
    names = [[run.job.name for run in study(cells=cells, rounds=n).runs(Path())] for n in (2, 4)]
    assert [a == b for a, b in zip(*names, strict=True)] == [False, True] * 2


def test_cells_with_the_same_settings_share_a_run(tmp_path: Path) -> None:
    cells = [cell("fedavg"), cell("fedavg", "the same")]
    results = finish(study(cells=cells, seeds=(0,)), tmp_path)
    assert len(results) == 2
    assert len([*(tmp_path / "runs").iterdir()]) == 1


@pytest.mark.parametrize("algo", ["fedavg", "feddyn"])
def test_a_cell_of_several_tables_is_one_run(algo: str) -> None:
    cells = {
        "fedinit-table1": f"{algo}/resnet18/cifar10/10%-100/dir-0.1",
        "fedinit-figure1": f"{algo}/K=5",
        "afedpd-table2": f"{algo}/resnet18/cifar10/dir-0.1",
        "afedpd-figure2": f"{algo}/interval=50",
    }
    if algo == "fedavg":
        cells["fedinit-table3"] = "beta=0/*"
    names = set()
    for name, pattern in cells.items():
        table = find(name)
        (run,) = Study.make(table, table.matching([pattern]), (0,), None, {}).runs(Path())
        names.add(run.job.name)
    assert len(names) == 1


def test_only_changes_that_affect_numbers_are_named(tmp_path: Path) -> None:
    shown = {"lr": 0.05, "eval-every": 2, "max-client-norm": 9.0}
    changes = shown | {"device": "cpu", "threads": 1, "data-dir": "/x"}
    own = study(cells=TABLE.cells[:1], seeds=(0,), rounds=1, changes=changes)
    (row,) = finish(own, tmp_path).itertuples()
    assert row.changed == "eval-every=2 lr=0.05 max-client-norm=9.0"
    assert own.configuration(TABLE.cells[0]).config.flat["lr"] == 0.05


def test_a_diverged_run_is_a_result_with_its_reason(tmp_path: Path) -> None:
    own = study(cells=TABLE.cells[:1], seeds=(0,), changes={"lr": 1e30})
    (row,) = finish(own, tmp_path).itertuples()
    assert (row.status, row.rounds) == ("failed", 4)
    assert "failed" in str(row.reason)
    (run,) = own.runs(tmp_path)
    before = run.job.file.stat().st_mtime_ns
    assert finish(own, tmp_path).reason.tolist() == [row.reason]
    assert run.job.file.stat().st_mtime_ns == before  # it would diverge again
    shorter = study(cells=TABLE.cells[:1], seeds=(0,), changes={"lr": 1e30}, rounds=2)
    assert shorter.done(shorter.runs(tmp_path)[0]) is None


def test_a_failed_run_is_run_again(tmp_path: Path) -> None:
    """Also beside a shorter one that is completed."""
    short, whole = (study(cells=TABLE.cells[:1], seeds=(0,), rounds=n) for n in (2, 4))
    first = finish(short, tmp_path)
    (run,) = whole.runs(tmp_path)
    run.job.file.write_text('{"status": "failed", "reason": "disk full"}')
    assert whole.done(run) is None
    assert finish(short, tmp_path).equals(first)
    assert finish(whole, tmp_path).status.tolist() == ["completed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed: `reproduce` sets it .* choose by --cells, --seeds, --rounds and --o"),
        ({"num-server-rounds": 3}, "num-server-rounds: `reproduce` sets it"),
        ({"algo": "fedavg"}, "algo: `reproduce` sets it"),
        ({"name": "x"}, "name: `reproduce` sets it"),
        ({"lrr": 0.1}, "unknown key 'lrr'"),
        ({"fraction-train": 0.0}, "fraction-train: expected"),
    ],
)
def test_changes_that_no_cell_supports_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study(changes=changes)


def test_a_change_that_no_cell_reads_gives_a_warning() -> None:
    assert study(changes={"lr": 0.05}).warnings() == []
    (line,) = study(changes={"lr": 0.05, "fedprox.mu": 0.3}).warnings()
    assert line == "fedprox.mu=0.3 has no effect: it needs algo=fedprox"
    one_reads = [*TABLE.cells, cell("fedprox")]
    assert study(cells=one_reads, changes={"fedprox.mu": 0.3}).warnings() == []


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    results: list[Done] = []
    with Lock(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()} .* writes here"):
        study().perform(tmp_path, SweepOptions(workers=1), results.append)
    assert results == []


def test_settings_that_do_not_fit_the_data_are_refused_before_the_first_run(
    tmp_path: Path,
) -> None:
    own = study(seeds=(0,), changes={"num-clients": 5000})
    with pytest.raises(ValueError, match=r"^num-clients: expected at least one sample per client"):
        finish(own, tmp_path)
    assert not any(tmp_path.iterdir())

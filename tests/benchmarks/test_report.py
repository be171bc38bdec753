"""The runs that benchmarks/report.py generates are read like real runs."""

from pathlib import Path

import numpy as np
import pytest
import report

from fedaccord.experiments.analysis.groups import groups_of
from fedaccord.runs import reader


def test_runs_of_a_method_are_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROUNDS", 3)
    for method in ("fedavg", "scaffold"):
        for seed in (0, 1):
            report.write(tmp_path, method, seed, np.random.default_rng(seed))
    groups = groups_of([reader.read(path) for path in reader.find([tmp_path])])
    assert [(group.label, len(group.runs)) for group in groups] == [("fedavg", 2), ("scaffold", 2)]
    (run, _), table = groups[0].runs, groups[0].tables[0]
    assert len(run.clients) == 3 * report.COHORT
    assert [*table["gradients"]] == [500, 1000, 1500]

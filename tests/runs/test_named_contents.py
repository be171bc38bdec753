"""Which files and functions of a run's settings have a hash."""

from pathlib import Path

import pytest

from fedaccord.config import RunConfig
from fedaccord.runs.named_contents import functions, of_run

CODE = """
def data(): ...
def net(): ...
def metric(predictions, targets): ...
"""


def test_functions_and_files_that_affect_numbers_or_are_metrics_have_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_run.py").write_text(CODE)
    parts = tmp_path / "parts.json"
    parts.write_text("[[0], [1]]")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "dataset": "named_by_a_run:data",
        "model": "named_by_a_run:net",
        "metrics": "accuracy,named_by_a_run:metric",
        "partition": "file",
        "partition-file": str(parts),
        "state-dir": str(tmp_path),  # affects no number
    }
    config = RunConfig.make(settings)
    assert functions(config) == {
        "dataset": ["named_by_a_run:data"],
        "model": ["named_by_a_run:net"],
        "metrics": ["named_by_a_run:metric"],
    }
    first = of_run(config, {"samples": "12345678"})  # which are those of the data set's function
    assert {*first} == {"samples", "model", "metrics", "partition-file"}
    assert {*of_run(config, {})} == {"dataset", "model", "metrics", "partition-file"}
    assert all(len(digest) == 8 for digest in first.values())
    parts.write_text("[[1], [0]]")
    second = of_run(config, {"samples": "12345678"})
    assert [key for key in first if first[key] != second[key]] == ["partition-file"]


def test_code_that_devices_alone_have_is_left_out() -> None:
    config = RunConfig.make({"model": "no_such_module:net", "dataset": "digits"})
    assert of_run(config, {"samples": "12345678"}) == {"samples": "12345678"}

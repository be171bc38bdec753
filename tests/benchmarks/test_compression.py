"""The page of benchmarks/compression.py, from a run directory made by hand."""

from argparse import Namespace
from pathlib import Path

import compression
import pytest

from fedaccord.config import defaults
from fedaccord.runs import RunDirectory


def test_kept_runs_of_another_length_are_refused(tmp_path: Path) -> None:
    name = compression.name_of("fashion-mnist", "fedavg", "none", 0)
    run = RunDirectory(str(tmp_path), name, defaults() | {"algo": "fedavg"})
    for number in range(4):
        row = {"round": number, "test-accuracy": 0.5, "replies": 1, "up-bytes": 1, "up-vectors": 1}
        run.record(row | {"seconds": 1.0, "down-bytes": 1}, [])
    run.summarise("completed")
    run.close()
    options = Namespace(folder=tmp_path, dataset="fashion-mnist", seeds=[0], rounds=3)
    assert [trained.rounds for trained in compression.completed(options)["fedavg", "none"]] == [3]
    options.rounds = 5
    for act in (compression.train, compression.write):
        with pytest.raises(SystemExit, match="expected runs of --rounds 5, found runs of 3; name"):
            act(options)

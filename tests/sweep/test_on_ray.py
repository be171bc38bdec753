"""Ray Tune: the rows of one process; ASHA, whose choices nobody can foresee."""

from pathlib import Path

import pandas as pd
import pytest

from tests.sweep.plans import finish, make, table

pytest.importorskip("ray.tune", reason="needs the extra sweep")
pytestmark = pytest.mark.flower  # it starts Ray
SPACE = {"algo": ["fedavg"], "lr": {"low": 0.01, "high": 0.3, "log": True}}


def test_ray_gives_the_table_of_one_process(tmp_path: Path) -> None:
    own = {"search": "halving", "trials": 3, "eta": 2, "rungs": 2}
    finish(make(SPACE, **own), tmp_path / "one")
    finish(make(SPACE, **own, workers=2, ray_address="local"), tmp_path / "ray")
    for name in ("table.csv", "winners.csv"):
        pd.testing.assert_frame_equal(table(tmp_path / "ray", name), table(tmp_path / "one", name))
    assert not (tmp_path / "ray" / "ray").exists()


@pytest.mark.slow
def test_asha_takes_some_to_the_end_and_wins_with_one_of_them(tmp_path: Path) -> None:
    own = {"search": "asha", "trials": 4, "eta": 2, "rungs": 2, "ray_address": "local"}
    finish(make(SPACE, **own), tmp_path)
    trials = table(tmp_path)
    tuned = trials[trials.stage == "tune"]
    assert len(tuned) == 4
    assert set(tuned.rounds) <= {2, 3}
    winner = table(tmp_path, "winners.csv").iloc[0]
    assert winner.trial in set(tuned[tuned.status == "completed"].trial)
    assert winner.configurations == 4

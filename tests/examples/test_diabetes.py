"""The example of numbers to predict."""

import runpy
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "examples" / "diabetes" / "regression.py"


def test_every_method_predicts_better_than_at_the_start() -> None:
    example = runpy.run_path(str(FILE))
    sites, test, scale = example["samples"]()
    assert [len(site) for site in sites] == [71, 71, 71, 71, 69]
    assert len(test) == 89
    assert 70 < scale < 80
    for values in example["errors"](["fedavg", "scaffold"], rounds=4).values():
        assert values[-1] < 0.85 * values[0]

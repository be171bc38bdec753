"""What benchmarks/secure_sum.py measures of a run: its rounds."""

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import secure_sum


def test_the_start_of_a_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 5 seconds, the first one 8, and 1 more for each round."""
    now = [0.0]
    calls: list[int] = []

    def simulate(*_: Any, rounds: int, **__: Any) -> SimpleNamespace:
        now[0] += (5 if calls else 8) + rounds
        calls.append(rounds)
        return SimpleNamespace(metrics=pd.DataFrame({"up-bytes": [float("nan"), *[8.0] * rounds]}))

    monkeypatch.setattr(secure_sum, "simulate", simulate)
    monkeypatch.setattr(secure_sum.time, "process_time", lambda: now[0])
    seconds, up = secure_sum.measure(2, 10, rounds=2)[:2]
    assert seconds == 1.0
    assert up == 4.0
    assert sorted(calls[1:]) == [1, 3]


def test_bytes_are_of_one_round() -> None:
    measurements = [
        secure_sum.measure(4, 10, rounds, secure_sum.SecureSum(neighbours=3)) for rounds in (1, 2)
    ]
    one, two = measurements
    assert two[1:] == one[1:]
    assert one.up > 30  # ten numbers of 24 bits
    assert one.down > 0

"""The baseline of benchmarks/asynchronous.py: its mean of all clients' last updates."""

from pathlib import Path

import asynchronous
import numpy as np
import pytest
from ace import Ace

from tests.engine.test_buffered import EVERYONE, LR, PROBLEM, UNEQUAL, W0, C, K, buffered, run
from tests.reference import asynchronous as reference


def test_ace(tmp_path: Path) -> None:
    """Weights and every client's last update, with a client ten times slower than most."""
    plain = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": 0.0, "lr": LR}
    plain |= {"precision": "float64", "local_steps": K, "batch_size": 0, "server_lr": 0.2}
    cohorts, seconds = [[*EVERYONE]] * 60, (*UNEQUAL[:3], 20.05, *UNEQUAL[4:])  # no two at once
    history = run(Ace(**plain, **buffered(tmp_path, seconds, buffer_size=1)), cohorts)
    expected = reference.run(
        *("ace", PROBLEM, W0, cohorts, seconds), **{"M": 5, "B": 1, "K": K, "lr": LR}, server_lr=0.2
    )
    np.testing.assert_allclose(history.weights, expected.w, rtol=0, atol=1e-10)
    assert max(map(max, expected.delays)) > 10
    for i in range(C):
        state = history.clients[i]
        D = np.zeros(PROBLEM.dim) if state is None else state.D.numpy()
        np.testing.assert_allclose(D, expected.memories[-1, i], rtol=0, atol=1e-10)


def test_rates_of_ace_and_fedavg_fall_equally_over_as_many_replies() -> None:
    whole = asynchronous.SETTINGS["lr-decay"] ** asynchronous.ROUNDS
    steps = asynchronous.ROUNDS * asynchronous.SCHEDULES["buffered"]["concurrency"]
    assert steps == 800
    assert whole == pytest.approx(0.998**80)
    assert (asynchronous.SETTINGS | asynchronous.ACE)["lr-decay"] ** steps == pytest.approx(whole)

"""Private runs on real SuperNodes whose server is killed: what is spent, and whose noise it is."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedaccord.federation.accounting import Accountant
from fedaccord.runs.checkpoint import Checkpoints
from tests.flower import conftest
from tests.flower.conftest import REPOSITORY, Flower, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1800)]

NODES, ROUNDS, EVERY, Z, DELTA = 3, 7, 3, 6.0, 1e-3
SETTINGS: dict[str, Any] = {
    **{"algo": "scaffold", "sampling": "bernoulli", "fraction-train": 1.0, "local-steps": 2},
    **{"dp.noise-multiplier": Z, "dp.delta": DELTA, "dp.clip": 0.1, "threads": 1, "device": "cpu"},
    **{"eval-every": 1, "checkpoint-every": EVERY, "num-server-rounds": ROUNDS, "name": "there"},
}


@pytest.mark.parametrize(("where", "sensitivity"), [("server", 1), ("client", 2)])
def test_a_killed_server_forgets_no_budget_and_repeats_no_noise(
    lab: Flower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, sensitivity: int
) -> None:
    """All clients are in all rounds: without noise the repeated rounds would have the same loss."""
    monkeypatch.setattr(conftest, "PATIENCE", 1700.0)
    lab.start_supernodes(*(f"partition-id={i} num-partitions={NODES}" for i in range(NODES)))
    config = SETTINGS | {"dp.where": where, "out-dir": str(tmp_path)}
    run, file = tmp_path / "there", tmp_path / "there" / "metrics.csv"

    first = lab.submit(REPOSITORY, config)
    wait_until(
        lambda: file.exists() and len(file.read_text().splitlines()) > EVERY + 2,
        *(f"{EVERY + 1} rounds", lab.log),
    )
    for pid in lab._descendants():
        with suppress(OSError):
            if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: lab._status(first).startswith("finished"), "the end", lab.log)
    before = pd.read_csv(file, index_col="round")
    end, base = before.index.max(), Checkpoints(run / "checkpoint").load().number
    assert EVERY <= base < end < ROUNDS
    assert spent(run) == end
    outcome = lab.run(REPOSITORY, config | {"resume": True})
    assert outcome.status == "finished:completed", outcome.output

    after, repeated = pd.read_csv(file, index_col="round"), range(base + 1, end + 1)
    assert (after.loc[:base, "test-loss"] == before.loc[:base, "test-loss"]).all()
    assert (after.loc[repeated, "test-loss"] != before.loc[repeated, "test-loss"]).all()
    cut_off = int(where == "client")  # devices may have sent uploads of the round
    total = end + cut_off + ROUNDS - base
    assert spent(run) == total
    account, ends = Accountant(Z / sensitivity, 1.0, DELTA), range(total - ROUNDS + base, total)
    expected = [account.epsilon(t + 1) for t in ends]
    assert after.loc[base + 1 :, "dp-epsilon"].tolist() == expected
    summary = json.loads((run / "summary.json").read_text())["dp"]
    assert (summary["epsilon"], summary["noise"]) == (expected[-1], "system")
    assert not (run / "clients.csv").exists() or pd.read_csv(run / "clients.csv").empty


def spent(run: Path) -> int:
    return int(json.loads((run / "privacy.json").read_text())["releases"])

"""A million registered clients: the rounds of a few, as fast and as small."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaccord import engine, recorded_run
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.run import Run
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.task import load_task
from fedaccord.task.task import COUNTED_CLIENTS

MILLION, FEW = 1_000_000, 50
COHORTS = [[3, 7, 41], [7, 8], [3, 8, 49], [0], [41, 7]]  # of the first clients
SETTINGS: dict[str, Any] = {
    **{"model": "linear", "precision": "float64", "partition": "dirichlet", "threads": 1},
    **{"samples-per-client": 12, "local-steps": 3, "batch-size": 4, "vectorize": "off"},
}


def begin(num_clients: int, cohorts: Any = None, **changes: Any) -> tuple[Run, LocalFleet]:
    config = RunConfig.make(SETTINGS | {"num-clients": num_clients} | changes)
    task, method = load_task(config.task, num_clients=num_clients), config.strategy
    initial, fleet = recorded_run.initial_arrays(task, method.model_settings), LocalFleet(task)
    run = Run(method, fleet, initial, len(COHORTS), cohorts=cohorts)
    run.begin()
    return run, fleet


def rounds(num_clients: int, algo: str) -> tuple[Run, LocalFleet]:
    run, fleet = begin(num_clients, COHORTS, algo=algo)
    for _ in COHORTS:
        assert run.train_round().metrics["dropped"] == 0
    return run, fleet


def state(run: Run) -> dict[str, Tensor]:
    return {"w": run.state.w, **dict(leaves(run.state.server))}


@pytest.mark.parametrize("algo", ["fedavg", "fedinit", "fedcm", "fedadam", "afedpd"])
def test_who_is_never_there_does_not_count(algo: str) -> None:
    """The same cohorts of fifty and of a million: the same bits, where P/C does not matter."""
    few, many = state(rounds(FEW, algo)[0]), state(rounds(MILLION, algo)[0])
    assert few.keys() == many.keys()
    assert all(torch.equal(v, many[name]) for name, v in few.items())


@pytest.mark.parametrize(
    ("algo", "mean", "own"), [("scaffold", "c", "c_i"), ("feddyn", "lam_bar", "lam")]
)
def test_the_servers_memory_is_the_mean_over_a_million(algo: str, mean: str, own: str) -> None:
    """Those that were never there hold zero: the sum over the six others, divided by C."""
    for num_clients in (FEW, MILLION):
        run, fleet = rounds(num_clients, algo)
        assert fleet.store.clients() == sorted({i for cohort in COHORTS for i in cohort})
        states = [fleet.store.load(i).latest.state for i in fleet.store.clients()]
        vectors = [dict(leaves(state))[own] for state in states]
        memory = dict(leaves(run.state.server))[mean]
        expected = sum(vectors, torch.zeros_like(vectors[0])) / num_clients
        torch.testing.assert_close(memory, expected, rtol=1e-9, atol=1e-18)
        assert memory.abs().max() > 0


@pytest.mark.parametrize(
    ("algo", "sampling"),
    [
        ("fedavg", "fixed"),
        ("scaffold", "bernoulli"),
        ("afedpd", "fixed"),
        ("feddeper", "bernoulli"),
    ],
)
def test_a_round_makes_no_list_of_all_clients(algo: str, sampling: str) -> None:
    """Of what Python and NumPy allocate; PyTorch copies `RoundState.accepted`, 8 bytes a client."""
    share = 20 / MILLION
    more = {"algo": algo, "sampling": sampling, "fraction-train": share}
    run, _ = begin(MILLION, **more)
    run.train_round()
    tracemalloc.start()
    try:
        for _ in range(2):
            assert 3 < run.train_round().metrics["replies"] < 60
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MILLION


def test_a_run_of_a_million_clients_is_written_and_goes_on(tmp_path: Path) -> None:
    """Tables, a checkpoint and the states of the clients that took part, and of no others."""
    more = {"num-clients": MILLION, "fraction-train": 5 / MILLION, "out-dir": str(tmp_path)}
    more |= {"algo": "scaffold", "vectorize": "auto", "client-state": "disk", "name": "parts"}
    with engine.quiet():
        engine.run(RunConfig.make(SETTINGS | more | {"num-server-rounds": 2}))
        config = RunConfig.make(SETTINGS | more | {"num-server-rounds": 3, "resume": True})
        path = engine.run(config).path
    checkpoint = Checkpoints(path / "checkpoint").load()
    assert checkpoint.number == 3
    assert len(checkpoint.clients) == 15
    assert len(checkpoint.server["accepted"]) == MILLION
    assert int((checkpoint.server["accepted"] >= 0).sum()) == 15
    assert len((path / "classes.csv").read_text().splitlines()) == 1 + COUNTED_CLIENTS

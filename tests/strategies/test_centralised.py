"""Centralised training: SGD on all data, in the steps of one client."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedaccord import engine, simulate
from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.federation.settings import Settings
from fedaccord.strategies import SAM, Gossip, RelaxedInit
from tests.federation import half_square, linear
from tests.reference import centralised
from tests.reference.problem import LeastSquares
from tests.strategies.federate import close, federate

C, T, K = 8, 10, 3
LEAST_SQUARES = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=LEAST_SQUARES.dim)
SETTINGS: dict[str, Any] = {"lr": 0.02, "lr_decay": 0.95, "weight_decay": 0.05, "clip_norm": 5.0}


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_equals_sgd_on_the_union(rho: float) -> None:
    expected = centralised.run(LEAST_SQUARES, W0, T, local_steps=K, sam_rho=rho, **SETTINGS)
    method = S.Centralised(
        plugins=(SAM(rho=rho),), precision="float64", local_steps=K, batch_size=0, **SETTINGS
    )
    history = federate(method, centralised.union(LEAST_SQUARES), W0, [[0]] * T)
    close(history.weights, expected.weights)


def test_simulate_pools_the_samples_of_all_clients() -> None:
    """By name and by a strategy: whatever number of clients the samples came from."""
    more: dict[str, Any] = SETTINGS | {"local_steps": K, "batch_size": 0}
    expected = centralised.run(LEAST_SQUARES, W0, T, local_steps=K, **SETTINGS)
    of: dict[str, Any] = {
        "clients": LEAST_SQUARES.clients(),
        "model": linear(W0),
        "loss": half_square,
        "rounds": T,
        "record": "weights",
    }
    by_name = simulate("centralised", dtype=torch.float64, **of, **more)
    assert by_name.weights is not None
    close(by_name.weights, expected.weights)
    strategy = simulate(S.Centralised(precision="float64", **more), **of)
    assert strategy.weights is not None
    assert torch.equal(strategy.weights, by_name.weights)
    assert len(by_name.clients) == 1


@pytest.mark.parametrize(
    ("own", "clients", "expected"),
    [
        ({"local_steps": 7}, 20, 7),
        ({"local_epochs": 5, "batch_size": 50}, 20, 10),  # ceil(1438 / 20 / 50) = 2
        ({"local_epochs": 1, "batch_size": 50}, 1, 29),
        ({"local_epochs": 3, "batch_size": 0}, 20, 3),  # a step an epoch
        ({"local_epochs": 3, "batch_size": 0}, 1, 3),
    ],
)
def test_a_round_takes_the_steps_of_a_client(
    own: dict[str, Any], clients: int, expected: int
) -> None:
    assert Settings(**own).mean_steps(1438, clients) == expected


def test_a_run_has_one_client_with_all_samples_and_a_clients_steps(tmp_path: Path) -> None:
    """As many steps as a client of the same federation takes, where all hold equally many."""
    same = {"num-clients": 16, "local-epochs": 2, "num-server-rounds": 2, "threads": 1}
    same |= {"out-dir": str(tmp_path), "partition": "iid"}
    for algo in ("centralised", "fedavg"):
        with engine.quiet():
            engine.run(RunConfig.make(same | {"algo": algo, "name": algo}))
    one, many = (pd.read_csv(tmp_path / name / "clients.csv") for name in ("centralised", "fedavg"))
    assert set(one["client"]) == {0}
    assert set(one["num-examples"]) == {1438}
    assert {*one["steps"]} == {*many["steps"]} == {4}


def test_what_makes_no_sense_is_refused() -> None:
    for plugin in (Gossip(), RelaxedInit(beta=0.1), S.Robust(rule="median")):
        with pytest.raises(ValueError, match=f"(?i){type(plugin).__name__}"):
            S.Centralised(plugins=(plugin,))
    with pytest.raises(ValueError, match=r"expected one client.*got 20.*num-supernodes=1"):
        S.Centralised().check_clients(20)


def test_settings_of_a_partition_are_told_to_be_unread() -> None:
    given = {"algo": "centralised", "dirichlet-alpha": 0.1, "fraction-train": 0.1}
    config = RunConfig.make(given | {"num-clients": 100, "local-steps": 5})
    assert config.num_clients == 1
    lines = config.unread()
    assert [line.partition("=")[0] for line in lines] == [
        *("num-clients", "dirichlet-alpha", "fraction-train")
    ]
    assert all("one client with all training data" in line for line in lines)
    by_epochs = RunConfig.make({"algo": "centralised", "num-clients": 100})
    assert by_epochs.unread() == []  # it divides an epoch

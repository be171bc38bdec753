"""What a method costs: the published table, what it says of itself, and what a run counts."""

from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.core.vectors import leaves, nbytes
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import METHODS, SAM, RelaxedInit
from fedaccord.task.solver import takes_one_gradient

# ALGORITHMS, section 1, in vectors of d: down, up, gradients a local step, client, server
TABLE = {
    "fedavg": (1, 1, 1, 0, 1),
    "fedinit": (1, 1, 1, 1, 1),
    "fedprox": (1, 1, 1, 0, 1),
    "fedavgm": (1, 1, 1, 0, 2),
    "fedadam": (1, 1, 1, 0, 3),
    "fedyogi": (1, 1, 1, 0, 3),
    "fedadagrad": (1, 1, 1, 0, 2),
    "fednova": (1, 1, 1, 0, 1),
    "fedsam": (1, 1, 2, 0, 1),
    "fedlesam": (1, 1, 1, 1, 1),
    "scaffold": (2, 2, 1, 1, 2),
    "fedgamma": (2, 2, 2, 1, 2),
    "fedcm": (2, 1, 1, 0, 2),
    "mofedsam": (2, 1, 2, 0, 2),
    "feddeper": (1, 1, 2, 1, 1),
    "fedpd": (1, 1, 1, 3, 1),
    "fedadmm": (1, 1, 1, 2, 1),
    "feddyn": (1, 1, 1, 1, 2),
    "fedspeed": (1, 1, 2, 1, 2),
    "fedsmoo": (2, 2, 2, 2, 3),
    "afedpd": (2, 1, 1, 1, 2),
    "afedpdsam": (2, 1, 2, 1, 2),
    "local": (0, 1, 1, 1, 2),
    # without a server: what the relay sees
    "dpsgd": (1, 1, 1, 0, 1),
    "dfedavg": (1, 1, 1, 0, 1),
    "dfedavgm": (1, 1, 1, 0, 1),
    "dfedsam": (1, 1, 2, 0, 1),
    "dfedsam-mgs": (1, 1, 2, 0, 1),
    "dispfl": (1, 2, 1, 2, 1),
}
C, K = 5, 2
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in METHODS} | {
    "fednova, ri": ("fednova", {"plugins": (RelaxedInit(),)}),
    "fedcm, ri": ("fedcm", {"plugins": (RelaxedInit(),)}),
    "feddyn, ri around the start": ("feddyn", {"plugins": (RelaxedInit(center="start"),)}),
    "scaffold, ri and sam": ("scaffold", {"plugins": (RelaxedInit(), SAM())}),
    "dispfl, random": ("dispfl", {"regrow": "random"}),
    "fedspeed, paper": ("fedspeed", {"variant": "paper"}),
    "fedadagrad, beta1": ("fedadagrad", {"beta1": 0.5}),
    "scaffold, gossip": ("scaffold", {"plugins": (S.Gossip(),)}),
    "scaffold, adamw": ("scaffold", {"optimizer": "adamw"}),
    "scaffold, adamw kept": ("scaffold", {"optimizer": "adamw", "optimizer_state": "keep"}),
    "fedavg, muon average": ("fedavg", {"optimizer": "muon", "optimizer_state": "average"}),
    "fedcm, momentum": ("fedcm", {"optimizer": "momentum"}),
}


class Linear(nn.Linear):
    """A layer that counts its training passes."""

    passes: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        Linear.passes += self.training
        return super().forward(x)


def make(name: str, **own: Any) -> FederatedStrategy:
    steps = 1 if name == "dpsgd" else K
    return METHODS[name](local_steps=steps, batch_size=4, lr=0.05, fraction_train=1.0, **own)


def clients() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 6, generator=g), torch.arange(8) % 3) for _ in range(C)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_costs_what_the_table_says(name: str) -> None:
    """Of a method that is not in the table its reference says so, as ``COST``."""
    if name not in TABLE:
        expected = import_module(f"tests.reference.{name.replace('-', '_')}").COST
    else:
        expected = TABLE[name]
    assert tuple(make(name).cost) == expected


@pytest.mark.parametrize("label", VARIANTS)
def test_a_run_costs_what_the_method_says(label: str) -> None:
    """Vectors, passes and memory of clients that return after they missed a round."""
    name, own = VARIANTS[label]
    method = make(name, **own)
    cost, everyone = method.cost, method.all_clients or method.topology.is_decentralised
    cohorts = None if everyone else [[0, 1, 2], [2, 3, 4], [0, 1]]
    Linear.passes, rows = 0, list[dict[str, Any]]()
    history = simulate(
        method,
        clients=clients(),
        model=Linear(6, 3),
        rounds=3,
        participation=cohorts,
        record="weights",
        on_round=lambda round: rows.extend(round.clients),
    )
    size = history.weights.shape[-1] * history.weights.itemsize
    last = history.metrics.iloc[-1]
    assert last["replies"] == (C if everyone else 2)
    assert (history.metrics["dropped"][1:] == 0).all()

    state = history.state
    steps = sum(row["steps"] for row in rows)
    regrowth = len(rows) if label == "dispfl" else 0  # one a client a round
    trial = 1  # before round 1
    assert Linear.passes == trial + cost.gradients * steps + regrowth
    assert takes_one_gradient(method.client_half()) == (Linear.passes == trial + steps)
    assert last["down-vectors"] / last["replies"] == cost.down
    assert last["up-vectors"] / last["replies"] == cost.up
    states = [state for state in history.clients if state is not None]
    assert {nbytes(state) // size for state in states} == {cost.client}  # and a number of steps
    past = getattr(state.server, "lam_bar_after", {})  # A-FedPD: lam_bar after past rounds
    vectors = {
        v.data_ptr(): v
        for key, v in (*leaves(state.server), *leaves(state.moments))
        if not key.startswith("lam_bar_after.")
    }
    assert 1 + len(vectors) == cost.server
    assert all(v.shape == state.w.shape for v in vectors.values())
    assert sorted(past) == ([1, 2] if past else [])  # rounds in which some client was last seen


@pytest.mark.parametrize("name", ["fedinit", "fedadmm", "feddeper"])
def test_a_first_visit_after_round_1_is_sent_w_0(name: str) -> None:
    cohorts = [[0, 1], [1, 2], [1, 2]]
    history = simulate(
        make(name), clients=clients(), model=Linear(6, 3), rounds=3, participation=cohorts
    )
    assert list(history.metrics["down-vectors"][1:]) == [2, 3, 2]

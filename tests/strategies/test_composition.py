"""Every method with every plug-in, and what it costs, counted."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedaccord import records
from fedaccord.config import RunConfig
from fedaccord.engine import History, Recorder, simulate
from fedaccord.strategies import METHODS, SAM, DFedAvg, Gossip, RelaxedInit
from fedaccord.strategies.base import FederatedStrategy, PlugIn
from fedaccord.task import load_task

C, P, T = 5, 3, 3
PLUGINS: dict[str, tuple[PlugIn | Gossip, ...]] = {
    "none": (),
    "ri": (RelaxedInit(beta=0.1),),
    "sam": (SAM(rho=0.05),),
    "ri+sam": (RelaxedInit(beta=0.1), SAM(rho=0.05)),
    "gossip": (Gossip(topology="full"),),
    "ri+sam+gossip": (RelaxedInit(beta=0.1), SAM(rho=0.05), Gossip(topology="full")),
}
NO_SAM = ["fedlesam", "fedsmoo", "dispfl"]
NO_RI = ["dispfl"]
NO_GOSSIP = [
    *("fedadam", "fedyogi", "fedadagrad", "fednova", "fedsmoo"),
    *("fedpd", "afedpd", "afedpdsam"),
]
REFUSED = {
    (METHODS[name], plugins)
    for plugins in PLUGINS
    for refusing, plugin in ((NO_SAM, "sam"), (NO_RI, "ri"), (NO_GOSSIP, "gossip"))
    for name in refusing
    if plugin in plugins.split("+")
}


class Linear(nn.Linear):
    """Softmax regression that counts its training passes."""

    passes: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        Linear.passes += self.training
        return super().forward(x)


def digits() -> list[tuple[Tensor, Tensor]]:
    """Five clients with 40 of scikit-learn's digits each."""
    task = load_task(**RunConfig.make({"partition": "iid"}).task(), num_clients=30)
    samples = [task.clients.samples(i) for i in range(C)]
    return [(task.prepare(x, torch.float32).flatten(1), y) for x, y in samples]


def make(kind: type[FederatedStrategy], plugins: tuple[PlugIn | Gossip, ...]) -> FederatedStrategy:
    full = kind.__name__ == "FedPD"
    if issubclass(kind, DFedAvg) and not any(isinstance(p, Gossip) for p in plugins):
        plugins = (*plugins, Gossip())
    return kind(fraction_train=1.0 if full else P / C, batch_size=16, plugins=plugins)


def federate(strategy: FederatedStrategy, rounds: int = T) -> History:
    torch.manual_seed(0)
    return simulate(
        strategy, clients=digits(), model=Linear(64, 10), rounds=rounds, record="weights"
    )


@pytest.mark.parametrize("plugins", PLUGINS)
@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_every_method_with_every_plugin(kind: type[FederatedStrategy], plugins: str) -> None:
    """Finite and reproducible weights, another path with each plug-in."""
    if (kind, plugins) in REFUSED:
        with pytest.raises(ValueError, match=r"cannot take \w+: \w+"):
            make(kind, PLUGINS[plugins])
        return
    first, second = (federate(make(kind, PLUGINS[plugins])) for _ in range(2))
    assert torch.isfinite(first.weights).all()
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.weights[0], first.weights[-1])
    assert (first.metrics["dropped"][1:] == 0).all()
    if plugins != "none":
        plain = federate(make(kind, ()))
        assert not torch.equal(first.weights, plain.weights)


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_beta_0_and_rho_0_are_the_bare_method_bit_for_bit(kind: type[FederatedStrategy]) -> None:
    off: tuple[PlugIn | Gossip, ...] = (Gossip(topology="none"),) if kind.refuses == {} else ()
    if issubclass(kind, DFedAvg):
        off = ()
    if (kind, "ri") not in REFUSED:
        off += (RelaxedInit(beta=0.0),)
    if (kind, "sam") not in REFUSED:
        off += (SAM(rho=0.0),)
    assert torch.equal(federate(make(kind, off)).weights, federate(make(kind, ())).weights)


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_costs_are_what_the_table_says(kind: type[FederatedStrategy]) -> None:
    """Counted in a run of the method as configured by default."""
    default = RunConfig.make(
        {"algo": next(n for n, k in METHODS.items() if k is kind)}
        | ({"fraction-train": 1.0} if kind.__name__ == "FedPD" else {})
    )
    strategy = default.build_strategy()
    strategy.batch_size = 16
    if kind.__name__ != "FedPD":
        strategy.participation = [[0, 1, 2], [2, 3, 4], [0, 1]]
    Linear.passes = 0
    found = federate(strategy)
    d = found.weights.shape[-1]
    cost, last = kind.cost, found.metrics.iloc[-1]

    steps = sum(row["steps"] for row in rows(strategy))
    regrowth = len(rows(strategy)) if kind.__name__ == "DisPFL" else 0  # one a client a round
    assert Linear.passes == cost.gradients * steps + regrowth
    down = last["down-vectors"] / last["replies"]
    up = last["up-vectors"] / last["replies"]
    wanted_up = cost.up + (
        1
        if kind.__name__ in ("FedCM", "MoFedSAM")
        and strategy.plugins
        and isinstance(strategy.plugins[0], RelaxedInit)
        else 0
    )
    assert (down, up) == (cost.down, wanted_up)
    states = [s for s in found.clients if s is not None]
    assert {records.size(records.pack(s))[0] / d for s in states} == {cost.client}
    server = {v.data_ptr(): v for v in vectors(strategy.state)}
    if hasattr(strategy.state, "seen"):  # A-FedPD: lam_bar after each distinct last round
        kept = {v.data_ptr() for v in strategy.state.seen.values()}
        assert len(kept) == len({0, 1, 2} & set(strategy.state.seen)) <= T
        server = {p: v for p, v in server.items() if p not in kept or v is strategy.state.lam_bar}
    assert 1 + len(server) == cost.server
    assert all(v.numel() == d * (C if strategy.gossip else 1) for v in server.values())


def rows(strategy: FederatedStrategy) -> list[dict[str, Any]]:
    recorder = strategy.on_round
    assert isinstance(recorder, Recorder)
    return recorder.client_rows


def vectors(state: Any) -> list[Tensor]:
    found = []
    for value in state:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += value.values()
    return found


def test_plugin_order_does_not_matter() -> None:
    ri, sam = RelaxedInit(beta=0.1), SAM(rho=0.05)
    kind = METHODS["scaffold"]
    a, b = federate(make(kind, (ri, sam))), federate(make(kind, (sam, ri)))
    assert torch.equal(a.weights, b.weights)
    np.testing.assert_array_equal(a.clients[0].last, b.clients[0].last)


@pytest.mark.parametrize("algo", ["afedpd", "afedpdsam", "fedlesam"])
def test_methods_whose_anchor_cannot_move_say_so(algo: str) -> None:
    keys = {"algo": algo, "relaxed-init.beta": 0.1, "relaxed-init.center": "start"}
    with pytest.raises(ValueError, match=r"cannot take RelaxedInit\.center=start: [a-z]"):
        RunConfig.make(keys).build_strategy()

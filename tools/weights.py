"""The weights of every method, bit for bit: record them before a change, compare them after it.

    python tools/weights.py record FILE      # ten rounds of every method, plain and with plug-ins
    python tools/weights.py compare FILE     # the same again; exit 1 if a bit changed

Digits, a network of two layers, six clients of unequal size under partial participation (all of
them if the method needs that, and without a server), float32 and float64, one thread. FILE is valid
for one machine and one version of PyTorch only: sums differ between processors.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord.data import datasets
from fedaccord.strategies import METHODS

ROUNDS = 10
SIZES = (40, 24, 33, 16, 52, 28)
COHORTS = [[0, 1, 2], [2, 3], [0, 4, 5], [1, 5], [0, 1, 3], [2, 4], [0, 5], [1, 2, 3], [4], [0, 3]]
RI, SAM, GOSSIP = {"relaxed-init.beta": 0.1}, {"sam.rho": 0.05}, {"gossip.topology": "ring"}
PLUGINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ri": RI,
    "sam": SAM,
    "gossip": GOSSIP,
    "ri+sam": RI | SAM,
    "ri+sam+gossip": RI | SAM | GOSSIP,
    "ri off, sam off": {"relaxed-init.beta": 0, "sam.rho": 0.0},
    "ri current": RI | {"relaxed-init.first-visit": "current"},
    "ri start": RI | {"relaxed-init.center": "start"},
    "gossip twice": GOSSIP | {"gossip.steps": 2},
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"weighting": "examples"}, {"fedavg.server-lr": 0.7}],
    "fedinit": [{"fedinit.server": "updates"}],
    "fedadam": [{"fedadam.beta1": 0.0}, {"fedadam.v0": 0.0}],
    "fedadagrad": [{"fedadagrad.beta1": 0.3}],
    "fednova": [{"weighting": "examples"}],
    "fedcm": [{"fedcm.decay": "inside"}],
    "fedpd": [{"fedpd.p": 0.5}, {"fedpd.local-init": "own"}],
    "fedadmm": [{"fedadmm.variant": "active"}],
    "fedspeed": [{"fedspeed.variant": "paper"}, {"fedspeed.mix": 0.6}],
    "afedpd": [{"weighting": "examples"}],
    "dpsgd": [{"dpsgd.variant": "atc"}],
    "dispfl": [{"dispfl.regrow": "random"}, {"dispfl.density": 0.2}],
}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, method, keys) of every combination; the refused ones among them."""
    for algo in METHODS:
        for plugins, keys in PLUGINS.items():
            yield f"{algo} | {plugins}", algo, keys
        for keys in VARIANTS.get(algo, []):
            yield f"{algo} | {keys}", algo, keys


Own = list[tuple[Tensor, Tensor]]  # samples and classes of each client


def clients() -> Own:
    data = datasets.load("digits")
    x = data.x_train.double().flatten(1) / 255
    n = sum(SIZES)
    return list(zip(x[:n].split(SIZES), data.y_train[:n].split(SIZES), strict=True))


def network(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        layers = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    return layers.to(dtype)


def weights(algo: str, keys: dict[str, Any], own: Own, dtype: torch.dtype) -> Tensor | str:
    """(T+1, ..., d), or why the combination is refused; own: of each client."""
    method = METHODS[algo](fraction_train=1.0)
    everyone = method.all_clients or method.topology.is_decentralised or "gossip.topology" in keys
    local = {} if "local_epochs" in method.replaces else {"local-epochs": 2}
    try:
        history = simulate(
            algo,
            clients=[(x.to(dtype), y) for x, y in own],
            model=network(dtype),
            rounds=ROUNDS,
            participation=1.0 if everyone else COHORTS,
            dtype=dtype,
            record="weights",
            **{"batch-size": 8, "clip-norm": 1.5, **local, **keys},
        )
    except (TypeError, ValueError) as error:
        if not keys:
            raise
        return str(error)
    assert history.weights is not None
    return history.weights


def record() -> dict[str, Tensor | str]:
    torch.set_num_threads(1)
    own = clients()
    return {
        f"{name} | {dtype}": weights(algo, keys, own, dtype)
        for name, algo, keys in cases()
        for dtype in (torch.float32, torch.float64)
    }


def moved(before: dict[str, Tensor | str], after: dict[str, Tensor | str]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
            if not torch.equal(old, new):
                distance = (old - new).abs().max() / old.abs().max()
                yield f"{name}: moved by {float(distance):.1e} of the largest weight"
        elif type(old) is not type(new) or isinstance(old, Tensor):
            yield f"{name}: {_text(old)} before, {_text(new)} after"


def _text(value: Any) -> str:
    return f"weights {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    file = Path(sys.argv[2])
    now = record()
    refused = sum(isinstance(value, str) for value in now.values())
    count = f"{len(now)} cases, {refused} of them refused"
    if sys.argv[1] == "record":
        torch.save(now, file)
        print(f"{count}, in {file}")
        return
    lines = sorted(moved(torch.load(file), now))
    print("\n".join(lines) or f"{count}, every bit as before")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()

"""Every method with the plug-ins that it takes, and some with other optimisers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fedaccord.core.plugin import PlugIn
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.sam import SAM
from fedaccord.strategies import METHODS

PLUGINS: dict[str, tuple[PlugIn, ...]] = {
    "bare": (),
    "ri": (RelaxedInit(beta=0.1),),
    "ri-start": (RelaxedInit(beta=0.1, center="start", first_visit="current"),),
    "sam": (SAM(rho=0.05),),
    "sam+ri": (SAM(rho=0.05), RelaxedInit(beta=0.1)),
    "sam+ri+gossip": (SAM(rho=0.05), RelaxedInit(beta=0.1), Gossip(topology="full")),
}
STEPS: dict[str, dict[str, Any]] = {
    "momentum-average": {"optimizer": "momentum", "optimizer_state": "average"},
    "adamw-keep": {"optimizer": "adamw", "optimizer_state": "keep"},
    "ri+muon-average": {
        "optimizer": "muon",
        "optimizer_state": "average",
        "plugins": PLUGINS["ri"],
    },
}
LOSSY: dict[str, tuple[PlugIn, ...]] = {
    "topk": (Compress(method="topk", share=0.4),),
    "topk-feedback+ri": (
        RelaxedInit(beta=0.1),
        Compress(method="topk", share=0.4, error_feedback="true"),
    ),
    "qsgd": (Compress(method="qsgd"),),
    "rounded": (Broadcast(dtype="bf16"),),
    "rounded+topk": (Broadcast(dtype="int8"), Compress(method="topk", share=0.4)),
}


def make(name: str, parts: str) -> FederatedStrategy:
    """parts: a key of `PLUGINS`, of `STEPS` or of `LOSSY`."""
    more = STEPS.get(parts) or {"plugins": (PLUGINS | LOSSY)[parts]}
    return METHODS[name](fraction_train=1.0, precision="float64", **more)


def taken(name: str, plugins: str) -> bool:
    try:
        make(name, plugins)
    except ValueError:
        return False
    return True


COMBINATIONS = [(name, plugins) for name in METHODS for plugins in PLUGINS if taken(name, plugins)]
COMBINATIONS += [
    (name, steps)
    for name in ("scaffold", "fedcm", "feddyn", "fedinit", "dfedavg")
    for steps in STEPS
    if taken(name, steps)
]
COMPRESSED = [
    *((name, "topk") for name in ("fedavg", "scaffold", "feddyn", "afedpd", "fedadmm", "fedsmoo")),
    *((name, "topk-feedback+ri") for name in ("fedavg", "fedcm", "scaffold")),
    ("scaffold", "qsgd"),
    ("feddyn", "rounded"),
    *((name, "rounded+topk") for name in ("fedinit", "scaffold", "afedpd")),
]


def all_or_slow(cases: Sequence[tuple[str, str]]) -> list[Any]:
    """All cases; one of each method is not slow: that with the least seen plug-ins so far."""
    seen: Counter[str] = Counter()
    chosen = set()
    for method in dict.fromkeys(name for name, _ in cases):
        case = min((it for it in cases if it[0] == method), key=lambda it: seen[it[1]])
        seen[case[1]] += 1
        chosen.add(case)
    slow = pytest.mark.slow
    return [case if case in chosen else pytest.param(*case, marks=slow) for case in cases]

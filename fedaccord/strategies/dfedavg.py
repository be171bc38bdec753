"""DFedAvg: Decentralized Federated Averaging.

Sun, Li, Wang. IEEE TPAMI 2023, arXiv:2104.11375, Algorithm 1 without momentum.

    node    w <- w - lr g_i(w)                        K steps from x_i^t; z_i = w_{i,K}
    gossip  x_i^{t+1} = sum over j of W_ij z_j        see gossip.py

With W = 11^T/m it is FedAvg at full participation.

When to use: as the baseline of every decentralised method, and if a node can afford one gradient
a step and one model per link and round. Its fixed point is biased as FedAvg's is, more so on sparse
graphs.

Where we differ: all nodes start from one model, so only the graph distinguishes it from FedAvg. The
paper's momentum is dfedavgm.py; its quantised messages are not implemented.
"""

from dataclasses import dataclass
from typing import Any

from fedaccord.core import Cohort, LocalRule, Model, PlugIn, Vector
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.fedavg import FedAvgClient


@dataclass(frozen=True, kw_only=True)
class DFedAvg(FederatedStrategy):
    assumes_sgd = False
    linear = True
    beyond_sums = "each node's model, as there is no server"
    cost_note = "the relay's; between peers 1 each way per link and gossip step"

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (Gossip(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.topology.is_decentralised:
            raise ValueError(
                f"gossip.topology: expected a graph for {type(self).__name__}, got none; use "
                "fedavg or fedsam for a server's mean"
            )

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        return cohort.mean(ups.w), state  # z, which gossip mixes

"""D-PSGD: Can Decentralized Algorithms Outperform Centralized Algorithms?

Lian, Zhang, Zhang, Hsieh, Zhang, Liu. NeurIPS 2017, arXiv:1705.09056, Algorithm 1.

    lian    x_i^{t+1} = sum over j of W_ij x_j^t - lr g_i(x_i^t)      the gradient before mixing
    atc     x_i^{t+1} = sum over j of W_ij (x_j^t - lr g_j(x_j^t))    adapt, then combine

One local step a round, whatever local-epochs says. atc is DFedAvg with one local step.

When to use: where communication is cheap beside a gradient, as between machines of one network. One
step between two mixings leaves no room for client drift, and takes the most rounds.

Where we differ: not from the paper with lian. Comparisons in later papers use atc, or let dpsgd
train whole epochs, which is dfedavg. Under relaxed initialisation, which the paper does not have,
the gradient is at the relaxed start and lian still mixes x_j: the relaxation, like the gradient,
reaches the neighbours a round later.
"""

from dataclasses import dataclass
from typing import Any

from fedaccord.strategies.base import Model, Nodes, Vector
from fedaccord.strategies.dfedavg import DFedAvg
from fedaccord.strategies.gossip import Network
from fedaccord.strategies.options import option


@dataclass(kw_only=True, eq=False)
class DPSGD(DFedAvg):
    variant: str = option("lian", "mix before or after the step", choices=("lian", "atc"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps > 1:
            raise ValueError(
                f"local-steps: dpsgd takes one step a round, got {self.local_steps}; take dfedavg "
                "for more"
            )
        self.local_steps = 1

    def aggregate_nodes(
        self, w: Vector, ups: Model, state: Any, cohort: Nodes, network: Network
    ) -> tuple[Vector, Any]:
        if self.variant == "atc":
            return super().aggregate_nodes(w, ups, state, cohort, network)
        step = cohort.mean(ups.w) - w  # -lr g_i(x_i), and the relaxation where there is one
        return network.mix(w.clone()).add_(step), state

"""D-PSGD: Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu. NeurIPS 2017, arXiv:1705.09056, Algorithm 1.

    lian    x_i^{t+1} = sum over j of W_ij x_j^t - lr g_i(x_i^t)      the gradient before mixing
    atc     x_i^{t+1} = sum over j of W_ij (x_j^t - lr g_j(x_j^t))    adapt, then combine

One local step a round, whatever local-epochs says. atc is DFedAvg with one local step.

When to use: if communication is cheap compared with a gradient, as between machines of one network.
One step between two mixings allows no client drift, and needs the most rounds.

Where we differ: lian follows the paper. Comparisons in later papers use atc, or let dpsgd
train whole epochs, which is dfedavg. Under relaxed initialisation, which the paper does not have,
the gradient is at the relaxed start and lian still mixes x_j: the relaxation, like the gradient,
reaches the neighbours a round later.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import Any, ClassVar

from fedaccord.core import Cohort, Model, Vector, option
from fedaccord.plugins.gossip import Network
from fedaccord.strategies.dfedavg import DFedAvg


@dataclass(frozen=True, kw_only=True)
class DPSGD(DFedAvg):
    replaces: ClassVar = {"local_epochs": "dpsgd takes one step a round"}

    variant: str = option("lian", "mix before or after the step", choices=("lian", "atc"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps > 1:
            raise ValueError(
                f"local-steps: dpsgd takes one step a round, got {self.local_steps}; use dfedavg "
                "for more"
            )

    def steps_of_round(self, t: int) -> int:
        return 1

    def aggregate_nodes(
        self, w: Vector, ups: Model, state: Any, cohort: Cohort, network: Network
    ) -> tuple[Vector, Any]:
        z = cohort.mean(ups.w)
        if self.variant == "atc":
            return network.mix(z), state
        return network.mix(w).add_(z - w), state  # z - w: -lr g_i(x_i), and the relaxation

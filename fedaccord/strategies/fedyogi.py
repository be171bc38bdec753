"""FedYogi: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021, arXiv:2003.00295,
Algorithm 2.

    as FedAdam (see fedadam.py), with   v <- v - (1 - beta2) D^2 sign(v - D^2)

When to use: as FedAdam, if v should not forget a large update soon. v changes by at most
(1 - beta2) D^2 a round, so the rate of a coordinate rises slowly after it. Costs, fixed points and
the reason for the defaults are FedAdam's.

Where we differ: as in fedadam.py, v starts at tau^2 (v0), without bias correction.
"""

from dataclasses import dataclass

import torch

from fedaccord.core import Vector, option
from fedaccord.strategies.fedadam import Adaptive


@dataclass(frozen=True, kw_only=True)
class FedYogi(Adaptive):
    beta2: float = option(0.99, "decay of the second moment", low=0, high=1)

    def second_moment(self, v: Vector, D: Vector) -> Vector:
        return v - (1 - self.beta2) * D**2 * torch.sign(v - D**2)

"""FedAdagrad: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021, arXiv:2003.00295,
Algorithm 2.

    as FedAdam (see fedadam.py), with   v <- v + D^2   and beta1 = 0

When to use: as FedAdam, with rates that only fall. v never decreases, which suits sparse problems
and short runs; in long runs the steps vanish. Without momentum (beta1 = 0) the server keeps two
vectors.

Where we differ: as in fedadam.py, v starts at tau^2 (v0). beta1 above 0 adds the first moment. On
CIFAR-10 the paper has server_lr 0.1 with a smaller local rate; the default is FedAdam's.
"""

from dataclasses import dataclass

from fedaccord.core import Vector, option
from fedaccord.strategies.fedadam import Adaptive


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Adaptive):
    cost_note = "server 3 with beta1 above 0"

    beta1: float = option(0.0, "decay of the first moment", low=0, high=1)

    def second_moment(self, v: Vector, D: Vector) -> Vector:
        return v + D**2

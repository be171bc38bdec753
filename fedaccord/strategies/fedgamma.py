"""FedGamma: SCAFFOLD with SAM (see scaffold.py and sam.py).

Dai, Yang, Sun, Shen, Tian, Wang, Zhang: FedGAMMA: Federated Learning with Global Sharpness-Aware
Minimization. IEEE TNNLS 2023, doi:10.1109/TNNLS.2023.3304453.

    client  w <- w - lr (g_i(w + rho g_i(w) / ||g_i(w)||) - c_i + c)

When to use: as SCAFFOLD, if a flatter minimum is worth twice the gradients. Clients keep c_i and
should return; traffic is twice FedAvg's both ways, which points to cross-silo federations. The
radius costs SCAFFOLD its exactness, so it is kept small.

Where we differ: as in scaffold.py and sam.py; c_i comes from the displacement, as in option II.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.scaffold import Scaffold


@dataclass(frozen=True, kw_only=True)
class FedGamma(Scaffold):
    rho: float = argument(0.01, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.rho),)

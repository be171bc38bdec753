"""FedGamma: SCAFFOLD with SAM (see scaffold.py and sam.py).

Dai, Yang, Sun, Liu, Tian, Wang, Tao: FedGAMMA: Federated Learning with Global Sharpness-Aware
Minimization. IEEE TNNLS 2023, IEEE document 10269141.

    client  w <- w - lr (g_i(w + rho g_i(w) / ||g_i(w)||) - c_i + c)

When to use: as SCAFFOLD, where a flatter minimum is worth twice the gradients. Clients keep c_i and
should come back; traffic is twice FedAvg's both ways, which points to cross-silo federations. The
radius costs SCAFFOLD its exactness, so it is kept small.

Where we differ: as in scaffold.py and sam.py; c_i comes from the displacement, as in option II.
"""

from dataclasses import dataclass

from fedaccord.strategies.base import Cost, PlugIn
from fedaccord.strategies.sam import SAM
from fedaccord.strategies.scaffold import Scaffold


@dataclass(kw_only=True, eq=False)
class FedGamma(Scaffold):
    cost = Cost(down=2, up=2, gradients=2, client=1, server=2)

    plugins: tuple[PlugIn, ...] = (SAM(rho=0.01),)

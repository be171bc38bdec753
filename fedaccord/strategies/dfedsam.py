"""DFedSAM: Improving the Model Consistency of Decentralized Federated Learning.

Shi, Shen, Wei, Sun, Yuan, Wang, Tao. ICML 2023, arXiv:2302.04083, Algorithm 1.

    node    w <- w - lr g_i(w + rho g_i(w) / ||g_i(w)||)      K steps from x_i^t; z_i = w_{i,K}
    gossip  x_i^{t+1} = sum over j of W_ij z_j                see gossip.py, sam.py

When to use: if nodes overfit their own data and twice the gradients are affordable; traffic is
DFedAvg's. The radius adds a bias of its own.

Where we differ: as in sam.py; all nodes start from one model, the paper draws one for each node.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.dfedavg import DFedAvg


@dataclass(frozen=True, kw_only=True)
class DFedSAM(DFedAvg):
    rho: float = argument(0.01, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.rho), Gossip())

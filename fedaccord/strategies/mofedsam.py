"""MoFedSAM: FedCM with SAM (see fedcm.py and sam.py).

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization.
ICML 2022, arXiv:2206.02618, Algorithm 2.

    client  w <- w - lr (alpha g_i(w + rho g_i(w) / ||g_i(w)||) + (1 - alpha) delta)

When to use: as FedCM, where a flatter minimum is worth twice the gradients. Clients keep nothing,
so it suits cross-device federations at low participation. The biases of FedCM and of the radius
remain.

Where we differ: as in fedcm.py and sam.py.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.fedcm import FedCM


@dataclass(kw_only=True, eq=False)
class MoFedSAM(FedCM):
    rho: float = argument(0.1, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.rho),)

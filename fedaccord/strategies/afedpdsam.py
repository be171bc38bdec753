"""A-FedPDSAM: A-FedPD with SAM (see afedpd.py and sam.py).

Sun, Shen, Tao: A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs.
NeurIPS 2024, arXiv:2409.18915, Algorithm 1 with the SAM oracle.

    client  w <- w - lr (g_i(w + r g_i(w) / ||g_i(w)||) + lam_i + rho (w - w^t))

When to use: as A-FedPD, if a flatter minimum is worth twice the gradients. Costs and memory are
A-FedPD's otherwise. The radius costs it the exact optimum.

Where we differ: as in afedpd.py and sam.py; the radius 0.1 is provisional.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.afedpd import AFedPD


@dataclass(frozen=True, kw_only=True)
class AFedPDSAM(AFedPD):
    radius: float = argument(0.1, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.radius),)

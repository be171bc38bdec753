"""A-FedPDSAM: A-FedPD with SAM (see afedpd.py and sam.py).

Sun, Shen, Tao: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs. NeurIPS 2024,
arXiv:2409.18915, Algorithm 1 with the SAM oracle.

    client  w <- w - lr (g_i(w + r g_i(w) / ||g_i(w)||) + lam_i + rho (w - w^t))
"""

from dataclasses import dataclass

from fedaccord.strategies.afedpd import AFedPD
from fedaccord.strategies.base import PlugIn
from fedaccord.strategies.sam import SAM


@dataclass(kw_only=True, eq=False)
class AFedPDSAM(AFedPD):
    cost = AFedPD.cost._replace(gradients=2)

    plugins: tuple[PlugIn, ...] = (SAM(rho=0.1),)

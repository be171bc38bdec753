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

from fedaccord.strategies.base import Cost, PlugIn
from fedaccord.strategies.fedcm import FedCM
from fedaccord.strategies.sam import SAM


@dataclass(kw_only=True, eq=False)
class MoFedSAM(FedCM):
    cost = Cost(2, 1, 2, client=0, server=2, note="up 2 under relaxed initialisation")

    plugins: tuple[PlugIn, ...] = (SAM(rho=0.1),)

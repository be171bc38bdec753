"""FedSAM: FedAvg with SAM (see sam.py).

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization.
ICML 2022, arXiv:2206.02618, Algorithm 1.

    client  w <- w - lr g_i(w + rho g_i(w) / ||g_i(w)||)              K steps from w^t
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: if a flatter minimum is worth twice the gradients. Traffic and memory are FedAvg's,
so it suits cross-device federations with time to compute. The bias of FedAvg stays and the radius
adds its own; at low participation FedInit's authors lower it to 0.01.

Where we differ: as in sam.py, the clip bounds only the gradient at w + e, and one norm covers all
parameters.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedSAM(FedAvg):
    rho: float = argument(0.1, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.rho),)

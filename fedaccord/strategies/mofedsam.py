"""MoFedSAM: FedCM with SAM (see fedcm.py and sam.py).

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization.
ICML 2022, arXiv:2206.02618, Algorithm 2.

    client  w <- w - lr (alpha g_i(w + rho g_i(w) / ||g_i(w)||) + (1 - alpha) delta)

When to use: as FedCM, if a flatter minimum is worth twice the gradients. Clients are stateless,
so it suits cross-device federations at low participation. The biases of FedCM and of the radius
remain.

With a radius that works for FedSAM, MoFedSAM may not learn. On CIFAR-10 with LeNet-5 and 10 of 100
clients of Dirichlet-0.1 it has an accuracy of 10.2 ± 0.2% in rounds 40 to 60 with rho = 0.1, and of
24.4 ± 1.8% with 0.01; FedSAM has 20.0 ± 0.3% and 23.0 ± 0.9% (three seeds, docs/results/claims.md).
The likely cause: FedSAM's local steps correct the change of direction by the ascent; here they
carry a tenth of the gradient, the rest is delta, the mean of such directions. So the default is
0.01.

Where we differ: as in fedcm.py and sam.py. The simulator of FedInit's authors uses rho = 0.1.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.fedcm import FedCM


@dataclass(frozen=True, kw_only=True)
class MoFedSAM(FedCM):
    rho: float = argument(0.01, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.rho),)

"""MoFedSAM: FedCM with SAM (see fedcm.py and sam.py).

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization.
ICML 2022, arXiv:2206.02618, Algorithm 2.

    client  w <- w - lr (alpha g_i(w + rho g_i(w) / ||g_i(w)||) + (1 - alpha) delta)

When to use: as FedCM, if a flatter minimum is worth twice the gradients. Clients are stateless,
so it suits cross-device federations at low participation. The biases of FedCM and of the radius
remain.

With a radius that works for FedSAM, MoFedSAM may not learn. A LeNet on CIFAR-10 with 10 of 100
clients of Dirichlet-0.1 stays at 10% for 55 rounds with rho = 0.1 (10 local steps of batch 50; the
authors' simulator as well, in the 20 rounds that we ran) and reaches 22% after 20 rounds with rho =
0.01 (steps of batch 20). At the first model the ascent along each client's own gradient rotates the
clients' mean gradient in the hidden layers: its cosine with the mean at w is 0.27 with rho = 0.1,
0.96 with 0.01. FedSAM's local steps correct that; here they carry a tenth of the gradient, the rest
is delta, which accumulates the rotated means. After 10 rounds the mean gradient of the hidden
layers is a fifth of its first value, and the model ignores the image. So the default is 0.01.

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

"""FedPAC: FedMuon with any preconditioner (see fedmuon.py).

Liu, Shang, Liu, Liu, An, Liu: Taming Preconditioner Drift: Unlocking the Potential of Second-Order
Optimizers for Federated Learning on Non-IID Data. 2026, arXiv:2602.19271.

    client  the preconditioner starts at its mean over the last round's clients     alignment
            w <- w - lr ((1 - beta) p + beta G)           correction; K steps from w^t
            p = the optimiser's step along g_i(w)
    server  as in fedmuon.py

When to use: as FedMuon, with adamw if a model has few large matrices. Clients of a round share one
preconditioner, and clients are stateless. Traffic is four vectors down and three up with adamw and
muon, three and two with momentum.

Where we differ: as in fedmuon.py. The paper's preconditioners are those of SOAP, Sophia and Muon;
of these only fedpac.inner=muon is implemented, with which FedPAC is FedMuon. adamw, the default, is
ours: a diagonal preconditioner, whose bias-corrected moments are averaged, not corrected again.
With sgd it is FedCM with alpha = 1 - beta and weight decay inside the mixture.
"""

from dataclasses import dataclass

from fedaccord.core import option
from fedaccord.core.optimizer import FUNCTIONS, OPTIMIZERS
from fedaccord.strategies.fedmuon import FedMuon


@dataclass(frozen=True, kw_only=True)
class FedPAC(FedMuon):
    inner: str = option("adamw", "optimiser of the clients", choices=[*OPTIMIZERS], also=FUNCTIONS)

    @property
    def optimizer_name(self) -> str:
        return self.inner

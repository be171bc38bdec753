"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020, arXiv:1812.06127, Algorithm 2.

    client  w <- w - lr (g_i(w) + mu (w - w^t))                       K steps from w^t
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: if clients drift far in a round, by many or very unequal local steps. The prox term
keeps them near w^t; clients are stateless and any participation is supported, as in cross-device
federations. The fixed point stays biased even at full participation, and too large a mu slows every
step.

Where we differ: K steps of SGD solve the local problem, not a solver with a tolerance. The centre
is w^t also under relaxed initialisation, and the clip applies to g_i alone; the simulator of
FedInit's authors adds mu to weight decay: its clip applies to g - mu w^t, its centre is the start.
"""

from dataclasses import dataclass
from typing import Any

from fedaccord.core import Direction, LocalConfig, LocalRule, Model, option
from fedaccord.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedProxClient(LocalRule):
    mu: float

    def direction(self, down: Model, state: Any, config: LocalConfig) -> Direction:
        return Direction(rho=self.mu, anchor=down.w)


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    mu: float = option(0.1, "strength of the proximal term", low=0, tried="0.001, 0.01, 0.1, 1")

    def rule(self) -> LocalRule:
        return FedProxClient(self.mu)

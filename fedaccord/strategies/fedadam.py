"""FedAdam: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021, arXiv:2003.00295,
Algorithm 2.

    client  w <- w - lr g_i(w)                                        K steps from w^t
    server  D = w_bar - w^t;   m <- beta1 m + (1 - beta1) D;   v <- beta2 v + (1 - beta2) D^2
            w^{t+1} = w^t + server_lr m / (sqrt(v) + tau)             elementwise

m starts at 0 and v at tau^2; there is no bias correction.

When to use: if coordinates need rates of their own, as with rare features or embeddings. All
memory is on the server, and it works at any participation, so it suits cross-device federations.
Its fixed points are those of FedAvg; server_lr and tau should be tuned together. In our tuned runs
it is mostly above FedAvg in short trainings, and 1.3 to 3.8 points below it after 800 rounds
([side by side](../results/overview.md)).

If D is small compared with tau, the step approaches server_lr / tau times FedAvg's as v forgets its
start; if it is large, every coordinate changes by about server_lr. The defaults, server_lr 0.01 and
tau 0.001, are the paper's for CIFAR-10. With server_lr 0.1 all three methods diverged there at 10
of 100 clients: ten steps of rate 0.1 give a LeNet a D below 1e-3 per coordinate, which is then
multiplied by up to 100.

Where we differ: we follow the paper. Other code starts v at 0 (v0=0), the simulator of FedInit's
authors also with tau=0.01.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.fedavg import FedAvgClient


class ServerState(NamedTuple):
    m: Vector | None  # (d,), first moment; None: beta1 = 0, no momentum
    v: Vector  # (d,), second moment


@dataclass(frozen=True, kw_only=True)
class Adaptive(FederatedStrategy):
    """The server step that FedAdam, FedYogi and FedAdagrad share."""

    assumes_sgd = False
    takes_weights = True
    averages = True
    synchronous = ""
    refuses: ClassVar = {
        Gossip: "its server step is not linear, so the mean of the nodes' steps is not its step"
    }

    server_lr: float = option(0.01, "server rate", above=0, tried="0.01, 0.05, 0.1, 1 (FedAdam)")
    beta1: float = option(0.9, "decay of the first moment", low=0, high=1)
    tau: float = option(0.001, "adaptivity: added to sqrt(v)", above=0, high=1e9)
    v0: float = option(-1.0, "initial second moment; -1: tau^2", low=0, high=1e18, besides=-1)

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def init(self, w: Vector) -> ServerState:
        v0 = self.tau**2 if self.v0 == -1 else self.v0
        m = torch.zeros_like(w) if self.beta1 else None
        return ServerState(m, v=torch.full_like(w, v0))

    @abstractmethod
    def second_moment(self, v: Vector, D: Vector) -> Vector:
        """The next v (d,)."""

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        D = cohort.mean(ups.w) - w
        m = D if state.m is None else self.beta1 * state.m + (1 - self.beta1) * D
        v = self.second_moment(state.v, D)
        step = self.server_lr * m / (v.sqrt() + self.tau)
        return w + step, ServerState(None if state.m is None else m, v)


@dataclass(frozen=True, kw_only=True)
class FedAdam(Adaptive):
    beta2: float = option(0.99, "decay of the second moment", low=0, high=1)

    def second_moment(self, v: Vector, D: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * D**2

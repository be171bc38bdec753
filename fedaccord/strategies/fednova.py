"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020, arXiv:2007.07481, section 4.

    client  w <- w - lr g_i(w)                                        K_i steps from w^t
    server  d_i = (w^t - w_{i,K_i}) / K_i;   tau = sum over active of p_i K_i
            w^{t+1} = w^t - server_lr tau sum over active of p_i d_i

p_i = 1/P, or the share of examples with weighting=examples. With equal K_i this is FedAvg.

When to use: where clients take unequal numbers of local steps, as with local-epochs on data of
unequal sizes. It takes away the bias of unequal work, not that of unlike data. It costs what FedAvg
does, keeps nothing on clients and takes any participation.

Where we differ: the local solver is plain SGD, for which the paper's a_i is K_i; local momentum and
prox terms, which have other a_i, are not offered. Clients count equally; the paper weights them by
their examples (weighting=examples).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedaccord.strategies.base import Cohort, FederatedStrategy, LocalRule, Model, Vector
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.options import option


@dataclass(kw_only=True, eq=False)
class FedNova(FederatedStrategy):
    refuses: ClassVar = {"Gossip": "tau needs the steps of all clients; take dfedavg"}

    server_lr: float = option(1.0, "server rate", low=0)

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        p = [weight / sum(cohort.weights) for weight in cohort.weights]
        tau = sum(p_i * K_i for p_i, K_i in zip(p, cohort.steps, strict=True))
        d = [(w - w_K) / K_i for w_K, K_i in zip(ups.w, cohort.steps, strict=True)]
        return w - self.server_lr * tau * cohort.mean(d), state

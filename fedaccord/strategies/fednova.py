"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020, arXiv:2007.07481, section 5.

    client  w <- w - lr g_i(w)                                        K_i steps from w^t
    server  d_i = (w_{i,0} - w_{i,K_i}) / K_i;   tau = sum over active of p_i K_i
            w^{t+1} = w^t - server_lr tau sum over active of p_i d_i

p_i = 1/P, or the share of examples with weighting=examples. With equal K_i this is FedAvg.

d_i / lr is the mean of the gradients of i's steps, for any K_i. Under relaxed initialisation this
holds only for the true displacement w_{i,0} - w_{i,K_i}; w^t - w_{i,K_i} would also contain the
jump, which is not a step, divided by K_i. So the client sends w_{i,0} too, and with equal K_i
FedNova is FedInit with server=updates.

When to use: if clients take unequal numbers of local steps, as with local-epochs on data of
unequal sizes. It removes the bias of unequal work, not that of heterogeneous data. Its costs are
FedAvg's, clients are stateless, and any participation is supported.

Where we differ: the local solver is plain SGD, for which the paper's a_i is K_i; local momentum and
prox terms, with other a_i, are not implemented. Clients count equally; the paper weights them by
their examples (weighting=examples).
"""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.fedavg import FedAvgClient

log = logging.getLogger("flwr")


@dataclass(frozen=True, kw_only=True)
class FedNova(FederatedStrategy):
    takes_weights = True
    reads_starts = True
    keeps_jumps = False
    beyond_sums = "the number of steps of each client"
    synchronous = ""
    refuses: ClassVar = {Gossip: "tau needs the steps of all clients; use dfedavg"}
    cost_note = "up 2 under relaxed initialisation"

    server_lr: float = option(1.0, "server rate", low=0)

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def summary(self) -> None:
        super().summary()
        are_bounded = self.local_steps or self.max_examples < type(self).max_examples
        if (self.max_client_norm or self.max_update_norm) and not are_bounded:
            log.warning(
                "fednova: the model's step grows with the steps that clients report, which only "
                "max-examples bounds: set it to the most samples of a client, or set local-steps"
            )

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        p = [weight / sum(cohort.weights) for weight in cohort.weights]
        tau = sum(p_i * K_i for p_i, K_i in zip(p, cohort.steps, strict=True))
        clients = zip(cohort.starts, ups.w, cohort.steps, strict=True)
        d = [(w_i0 - w_K) / K_i for w_i0, w_K, K_i in clients]
        return w - self.server_lr * tau * cohort.mean(d), state

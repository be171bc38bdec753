"""FedInit: FedAvg with relaxed initialisation (see relaxed_init.py).

Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization. NeurIPS 2023, arXiv:2306.05706, Algorithm 1.

    client  w_{i,0} = w^t + beta (w^t - l_i);   w <- w - lr g_i(w)   K steps;   l_i <- w_{i,K}
    server  w^{t+1} = w_bar, the mean of the active clients' w_{i,K};
            server = updates: w^t + mean of w_{i,K} - w_{i,0}

When to use: to improve FedAvg on skewed data at FedAvg's traffic. A client keeps one vector, its
last local model, so clients should return: the older l_i, the longer the jump at the start. With a
share p of the clients in a round, beta must be below p / (1 - p): relaxed_init.py shows why. At
5% the default is too large (docs/results/claims.md). Its fixed point is biased as FedAvg's is.

Where we differ: we follow the paper. The authors' simulator adds mean displacements instead of
averaging models (server=updates, which sends w_{i,0} too); this differs at partial participation,
where the bound on beta is then 1.
"""

from dataclasses import dataclass
from typing import Any

from fedaccord.core import Cohort, PlugIn, Vector, argument, option
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedInit(FedAvg):
    beta: float = argument(
        0.1,
        "beta of relaxed initialisation, at least -1; its run-config key is relaxed-init.beta",
    )
    server: str = option(
        "models",
        "average local models (the paper), or add the mean displacement (the authors' simulator)",
        choices=("models", "updates"),
    )

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (RelaxedInit(beta=self.beta),)

    @property
    def keeps_jumps(self) -> bool:
        return self.server == "models"

    @property
    def reads_starts(self) -> bool:
        return not self.keeps_jumps

    @property
    def beyond_sums(self) -> str:
        return "the start of each client" if self.reads_starts else ""

    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        if not self.keeps_jumps:  # every local model is moved back by its jump, w_{i,0} - w^t
            pairs = zip(ups.w, cohort.starts, strict=True)
            ups = ups._replace(w=tuple(w_K - (w_i0 - w) for w_K, w_i0 in pairs))
        return super().aggregate(w, ups, state, cohort)

"""FedInit: FedAvg with relaxed initialisation (see relaxed_init.py).

Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization. NeurIPS 2023, arXiv:2306.05706, Algorithm 1.

    client  w_{i,0} = w^t + beta (w^t - l_i);   w <- w - lr g_i(w)   K steps;   l_i <- w_{i,K}
    server  w^{t+1} = mean of the active clients' w_{i,K}

When to use: to improve FedAvg on skewed data at FedAvg's traffic. A client keeps one vector, its
last local model, so clients should come back: the older l_i, the longer the jump at the start. Its
fixed point is biased as FedAvg's is.

Where we differ: not from the paper. The authors' simulator adds mean displacements where the paper
averages models (relaxed-init.server=updates); the two differ under partial participation.
"""

from dataclasses import dataclass

from fedaccord.core import PlugIn, argument
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedInit(FedAvg):
    beta: float = argument(
        0.1,
        "beta of relaxed initialisation, at least -1; its run-config key is relaxed-init.beta",
    )

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (RelaxedInit(beta=self.beta),)

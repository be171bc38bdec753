"""Centralised training: all data in one place.

A baseline, of no paper: SGD on the union of the clients' data, in as many steps as a client takes.

    client  w <- w - lr g(w)      K steps from w^t, on batches of all training samples
    server  w^{t+1} = w_K

When to use: beside any federation, to learn what it costs that the data stays apart. Set what the
federation has: a round is `local-steps` steps; with `local-epochs` E it is E ceil(N / (C B)) of
them, those of a client with a Cth of the N samples in batches of B, C being `num-clients`.

Where we differ: there is no paper to differ from. Its one client is a client as any other, so that
rate, decay, clipping and evaluation are those of a federation; batches are drawn anew every round,
and models still count as sent, though nothing would be. m active clients take m K steps a round on
m K B samples: `batch-size` times m sees as many.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedaccord.core import Cohort, Cohorts, LocalRule, Model, Vector
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit


@dataclass(frozen=True)
class CentralisedClient(LocalRule):
    """Plain SGD from the received model: every seat of `LocalRule` as it is."""


@dataclass(frozen=True, kw_only=True)
class Centralised(FederatedStrategy):
    assumes_sgd = False
    takes_weights = True
    pools = True
    refuses: ClassVar = {
        Gossip: "one client has nobody to exchange models with",
        RelaxedInit: "w^t is its one client's last local model already",
    }
    cost_note = "one client; in one place nothing would be sent"

    def rule(self) -> LocalRule:
        return CentralisedClient()

    def check_clients(self, num_clients: int, cohorts: Cohorts | None = None) -> None:
        if num_clients != 1:
            raise ValueError(
                f"centralised: expected one client, which holds all training data, got "
                f"{num_clients}; under Flower start one node (num-supernodes=1)"
            )
        super().check_clients(num_clients, cohorts)

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        return cohort.mean(ups.w), state  # of one

"""What the decentralised references share: their states per node, failing nodes, their history.

Node i is client i of the problem; every node trains in every round unless it fails. x_i is the
node's model at the start of a round, z_i the one it has trained, W the round's mixing matrix. A
node that fails in a round neither trains nor sends nor receives: its model and all else it keeps
are the same one round later. The others mix with what `topology.without` makes of W.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import topology
from .problem import Array, Federation, reference

Failures = Sequence[Sequence[int]]  # failed[t]: nodes that fail in round t


class GossipHistory(NamedTuple):
    """What a decentralised reference returns."""

    weights: Array  # (T+1, C, d), row t: all x_i at the start of round t; row T: the final ones
    averages: Array  # (T+1, d): mean over all nodes of weights
    local: Array  # (T, C, d), row t: all z_i of round t; a failed node's is its x_i
    before: Array  # (T,): consensus distance of the z_i, before the mix of round t
    after: Array  # (T,): consensus distance of the x_i that the mix of round t makes
    clients: dict[str, Array]  # (C, d) each, after the last round; "last" = last local models
    traces: dict[str, Array]  # (T+1, C, d) each: what a node holds per round, row 0 = initial


def consensus_distance(x: Array) -> float:
    """(1/C) sum_i ||x_i - x_bar||^2 of the rows of x."""
    return float(np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1)))


class Network(Federation):
    """What a listing without a server leaves out.

    w0: one (d,) for all nodes, or a row for each. The schedule has a mixing matrix per round.
    """

    def __init__(
        self, *common: Any, failed: Failures | None = None, gossip_steps: int = 1, **more: Any
    ) -> None:
        super().__init__(*common, **more)
        self.failures, self.gossip_steps = failed, gossip_steps
        self.models, self.local_models = [self.copies(self.w0)], []

    def failed(self, t: int) -> list[int]:
        """The nodes that fail in round t."""
        return [] if self.failures is None else list(self.failures[t])

    def working(self, t: int) -> list[int]:
        """The nodes that train and mix in round t."""
        return [i for i in range(self.C) if i not in self.failed(t)]

    def power(self, W: Array, t: int) -> Array:
        """W^Q, the failed nodes taken out of W first."""
        return np.linalg.matrix_power(topology.without(W, self.failed(t)), self.gossip_steps)

    def record(self, x: Array, z: Array, **memories: Array) -> None:
        self.models.append(x.copy())
        self.local_models.append(z.copy())
        self.trace(memories)

    def history(self, **clients: Array) -> GossipHistory:
        return GossipHistory(
            np.array(self.models),
            np.array([x.mean(axis=0) for x in self.models]),
            np.array(self.local_models),
            np.array([consensus_distance(z) for z in self.local_models]),
            np.array([consensus_distance(x) for x in self.models[1:]]),
            {"last": self.last, **clients},
            {name: np.array(trace) for name, trace in self.traces.items()},
        )


decentralised: Callable[..., Any] = partial(reference, kind=Network)

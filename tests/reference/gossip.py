"""What the decentralised references share: their states per node, failing nodes, their history.

Node i is client i of the problem; every node trains in every round unless it fails. x_i is the
node's model at the start of a round, z_i the one it has trained, W the round's mixing matrix. A
node that fails in a round neither trains nor sends nor receives: its model and all else it keeps
are the same one round later. The others mix with what `topology.without` makes of W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import topology
from .problem import Array, LastModels

Mixing = Sequence[Array]  # mixing[t]: (C, C), the matrix of round t; as many rounds as matrices
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


class Recorder:
    """Collects a GossipHistory round by round."""

    def __init__(self, x: Array) -> None:
        self.weights = [x.copy()]
        self.local: list[Array] = []

    def add(self, z: Array, x: Array) -> None:
        self.local.append(z.copy())
        self.weights.append(x.copy())

    def history(self, clients: dict[str, Array], **traces: list[Array]) -> GossipHistory:
        return GossipHistory(
            np.array(self.weights),
            np.array([x.mean(axis=0) for x in self.weights]),
            np.array(self.local),
            np.array([consensus_distance(z) for z in self.local]),
            np.array([consensus_distance(x) for x in self.weights[1:]]),
            clients,
            {name: np.array(trace) for name, trace in traces.items()},
        )


def start(w0: Array, C: int) -> Array:
    """x_i^0, (C, d): one w0 (d,) for all nodes, or already a row each."""
    return np.broadcast_to(w0, (C, w0.shape[-1])).copy()


def last_models(x: Array, beta: float, first_visit: str) -> LastModels:
    """l_i and relaxed starts as of a centralised method; l_i = x_i^0 before the first training."""
    last = LastModels(x[0], len(x), beta, first_visit)
    last.table = x.copy()
    return last


def failures(failed: Failures | None, t: int) -> list[int]:
    """The nodes that fail in round t."""
    return [] if failed is None else list(failed[t])


def working(C: int, failed: Failures | None, t: int) -> list[int]:
    """The nodes that train and mix in round t."""
    return [i for i in range(C) if i not in failures(failed, t)]


def power(W: Array, failed: Sequence[int], gossip_steps: int) -> Array:
    """W^Q, the failed nodes taken out of W first."""
    return np.linalg.matrix_power(topology.without(W, failed), gossip_steps)

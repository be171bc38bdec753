"""Gossip: averaging with neighbours instead of by a server, as a plug-in of most methods.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized
Algorithms? NeurIPS 2017, arXiv:1705.09056; weights of Xiao, Boyd, Kim, JPDC 2007.

    x_i <- sum over j of (W^Q)_ij z_j        instead of   w <- mean of z_i

W (m, m) is doubly stochastic, so mixing keeps the mean of the nodes; Q = gossip.steps. Every node
is the server of a federation of its own: it takes the method's server step on its own reply, then
its model and the memory of the method's server are mixed, with the same row of W^Q. All nodes start
from one model and train in every round. Flower has no messages between clients, so the ServerApp is
the relay: the stack (m, d) of models is stored there between rounds.

On an undirected graph W has Metropolis weights: 1 / (1 + max(deg_i, deg_j)) on edges, the rest on
the diagonal. Nodes without a reply in a round keep their model; the others mix over the remaining
graph, with W made doubly stochastic again.

When to use: if no server may average, or to see what a method loses without one. One gossip step
multiplies the distance to consensus by at most 1 - gap; more steps cost more traffic. A dense graph
(exponential, random with ten peers) helps more than many steps on a ring. The server's memory
becomes part of every node's memory, and is sent with the model.

Where we differ: released code for decentralised learning often draws neighbours with uniform
weights, which is not doubly stochastic and shifts the mean; here every matrix is doubly stochastic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedaccord.core.cohort import Cohort, Reply, rows
from fedaccord.core.method_settings import expect
from fedaccord.core.options import listed, option
from fedaccord.core.plugin import PlugIn
from fedaccord.core.topology import RoundInfo, ServerHalf, Step, server_step
from fedaccord.core.vectors import Number, Vector, map_vectors, stack, sum_dtype, to_device
from fedaccord.plugins._topologies import check, components, mixing_matrix, restricted, spectral_gap

TOPOLOGIES = ("ring", "grid", "torus", "exponential", "exponential-directed", "full", "random")
ALL_TRAIN = "under gossip all nodes train in every round"
NODES = 10_000
CHUNK = 1 << 18  # elements of the mixed stack per step


@dataclass(frozen=True, kw_only=True)
class Gossip(PlugIn):
    replaces: ClassVar = {"fraction_train": ALL_TRAIN, "sampling": ALL_TRAIN}

    topology: str = option(
        "ring",
        "graph of the nodes; random: drawn anew every round; none: a server averages",
        choices=("none", *TOPOLOGIES, "file"),
        auto=True,
    )
    steps: int = option(1, "gossip steps Q a round", low=1, auto=True)
    peers: int = option(
        0,
        "random: peers that each node draws; 0: min(10, m/2)",
        low=0,
        only={"topology": ["random"]},
    )
    file: str = option(
        "",
        'file: absolute path of JSON with "edges" or a "matrix"',
        only={"topology": ["file"]},
        path=True,
    )
    eval_nodes: bool = option(
        True, "evaluate every node's model beside the mean of all", affects="records"
    )

    @property
    def is_off(self) -> bool:
        return self.topology == "none"

    def fit(self, method: ServerHalf) -> "Gossip":
        super().fit(method)
        if not method.linear:
            name = type(method).__name__
            raise ValueError(
                f"{name} does not support Gossip: its server step is not declared linear"
            )
        why = ": the mixing matrix weighs the nodes"
        expect(method, "weighting", ["uniform"], "with gossip", why)
        return self

    def graph(self, seed: int) -> "GossipTopology":
        return GossipTopology(self, seed)

    def matrix(self, m: int, t: int, seed: int) -> Tensor:
        """W (m, m), float64, of round t. Raises ValueError if m nodes do not fit."""
        if m > NODES:
            raise ValueError(
                f"gossip: expected at most {NODES} nodes, whose matrix needs 0.8 GB, got {m}"
            )
        return mixing_matrix(self.topology, m, t=t, seed=seed, peers=self.peers, file=self.file)


class GossipTopology:
    """The topology of a federation without a server: every node is its own server.

    Models and server states are stacks (m, d), a row for each node, and a round's cohort is one
    client in m federations at once: uploads are (m, d), means over the one client. A graph that is
    the same in all rounds is read once: a run makes its own topology.
    """

    is_decentralised = True

    def __init__(self, gossip: Gossip, seed: int) -> None:
        self.gossip = gossip
        self.seed = seed
        self.eval_nodes = gossip.eval_nodes
        self._constant: dict[int, tuple[Tensor, float]] = {}  # by the number of nodes

    def __repr__(self) -> str:
        return f"GossipTopology({self.gossip})"

    def mixing(self, m: int, t: int) -> tuple[Tensor, float]:
        """W (m, m), float64, of round t, and its spectral gap. Raises ValueError, in one line, if m
        nodes do not fit."""
        if self.gossip.topology == "random":
            W = self.gossip.matrix(m, t, self.seed)
            return W, spectral_gap(W)
        if m not in self._constant:
            W = self.gossip.matrix(m, t, self.seed)
            check(W)
            self._constant[m] = W, spectral_gap(W)
        return self._constant[m]

    def facts(self, num_clients: int) -> dict[str, Any]:
        _, gap = self.mixing(num_clients, 0)
        return {
            "gossip": {
                "topology": self.gossip.topology,
                "nodes": num_clients,
                "steps": self.gossip.steps,
                "spectral-gap": gap,
            }
        }

    def describe(self, num_clients: int) -> str:
        graph = self.facts(num_clients)["gossip"]
        return (
            f"{graph['topology']} of {graph['nodes']} nodes, {graph['steps']} step(s) a round, "
            f"spectral gap {graph['spectral-gap']:.4g}"
        )

    def begin(self, w: Vector, server: Any, num_clients: int) -> tuple[Vector, Any]:
        def for_each(v: Vector) -> Vector:
            return v.expand(num_clients, -1)

        return for_each(w), map_vectors(for_each, server)

    def view(self, w: Vector, server: Any, client: int) -> tuple[Vector, Any]:
        return w[client], map_vectors(lambda v: v[client], server)

    def gather(self, w: Vector, replies: Sequence[Reply], info: RoundInfo) -> tuple[Any, Cohort]:
        nodes = [reply.client for reply in replies]
        w = _rows(w, nodes)
        own_starts = any(reply.w_i0 is not None for reply in replies)
        starts = (
            torch.stack(
                [r.w_i0 if r.w_i0 is not None else x for r, x in zip(replies, w, strict=True)]
            )
            if own_starts
            else w
        )
        steps = torch.tensor([reply.steps for reply in replies], dtype=torch.float64)[:, None]
        cohort = Cohort(
            nodes,
            round=info.round,
            num_clients=1,
            weights=[1.0],
            w=w,
            steps=[to_device(steps.to(w.dtype), w.device)],
            lengths=[to_device(info.length(steps).to(w.dtype), w.device)],
            starts=[starts],
            anchor=starts if info.anchored_at_starts else w,
            accepted=info.accepted,
        )
        return rows([replies[0]._replace(up=stack([reply.up for reply in replies]))]), cohort

    def step(self, method: ServerHalf, w: Vector, ups: Any, server: Any, cohort: Cohort) -> Step:
        """Every node takes a step with its own reply, then mixes with its neighbours."""
        m, nodes = len(w), cohort.clients
        W, gap = self.mixing(m, cohort.round)
        are_absent = len(nodes) < m
        if are_absent:
            W = restricted(W, nodes)
            gap = spectral_gap(W)
        network = Network(W, self.gossip.steps)
        present = map_vectors(lambda v: _rows(v, nodes), server)
        take = method.aggregate_nodes if isinstance(method, MixesItself) else _mixed(method)
        w_next, next_server = take(cohort.w, ups, present, cohort, network)

        def put_back(v: Vector, before: Vector) -> Vector:
            at = to_device(torch.tensor(nodes), v.device)
            return before.clone().index_copy_(0, at, v) if are_absent else v

        w_next = put_back(w_next, w)
        metrics: dict[str, Number] = {
            "consensus-after": consensus_distance(w_next),
            "spectral-gap": gap,
            "peer-vectors": network.sent,
            "peer-bytes": _rounded(network.sent * w[0].numel() * w.element_size()),
        }
        if "w" in ups._fields:
            local = dict(zip(nodes, ups.w[0], strict=True))
            before = consensus_distance([local.get(i, w[i]) for i in range(m)])
            metrics = {"consensus-before": before, **metrics}
        return Step(w_next, map_vectors(put_back, next_server, server), metrics)

    def absence(self, num_clients: int, cohort: Cohort) -> str:
        absent = sorted(set(range(num_clients)) - set(cohort.clients))
        if not absent:
            return ""
        W = restricted(self.mixing(num_clients, cohort.round)[0], cohort.clients)
        return (
            f"nodes {listed(absent)} did not answer and keep their models; the others mix over the "
            f"remaining graph, in {len(components(W))} part(s)"
        )

    def average(self, w: Vector) -> Vector:
        return w.mean(0)


@runtime_checkable
class MixesItself(Protocol):
    """A decentralised method that does more than a server step followed by mixing."""

    def aggregate_nodes(
        self, w: Vector, ups: Any, state: Any, cohort: Cohort, network: "Network"
    ) -> tuple[Vector, Any]:
        """Models (m, d) and memory of the nodes that replied; each field of ups: ((m, d),)."""


def _mixed(method: ServerHalf) -> Any:
    """The method's server step, taken by every node, then mixed with its memory."""

    def take(
        w: Vector, ups: Any, state: Any, cohort: Cohort, network: "Network"
    ) -> tuple[Vector, Any]:
        w, state = server_step(method, w, ups, state, cohort)
        return network.mix(w), map_vectors(network.mix, state)

    return take


def _rows(v: Vector, nodes: Sequence[int]) -> Vector:
    return v if len(nodes) == len(v) else v[to_device(torch.tensor(nodes), v.device)]


class Network:
    """The graph of a round, over the nodes that replied; mixes and counts the traffic."""

    def __init__(self, W: Tensor, steps: int) -> None:
        self.W = W
        self.steps = steps
        self.power = torch.linalg.matrix_power(W, steps)
        self.sent: Number = 0.0  # vectors of d that were sent over links in this round

    @property
    def links(self) -> Tensor:
        """(m, m), bool: i receives from j != i."""
        return (self.W != 0) & ~torch.eye(len(self.W), dtype=torch.bool)

    def send(self, vectors: Tensor) -> None:
        """Count one exchange over every link; vectors (m,): sent by each node, in units of d."""
        dtype = sum_dtype(vectors.device)
        links = to_device(self.links.to(dtype).sum(0), vectors.device)
        sent = links @ vectors.to(dtype)
        self.sent = self.sent + (float(sent) if sent.is_cpu else sent)

    def mix(self, x: Vector) -> Vector:
        """W^Q x; x (m, d)."""
        self.send(torch.full((len(x),), float(self.steps)))
        return _product(self.power, x)

    def total(self, x: Vector) -> Vector:
        """For each node i the sum of x over i and its neighbours; x (m, d)."""
        return _product((self.links | torch.eye(len(x), dtype=torch.bool)).double(), x)


def _product(matrix: Tensor, x: Vector) -> Vector:
    """matrix x, some columns at a time."""
    matrix, product = to_device(matrix.to(x.dtype), x.device), torch.empty_like(x)
    size = max(1, CHUNK // len(x))
    for some, out in zip(
        torch.split(x, size, dim=1), torch.split(product, size, dim=1), strict=True
    ):
        out.copy_(matrix @ some)
    return product


def consensus_distance(x: Sequence[Vector] | Vector) -> Tensor:
    """(1/m) sum over i of ||x_i - mean of x||^2, (), float64 if the device has it; x: (d,) for
    each of m nodes."""
    centre = x[0].clone()
    for x_i in x[1:]:
        centre += x_i
    centre /= len(x)
    distances = torch.stack([torch.dist(x_i, centre) for x_i in x])
    return distances.to(sum_dtype(centre.device)).square().mean()


def _rounded(number: Number) -> Number:
    return number.round() if isinstance(number, Tensor) else round(number)

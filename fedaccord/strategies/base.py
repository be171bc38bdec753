"""What every method is made of: vectors, the client half, the server half and the round loop."""

import dataclasses
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any, ClassVar, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedaccord import records
from fedaccord.strategies.gossip import (
    Gossip,
    Network,
    among,
    consensus_distance,
    parts,
    spectral_gap,
    words,
)
from fedaccord.strategies.options import check_option, option, options

log = logging.getLogger("flwr")

Vector = torch.Tensor  # (d,) all parameters of a model; formulas also hold over (..., d)


GradientAt = Callable[[Vector], Vector]  # puts the batch's gradient at a point into g; the loss
Clip = Callable[[], None]  # bounds the norm of g
Oracle = Callable[[Any, GradientAt, Clip], Vector]
"""(model, gradient_at, clip) -> loss; leaves a clipped gradient in model.g (task/training.py)."""


# --- the client half ------------------------------------------------------------------------------


class Model(NamedTuple):
    """A message of one model: what is broadcast, or the local model after the last step."""

    w: Vector


class Nothing(NamedTuple):
    """The state of a method without memory."""


class Direction(NamedTuple):
    """w <- w - lr (scale g(w) + shift + rho (w - anchor) + decay wd w), all round long."""

    scale: float = 1.0
    shift: Vector | None = None  # None: zero
    rho: float = 0.0
    anchor: Vector | None = None
    decay: float = 1.0  # factor on the run's weight decay wd


class Plan(NamedTuple):
    """The local settings of a round."""

    round: int  # t
    lr: float  # eta_t
    weight_decay: float
    client: int
    seed: int


class Work(NamedTuple):
    """The local steps that were taken."""

    w_0: Vector  # w_{i,0}
    steps: int  # K_i
    round: int  # t
    lr: float  # eta_t
    examples: int  # samples of the client
    loss: float  # mean training loss over the steps
    oracle: Any = None  # the round's gradient oracle, with what it remembers


class LocalRule:
    """The client half of a method: a frozen dataclass of its hyper-parameters.

    State comes in and goes out; a rule keeps nothing. Returned vectors may be passed on by
    reference, so none of them is changed in place afterwards.
    """

    receives: ClassVar[Any] = Model  # NamedTuple type of the broadcast; its field w is the model
    sends: ClassVar[Any] = Model  # NamedTuple type of the reply; a field w is w_{i,K}

    @property
    def needs_initial(self) -> bool:
        """Whether `init` looks at w^0, which the server then sends with a client's first order."""
        return False

    def init(self, w: Vector, w_0: Vector) -> Any:
        """Client state before the first visit; w: the model received, w_0: w^0 if needed."""
        return Nothing()

    def start(self, down: Any, state: Any) -> Vector:
        """w_{i,0}, where the local steps start."""
        return down.w  # type: ignore[no-any-return]

    def direction(self, down: Any, state: Any, plan: Plan) -> Direction:
        return Direction()

    def oracle(self, down: Any, state: Any, plan: Plan) -> Oracle | None:
        """The gradient oracle of this round; None: the batch's gradient at w."""
        return None

    def finish(self, w_K: Vector, down: Any, state: Any, work: Work) -> tuple[Any, Any]:
        """The reply and the client's next state."""
        return Model(w_K), state

    def personal(self, state: Any) -> Vector | None:
        """The client's own model, evaluated on its own test samples; None: it has none."""
        return None


@dataclass(frozen=True)
class PlugIn(LocalRule):
    """A rule around another rule: whatever seat it does not take is the other's."""

    rule: LocalRule = dataclasses.field(default_factory=LocalRule, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "receives", self.rule.receives)
        object.__setattr__(self, "sends", self.rule.sends)

    @property
    def needs_initial(self) -> bool:
        return self.rule.needs_initial

    def init(self, w: Vector, w_0: Vector) -> Any:
        return self.rule.init(w, w_0)

    def advice(self) -> str:
        """A warning about the settings, shown before round 1; empty: none."""
        return ""

    def base(self, state: Any) -> Any:
        """The other rule's part of the client state; a plug-in with a memory overrides it."""
        return state

    def start(self, down: Any, state: Any) -> Vector:
        return self.rule.start(down, self.base(state))

    def direction(self, down: Any, state: Any, plan: Plan) -> Direction:
        return self.rule.direction(down, self.base(state), plan)

    def oracle(self, down: Any, state: Any, plan: Plan) -> Oracle | None:
        return self.rule.oracle(down, self.base(state), plan)

    def finish(self, w_K: Vector, down: Any, state: Any, work: Work) -> tuple[Any, Any]:
        return self.rule.finish(w_K, down, self.base(state), work)

    def personal(self, state: Any) -> Vector | None:
        return self.rule.personal(self.base(state))


# --- the server half ------------------------------------------------------------------------------


class Client(NamedTuple):
    """A client as the server knows it."""

    id: int
    round: int  # t, the round that starts
    last_round: int  # the last round whose reply was accepted; -1: none yet


class Cohort:
    """The active clients P^t whose replies were accepted, in the order of their ids."""

    def __init__(
        self,
        clients: Sequence[int],
        weights: Sequence[float],
        *,
        round: int,
        num_clients: int,
        last_rounds: frozenset[int],
        steps: Sequence[int],
        lr: float,
    ) -> None:
        self.clients = clients
        self.steps = steps  # K_i of each
        self.lr = lr  # eta_t
        self.weights = weights  # of the mean; all 1 for uniform
        self.round = round  # t
        self.num_clients = num_clients  # C
        self.last_rounds = last_rounds  # the rounds in which some client was last accepted
        self._means: dict[int, tuple[Any, Vector]] = {}

    @property
    def participation(self) -> float:
        """P / C."""
        return len(self.clients) / self.num_clients

    def mean(self, xs: Sequence[Vector] | Vector) -> Vector:
        """A_P[x_i]: the mean over the active clients, weighted as the run says.

        xs: a vector per active client, as a sequence or stacked.
        """
        if id(xs) not in self._means:  # the strategy and its metrics ask for the same mean
            total = self._sum(xs, self.weights)
            self._means[id(xs)] = xs, total.div_(sum(self.weights))  # xs too: it keeps its id
        return self._means[id(xs)][1]

    def sum(self, xs: Sequence[Vector] | Vector) -> Vector:
        """The plain sum over the active clients."""
        return self._sum(xs, [1.0] * len(xs))

    def starts(self, w: Vector, sent: Sequence[Vector | None]) -> list[Vector]:
        """w_{i,0} of each active client: what it ``sent``, else the model that it received."""
        received = self._received(w)
        return [w_i if w_0 is None else w_0 for w_i, w_0 in zip(received, sent, strict=True)]

    def _received(self, w: Vector) -> Sequence[Vector]:
        return [w] * len(self.clients)

    @staticmethod
    def _sum(xs: Sequence[Vector] | Vector, weights: Sequence[float]) -> Vector:
        total = weights[0] * xs[0]
        for weight, x in zip(weights[1:], xs[1:], strict=True):
            total.add_(x, alpha=weight)
        return total


class Nodes(Cohort):
    """The nodes of a decentralised round, each of them a server whose one client is itself.

    So a mean is a vector per node, (m, d), and gossip mixes it afterwards.
    """

    @property
    def participation(self) -> float:
        return 1.0

    def mean(self, xs: Sequence[Vector] | Vector) -> Vector:
        return xs if isinstance(xs, torch.Tensor) else torch.stack(tuple(xs))

    def sum(self, xs: Sequence[Vector] | Vector) -> Vector:
        return self.mean(xs)

    def _received(self, w: Vector) -> Sequence[Vector]:
        return list(w)


def is_finite(v: Vector) -> bool:
    """Whether v holds neither NaN nor Inf, in one pass without a vector of answers."""
    norm = torch.linalg.vector_norm(v)  # may overflow where v is finite
    return bool(torch.isfinite(norm)) or bool(torch.isfinite(v).all())


def each(state: Any, change: Callable[[Vector], Vector]) -> Any:
    """A NamedTuple of vectors with every one of them changed."""
    return type(state)(*(None if v is None else change(v) for v in state))


class Cost(NamedTuple):
    """What a method costs an active client a round, and what is kept, in vectors of d."""

    down: float
    up: float
    gradients: float  # evaluations per local step
    client: float  # persistent client state
    server: float  # server state, the model included
    note: str = ""


class Round(NamedTuple):
    """What is known at the end of a round; number 0 is the state before the first."""

    number: int  # t + 1
    w: Vector  # w^{t+1}, the model that the next round broadcasts; (m, d) under gossip
    w_bar: Vector  # mean of the accepted local models; w^{t+1} where they are not sent;
    # under gossip the mean of the nodes' w^{t+1}
    metrics: dict[str, float]
    clients: list[dict[str, Any]]  # a row per asked client


class FederationError(RuntimeError):
    """The federation cannot go on; the message says why and what to do."""


@dataclass(kw_only=True, eq=False)
class FederatedStrategy(Strategy, ABC):
    """The server half of a method, and the round loop that all of them share.

    A subclass writes the paper: `rule` (its client half), `init`, `broadcast` and `aggregate`.
    This class waits for the clients, draws cohorts, drops bad replies, evaluates and reports.
    Works in any Flower ServerApp: ``strategy.start(grid=..., initial_arrays=..., num_rounds=...)``
    with `fedaccord.train_locally` in the ClientApp.
    """

    cost: ClassVar[Cost] = Cost(down=1, up=1, gradients=1, client=0, server=1)
    refuses: ClassVar[dict[str, str]] = {}  # plug-in's class, or class.option=value -> why not

    fraction_train: float = option(0.5, "share of all clients drawn each round", above=0, high=1)
    sampling: str = option(
        "fixed",
        "cohorts of fixed size without replacement, or each client with probability fraction-train",
        choices=("fixed", "bernoulli"),
    )
    seed: int = option(0, "seed of initial model, partition, cohorts, batches", low=0)
    eval_every: int = option(1, "rounds between evaluations; the last is always evaluated", low=1)
    round_timeout: float = option(3600.0, "seconds to wait for the replies of a round", above=0)
    wait_timeout: float = option(600.0, "seconds to wait for all clients before round 1", above=0)
    min_replies: int = option(1, "good replies that a round needs to count", low=1)
    max_failed_rounds: int = option(3, "failed rounds in a row after which the run stops", low=1)
    weighting: str = option(
        "uniform",
        "weights of the mean over active clients; the papers' methods use uniform",
        choices=("uniform", "examples"),
    )
    lr: float = option(0.1, "local rate in round 1", above=0)
    lr_decay: float = option(0.998, "factor on the local rate per round", above=0, high=1)
    weight_decay: float = option(0.001, "local weight decay, outside clip and corrections", low=0)
    clip_norm: float = option(10.0, "bound on the norm of the data gradient; 0: off", low=0)
    local_epochs: int = option(5, "passes over the client's data a round", low=1)
    local_steps: int = option(0, "steps a round instead of epochs; 0: count epochs", low=0)
    batch_size: int = option(50, "local batch; 0: the whole client, in order, every step", low=0)
    precision: str = option(
        "float32",
        "vectors and steps in float32 or float64; bfloat16: float32 with bfloat16 forward passes",
        choices=("float32", "float64", "bfloat16"),
    )

    plugins: tuple[PlugIn | Gossip, ...] = ()  # outermost last
    participation: Sequence[Sequence[int]] | None = None  # explicit cohorts, one per round
    on_round: Callable[[Round], None] | None = None
    # (headline model, its metrics so far) -> more metrics of it
    evaluate_headline_fn: (
        Callable[[ArrayRecord, Mapping[str, float]], Mapping[str, float]] | None
    ) = None

    def __post_init__(self) -> None:
        for field in options(type(self)):
            setattr(self, field.name, check_option(field.name, getattr(self, field.name), field))
        for plugin in self.plugins:
            for field in options(type(plugin)):
                check_option(field.name, getattr(plugin, field.name), field)
            name = type(plugin).__name__
            given = [f"{name}.{f.name}={getattr(plugin, f.name)}" for f in options(type(plugin))]
            for refused in {name, *given} & self.refuses.keys():
                raise ValueError(
                    f"{type(self).__name__} cannot take {refused}: {self.refuses[refused]}"
                )
        if self.gossip and self.weighting != "uniform":
            raise ValueError(
                f"weighting: expected uniform with gossip, got {self.weighting!r}: the mixing "
                "matrix weighs the nodes"
            )
        self._nodes: dict[int, int] = {}  # client id -> node id, of the connected clients
        self._asked: set[int] = set()  # node ids that were asked who they are
        self._sent: dict[int, Message] = {}  # client id -> this round's message
        self.num_rounds = 0  # T
        self._layout: dict[str, torch.Size] = {}  # shapes of the parameters by name
        self.facts: dict[str, Any] = {}  # of the run, for its summary
        self.state: Any = None
        self._w = self._w_0 = torch.empty(0)

    # the method: what a subclass writes

    @abstractmethod
    def rule(self) -> LocalRule:
        """The client half with this run's hyper-parameters."""

    def init(self, w: Vector) -> Any:
        """Server state before round 1."""
        return Nothing()

    def broadcast(self, w: Vector, state: Any, client: Client) -> Any:
        """What one client receives."""
        return Model(w)

    @abstractmethod
    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        """w^{t+1} and the next server state.

        ups: the replies' NamedTuple with a tuple of vectors, one per client, in every field.
        """

    def aggregate_nodes(
        self, w: Vector, ups: Any, state: Any, cohort: Nodes, network: Network
    ) -> tuple[Vector, Any]:
        """`aggregate` under gossip: models and memory of every node, (m, d), by its own reply,
        then mixed."""
        w, state = self.aggregate(w, ups, state, cohort)
        return network.mix(w), each(state, network.mix)

    def headline(self, w: Vector, state: Any) -> Vector:
        """The model that is evaluated, saved and returned; under gossip, the mean of these."""
        return w

    # Flower's Strategy

    def summary(self) -> None:
        log.info("%s, client half %s", type(self).__name__, self.client_rule())
        for plugin in self.plugins:
            if isinstance(plugin, PlugIn) and (advice := plugin.advice()):
                log.warning(advice)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per client of the round's cohort; connects and initialises before round 1."""
        if self.state is None:
            self._connect(grid)
            self._initialise(arrays)
        elif server_round > 1:
            self._meet_new_nodes(grid)
        t = server_round - 1
        order = self._order(t)
        self._sent = {i: self._message(i, order, config) for i in self._draw(t)}
        return list(self._sent.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The headline model after this round and its metrics; (None, None) for a failed round.

        Raises FederationError after ``max_failed_rounds`` failed rounds in a row.
        """
        t = server_round - 1
        good, rows = self._accept(t, replies)
        if len(good) < self.min_replies:
            self._fail(server_round, len(good))
            self._last = Round(server_round, self._w, self._average(), {"replies": len(good)}, rows)
            return None, None
        self._failed_rounds = 0
        for i in good:
            self._last_rounds[i] = t
        if len(self._last_rounds) == self.num_clients:
            self._w_0 = torch.empty(0)  # no client is left to be sent it
        cohort = (Nodes if self.gossip else Cohort)(
            list(good),
            [m["num-examples"] if self.weighting == "examples" else 1.0 for _, m in good.values()],
            round=t,
            num_clients=1 if self.gossip else self.num_clients,
            last_rounds=frozenset(self._last_rounds.values()),
            steps=[int(m["steps"]) for _, m in good.values()],
            lr=self.lr * self.lr_decay**t,
        )
        kind = type(next(iter(good.values()))[0])
        ups = kind(*zip(*(up for up, _ in good.values()), strict=True))
        metrics = self._metrics([m for _, m in good.values()], rows)
        if isinstance(cohort, Nodes):
            metrics |= self._gossip(ups, cohort)
            w_bar = self._average()
        else:
            self._w, self.state = self.aggregate(self._w, ups, self.state, cohort)
            w_bar = self._w
            if "w" in ups._fields:
                w_bar = cohort.mean(ups.w)
                metrics |= self._drift(ups.w, w_bar)
        self._last = Round(server_round, self._w, w_bar, metrics, rows)
        return self.arrays(self._headline()), MetricRecord(dict(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the server evaluates, through ``evaluate_fn``."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation; arguments and result as Flower's own `Strategy.start`.

        ``timeout`` (seconds, per round) takes the place of ``round_timeout``. ``evaluate_fn`` is
        called on the headline model before round 1 and every ``eval_every`` rounds, and once more,
        its metrics ending in ``-broadcast``, where the broadcast model is another one.
        Raises ValueError on bad settings before any message is sent, FederationError when the
        clients do not come or too many rounds fail in a row.
        """
        if self.participation is not None and len(self.participation) < num_rounds:
            raise ValueError(
                f"participation: expected a cohort for each of {num_rounds} rounds, "
                f"got {len(self.participation)}"
            )
        self.num_rounds = num_rounds
        self.summary()
        result = Result(arrays=initial_arrays)
        self._connect(grid)
        self._initialise(initial_arrays)
        self._last = Round(0, self._w, self._average(), {}, [])
        self._report(result, evaluate_fn, grid)
        for server_round in range(1, num_rounds + 1):
            began = time.perf_counter()
            config = ConfigRecord(dict(train_config or {}))
            messages = self.configure_train(server_round, result.arrays, config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout or self.round_timeout)
            arrays, metrics = self.aggregate_train(server_round, replies)
            del replies
            if arrays is not None and metrics is not None:
                result.arrays = arrays
                result.train_metrics_clientapp[server_round] = metrics
            self._last.metrics["seconds"] = time.perf_counter() - began
            self._report(result, evaluate_fn, grid)
        return result

    # before round 1

    @property
    def gossip(self) -> Gossip | None:
        """How the nodes of a decentralised federation average; None: there is a server."""
        found = (p for p in self.plugins if isinstance(p, Gossip) and p.topology != "none")
        return next(found, None)

    def client_rule(self) -> LocalRule:
        """The method's rule inside its plug-ins."""
        rule = self.rule()
        for plugin in self.plugins:
            if isinstance(plugin, PlugIn):
                rule = replace(plugin, rule=rule)
        return rule

    def arrays(self, vector: Vector) -> ArrayRecord:
        """A vector (d,) under the names and shapes of the initial arrays."""
        pieces = vector.split([shape.numel() for shape in self._layout.values()])
        views = [p.view(s) for p, s in zip(pieces, self._layout.values(), strict=True)]
        return records.to_record(dict(zip(self._layout, views, strict=True)))

    def current(self) -> ArrayRecord | None:
        """The headline model as it is now; None before `start`."""
        if self.state is None:
            return None
        return self.arrays(self._headline())

    def _headline(self) -> Vector:
        w = self.headline(self._w, self.state)
        return w.mean(0) if self.gossip else w

    def _average(self) -> Vector:
        """The mean of the nodes' models; without gossip the broadcast model."""
        return self._w.mean(0) if self.gossip else self._w

    def client_state_like(self) -> Any:
        """A client's state with vectors that hold nothing: its structure."""
        return self._rule.init(self._like, self._like)

    def _initialise(self, initial_arrays: ArrayRecord) -> None:
        tensors = {name: records.to_tensor(array) for name, array in initial_arrays.items()}
        if not tensors or not all(x.is_floating_point() for x in tensors.values()):
            raise ValueError(
                "initial_arrays: expected the floating-point parameters of a model, got "
                f"{ {name: str(x.dtype) for name, x in tensors.items()} }"
            )
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        self._layout = {name: x.shape for name, x in tensors.items()}
        self._w = torch.cat([x.reshape(-1).to(dtype) for x in tensors.values()])
        self._w_0, self._like = self._w, self._w.to("meta")
        self.state = self.init(self._w)
        if self.gossip:
            self.facts["gossip"] = self.gossip.begin(self.num_clients, self.seed)
            log.info("gossip: %s", words(self.facts["gossip"]))
            self._w, self.state = (
                self._by_node(self._w),
                each(self.state, self._by_node),
            )
        self._rule = self.client_rule()
        self._rule_text = records.dumps(self._rule)
        self._last_rounds: dict[int, int] = {}
        self._failed_rounds = 0

    def _by_node(self, v: Vector) -> Vector:
        """(m, d): the same vector for every node."""
        return v.expand(self.num_clients, -1)

    def _connect(self, grid: Grid) -> None:
        """Wait until every client has said who it is."""
        deadline = time.monotonic() + self.wait_timeout
        self.num_clients = 0
        self._nodes, self._asked = {}, set()
        while not self.num_clients or len(self._nodes) < self.num_clients:
            self._meet_new_nodes(grid)
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.num_clients)) - set(self._nodes))
                raise FederationError(
                    f"expected {self.num_clients or 'some'} clients within {self.wait_timeout:g} s,"
                    f" got {len(self._nodes)}; missing partition-ids: {missing or 'all'}. Start "
                    "their SuperNodes or give them more time with wait-timeout"
                )
            if len(self._nodes) < (self.num_clients or 1):
                time.sleep(0.1)
        log.info("%d clients connected, %d a round", self.num_clients, self._cohort_size())
        if self.num_clients == FLOWERS_DEFAULT:
            log.info("for more simulated clients: flwr run . --federation-config %s", MORE_CLIENTS)

    def _meet_new_nodes(self, grid: Grid) -> None:
        """Ask nodes that were not there before which client they are; forget those that left."""
        online = set(grid.get_node_ids())
        gone = [i for i, node in self._nodes.items() if node not in online]
        for i in gone:
            log.warning("client %d is offline", i)
            del self._nodes[i]
        new = sorted(online - self._asked)
        if not new:
            return
        self._asked |= set(new)
        asked = [Message(records.hello(), node, MessageType.TRAIN) for node in new]
        met: dict[int, int] = {}
        for reply in grid.send_and_receive(asked, timeout=self.wait_timeout):
            if reply.has_error():
                # a node that died is reported by the SuperLink; any other error is the client's own
                if reply.metadata.src_node_id in online:
                    raise FederationError(
                        f"a client could not start: {_last_line(reply.error.reason)}"
                    )
                continue
            i, num_clients = records.introduction(reply)
            node = reply.metadata.src_node_id
            if i in met:
                raise FederationError(
                    f"expected one SuperNode per partition-id, got two with partition-id={i} "
                    f"(nodes {met[i]} and {node}): give each its own in --node-config"
                )
            if not 0 <= i < num_clients or self.num_clients not in (0, num_clients):
                raise FederationError(
                    f"expected partition-id below num-partitions, and one num-partitions for all "
                    f"SuperNodes, got partition-id={i} num-partitions={num_clients}"
                    + (f" beside num-partitions={self.num_clients}" if self.num_clients else "")
                )
            self.num_clients = num_clients
            met[i] = node
        for i in met.keys() & self._nodes.keys():
            log.warning("client %d came back as another node, which takes its place", i)
        self._nodes |= met

    # a round

    def _cohort_size(self) -> int:
        if self.gossip:  # every node trains in every round
            return self.num_clients
        return max(1, round(self.fraction_train * self.num_clients))

    def _draw(self, t: int) -> list[int]:
        """The active clients of round t, by a generator of (seed, t) over the sorted clients."""
        clients = sorted(self._nodes)
        if self.participation is not None:
            wanted = sorted(set(self.participation[t]))
            if wanted and not 0 <= wanted[0] <= wanted[-1] < self.num_clients:
                raise ValueError(
                    f"participation: expected clients 0..{self.num_clients - 1}, got {wanted}"
                )
            return [i for i in wanted if i in self._nodes]
        if self.gossip:
            return clients
        generator = random.Random(f"cohort {self.seed} {t}")
        if self.sampling == "bernoulli":
            drawn: list[int] = []
            while clients and not drawn:
                drawn = [i for i in clients if generator.random() < self.fraction_train]
            return drawn
        return sorted(generator.sample(clients, min(self._cohort_size(), len(clients))))

    def _order(self, t: int) -> records.Order:
        return records.Order(
            round=t,
            client=-1,
            last_round=-1,
            rule=self._rule_text,
            shapes=records.shapes_text(self._layout.values()),
            lr=self.lr * self.lr_decay**t,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            local_epochs=self.local_epochs,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            seed=self.seed,
            precision=self.precision,
        )

    def _message(self, i: int, order: records.Order, config: ConfigRecord) -> Message:
        last_round = self._last_rounds.get(i, -1)
        order = order._replace(client=i, last_round=last_round)
        w, state = self._w, self.state
        if self.gossip:
            w, state = w[i], each(state, lambda v: v[i])
        down = self.broadcast(w, state, Client(i, order.round, last_round))
        content = RecordDict(
            {records.DOWN: records.pack(down), records.CONFIG: records.write_order(order, config)}
        )
        if self._rule.needs_initial and last_round < 0 < order.round:
            content[records.INITIAL] = records.pack(Model(self._w_0))
        return Message(content, self._nodes[i], MessageType.TRAIN)

    def _accept(
        self, t: int, replies: Iterable[Message]
    ) -> tuple[dict[int, tuple[Any, dict[str, float]]], list[dict[str, Any]]]:
        """The good replies by client, in client order, and a row per asked client."""
        of_message = {m.metadata.message_id: i for i, m in self._sent.items()}
        outcome: dict[int, Any] = dict.fromkeys(self._sent, "no reply in time")
        for reply in replies:
            i = of_message.get(reply.metadata.reply_to_message_id)
            if i is not None:
                outcome[i] = self._read(reply)
        good, rows = {}, []
        for i, read in outcome.items():  # in client order, as they were sent
            row: dict[str, Any] = {"round": t + 1, "client": i}
            if isinstance(read, str):
                log.warning("round %d: dropped client %d: %s", t + 1, i, read)
                rows.append(row | {"status": read})
            else:
                good[i] = read
                rows.append(row | {"status": "ok"} | read[1])
        return good, rows

    def _read(self, reply: Message) -> tuple[Any, dict[str, float]] | str:
        """(vectors, metrics) of a good reply, else what is wrong with it, in one line."""
        if reply.has_error():
            return f"error {reply.error.code}: {_last_line(reply.error.reason)}"
        arrays = reply.content.array_records
        numbers = reply.content.metric_records.get(records.METRICS)
        needed = {"num-examples", "steps", "train-loss"}
        if set(arrays) != {records.UP} or numbers is None or not needed <= set(numbers):
            return (
                f"expected the records {records.UP!r} and {records.METRICS!r} with "
                f"{', '.join(sorted(needed))}, got {sorted(reply.content)}"
            )
        try:
            up = records.unpack(self._rule.sends, arrays[records.UP], like=self._like)
        except ValueError as error:
            return str(error)
        examples = numbers["num-examples"]
        if not isinstance(examples, int) or examples <= 0:
            return f"expected num-examples above 0, got {examples}"
        for name, vector in zip(up._fields, up, strict=True):
            if vector is not None and not is_finite(vector):
                return f"expected finite numbers, got NaN or Inf in {name!r}"
        elements, up_bytes = records.size(arrays[records.UP])
        return up, {**numbers, "up-vectors": elements / self._like.numel(), "up-bytes": up_bytes}  # type: ignore[dict-item]

    def _fail(self, server_round: int, replies: int) -> None:
        self._failed_rounds += 1
        log.warning(
            "round %d failed: expected at least %d good replies, got %d; the model stays",
            *(server_round, self.min_replies, replies),
        )
        if self._failed_rounds >= self.max_failed_rounds:
            raise FederationError(
                f"{self._failed_rounds} rounds in a row had fewer than {self.min_replies} good "
                "replies (see the reasons above); mend the clients, or lower lr if they diverged, "
                "or raise max-failed-rounds"
            )

    def _metrics(
        self, replies: list[dict[str, float]], rows: list[dict[str, Any]]
    ) -> dict[str, float]:
        """The row of the round: loss and traffic, summed over the cohort."""
        down = [
            records.size(record)
            for message in self._sent.values()
            for record in message.content.array_records.values()
        ]
        weights = [m["num-examples"] for m in replies]
        losses = [m["train-loss"] * n for m, n in zip(replies, weights, strict=True)]
        return {
            "train-loss": sum(losses) / sum(weights),
            "replies": len(replies),
            "dropped": len(rows) - len(replies),
            "down-vectors": sum(n for n, _ in down) / self._like.numel(),
            "down-bytes": sum(b for _, b in down),
            "up-vectors": sum(m["up-vectors"] for m in replies),
            "up-bytes": sum(m["up-bytes"] for m in replies),
        }

    def _gossip(self, ups: Any, cohort: Nodes) -> dict[str, float]:
        """Move every node by its own reply, and mix; what that did to consensus, what it took."""
        assert self.gossip
        nodes, t, found = cohort.clients, cohort.round, {}
        W = self.gossip.matrix(self.num_clients, t, self.seed)
        absent = sorted(set(range(self.num_clients)) - set(nodes))
        if absent:
            W = among(W, nodes)
            log.warning(
                "round %d: nodes %s did not answer and keep their models; the others mix over what "
                "is left of the graph, in %d part(s)",
                *(t + 1, absent, len(parts(W))),
            )
        network = Network(W, self.gossip.steps)
        if "w" in ups._fields:
            local = dict(zip(nodes, ups.w, strict=True))
            everyone = [local.get(i, self._w[i]) for i in range(self.num_clients)]
            found["consensus-before"] = consensus_distance(everyone)

        def present(v: Vector) -> Vector:
            return v[nodes] if absent else v

        def put_back(v: Vector, before: Vector) -> Vector:
            return before.clone().index_copy_(0, torch.tensor(nodes), v) if absent else v

        w, state = self.aggregate_nodes(
            present(self._w), ups, each(self.state, present), cohort, network
        )
        self._w = put_back(w, self._w)
        pairs = zip(state, self.state, strict=True)
        self.state = type(state)(*(v if v is None else put_back(v, old) for v, old in pairs))
        return found | {
            "consensus-after": consensus_distance(self._w),
            "spectral-gap": spectral_gap(W),
            "peer-vectors": network.sent,
            "peer-bytes": round(network.sent * self._like.numel() * self._like.element_size()),
        }

    def _drift(self, locals: Sequence[Vector], w_bar: Vector) -> dict[str, float]:
        """Consistency Delta^t of the active clients, against w^{t+1} and against w_bar^{t+1}."""

        def mean_square(centre: Vector) -> float:
            return sum(float((w_K - centre).square_().sum()) for w_K in locals) / len(locals)

        return {"drift": mean_square(self._w), "spread": mean_square(w_bar)}

    def _report(
        self,
        result: Result,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        grid: Grid,
    ) -> None:
        """Evaluate where it is due, and hand the round on."""
        number, found = self._last.number, {}
        if number % self.eval_every == 0 or number == self.num_rounds:
            found = self._evaluate(evaluate_fn, number) | self._evaluate_personal(grid)
            if evaluate_fn:
                result.evaluate_metrics_serverapp[number] = MetricRecord(found)
            self._last.metrics.update(found)  # type: ignore[arg-type]
        metrics = self._last.metrics
        text = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k in SHOWN or k in found)
        log.info("[round %d/%d] %s", number, self.num_rounds, text)
        if self.on_round:
            self.on_round(self._last)

    def _evaluate(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None, number: int
    ) -> dict[str, Any]:
        """Metrics of the headline model and, beside it, of the broadcast one or of the nodes'."""

        def metrics(w: Vector) -> dict[str, Any]:
            return dict(evaluate_fn(number, self.arrays(w)) or {}) if evaluate_fn else {}

        headline = self._headline()
        found = metrics(headline)
        if self.evaluate_headline_fn:
            found |= self.evaluate_headline_fn(self.arrays(headline), found)
        if self.gossip:
            if self.gossip.eval_nodes and number:  # at first all are the same
                nodes = [metrics(w_i) for w_i in self.headline(self._w, self.state)]
                for name in nodes[0]:
                    values = [node[name] for node in nodes]
                    found |= {f"{name}-nodes": fmean(values), f"{name}-nodes-std": pstdev(values)}
        elif headline is not self._w:
            found |= {f"{name}-broadcast": value for name, value in metrics(self._w).items()}
        return found

    def _evaluate_personal(self, grid: Grid) -> dict[str, Any]:
        """Mean metrics of the clients' own models, where the method has such and clients answer."""
        met = [i for i in self._last_rounds if i in self._nodes]
        if not met or self._rule.personal(self.client_state_like()) is None:
            return {}
        order = records.write_order(self._order(self._last.number), {})
        asked = [
            Message(RecordDict({records.CONFIG: order}), self._nodes[i], MessageType.EVALUATE)
            for i in sorted(met)
        ]
        replies = list(grid.send_and_receive(asked, timeout=self.round_timeout))
        wrong = [_last_line(r.error.reason) for r in replies if r.has_error()]
        if wrong:
            log.warning(
                "%d of %d clients did not evaluate their personal model: %s",
                *(len(wrong), len(asked), wrong[0]),
            )
        found: list[Mapping[str, Any]] = [
            r.content.metric_records[records.METRICS] for r in replies if not r.has_error()
        ]
        names = [name for name in (found[0] if found else {}) if name != "num-examples"]
        return {f"personal-{name}": fmean(row[name] for row in found) for name in names}


def own_options(kind: "type[FederatedStrategy]") -> "list[dataclasses.Field[Any]]":
    """The options that a method adds to those of every strategy."""
    common = {f.name for f in options(FederatedStrategy)}
    return [f for f in options(kind) if f.name not in common]


def _last_line(reason: str | None) -> str:
    """What was raised: Flower's simulation puts a whole traceback above it."""
    lines = [line.strip() for line in (reason or "no reason given").splitlines() if line.strip()]
    return lines[-1].removeprefix(RAISED).strip("'>")


RAISED = "Exception ClientAppException occurred. Message: "
FLOWERS_DEFAULT = 2  # simulated SuperNodes where nobody asks for more
MORE_CLIENTS = '"num-supernodes=20 client-resources-num-cpus=1"'
SHOWN = ("train-loss", "replies", "seconds")

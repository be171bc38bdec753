"""The server half of every method: a Flower Strategy, and the round loop that all of them share."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedaccord.core import rounds
from fedaccord.core.cohort import Client, Cohort
from fedaccord.core.cost import Cost, cost_of
from fedaccord.core.options import argument, check_option, options
from fedaccord.core.plugin import ClientHalf, PlugIn, combine
from fedaccord.core.rounds import RoundState
from fedaccord.core.rule import LocalRule, Model, Stateless
from fedaccord.core.topology import Star, Topology
from fedaccord.core.vectors import Vector
from fedaccord.core.visit import Visit
from fedaccord.federation import sampling
from fedaccord.federation.clock import TimeLeft
from fedaccord.federation.errors import FederationError
from fedaccord.federation.evaluation import (
    EvaluateFn,
    EvaluateHeadlineFn,
    evaluate_at_clients,
    evaluate_at_server,
)
from fedaccord.federation.fleet import Answers, Fleet, MessageFleet
from fedaccord.federation.round import Round, finish
from fedaccord.federation.session import Session
from fedaccord.federation.settings import Settings

log = logging.getLogger("flwr")


@dataclass(kw_only=True, eq=False)
class FederatedStrategy(Settings, Strategy, ABC):
    """The server half of a method.

    A subclass writes the paper: `rule` (its client half), `init`, `broadcast` and `aggregate`, all
    of them pure. Between two rounds everything that is known is in ``state``, a value.
    Works in any Flower ServerApp: ``strategy.start(grid=..., initial_arrays=..., num_rounds=...)``
    with `fedaccord.train_locally` in the ClientApp.
    """

    # What a method says of its server step. The defaults are the safe ones.
    linear: ClassVar[bool] = False  # mixed steps are a step of mixed nodes: gossip may mix them
    takes_weights: ClassVar[bool] = False  # with weighting=examples its fixed point is weighted too
    reads_starts: ClassVar[bool] = False  # `aggregate` reads cohort.starts
    reads_anchors: ClassVar[bool] = False  # `aggregate` reads cohort.anchor
    fixed_anchor: ClassVar[str] = ""  # why relaxed initialisation cannot move w^t as the anchor
    tied: ClassVar[bool] = True  # the server's memory sums up the clients': see `rounds.forget`
    averages_plain_models: ClassVar[bool] = False  # FedAvg's step after plain SGD, nothing else
    averages: ClassVar[bool] = False  # `aggregate` reads the uploads by cohort.mean(ups.w) alone
    pools: ClassVar[bool] = False  # one client, which holds all training data
    refuses: ClassVar[dict[type[PlugIn], str]] = {}  # a plug-in -> why it does not fit
    cost_note: ClassVar[str] = ""  # on what the cost depends

    plugins: tuple[PlugIn, ...] = argument(
        (),
        "plug-ins beside the method's own, or in the place of its own of the same kind, as "
        "(SAM(rho=0.1), Gossip(topology='ring')); the outermost last",
    )
    num_rounds: int = argument(0, "the number of rounds T; start sets it", shown=False)
    participation: Sequence[Sequence[int]] | None = argument(
        None, "explicit cohorts, the clients of each round; None: they are drawn", shown=False
    )
    on_round: Callable[[Round], None] | None = argument(
        None, "called with each round at its end, and before the first", shown=False
    )
    evaluate_headline_fn: EvaluateHeadlineFn | None = argument(
        None, "evaluates the headline model beside evaluate_fn of start", shown=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting != "uniform" and not self.takes_weights:
            raise ValueError(
                f"weighting: expected uniform with {type(self).__name__}, got {self.weighting!r}: "
                "its server step counts clients equally"
            )
        self.plugins = combine(self.own_plugins(), self.plugins)
        for plugin in self.plugins:
            for field in options(type(plugin)):
                check_option(field.name, getattr(plugin, field.name), field)
        self.plugins = tuple(plugin.fit(self) for plugin in self.plugins if not plugin.is_off)
        graphs = (plugin.graph(self.seed) for plugin in self.plugins)
        self._topology: Topology = next((g for g in graphs if g is not None), Star())
        self.state: RoundState | None = None
        self.session: Session | None = None
        self.federation, self.attempt = "", 0  # as clients are told: see `TrainInstruction`
        self.durable: Sequence[int] | None = None  # as `TrainInstruction.durable`, of every client
        self.scratch: Path | None = None  # for what memory does not hold; None: the temporary one
        self._asked: list[Visit] = []  # between `configure_train` and `aggregate_train`

    # the method: what a subclass writes

    @abstractmethod
    def rule(self) -> LocalRule:
        """The client half with this run's hyper-parameters."""

    def own_plugins(self) -> tuple[PlugIn, ...]:
        """The plug-ins that make the method what it is."""
        return ()

    def init(self, w: Vector) -> Any:
        """Server state before round 1, a NamedTuple of vectors; w: (d,)."""
        return Stateless()

    def broadcast(self, w: Vector, state: Any, client: Client) -> Any:
        """What one client receives, a NamedTuple of vectors (d,); w: (d,)."""
        return Model(w)

    @abstractmethod
    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        """w^{t+1} (..., d) and the next server state; nothing that comes in is changed.

        w: (..., d), w^t. ups: the replies' NamedTuple with a tuple of vectors (..., d), one for
        each client, in every field. state: the server state, its vectors (..., d).
        """

    def headline(self, w: Vector, state: Any) -> Vector:
        """The model (..., d) that is evaluated, saved and returned."""
        return w

    def check_clients(self, num_clients: int) -> None:
        """Raise ValueError, in one line, where the settings do not fit this many clients."""
        size = self.cohort_size(num_clients)
        if self.participation is None and self.min_replies > size:
            average = " on average" if self.sampling == "bernoulli" else ""
            more = "" if size == num_clients else ", or raise fraction-train"
            raise ValueError(
                f"min-replies: expected at most {size}, the clients of a round{average} (of "
                f"{num_clients} in all), got {self.min_replies}; lower it{more}"
            )

    def needed_replies(self, num_clients: int) -> int:
        """Good replies that a round needs to count."""
        return self.min_replies

    # what follows from it

    @property
    def topology(self) -> Topology:
        """Who averages with whom: a star, or the graph of a plug-in."""
        return self._topology

    @property
    def cost(self) -> Cost:
        """What an active client costs a round, with the plug-ins in use."""
        return cost_of(self, self.client_half())

    def client_half(self) -> ClientHalf:
        """What clients run: the method's rule in the plug-ins that have a client half."""
        inside = (p for p in self.plugins if p.graph(self.seed) is None)
        return ClientHalf(self.rule(), tuple(inside))

    def cohort_size(self, num_clients: int) -> int:
        """Clients of a round, on average where they are drawn one by one."""
        if self.topology.everyone:
            return num_clients
        return sampling.cohort_size(self.fraction_train, num_clients)

    def current(self) -> ArrayRecord | None:
        """The headline model as it is now; None before `start`."""
        if self.state is None or self.session is None:
            return None
        return self.session.arrays(self._headline(self.state))

    # Flower's Strategy

    def summary(self) -> None:
        half = self.client_half()
        log.info("%s, client half %s", type(self).__name__, half.rule)
        for plugin in half.plugins:
            log.info("with %s", plugin)
            if advice := plugin.advice():
                log.warning(advice)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per client of the round's cohort; connects before round 1."""
        if self.session is None:
            self.begin(MessageFleet(grid), arrays)
        fleet = self._messages()
        fleet.grid, fleet.extra = grid, config
        self._asked = self._visits(self._connected(), self._open())
        return fleet.messages(self._asked)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The headline model after this round and its metrics; (None, None) for a failed round.

        Raises FederationError after ``max_failed_rounds`` failed rounds in a row.
        """
        round = self._finish_round(self._asked, self._messages().read(replies).items())
        self._check_failures(self._open(), round)
        if self._open().failed:
            return None, None
        return self.current(), MetricRecord(dict(round.metrics))

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
        grid: Grid | Fleet,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        state: RoundState | None = None,
    ) -> Result:
        """Run the federation; arguments and result as Flower's own `Strategy.start`.

        ``grid`` may also be a fleet of clients in this process. ``timeout`` (seconds, per round)
        takes the place of ``round_timeout``. ``evaluate_fn`` is called on the headline model before
        round 1 and every ``eval_every`` rounds, and once more, its metrics ending in
        ``-broadcast``, where the broadcast model is another one. ``state``: go on from there, to
        ``num_rounds`` in all.
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
        fleet = MessageFleet(grid, train_config) if isinstance(grid, Grid) else grid
        result, s = Result(arrays=initial_arrays), self.begin(fleet, initial_arrays, state)
        if s.t == 0:
            round = Round(0, s.w, self.topology.average(s.w), {}, [])
            self._report(round, result, evaluate_fn)
        left = TimeLeft(s.t, num_rounds)
        for server_round in range(s.t + 1, num_rounds + 1):
            round = self.train_round(timeout)
            current = self.current()
            if not self._open().failed and current is not None:
                result.arrays = current
                result.train_metrics_clientapp[server_round] = MetricRecord(dict(round.metrics))
            self._report(round, result, evaluate_fn, left)
            self._check_failures(self._open(), round)
        return result

    def begin(
        self, fleet: Fleet, arrays: ArrayRecord, state: RoundState | None = None
    ) -> RoundState:
        """Before round 1 the clients connect, and session and state begin; or go on from there.

        Raises ValueError where a state is not of this many clients or of another model.
        """
        fleet.connect(self.wait_timeout)
        num_clients = fleet.num_clients
        log.info("%d clients connected, %d a round", num_clients, self.cohort_size(num_clients))
        self.check_clients(num_clients)
        if graph := self.topology.describe(num_clients):
            log.info("gossip: %s", graph)
        self.session = Session(self, arrays, fleet)
        first = rounds.first_state(self, self.session.vector(arrays), num_clients)
        if state is not None:
            _check_alike(state, first)
            state = state.to(first.w.device)
        self.state = state or first
        return self.state

    def train_round(self, timeout: float | None = None) -> Round:
        """One round, from the state s to the next one; after `begin`."""
        s, session, began = self._open(), self._connected(), time.perf_counter()
        visits = self._visits(session, s)
        answers = session.fleet.train(visits, timeout or self.round_timeout)
        round = self._finish_round(visits, answers)
        round.metrics["seconds"] = time.perf_counter() - began
        return round

    # the steps of a round

    def _open(self) -> RoundState:
        if self.state is None:
            raise RuntimeError("expected a strategy that has begun: call start")
        return self.state

    def _connected(self) -> Session:
        assert self.session is not None
        return self.session

    def _messages(self) -> MessageFleet:
        fleet = self._connected().fleet
        assert isinstance(fleet, MessageFleet)
        return fleet

    def _visits(self, session: Session, s: RoundState) -> list[Visit]:
        """What each client of the round's cohort is asked."""
        return session.visits(self, s, self._draw(s, session.fleet.here()))

    def _draw(self, s: RoundState, here: Sequence[int]) -> Sequence[int]:
        if self.participation is not None:
            return sampling.scheduled(self.participation[s.t], here, s.num_clients)
        if self.topology.everyone:
            return here
        return sampling.draw(
            here,
            t=s.t,
            seed=self.seed,
            fraction=self.fraction_train,
            sampling=self.sampling,
            num_clients=s.num_clients,
        )

    def _finish_round(self, visits: Sequence[Visit], answers: Answers) -> Round:
        """Take the answers in: from the state s to the next one."""
        self.state, round = finish(self, self._connected(), self._open(), visits, answers)
        return round

    def _check_failures(self, s: RoundState, last: Round) -> None:
        if s.failed >= self.max_failed_rounds:
            why = next((f", the last with {r['status']!r:.200}" for r in last.clients), "")
            raise FederationError(
                f"{s.failed} rounds in a row failed{why} (see the reasons above); fix the clients, "
                "or lower lr if they diverged, or raise max-failed-rounds"
            )

    def _headline(self, s: RoundState) -> Vector:
        return self.topology.average(self.headline(s.w, s.server))

    def _report(
        self,
        round: Round,
        result: Result,
        evaluate_fn: EvaluateFn | None,
        left: Callable[[int], str] = lambda _: "",
    ) -> None:
        """Evaluate where it is due, and hand the round on."""
        s, session = self._open(), self._connected()
        number, values = round.number, {}
        if number % self.eval_every == 0 or number == self.num_rounds:
            headline = self.headline(s.w, s.server)
            graph = self.topology.everyone
            each_node = graph and self.topology.eval_nodes and number  # at first all are the same
            values = evaluate_at_server(
                *(number, evaluate_fn, self.evaluate_headline_fn, session.arrays),
                headline=self.topology.average(headline),
                broadcast=None if graph or headline is s.w else s.w,
                nodes=headline if each_node else (),
            )
            if session.has_personal:
                asked = session.questions(self, s)
                values |= evaluate_at_clients(session.fleet, asked, self.round_timeout)
            if evaluate_fn:
                result.evaluate_metrics_serverapp[number] = MetricRecord(values)
            round.metrics.update(values)
        shown = {k: v for k, v in round.metrics.items() if k in SHOWN or k in values}
        words = [*(f"{name} {value:.4g}" for name, value in shown.items()), left(number)]
        log.info("[round %d/%d] %s", number, self.num_rounds, ", ".join(filter(None, words)))
        if self.on_round:
            self.on_round(round)


def _check_alike(state: RoundState, first: RoundState) -> None:
    if state.num_clients != first.num_clients:
        raise ValueError(
            f"expected {state.num_clients} clients, as the run began with, got {first.num_clients}"
        )
    if state.w.shape != first.w.shape or state.w.dtype != first.w.dtype:
        raise ValueError(
            f"expected a model of {state.w.shape[-1]} parameters in {state.w.dtype}, as the run "
            f"began with, got {first.w.shape[-1]} in {first.w.dtype}"
        )


def own_options(kind: type[FederatedStrategy]) -> list[Any]:
    """The options that a method adds to those of every strategy."""
    common = {field.name for field in options(FederatedStrategy)}
    return [field for field in options(kind) if field.name not in common]


SHOWN = ("train-loss", "replies", "seconds")

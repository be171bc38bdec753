"""A run of a method over a fleet: the state, the loop over rounds, the callbacks."""

import logging
import time
from collections.abc import Callable
from copy import copy
from statistics import fmean
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedaccord.core import rounds
from fedaccord.core.cohort import Cohorts
from fedaccord.core.method_settings import expect
from fedaccord.core.metrics import STD, WORST
from fedaccord.core.request import ModelLayout
from fedaccord.core.rounds import RoundState
from fedaccord.federation import sampling
from fedaccord.federation.budget import Budget
from fedaccord.federation.clock import Clock
from fedaccord.federation.device_profiles import NONE
from fedaccord.federation.errors import FederationError, NotConnected
from fedaccord.federation.eta import Eta
from fedaccord.federation.evaluation import (
    Evaluate,
    EvaluateOutput,
    evaluate_at_clients,
    evaluate_at_server,
)
from fedaccord.federation.fleet import DEVICES, Fleet
from fedaccord.federation.method import Method
from fedaccord.federation.metrics import OK
from fedaccord.federation.policies import Buffered, FullRound
from fedaccord.federation.round import Round, finish
from fedaccord.federation.session import Book, Session
from fedaccord.storage.mapped import SpillPast

log = logging.getLogger("flwr")

UNLIKELY = 0.01  # chance that small cohorts end a run, above which to warn

OnRound = Callable[[Round], None]
LOGGED_METRICS = ("train-loss", "replies", "dp-epsilon", "clock", "seconds")  # of each round


class Run:
    """One run of ``method``, ``num_rounds`` rounds from the parameters ``initial``.

    cohorts: the clients of each round; None: drawn. timeout: seconds for the replies of a round,
    instead of the method's ``round_timeout``. evaluate: metrics of the output model, the broadcast
    one and those of nodes; evaluate_output: more metrics of only the output model.
    on_round: called with every round, the first with number 0, before any training. book: the
    records of the run; None: none. model: the roles of the model's tensors; None: from ``initial``,
    by `state_dict.layout_of`. clock: of a simulation, if the method has a ``device_profile``; None:
    real time.
    Raises ValueError, before any message is sent, if the arguments do not fit.
    """

    def __init__(
        self,
        method: Method,
        fleet: Fleet,
        initial: ArrayRecord,
        num_rounds: int,
        *,
        cohorts: Cohorts | None = None,
        timeout: float | None = None,
        evaluate: Evaluate | None = None,
        evaluate_output: EvaluateOutput | None = None,
        on_round: OnRound | None = None,
        book: Book | None = None,
        model: ModelLayout | None = None,
        clock: Clock | None = None,
    ) -> None:
        if cohorts is not None:
            sampling.check_number(cohorts, num_rounds)
            if method.has_noisy_sums:
                raise ValueError(
                    "participation: expected a share of the clients with dp, got cohorts: the "
                    "guarantee assumes that clients are drawn independently"
                )
            expect(method, "over-selection", [0], "with given cohorts")
        if clock is None:
            check_real_time(method, fleet.place == DEVICES)
        if cohorts is not None and method.is_buffered and not method.concurrency:
            raise ValueError(
                "concurrency: expected the number of active clients with given cohorts and "
                "schedule=buffered, got 0: set it, for example to the size of a cohort"
            )
        method = copy(method)
        vars(method).pop("topology", None)  # of an earlier run: this one reads its graph itself
        self.method, self.num_rounds, self.cohorts = method, num_rounds, cohorts
        self.timeout = method.round_timeout if timeout is None else timeout
        book = book or Book()
        self.session = Session(method, initial, fleet, num_rounds, book, model)
        self._initial = initial
        self._evaluate, self._evaluate_output = evaluate, evaluate_output
        self._on_round = on_round
        spill = self._spill = SpillPast(book.folder)
        self._clock = clock
        self._budget: Budget | None = None  # of the method's privacy guarantee
        self._last = num_rounds  # after which the run ends
        kind = Buffered if method.is_buffered else FullRound
        self._policy = kind(
            self.session,
            cohorts,
            clock,
            self.timeout,
            release=lambda s: spill.release(s.server),
        )
        self._state: RoundState | None = None

    @property
    def state(self) -> RoundState:
        """The state after the last round; raises RuntimeError before `begin`."""
        if self._state is None:
            raise RuntimeError("expected a run that has begun: call begin or play")
        return self._state

    @property
    def has_begun(self) -> bool:
        return self._state is not None

    def output(self) -> ArrayRecord:
        """The current output model, under the names of the initial parameters."""
        if not self.has_begun:
            return self._initial
        s = self.state
        return self.session.arrays(self.method.averaged_output(s.w, s.server), s.buffers)

    def play(self, state: RoundState | None = None) -> Result:
        """All rounds, from ``state`` if there is one. Raises as `begin`, and FederationError after
        ``max_failed_rounds`` failed rounds in a row. Afterwards it makes no callbacks."""
        try:
            return self._play(state)
        finally:
            self._on_round = None  # it may refer to this run: breaks the cycle, which frees memory

    def _play(self, state: RoundState | None) -> Result:
        self.method.summary()
        s, result = self.begin(state), Result(arrays=self._initial)
        if state is None:  # otherwise its row is written already
            first = {"clock": s.clock} if self._clock else {}
            self._report(Round(s, self.method.topology.average(s.w), first, []), result)
        elif s.t >= self._last:  # its rows are written, but not its end
            if s.failed >= self.method.max_failed_rounds:
                raise FederationError(
                    f"the last {s.failed} of {s.t} rounds failed; fix the clients, or lower lr if "
                    "they diverged, and raise num-server-rounds"
                )
            self._evaluated(s, result)
        left = Eta(s.t, self.num_rounds)
        for number in range(s.t + 1, self._last + 1):
            round = self.train_round()
            if not round.failure:
                result.train_metrics_clientapp[number] = MetricRecord(dict(round.metrics))
            self._report(round, result, left)
            self._check_failures(round)
        result.arrays = self.output()
        return result

    def begin(self, state: RoundState | None = None) -> RoundState:
        """Wait for the clients; the state before round 1, or ``state``, from which to resume, after
        ``wait_timeout`` also without those that a round does not need.

        Raises FederationError if the clients do not connect, ValueError if their number does not
        fit the settings, or ``state`` is of another number of clients or of another model.
        """
        session, method = self.session, self.method
        least = 0 if state is None else max(1, method.needed_replies(state.num_clients))
        settings = method.model_settings
        session.fleet.connect(method.wait_timeout, settings, session.model, least)
        num_clients = session.fleet.num_clients
        size = fmean(map(len, self.cohorts)) if self.cohorts else method.cohort_size(num_clients)
        log.info("%d clients connected, %d a round", num_clients, round(size))
        method.check_clients(num_clients, self.cohorts)
        replies = method.buffer_of(num_clients) if method.is_buffered else size
        for plugin in session.half.plugins:
            if advice := plugin.advice(method, replies / num_clients):
                log.warning(advice)
        self._warn_of_small_cohorts(num_clients)
        first = rounds.first_state(
            method,
            session.vector(self._initial),
            num_clients,
            session.buffers(self._initial),
            method.is_buffered,
        )
        if graph := method.topology.describe(num_clients):
            log.info("gossip: %s", graph)
        if state is not None:
            _check_alike(state, first)
            state = state.to(first.w.device)
            if self._clock is None:  # replies to the previous server are discarded
                state = state._replace(visits=())
        self._state = self._with_privacy(state or first)
        return self._state

    def _warn_of_small_cohorts(self, num_clients: int) -> None:
        """Warn if so many drawn cohorts will be too small that the run is likely to end."""
        method = self.method
        needed, q = method.needed_replies(num_clients), method.fraction_train
        if method.masking:
            needed = max(needed, method.masking.least)
        is_drawn = self.cohorts is None and not method.topology.is_decentralised
        if is_drawn and method.sampling == "bernoulli":
            fail = sampling.chance_of_fewer(needed, q, num_clients, method.has_noisy_sums)
            if self.num_rounds * fail**method.max_failed_rounds > UNLIKELY:
                log.warning(
                    "sampling: %.2g%% of the rounds will have fewer than the %d clients that they "
                    "need, and %d failed rounds in a row end the run: raise fraction-train, or "
                    "max-failed-rounds",
                    100 * fail,
                    needed,
                    method.max_failed_rounds,
                )

    def _with_privacy(self, s: RoundState) -> RoundState:
        """The state with that of the privacy mechanism; sets the end of the run."""
        method, left = self.method, max(0, self.num_rounds - s.t)
        if method.guarantee is None or (s.privacy is None and not left):
            return s
        numbers = s.w.numel() * len(self.session.half.rule.sends._fields)
        self._budget = Budget(
            method.guarantee,
            share=method.fraction_train,
            num_rounds=left,
            num_clients=s.num_clients,
            numbers=numbers,
            begun=s.privacy,
            secret=self.session.is_deployed,
        )
        for plugin in self.session.half.at(self._budget.first).plugins:
            plugin.check_size(numbers)
        if self._budget.rounds_left < left:
            self._last = s.t + self._budget.rounds_left
            log.warning(
                "dp.max-epsilon: the run ends after round %d of %d: the next one would exceed it",
                self._last,
                self.num_rounds,
            )
        return s._replace(privacy=self._budget.first)

    def facts(self) -> dict[str, Any]:
        """Facts for the summary: clients, graph and privacy."""
        s = self.state
        facts = {"clients": s.num_clients, **self.method.topology.facts(s.num_clients)}
        if self._budget and s.privacy:
            facts["dp"] = self._budget.facts(s.privacy)
        return facts

    def train_round(self) -> Round:
        """One round, from the state to the next one; after `begin`."""
        began = time.perf_counter()
        collected = self._policy.collect(self.state)
        round = finish(
            self.session, collected.state, collected.requests, collected.replies, collected.failure
        )
        if self._budget and round.state.privacy:
            self.session.book.spend(round.state.privacy.releases)  # before any release
        self._state = round.state._replace(server=self._spill(round.state.server))
        if self._clock:
            round.metrics["clock"] = self._state.clock
            for row in round.clients:
                row["clock"] = collected.ends[row["client"]]
        if self._budget and self._state.privacy:
            round.metrics["dp-epsilon"] = self._budget.epsilon(self._state.privacy)
        round.metrics["seconds"] = time.perf_counter() - began
        return round._replace(state=self._state)

    def is_evaluated(self, number: int) -> bool:
        """Whether the model is evaluated after ``number`` rounds."""
        return number % self.method.eval_every == 0 or number == self._last

    def _check_failures(self, last: Round) -> None:
        failed = last.state.failed
        if last.failure and failed >= self.method.max_failed_rounds:
            bad = (row for row in last.clients if row["status"] != OK)
            dropped = next((f"; client {row['client']}: {row['status']}" for row in bad), "")
            advice = "; fix the clients, or lower lr if they diverged,"
            if self.method.deadline and dropped.partition(": ")[2].startswith("late"):
                advice = "; raise deadline"
            if isinstance(last.failure, NotConnected):  # its text has advice already
                advice = ""
            raise FederationError(
                f"{failed} rounds in a row failed (see above), the last one: {last.failure}"
                f"{dropped:.200}{advice} or raise max-failed-rounds"
            )

    def _report(
        self, round: Round, result: Result, left: Callable[[int], str] = lambda _: ""
    ) -> None:
        """Evaluate if due, log the round and make the callbacks."""
        number = round.number
        values: dict[str, Any] = {}
        if self.is_evaluated(number):
            values, clients = self._evaluated(round.state, result)
            round.metrics.update(values)
            round = round._replace(evaluations=clients)
        shown = {
            name: value
            for name, value in round.metrics.items()
            if name in LOGGED_METRICS or (name in values and not name.endswith((WORST, STD)))
            if not isinstance(value, list)  # Flower's metrics may be lists
        }
        words = [*(f"{name} {value:.4g}" for name, value in shown.items()), left(number)]
        log.info("[round %d/%d] %s", number, self.num_rounds, ", ".join(filter(None, words)))
        if self._on_round:
            self._on_round(round)

    def _evaluated(self, s: RoundState, result: Result) -> tuple[dict[str, Any], list[Any]]:
        """Metrics of the server and of the clients, and the latter's rows."""
        values = evaluate_at_server(self.session, s, self._evaluate, self._evaluate_output)
        if values:
            result.evaluate_metrics_serverapp[s.t] = MetricRecord(dict(values))
        evaluation = evaluate_at_clients(self.session, s, self.timeout)
        if evaluation.metrics:
            result.evaluate_metrics_clientapp[s.t] = MetricRecord(dict(evaluation.metrics))
        return values | evaluation.metrics, evaluation.clients


def _check_alike(state: RoundState, first: RoundState) -> None:
    if state.num_clients != first.num_clients:
        raise ValueError(
            f"expected {state.num_clients} clients, as at the run's start, got {first.num_clients}"
        )
    if state.w.shape != first.w.shape or state.w.dtype != first.w.dtype:
        raise ValueError(
            f"expected a model of {state.w.shape[-1]} parameters in {state.w.dtype}, as at the "
            f"run's start, got {first.w.shape[-1]} in {first.w.dtype}"
        )


def check_real_time(method: Method, deployed: bool) -> None:
    """Raise ValueError, in one line, if the method needs the clock of simulated devices."""
    why = ": `fedaccord run` and `simulate` simulate devices"
    expect(method, "device-profile", [NONE], "under Flower, whose clock is real", why)
    if method.is_buffered and not deployed:
        raise ValueError(
            "schedule: expected synchronous without simulated devices or SuperNodes, got "
            "'buffered': `fedaccord run` and `simulate` support it with device-profile=lognormal; "
            "Flower's simulation does not"
        )

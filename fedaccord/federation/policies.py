"""The replies of a server step: those of a whole cohort, or the first ones of active clients."""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from fedaccord.core.cohort import Cohorts, PendingRequest
from fedaccord.core.method_settings import OWN_BUFFERS, OWN_STATES, expect
from fedaccord.core.request import TrainRequest
from fedaccord.core.rounds import RoundState
from fedaccord.federation import sampling, secure
from fedaccord.federation.clock import Clock, Timing
from fedaccord.federation.errors import NotConnected
from fedaccord.federation.fleet import TrainReplies
from fedaccord.federation.method import Method
from fedaccord.federation.replies import check_numbers
from fedaccord.federation.session import Session


class Collected(NamedTuple):
    """The replies that a server step reads."""

    state: RoundState  # the state at the server step
    requests: Sequence[TrainRequest]  # in the order of clients
    replies: TrainReplies  # iterated once, in `replies.check_all`: some fleets train there
    ends: Mapping[int, float] = {}  # simulated arrival time of each client's reply
    failure: str = ""  # why the round has no cohort


class FullRound:
    """A round has the replies of its whole cohort, or with a clock the earliest ones.

    cohorts: as of `Run`. timeout: seconds to wait for the replies. release: called on a state when
    the messages are made.
    """

    def __init__(
        self,
        session: Session,
        cohorts: Cohorts | None,
        clock: Clock | None,
        timeout: float,
        release: Callable[[RoundState], None],
    ) -> None:
        self.session, self.method, self.fleet = session, session.method, session.fleet
        self.cohorts, self.clock, self.timeout, self.release = cohorts, clock, timeout, release
        # whether the cohorts are secret: see `sampling.generator`
        self.secret = session.is_deployed and session.method.has_noisy_sums

    def cohort(
        self, s: RoundState, available: Sequence[int], size: int | None = None
    ) -> Sequence[int]:
        """The clients of round t, among the available ones; size: as of `Method.draw`."""
        if self.cohorts is None:
            return self.method.draw(s.t, available, s.num_clients, size, self.secret)
        return sampling.scheduled(self.cohorts[s.t], available, size)

    def collect(self, s: RoundState) -> Collected:
        available, missing = self._connected(s)
        if missing:
            return Collected(s, [], (), failure=missing)
        if self.clock:
            s, available = self._later(self.clock, s, available)
        requests = self.session.requests(s, self.cohort(s, available))
        timing = self._timing(requests, s)
        in_time = [it for it in requests if it.instruction.client not in timing.late]
        self.release(s)
        replies = chain(self._train(in_time), timing.late.items())
        return Collected(s._replace(clock=timing.seconds), requests, replies, timing.ends)

    def _later(
        self, clock: Clock, s: RoundState, connected: Sequence[int]
    ) -> tuple[RoundState, Sequence[int]]:
        """The state once as many devices are available as a round needs, and these."""
        least = self.method.needed_replies(s.num_clients)
        available, now = clock.available(self._eligible(s, connected), s.clock, least)
        return s._replace(clock=now), available

    def _eligible(self, s: RoundState, connected: Sequence[int]) -> Sequence[int]:
        """The connected clients that round t may have: all of them, or those of its cohort."""
        if self.cohorts is None:
            return connected
        return sampling.scheduled(self.cohorts[s.t], connected)

    def _connected(self, s: RoundState) -> tuple[Sequence[int], str]:
        """The connected clients, after a wait for as many as a round needs, and the reason if they
        are fewer; empty: they are not."""
        method, least = self.method, self.method.needed_replies(s.num_clients)
        least = max(1, least, method.masking.least if method.masking else 0)
        at_work = [request.client for request in s.visits]
        available, why = self.fleet.wait_for(least, at_work, method.wait_timeout)
        return available, NotConnected(why) if why else ""

    def _train(self, requests: Sequence[TrainRequest]) -> TrainReplies:
        if self.method.masking is None:
            return self.fleet.train(requests, self.timeout)
        check = partial(check_numbers, self.session)
        return secure.train(self.fleet, requests, self.timeout, self.method.masking, check)

    def _timing(self, requests: Sequence[TrainRequest], s: RoundState) -> Timing:
        """The clients that the round awaits, by the simulated clock; without one all."""
        if self.clock is None:
            return Timing(s.clock, {}, {})
        wanted = len(requests)
        if self.method.over_selection:
            wanted = min(wanted, self.method.cohort_size(s.num_clients))
        return self.clock.round(requests, s.clock, wanted, self.method.deadline)


class Buffered(FullRound):
    """A server step has the first ``buffer-size`` replies of ``concurrency`` active clients.

    Free slots are filled at the beginning of a round: all its requests have the same model, and a
    client has one request at a time. Buffer = concurrency is a synchronous round.
    """

    def collect(self, s: RoundState) -> Collected:
        """Replies in the order of the simulated clock; without one in order of arrival."""
        available, missing = self._connected(s)
        if missing:
            return Collected(s, [], (), failure=missing)
        s, wanted = self._filled(s, available), self.method.buffer_of(s.num_clients)
        if self.clock:
            return self._simulated(s, wanted, self.clock)
        self.release(s)
        outcomes = self.fleet.receive([request.client for request in s.visits], wanted)
        requests, rest = self._split(s, outcomes)
        return Collected(s._replace(visits=rest), requests, outcomes.items())

    def _simulated(self, s: RoundState, wanted: int, clock: Clock) -> Collected:
        """Replies are computed when they arrive, as nothing reads them before: the requests are in
        the state alone, which a checkpoint stores."""
        ends = sorted((request.end, request.client) for request in s.visits)
        lost = {request.client: clock.lost(request) for request in s.visits if request.is_lost}
        arriving = [end for end in ends if end[1] not in lost]
        # too few: the server waits for the others until they disconnect
        last = arriving[:wanted] if len(arriving) >= wanted else ends
        step = (last or [(s.clock, -1)])[-1]
        end_of = {i: end for end, i in ends if (end, i) <= step}
        requests, rest = self._split(s, end_of)
        self.release(s)
        trained = [it for it in requests if it.instruction.client not in lost]
        away = ((i, line) for i, line in lost.items() if i in end_of)
        replies = chain(self.fleet.train(trained, self.timeout), away)
        return Collected(s._replace(clock=step[0], visits=rest), requests, replies, end_of)

    def _filled(self, s: RoundState, available: Sequence[int]) -> RoundState:
        """The state with requests of round t in the free slots; without a simulated clock clients
        receive them at once."""
        at_work = {request.client for request in s.visits}
        if self.clock and not at_work:
            s, available = self._later(self.clock, s, available)
        elif self.clock:
            available = self.clock.active(available, s.clock)
        if at_work:
            available = [i for i in available if i not in at_work]
        slots = self.method.cohort_size(s.num_clients) - len(at_work)
        pending = self.session.pending(s, self.cohort(s, available, slots))
        requests = self.session.requests_of(pending)
        if self.clock is None:
            self.fleet.send(requests, self.timeout)
        else:
            ends = [self.clock.end(request, s.clock) for request in requests]
            pending = [
                request._replace(end=end.seconds, is_lost=end.is_lost)
                for request, end in zip(pending, ends, strict=True)
            ]
        every = sorted([*s.visits, *pending], key=lambda request: request.client)
        return s._replace(visits=tuple(every))

    def _split(
        self, s: RoundState, clients: Container[int]
    ) -> tuple[list[TrainRequest], tuple[PendingRequest, ...]]:
        """The requests to these clients, and the remaining pending ones."""
        replied = [request for request in s.visits if request.client in clients]
        rest = tuple(request for request in s.visits if request.client not in clients)
        return self.session.requests_of(replied), rest


def check_buffered(method: Method) -> None:
    """Raise ValueError, in one line, if the method does not support replies to earlier models."""
    if why := method.why_synchronous:
        name = type(method).__name__
        raise ValueError(f"schedule: expected synchronous with {name}, got 'buffered': {why}")
    expect(method, "sampling", ["fixed"], "with schedule=buffered")
    expect(method, "buffers", OWN_BUFFERS, "with schedule=buffered")
    expect(method, "optimizer-state", OWN_STATES, "with schedule=buffered")
    if any(plugin.moves_anchor for plugin in method.active_plugins):
        raise ValueError("relaxed-init.center: expected server with schedule=buffered, got 'start'")
    if method.guarantee is not None:
        raise ValueError(
            "dp: expected off with schedule=buffered: its budget counts rounds of drawn cohorts"
        )

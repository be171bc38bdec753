"""The end of a round: the good answers become the next state, and what is told of it."""

import logging
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from fedaccord.core import rounds
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Vector
from fedaccord.core.visit import Lost, Visit
from fedaccord.federation import metrics
from fedaccord.federation.fleet import Reading
from fedaccord.federation.replies import Accepted, check_all
from fedaccord.federation.session import Session

log = logging.getLogger("flwr")

ANEW = "the server's memory sums up the clients', so all begin anew at this model"


class Round(NamedTuple):
    """What is known at the end of a round; number 0 is the state before the first."""

    number: int  # t + 1
    w: Vector  # w^{t+1}, the model that the next round broadcasts; (m, d) under gossip
    w_bar: Vector  # mean of the accepted local models; w^{t+1} where they are not sent;
    # under gossip the mean of the nodes' w^{t+1}
    metrics: dict[str, float]
    clients: list[dict[str, Any]]  # a row per asked client


def finish(
    method: Any,
    session: Session,
    s: RoundState,
    visits: Sequence[Visit],
    answers: Mapping[int, Reading],
) -> tuple[RoundState, Round]:
    """The next state, and what is told of the round; method: the strategy."""
    outcome = check_all(answers, session.half, session.like)
    replies = [read.reply for read in outcome.values() if isinstance(read, Accepted)]
    number, needed = s.t + 1, method.needed_replies(s.num_clients)
    if len(replies) < needed:
        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)
        values = metrics.counts(len(outcome), len(replies), counted=False)
    else:
        done = rounds.server_round(method, session.half, s, replies)
        after, w_bar = done.state, method.topology.average(done.state.w)
        values = metrics.traffic_and_loss(visits, outcome, session.like) | done.metrics
        if "w" in done.ups._fields and method.topology.everyone:
            values |= metrics.drift(done.ups.w[0], done.cohort.w)
        elif "w" in done.ups._fields:
            w_bar = done.cohort.mean(done.ups.w)
            values |= metrics.drift(done.ups.w, repeat(s.w))
            values |= metrics.consistency(done.ups.w, done.state.w, w_bar)
    repair, lost = "", [i for i, read in outcome.items() if isinstance(read, Lost)]
    if lost:
        after = rounds.forget(method, session.half, after, lost)
        anew = rounds.begins_anew(method, session.half)
        repair = ANEW if anew else "its next visit is a first one"
    rows = metrics.client_rows(number, outcome, repair)
    for row in rows:
        if row["status"] != metrics.OK:
            why = "; ".join(row[key] for key in ("status", "repair") if row.get(key))
            log.warning("round %d: dropped client %d: %s", number, row["client"], why)
    if after.failed:
        log.warning(
            "round %d failed: expected at least %d good replies, got %d; the model stays",
            *(number, needed, len(replies)),
        )
    return after, Round(number, after.w, w_bar, values, rows)

"""The end of a round: the good answers become the next state, and what is told of it."""

import logging
from collections.abc import Mapping, Sequence
from itertools import repeat
from statistics import median
from typing import Any, NamedTuple

from fedaccord.core import rounds
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Vector, is_finite, leaves, norm
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
    outcome = check_all(visits, answers, session.half, session.like, method.max_examples)
    replies = [read.reply for read in outcome.values() if isinstance(read, Accepted)]
    number, needed = s.t + 1, method.needed_replies(s.num_clients)
    failure = f"expected at least {needed} good replies, got {len(replies)}"
    if len(replies) >= needed:
        done = rounds.server_round(method, session.half, s, replies)
        _tell_of_the_far(number, s, done, method.topology.everyone)
        failure = _wrong(s, done.state, method.max_update_norm)
    if failure:
        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)
        values = metrics.counts(len(outcome), len(replies), counted=False)
    else:
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
        log.warning("round %d failed: %s; the model stays", number, failure)
    return after, Round(number, after.w, w_bar, values, rows)


def _wrong(s: RoundState, after: RoundState, most: float) -> str:
    """Why the server's own result cannot be taken; empty: it can.

    most: how far the model may go in a round, 0: as far as it likes.
    """
    for name, vector in {"w": after.w, **dict(leaves(after.server))}.items():
        if not is_finite(vector):
            return f"the replies are finite, but the server's {name!r} would hold NaN or Inf"
    length = float(norm(after.w - s.w).max()) if most else 0.0
    if length > most:
        return (
            f"max-update-norm: expected a step of the model of at most {most:g}, got {length:.4g}"
        )
    return ""


FAR = 100  # times the cohort's median distance from the model


def _tell_of_the_far(number: int, s: RoundState, done: rounds.ServerRound, everyone: bool) -> None:
    """Warn of a local model that is far from w^t, for its cohort and for the length of w^t.

    The last keeps the warning away from small steps near an optimum, where some are much smaller.
    """
    if "w" not in done.ups._fields:
        return
    clients, local, starts = done.cohort.clients, done.ups.w, repeat(s.w)
    if everyone:
        local, starts = local[0], iter(s.w[list(clients)])
    far = [float(norm(w_K - start)) for w_K, start in zip(local, starts, strict=False)]
    usual, scale = median(far), float(norm(s.w).max())
    for i, distance in zip(clients, far, strict=True):
        if distance > FAR * usual and distance > scale:
            log.warning(
                "round %d: the model of client %d is %.3g from the last one, the median of the "
                "round is %.3g; max-update-norm bounds what a round may do, robust.rule what a "
                "client may",
                *(number, i, distance, usual),
            )

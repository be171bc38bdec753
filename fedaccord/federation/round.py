"""The end of a round: the good answers become the next state, and what is told of it."""

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from fedaccord.core import rounds
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Vector, distances, is_finite, leaves, norm
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
    far: list[float] = []  # how far each local model is from w^t, where it was sent
    if len(replies) >= needed:
        done = rounds.server_round(method, session.half, s, replies)
        if "w" in done.ups._fields:
            if method.topology.everyone:  # each node from its own
                far = norm(done.ups.w[0] - done.cohort.w).flatten().tolist()
            else:
                far = distances(done.ups.w, s.w)
            _tell_of_the_far(number, done.cohort.clients, far, float(norm(s.w).max()))
        failure = _wrong(s, done.state, method.max_update_norm)
    if failure:
        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)
        values = metrics.counts(len(outcome), len(replies), counted=False)
    else:
        after, w_bar = done.state, method.topology.average(done.state.w)
        values = metrics.traffic_and_loss(visits, outcome, session.like) | done.metrics
        if far:
            values |= metrics.drift(far)
        if far and not method.topology.everyone:
            w_bar = done.cohort.mean_again(done.ups.w)
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
    before = {id(vector) for _, vector in leaves(s.server)}  # looked at in the round they were made
    for name, vector in {"w": after.w, **dict(leaves(after.server))}.items():
        if id(vector) not in before and not is_finite(vector):
            return f"the replies are finite, but the server's {name!r} would hold NaN or Inf"
    length = float(norm(after.w - s.w).max()) if most else 0.0
    if length > most:
        return (
            f"max-update-norm: expected a step of the model of at most {most:g}, got {length:.4g}"
        )
    return ""


FAR = 100  # times the cohort's median distance from the model


def _tell_of_the_far(
    number: int, clients: Sequence[int], far: Sequence[float], scale: float
) -> None:
    """Warn of a local model that is far from w^t, for its cohort and for scale, the length of w^t.

    The last keeps the warning away from small steps near an optimum, where some are much smaller.
    """
    usual = median(far)
    for i, distance in zip(clients, far, strict=True):
        if distance > FAR * usual and distance > scale:
            log.warning(
                "round %d: the model of client %d is %.3g from the last one, the median of the "
                "round is %.3g; max-update-norm bounds what a round may do, robust.rule what a "
                "client may",
                *(number, i, distance, usual),
            )

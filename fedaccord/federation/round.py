"""The end of a round: the good answers become the next state, and what is told of it."""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from statistics import median
from typing import Any, NamedTuple

import torch

from fedaccord.core import rounds
from fedaccord.core.request import StateLost, TrainRequest
from fedaccord.core.rounds import RoundState, ServerRound
from fedaccord.core.vectors import (
    Number,
    Vector,
    distances,
    each,
    fetch,
    is_finite,
    leaves,
    length,
    norm,
)
from fedaccord.federation import bounds, metrics
from fedaccord.federation.fleet import TrainReplies
from fedaccord.federation.method import Method
from fedaccord.federation.replies import Accepted, Outcome, check_all, settled, unread
from fedaccord.federation.session import Session

log = logging.getLogger("flwr")

ANEW = "the server's memory sums up the clients', so all begin anew at this model"


class Round(NamedTuple):
    """What is known at the end of a round; number 0 is the state before the first."""

    state: RoundState  # of round t + 1
    w_bar: Vector  # mean of the accepted local models; w^{t+1} where they are not sent;
    # under gossip the mean of the nodes' w^{t+1}
    metrics: dict[str, float]
    clients: list[dict[str, Any]]  # a row per asked client

    @property
    def number(self) -> int:
        """t + 1."""
        return self.state.t

    @property
    def w(self) -> Vector:
        """w^{t+1}, the model that the next round broadcasts; (m, d) under gossip."""
        return self.state.w


def finish(
    session: Session, s: RoundState, requests: Sequence[TrainRequest], replies: TrainReplies
) -> Round:
    """Close a round: validate the replies, take the server step, compute the metrics."""
    method = session.method
    w = None if method.topology.is_decentralised else s.w
    outcome = check_all(requests, replies, session.half, session.like, method.max_examples, w)
    number, needed = s.t + 1, method.needed_replies(s.num_clients)
    while True:
        good = {i: it for i, it in outcome.items() if isinstance(it, Accepted)}
        failure = f"expected at least {needed} good replies, got {len(good)}"
        look = _step(session, s, good.values()) if len(good) >= needed else None
        numbers = look.numbers if look else {}
        found = _read({i: unread(it) for i, it in good.items()} | numbers)
        sizes = _sizes(session, s, good) if method.max_client_norm else {}
        outcome |= {i: settled(it, found[i]) for i, it in good.items()}
        outcome |= _too_large(sizes, outcome, method.max_client_norm)
        if look is not None:
            failure = _wrong(look.fresh, found, method.max_update_norm)
        if all(isinstance(outcome[i], Accepted) for i in good):
            spoilers = _spoilers(session, s, good) if look and failure else []
            outcome |= dict.fromkeys(spoilers, f"{failure}, because of this reply")
            if not spoilers:
                break  # else once more without these replies, as if their clients were absent
    if look is not None and "far" in found:
        _tell_of_the_far(number, look.done.cohort.clients, found["far"], *found["scale"])
    if failure or look is None:
        after, w_bar = rounds.failed_round(s), method.topology.average(s.w)
        values = metrics.counts(len(outcome), len(good), counted=False)
    else:
        after, w_bar = look.done.state, look.w_bar
        values = metrics.traffic_and_loss(requests, outcome, session.like)
        values |= {name: found["own", name][0] for name in look.done.metrics}
        if "far" in found:
            values |= metrics.drift(found["far"])
        if "from-w" in found:
            values |= metrics.consistency(found["from-w"], found["from-w-bar"])
    repair, lost = "", [i for i, it in outcome.items() if isinstance(it, StateLost)]
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
    return Round(after, w_bar, values, rows)


def _sizes(
    session: Session, s: RoundState, good: Mapping[int, Accepted]
) -> dict[int, dict[str, float]]:
    """How large each client's uploaded vectors are, by name."""
    models, one = session.half.rule.models, s.w.dim() == 1
    unread = {i: bounds.sizes(it.reply, models, s.w if one else s.w[i]) for i, it in good.items()}
    found = _read({i: [*sizes.values()] for i, sizes in unread.items()})
    return {i: dict(zip(sizes, found[i], strict=True)) for i, sizes in unread.items()}


def _too_large(
    sizes: Mapping[int, Mapping[str, float]], outcome: Mapping[int, Outcome], most: float
) -> dict[int, Outcome]:
    """The good replies that pass max-client-norm, each with its line."""
    lines = {i: bounds.too_large(own, most) for i, own in sizes.items()}
    return {i: line for i, line in lines.items() if line and isinstance(outcome[i], Accepted)}


def _spoilers(session: Session, s: RoundState, good: Mapping[int, Accepted]) -> list[int]:
    """The fewest clients without whose replies the server can take its step, the largest first.

    At most half of the replies; empty if that does not help: then the others spoil it too.
    """
    method = session.method
    order = bounds.largest_first(_sizes(session, s, good))

    def fits(k: int) -> bool:
        look = _step(session, s, (good[i] for i in sorted(order[k:])))
        return not _wrong(look.fresh, _read(look.numbers), method.max_update_norm)

    most = min(len(order) // 2, len(order) - method.needed_replies(s.num_clients))
    if most < 1 or not fits(most):
        return []
    return order[: 1 + bisect_left(range(1, most), True, key=fits)]


def _step(session: Session, s: RoundState, good: Iterable[Accepted]) -> "_Look":
    """The server's step from these replies, and what has to be known of it."""
    accepted = [*good]
    done = rounds.server_round(session.method, session.half, s, [it.reply for it in accepted])
    return _look(session.method, s, done, [it.far for it in accepted])


class _Look(NamedTuple):
    """A server's step, and what has to be known of it."""

    done: ServerRound
    w_bar: Vector
    fresh: dict[str, Vector]  # what the server did not have before
    numbers: dict[Any, list[Number]]


def _look(method: Method, s: RoundState, done: ServerRound, known: list[float | None]) -> _Look:
    """Whether the result is finite and how far it went; what is told of the round.

    known: how far each local model is from w^t, where that was taken before.
    """
    after, ups, cohort = done.state, done.ups, done.cohort
    before = {id(vector) for _, vector in leaves(s.server)}  # looked at in the round they were made
    fresh = {"w": after.w, **dict(leaves(after.server))}
    fresh = {name: v for name, v in fresh.items() if id(v) not in before}
    numbers: dict[Any, list[Number]] = {("own", n): [x] for n, x in done.metrics.items()}
    numbers["fresh"] = [length(vector) for vector in fresh.values()]
    if method.max_update_norm:
        numbers["step"] = [norm(after.w - s.w).max()]
    w_bar, nodes = method.topology.average(after.w), method.topology.is_decentralised
    if "w" in ups._fields:  # how far each local model is from w^t: each node from its own
        far: list[Number] = [number for number in known if number is not None]
        if len(far) < len(known):
            far = each(norm(ups.w[0] - cohort.w).flatten() if nodes else distances(ups.w, s.w))
        numbers |= {"far": far, "scale": [norm(s.w).max()]}
        if not nodes:
            w_bar = cohort.mean(ups.w)
            from_w = from_w_bar = distances(ups.w, after.w)
            if not (w_bar.is_cpu and torch.equal(after.w, w_bar)):  # a GPU would have to wait
                from_w_bar = distances(ups.w, w_bar)
            numbers |= {"from-w": each(from_w), "from-w-bar": each(from_w_bar)}
    return _Look(done, w_bar, fresh, numbers)


def _read(numbers: Mapping[Any, Sequence[Number]]) -> dict[Any, list[float]]:
    """All numbers, after one wait for the device that they lie on."""
    found = iter(fetch(chain.from_iterable(numbers.values())))
    return {name: [*islice(found, len(some))] for name, some in numbers.items()}


def _wrong(fresh: Mapping[str, Vector], found: Mapping[Any, list[float]], most: float) -> str:
    """Why the server's own result cannot be taken; empty: it can.

    most: how far the model may go in a round, 0: as far as it likes.
    """
    norms = dict(zip(fresh, found["fresh"], strict=True))
    for name, vector in fresh.items():
        if not is_finite(vector, norms[name]):
            return f"the replies are finite, but the server's {name!r} would hold NaN or Inf"
    for name, size in norms.items():
        if size > LARGEST:
            return f"expected the server's {name!r} of norm at most {LARGEST:g}, got {size:.4g}"
    far = found["step"][0] if most else 0.0
    if far > most:
        return f"max-update-norm: expected a step of the model of at most {most:g}, got {far:.4g}"
    return ""


LARGEST = 1e25  # norm of a vector of the server's: beyond it a model has diverged
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
                "round is %.3g; max-client-norm bounds what a client may send, max-update-norm "
                "what a round may do",
                *(number, i, distance, usual),
            )

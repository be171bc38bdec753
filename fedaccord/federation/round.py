"""Close a round: validate the replies, take the server step, compute the metrics."""

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
from fedaccord.federation.clock import Late
from fedaccord.federation.fleet import TrainReplies
from fedaccord.federation.replies import Accepted, Outcome, check_all, complete, pending_numbers
from fedaccord.federation.secure import NotSummed
from fedaccord.federation.session import Session

log = logging.getLogger("flwr")

ANEW = "the server's memory sums up the clients', so all are reset at this model"
LARGEST = 1e25  # norm of a server's vector: above it a model has diverged
OUTLIER = 100  # times the cohort's median distance from the model


class Round(NamedTuple):
    """The result of a round; number 0 is the state before the first."""

    state: RoundState  # of round t + 1
    w_bar: Vector  # mean of the accepted local models; w^{t+1} if they are not sent;
    # under gossip the mean of the nodes' w^{t+1}
    metrics: dict[str, float]
    clients: list[dict[str, Any]]  # a row for each client of the cohort
    evaluations: Sequence[dict[str, Any]] = ()  # a row for each client with a request to evaluate
    failure: str = ""  # why it counts as failed

    @property
    def number(self) -> int:
        """t + 1."""
        return self.state.t

    @property
    def w(self) -> Vector:
        """w^{t+1}, the model that the next round broadcasts; (m, d) under gossip."""
        return self.state.w


def finish(
    session: Session,
    s: RoundState,
    requests: Sequence[TrainRequest],
    replies: TrainReplies,
    failure: str = "",
) -> Round:
    """Validate the replies to a round's requests, take the server step, compute the metrics.

    failure: why the round has no requests and does not count; empty: it may.
    """
    method, number = session.method, s.t + 1
    outcomes, has_cohort = check_all(session, s, requests, replies), not failure
    trial, failure = (None, failure) if failure else _settle(session, s, outcomes)
    good = sum(isinstance(outcome, Accepted) for outcome in outcomes.values())
    effect = "the model does not change"
    counted = trial is not None and not failure
    row = metrics.counts_and_traffic(requests, outcomes, session.like, counted=counted)
    if trial is None or failure:
        after, w_bar = rounds.failed_round(s, has_cohort), method.topology.average(s.w)
    else:
        after, w_bar = trial.round.state, trial.w_bar
        row = metrics.loss_and_staleness(outcomes) | row | trial.metrics()
        if not good:  # a step of noise alone; a cohort may be empty without a failure
            after = after._replace(failed=s.failed + bool(outcomes))
            effect = "the model changed by the noise alone"
            failure = "expected at least 1 good reply, got 0" if outcomes else ""
    if method.hides_clients:
        row.pop("train-loss", None)
    repair, lost = "", [i for i, it in outcomes.items() if isinstance(it, StateLost)]
    if lost:
        anew = rounds.begins_anew(method, session.half, after, lost)
        repair = ANEW if anew else "its next visit is a first one"
        # a loss is mended, and a client reports it once
        after = rounds.forget(method, session.half, after, lost)._replace(failed=0)
    rows = metrics.client_rows(number, outcomes, repair)
    for client in rows:
        if client["status"] != metrics.OK:
            why = "; ".join(client[key] for key in ("status", "repair") if client.get(key))
            if method.hides_clients:
                why = why.partition(", got ")[0]  # a client's numbers follow it, and are private
            level = (
                logging.INFO
                if isinstance(outcomes[client["client"]], (Late, NotSummed))
                else logging.WARNING
            )
            log.log(level, "round %d: dropped client %d: %s", number, client["client"], why)
    if trial is not None:
        if absence := method.topology.absence(s.num_clients, trial.round.cohort):
            log.warning("round %d: %s", number, absence)
        _warn_of_outliers(number, trial)
    if failure:
        log.warning("round %d failed: %s; %s", number, failure, effect)
    return Round(after, w_bar, row, [] if method.hides_clients else rows, failure=failure)


class _Trial(NamedTuple):
    """A server step from some replies, and the numbers that decide whether it counts."""

    round: ServerRound
    w_bar: Vector
    fresh: dict[str, Vector]  # new vectors of the server
    numbers: dict[Any, list[Number]]  # may be on a GPU
    values: Mapping[Any, list[float]] = {}  # the same as floats

    def metrics(self) -> dict[str, float]:
        """The metrics of the step: those of the topology, and the drift of the clients."""
        own = {name: self.values["own", name][0] for name in self.round.metrics}
        return own | metrics.mean_squares(self.values)


def _settle(
    session: Session, s: RoundState, outcomes: dict[int, Outcome]
) -> tuple[_Trial | None, str]:
    """The server step from the accepted replies, and why it does not count (empty: it does).

    Replies that turn out to be invalid, or to break the step, are replaced in ``outcomes`` by the
    reason, and the step is repeated as if their clients were absent. Each try synchronises a GPU
    once.
    """
    method, needed = session.method, session.method.needed_replies(s.num_clients)
    while True:
        good = {i: it for i, it in outcomes.items() if isinstance(it, Accepted)}
        trial = _try(session, s, good.values()) if len(good) >= needed else None
        pending = {i: pending_numbers(it) for i, it in good.items()}
        values = _fetch(pending | (trial.numbers if trial else {}))
        for i, it in good.items():
            outcomes[i] = complete(it, values[i], method.max_client_norm)
        if not all(isinstance(outcomes[i], Accepted) for i in good):
            continue
        if trial is None:
            unsummed = next((it for it in outcomes.values() if isinstance(it, NotSummed)), None)
            return None, unsummed or f"expected at least {needed} good replies, got {len(good)}"
        trial = trial._replace(values=values)
        failure = _failure(trial, method.max_update_norm)
        spoilers = _spoilers(session, s, outcomes) if failure else []
        if not spoilers:
            return trial, failure
        outcomes |= dict.fromkeys(spoilers, f"{failure}, because of this reply")


def _spoilers(session: Session, s: RoundState, outcomes: Mapping[int, Outcome]) -> list[int]:
    """The smallest set of clients, largest norms first, without which the step is valid.

    At most half of the replies; empty if dropping these does not suffice.
    """
    method = session.method
    if method.has_noisy_sums or method.masking:  # clipped, or unknown individually
        return []
    good = {i: it for i, it in outcomes.items() if isinstance(it, Accepted)}
    order = bounds.largest_first({i: it.sizes for i, it in good.items()})

    def fits(k: int) -> bool:
        trial = _try(session, s, (good[i] for i in sorted(order[k:])))
        return not _failure(trial._replace(values=_fetch(trial.numbers)), method.max_update_norm)

    most = min(len(order) // 2, len(order) - method.needed_replies(s.num_clients))
    if most < 1 or not fits(most):
        return []
    return order[: 1 + bisect_left(range(1, most), True, key=fits)]


def _try(session: Session, s: RoundState, good: Iterable[Accepted]) -> _Trial:
    """The server step from these replies; does not synchronise."""
    method, accepted = session.method, [*good]
    replies, normal = [it.reply for it in accepted], session.normal(s)
    round = rounds.server_round(method, session.half, s, replies, normal)
    after, ups, cohort = round.state, round.ups, round.cohort
    before = {id(vector) for _, vector in leaves(s.server)}  # checked in an earlier round
    fresh = {"w": after.w, **dict(leaves(after.server)), **dict(leaves(after.moments))}
    fresh = {name: v for name, v in fresh.items() if id(v) not in before}
    numbers: dict[Any, list[Number]] = {("own", n): [x] for n, x in round.metrics.items()}
    numbers["fresh"] = [length(vector) for vector in fresh.values()]
    if method.max_update_norm:
        numbers["step"] = [norm(after.w - s.w).max()]
    w_bar, nodes = method.topology.average(after.w), method.topology.is_decentralised
    if normal is not None or method.masking:
        w_bar = cohort.mean(ups.w) if "w" in ups._fields else w_bar
    elif "w" in ups._fields:  # drift: from the model that each client received
        numbers |= {"drift": [it.sizes["w"] for it in accepted], "scale": [norm(s.w).max()]}
        if not nodes:
            w_bar = cohort.mean(ups.w)
            from_w = from_w_bar = distances(ups.w, after.w)
            if not (w_bar.is_cpu and torch.equal(after.w, w_bar)):  # synchronises
                from_w_bar = distances(ups.w, w_bar)
            numbers |= {"consistency": each(from_w), "spread": each(from_w_bar)}
    return _Trial(round, w_bar, fresh, numbers)


def _fetch(numbers: Mapping[Any, Sequence[Number]]) -> dict[Any, list[float]]:
    """All numbers as floats, after one synchronisation."""
    values = iter(fetch(chain.from_iterable(numbers.values())))
    return {name: [*islice(values, len(some))] for name, some in numbers.items()}


def _failure(trial: _Trial, max_update_norm: float) -> str:
    """Why the result of a server step is invalid, in one line; empty: it is valid."""
    norms = dict(zip(trial.fresh, trial.values["fresh"], strict=True))
    for name, vector in trial.fresh.items():
        if not is_finite(vector, norms[name]):
            return f"the replies are finite, but the server's {name!r} would hold NaN or Inf"
    for name, size in norms.items():
        if size > LARGEST:
            return f"expected the server's {name!r} of norm at most {LARGEST:g}, got {size:.4g}"
    step = trial.values["step"][0] if max_update_norm else 0.0
    if step > max_update_norm:
        return (
            f"max-update-norm: expected a step of the model of at most {max_update_norm:g}, got "
            f"{step:.4g}"
        )
    return ""


def _warn_of_outliers(number: int, trial: _Trial) -> None:
    """Warn about local models that are far from w^t, relative to the cohort and to ||w^t||.

    The second condition avoids warnings for small steps near an optimum.
    """
    if not (distances := trial.values.get("drift")):
        return
    middle = median(distances)
    for i, distance in zip(trial.round.cohort.clients, distances, strict=True):
        if distance > OUTLIER * middle and distance > trial.values["scale"][0]:
            log.warning(
                f"round {number}: the model of client {i} is {distance:.3g} from the last one, the "
                f"median of the round is {middle:.3g}; max-client-norm limits what a "
                "client may send, max-update-norm the step of a round"
            )

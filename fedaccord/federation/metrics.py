"""The rows of a round in metrics.csv and clients.csv, which `runs/columns.toml` documents."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedaccord.core.request import StateLost, TrainRequest, round_of
from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import clean
from fedaccord.federation.replies import Accepted, Outcome

OK = "ok"  # status of an accepted reply, and of a client's evaluation
EVALUATED = "evaluated"  # status of a client that only evaluated
SQUARED = ("drift", "consistency", "spread")  # mean squared distances of the replies


def client_rows(
    number: int, outcomes: Mapping[int, Outcome], repair: str = ""
) -> list[dict[str, Any]]:
    """A row for each client of the cohort; number: t + 1.

    repair: the server's repair of lost client states.
    """
    rows: list[dict[str, Any]] = []
    for i, outcome in outcomes.items():
        row: dict[str, Any] = {"round": number, "client": i}
        if isinstance(outcome, Accepted):
            row |= {"status": OK} | outcome.metrics
        elif isinstance(outcome, StateLost):
            lost = round_of(outcome.accepted) + 1
            row |= {"status": f"lost its state of round {lost}", "repair": repair}
        else:
            row["status"] = clean(outcome)
        rows.append(row)
    return rows


def with_evaluations(
    number: int, clients: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of a round's clients with their evaluations, then those that only evaluated."""
    rows = {row["client"]: dict(row) for row in clients}
    for row in evaluations:
        one = rows.setdefault(row["client"], {"round": number, "client": row["client"]})
        one.setdefault("status", EVALUATED)
        one |= row
    return [*rows.values()]


def reported(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each client whose reply was accepted."""
    words = ("round", "client", "status", "repair")
    return [{k: v for k, v in row.items() if k not in words} for row in rows if row["status"] == OK]


def measured(evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each client that evaluated, with its ``num-examples``."""
    rows = [{**row} for row in evaluations if row["evaluation"] == OK]
    for row in rows:
        del row["client"], row["evaluation"]
        if (examples := row.pop("evaluation-examples", None)) is not None:
            row["num-examples"] = examples
    return rows


def counts_and_traffic(
    requests: Sequence[TrainRequest],
    outcomes: Mapping[int, Outcome],
    like: Vector,
    *,
    counted: bool,
) -> dict[str, float]:
    """The numbers of accepted and dropped replies, whether the round changed the state, and its
    traffic; like: (d,), without values."""
    down = [request.nbytes for request in requests]
    rows = _accepted(outcomes)
    return {
        "replies": len(rows),
        "dropped": len(outcomes) - len(rows),
        "counted": int(counted),
        "down-vectors": sum(down) / like.nbytes,
        "down-bytes": sum(down),
        "up-vectors": sum(m["up-vectors"] for m in rows),
        "up-bytes": sum(m["up-bytes"] for m in rows),
    }


def loss_and_staleness(outcomes: Mapping[int, Outcome]) -> dict[str, float]:
    """Means over the accepted replies."""
    rows = _accepted(outcomes)
    weights = [m["num-examples"] for m in rows]
    losses = [m["train-loss"] * n for m, n in zip(rows, weights, strict=True)]
    means = {"train-loss": sum(losses) / sum(weights)} if rows else {}
    if delays := [m["staleness"] for m in rows if "staleness" in m]:
        means["staleness"] = sum(delays) / len(delays)
    return means


def _accepted(outcomes: Mapping[int, Outcome]) -> list[Mapping[str, float]]:
    return [it.metrics for it in outcomes.values() if isinstance(it, Accepted)]


def mean_squares(distances: Mapping[Any, Sequence[float]]) -> dict[str, float]:
    """Mean squared distances of the local models w_{i,K} to the w^t that was sent (drift), to
    w^{t+1} (consistency, Delta^t of FedInit) and to their mean (spread)."""
    return {
        name: sum(x * x for x in distances[name]) / len(distances[name])
        for name in SQUARED
        if name in distances
    }

"""The row of a round: losses, traffic and client drift."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedaccord.core.vectors import Vector
from fedaccord.core.visit import Lost, Visit
from fedaccord.federation.replies import Accepted, Outcome, traffic

OK = "ok"  # status of an accepted reply


def client_rows(
    number: int, outcome: Mapping[int, Outcome], repair: str = ""
) -> list[dict[str, Any]]:
    """A row per asked client; number: t + 1; repair: what was done for who lost its state."""
    rows: list[dict[str, Any]] = []
    for i, read in outcome.items():
        row: dict[str, Any] = {"round": number, "client": i}
        if isinstance(read, Accepted):
            row |= {"status": OK} | read.metrics
        elif isinstance(read, Lost):
            row |= {"status": f"lost its state of round {read.accepted + 1}", "repair": repair}
        else:
            row["status"] = read
        rows.append(row)
    return rows


def counts(outcome: Mapping[int, Outcome]) -> dict[str, float]:
    """How many replies were good, and how many not."""
    replies = sum(isinstance(read, Accepted) for read in outcome.values())
    return {"replies": replies, "dropped": len(outcome) - replies}


def traffic_and_loss(
    visits: Sequence[Visit], outcome: Mapping[int, Outcome], like: Vector
) -> dict[str, float]:
    """Loss and traffic, summed over the cohort; like: (d,), without values."""
    down = [traffic(visit.down, visit.w_init) for visit in visits]
    rows = [read.metrics for read in outcome.values() if isinstance(read, Accepted)]
    weights = [m["num-examples"] for m in rows]
    losses = [m["train-loss"] * n for m, n in zip(rows, weights, strict=True)]
    return {
        "train-loss": sum(losses) / sum(weights),
        "down-vectors": sum(n for n, _ in down) / like.numel(),
        "down-bytes": sum(b for _, b in down),
        "up-vectors": sum(m["up-vectors"] for m in rows),
        "up-bytes": sum(m["up-bytes"] for m in rows),
    }


def drift(local: Sequence[Vector], w: Vector, w_bar: Vector) -> dict[str, float]:
    """Consistency Delta^t of the active clients, against w^{t+1} and against w_bar^{t+1}."""

    def mean_square(centre: Vector) -> float:
        return sum(float((w_K - centre).square_().sum()) for w_K in local) / len(local)

    return {"drift": mean_square(w), "spread": mean_square(w_bar)}

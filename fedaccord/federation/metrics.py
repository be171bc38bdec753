"""The row of a round: losses, traffic and client drift."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedaccord.core.request import StateLost, TrainRequest
from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import clean
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
        elif isinstance(read, StateLost):
            row |= {"status": f"lost its state of round {read.accepted + 1}", "repair": repair}
        else:
            row["status"] = clean(read)
        rows.append(row)
    return rows


def counts(asked: int, replies: int, *, counted: bool) -> dict[str, float]:
    """How many replies were good, how many not, and whether the round moved the state."""
    return {"replies": replies, "dropped": asked - replies, "counted": int(counted)}


def traffic_and_loss(
    requests: Sequence[TrainRequest], outcome: Mapping[int, Outcome], like: Vector
) -> dict[str, float]:
    """Loss and traffic, summed over the cohort; like: (d,), without values."""
    down = [traffic(request.down, request.w_init) for request in requests]
    rows = [read.metrics for read in outcome.values() if isinstance(read, Accepted)]
    weights = [m["num-examples"] for m in rows]
    losses = [m["train-loss"] * n for m, n in zip(rows, weights, strict=True)]
    return {
        "train-loss": sum(losses) / sum(weights),
        **counts(len(outcome), len(rows), counted=True),
        "down-vectors": sum(n for n, _ in down) / like.numel(),
        "down-bytes": sum(b for _, b in down),
        "up-vectors": sum(m["up-vectors"] for m in rows),
        "up-bytes": sum(m["up-bytes"] for m in rows),
    }


def drift(far: Sequence[float]) -> dict[str, float]:
    """How far the local steps went; far: the distance of each w_{i,K} from w^t as it was sent."""
    return {"drift": _mean_square(far)}


def consistency(from_w: Sequence[float], from_w_bar: Sequence[float]) -> dict[str, float]:
    """How far the active clients' w_{i,K} are from w^{t+1}, Delta^t of FedInit, and from their
    mean w_bar: of their distances."""
    return {"consistency": _mean_square(from_w), "spread": _mean_square(from_w_bar)}


def _mean_square(far: Sequence[float]) -> float:
    return sum(distance * distance for distance in far) / len(far)

"""Evaluation: the headline model at the server, personal models at their clients."""

import logging
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, pstdev
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import clean, last_line
from fedaccord.wire.records import CONFIG, METRICS, metrics_of

log = logging.getLogger("flwr")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
EvaluateHeadlineFn = Callable[[ArrayRecord, Mapping[str, float]], Mapping[str, float]]
"""(headline model, its metrics so far) -> more metrics of it"""


def evaluate_at_server(
    number: int,
    evaluate_fn: EvaluateFn | None,
    headline_fn: EvaluateHeadlineFn | None,
    arrays: Callable[[Vector], ArrayRecord],
    *,
    headline: Vector,
    broadcast: Vector | None,
    nodes: Iterable[Vector],
) -> dict[str, Any]:
    """Metrics of the headline model and, beside it, of the broadcast one and of the nodes'.

    broadcast: None where it is the headline model; nodes: none where there is a server.
    """

    def metrics(w: Vector) -> dict[str, Any]:
        return dict(evaluate_fn(number, arrays(w)) or {}) if evaluate_fn else {}

    row = metrics(headline)
    if headline_fn:
        row |= headline_fn(arrays(headline), row)
    each = [metrics(w_i) for w_i in nodes]
    for name in each[0] if each else ():
        values = [node[name] for node in each]
        row |= {f"{name}-nodes": fmean(values), f"{name}-nodes-std": pstdev(values)}
    if broadcast is not None:
        row |= {f"{name}-broadcast": value for name, value in metrics(broadcast).items()}
    return row


def evaluate_at_clients(
    grid: Grid, nodes: Mapping[int, int], config: Callable[[int], ConfigRecord], timeout: float
) -> dict[str, float]:
    """Mean metrics of the clients' own models, of those that answer.

    nodes: node id by client; config: a client's instruction.
    """
    asked = [
        Message(RecordDict({CONFIG: config(i)}), node, MessageType.EVALUATE)
        for i, node in sorted(nodes.items())
    ]
    if not asked:
        return {}
    answers = [_numbers(reply) for reply in grid.send_and_receive(asked, timeout=timeout)]
    wrong = [answer for answer in answers if isinstance(answer, str)]
    if wrong:
        log.warning(
            "%d of %d clients did not evaluate their personal model: %s",
            *(len(wrong), len(asked), wrong[0]),
        )
    rows = [answer for answer in answers if not isinstance(answer, str)]
    names = [name for name in (rows[0] if rows else {}) if name != "num-examples"]
    return {
        f"personal-{name}": fmean(row[name] for row in rows)
        for name in names
        if all(name in row for row in rows)
    }


def _numbers(reply: Message) -> dict[str, float] | str:
    """A client's metrics, or why there are none, in one line."""
    if reply.has_error():
        return last_line(reply.error.reason)
    metrics = metrics_of(reply.content, METRICS)
    if not metrics:
        return clean(f"expected the record {METRICS!r}, got {sorted(reply.content)}")
    return {name: v for name, v in metrics.items() if isinstance(v, (int, float))}

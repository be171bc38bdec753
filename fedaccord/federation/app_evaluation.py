"""The output model on the clients' own data, by the @app.evaluate() of the user's ClientApp.

Messages, replies and results are those of Flower's strategies: the app needs no FedAccord. It may
measure anything of the output model; personal models, the spread over clients and the rows of
clients.csv are handled by `federation/evaluation.py`, whose messages `evaluate_locally` and
FedAccord's own app answer. A run uses one of the two.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedaccord.compat.flower import has_no_function
from fedaccord.federation.errors import clean
from fedaccord.federation.fleet import LATE
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.method import Method
from fedaccord.federation.replies import unusual
from fedaccord.wire.messages import EXAMPLES

log = logging.getLogger("flwr")

AggregateMetrics = Callable[[list[RecordDict], str], MetricRecord]


@dataclass
class ClientEvaluation:
    """Requests to a share of the connected clients, drawn by (seed, round).

    timeout: seconds for the replies. config: the caller's own, of the messages. arrays_key,
    config_key: the names of the records in a message. aggregate: of the replies' metrics.
    """

    method: Method
    fleet: MessageFleet
    timeout: float
    config: Mapping[str, Any]
    arrays_key: str
    config_key: str
    aggregate: AggregateMetrics
    _is_off: bool = field(init=False)  # under dp, or the ClientApp has no such function

    def __post_init__(self) -> None:
        self._is_off = self.method.hides_clients
        if self._is_off and self.method.fraction_evaluate:
            log.info(
                "clients evaluate nothing: the guarantee of dp does not cover their numbers; "
                "write_client_metrics=True of the plug-in allows it"
            )

    def __call__(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Metrics of the model after ``number`` rounds; None: no client has any."""
        method, fleet = self.method, self.fleet
        if self._is_off or not method.fraction_evaluate:
            return None
        clients = method.draw_evaluators(number, fleet.available(), fleet.num_clients)
        config = ConfigRecord({**self.config, "server-round": number})
        content = RecordDict({self.arrays_key: arrays, self.config_key: config})
        replies = fleet.ask(clients, content, self.timeout, partial(_read, method.max_examples))
        answers = [str(reply) for reply in replies.values() if reply != LATE]
        if answers and all(map(has_no_function, answers)):
            log.info("clients evaluate nothing: their ClientApp has no @app.evaluate()")
            self._is_off = True
            return None
        return self._means(number, replies)

    def _means(self, number: int, replies: Mapping[int, RecordDict | str]) -> MetricRecord | None:
        problems = {i: reply for i, reply in replies.items() if isinstance(reply, str)}
        good = {i: reply for i, reply in replies.items() if isinstance(reply, RecordDict)}
        problems |= unusual("the metrics", {i: _form(reply) for i, reply in good.items()})
        if problems:
            log.warning(
                f"round {number}: {len(problems)} of {len(replies)} clients did not evaluate: "
                f"{clean(problems[min(problems)])}"
            )
        contents = [good[i] for i in sorted(good) if i not in problems]
        if not contents:
            return None
        means = self.aggregate(contents, EXAMPLES)
        if means is None:
            return None
        numbers = {clean(k): v for k, v in means.items() if isinstance(v, (int, float))}
        words = ", ".join(f"{k} {v:.4g}" for k, v in numbers.items())
        log.info("[round %d] %d clients evaluate: %s", number, len(contents), words)
        return means


def _read(most: int, reply: Message) -> RecordDict:
    """Raises ValueError, in one line, for a reply that cannot be averaged; most: examples."""
    if len(reply.content.metric_records) != 1:
        raise ValueError(f"expected one MetricRecord, got {len(reply.content.metric_records)}")
    metrics = _metrics(reply.content)
    weight = metrics.get(EXAMPLES)
    if not isinstance(weight, (int, float)) or not 0 < weight <= most:
        raise ValueError(
            f"expected {EXAMPLES} above 0 and at most {most} in the metrics, got {weight!r:.40}"
        )
    numbers = (x for v in metrics.values() for x in (v if isinstance(v, list) else [v]))
    if not all(map(math.isfinite, numbers)):
        raise ValueError("expected finite numbers in the metrics, got NaN or Inf")
    return reply.content


def _form(content: RecordDict) -> tuple[str, ...]:
    """The names of the metrics, and the lengths of lists."""
    numbers = sorted(_metrics(content).items())
    return tuple(
        f"{k} ({len(v)} numbers)" if isinstance(v, list) else _alone(k) for k, v in numbers
    )


def _alone(name: str) -> str:
    """The name of one number, which no list's looks like."""
    return f"{name} (one number)" if name.endswith(("number)", "numbers)")) else name


def weighted_means(contents: list[RecordDict], weight: str) -> MetricRecord:
    """Means of the numbers that clients report, as in Flower's strategies; lists elementwise."""
    rows = [_metrics(content) for content in contents]
    total = sum(row[weight] for row in rows)
    means = MetricRecord()
    for name, first in rows[0].items():
        if name == weight:
            continue
        if isinstance(first, list):
            columns = zip(*(row[name] for row in rows), strict=True)
            weights = [row[weight] for row in rows]
            means[name] = [
                sum(x * w for x, w in zip(column, weights, strict=True)) / total
                for column in columns
            ]
        else:
            means[name] = sum(row[name] * row[weight] for row in rows) / total
    return means


def _metrics(content: RecordDict) -> Mapping[str, Any]:
    return next(iter(content.metric_records.values()))

"""Evaluation: the output model at the server, personal models at their clients."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from fedaccord.core.options import listed
from fedaccord.core.request import TrainInstruction
from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import clean
from fedaccord.federation.fleet import Fleet
from fedaccord.federation.replies import MAX_LOSS, OWN_METRICS, OWN_NAME

log = logging.getLogger("flwr")

RANGES = {"accuracy": (0.0, 1.0), "loss": (-MAX_LOSS, MAX_LOSS)}  # of what clients report
LARGEST_METRIC = 1e30  # of another name, either way
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
EvaluateOutputFn = Callable[[ArrayRecord, Mapping[str, float]], Mapping[str, float]]
"""(output model, its metrics so far) -> more metrics of it"""


def evaluate_at_server(
    number: int,
    evaluate_fn: EvaluateFn | None,
    output_fn: EvaluateOutputFn | None,
    arrays: Callable[[Vector], ArrayRecord],
    *,
    output: Vector,
    broadcast: Vector | None,
    nodes: Iterable[Vector],
) -> dict[str, Any]:
    """Metrics of the output model and, beside it, of the broadcast one and of the nodes'.

    broadcast: None where it is the output model; nodes: none where there is a server.
    """

    def metrics(w: Vector) -> dict[str, Any]:
        return dict(evaluate_fn(number, arrays(w)) or {}) if evaluate_fn else {}

    row = metrics(output)
    if output_fn:
        row |= output_fn(arrays(output), row)
    each = [metrics(w_i) for w_i in nodes]
    for name in each[0] if each else ():
        values = [node[name] for node in each]
        row |= {f"{name}-nodes": fmean(values), f"{name}-nodes-std": pstdev(values)}
    if broadcast is not None:
        row |= {f"{name}-broadcast": value for name, value in metrics(broadcast).items()}
    return row


def evaluate_at_clients(
    fleet: Fleet, questions: Sequence[TrainInstruction], timeout: float
) -> dict[str, float]:
    """Mean metrics of the clients' own models, of those that answer."""
    if not questions:
        return {}
    replies = _of_one_form(map(_in_range, fleet.evaluate(questions, timeout)))
    wrong = [reply for reply in replies if isinstance(reply, str)]
    if wrong:
        log.warning(
            "%d of %d clients did not evaluate their personal model: %s",
            *(len(wrong), len(questions), clean(wrong[0])),
        )
    rows = [reply for reply in replies if not isinstance(reply, str)]
    given = [name for name in (rows[0] if rows else {}) if name != "num-examples"]
    names = [name for name in given if OWN_NAME.fullmatch(name)][:OWN_METRICS]
    return {f"personal-{name}": fmean(row[name] for row in rows) for name in names}


def _in_range(row: Mapping[str, float] | str) -> Mapping[str, float] | str:
    """An answer, or which of its numbers is none that a model can have."""
    if isinstance(row, str):
        return row
    for name, value in row.items():
        low, high = RANGES.get(name, (-LARGEST_METRIC, LARGEST_METRIC))
        if not low <= value <= high:
            return f"expected {name} from {low:g} to {high:g}, got {value:.4g}"
    return row


def _of_one_form(
    replies: Iterable[Mapping[str, float] | str],
) -> list[Mapping[str, float] | str]:
    """The answers, those with other names than most replaced by what is wrong with them."""
    replies = [*replies]
    forms = Counter(frozenset(row) for row in replies if not isinstance(row, str))
    if len(forms) < 2:
        return replies
    usual = forms.most_common(1)[0][0]
    return [
        row if isinstance(row, str) or row.keys() == usual else _unusual(row, usual)
        for row in replies
    ]


def _unusual(row: Mapping[str, float], usual: Iterable[str]) -> str:
    return f"expected {listed(sorted(usual))}, as the others evaluate, got {listed(sorted(row))}"

"""Evaluation: the output model at the server, personal models at their clients."""

import logging
from collections.abc import Callable, Mapping
from statistics import fmean, pstdev
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from fedaccord.core.metrics import METRICS, SHARE
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import clean
from fedaccord.federation.replies import MAX_LOSS, OWN_METRICS, OWN_NAME, unusual
from fedaccord.federation.session import Session

log = logging.getLogger("flwr")

RANGES = {  # of what clients report
    "loss": (-MAX_LOSS, MAX_LOSS),
    **{name: (0.0, 1.0) for name, metric in METRICS.items() if metric.unit == SHARE},
}
LARGEST_METRIC = 1e30  # of another name, either way
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
EvaluateOutputFn = Callable[[ArrayRecord, Mapping[str, float]], Mapping[str, float]]
"""(output model, its metrics so far) -> more metrics of it"""


def evaluate(
    session: Session,
    s: RoundState,
    evaluate_fn: EvaluateFn | None,
    output_fn: EvaluateOutputFn | None,
) -> dict[str, Any]:
    """Metrics of the output model and, if they are others, of the broadcast model, of the nodes'
    models (their mean and deviation) and of the clients' personal models."""
    method, topology = session.method, session.method.topology

    def metrics(w: Vector) -> dict[str, Any]:
        return dict(evaluate_fn(s.t, session.arrays(w, s.buffers)) or {}) if evaluate_fn else {}

    output = method.output_model(s.w, s.server)
    average = topology.average(output)
    row = metrics(average)
    if output_fn:
        row |= output_fn(session.arrays(average, s.buffers), row)
    if topology.is_decentralised and topology.eval_nodes and s.t:  # at first all are equal
        nodes = [metrics(w_i) for w_i in output]
        for name in nodes[0]:
            values = [node[name] for node in nodes]
            row |= {f"{name}-nodes": fmean(values), f"{name}-nodes-std": pstdev(values)}
    elif not topology.is_decentralised and output is not s.w:
        row |= {f"{name}-broadcast": value for name, value in metrics(s.w).items()}
    return row | _evaluate_personal(session, s) if session.has_personal else row


def _evaluate_personal(session: Session, s: RoundState) -> dict[str, float]:
    """Mean metrics of the clients' own models, of those that reply."""
    instructions = session.evaluate_instructions(s)
    if not instructions:
        return {}
    replies = session.fleet.evaluate(instructions, session.method.round_timeout)
    problems, rows = dict[int, str](), dict[int, Mapping[str, float]]()
    for i, reply in enumerate(replies):
        if isinstance(reply, str):
            problems[i] = reply
        elif problem := _out_of_range(reply):
            problems[i] = problem
        else:
            rows[i] = reply
    problems |= unusual("the metrics", {i: tuple(sorted(row)) for i, row in rows.items()})
    if problems:
        log.warning(
            f"{len(problems)} of {len(instructions)} clients did not evaluate their personal "
            f"model: {clean(problems[min(problems)])}"
        )
    good = [row for i, row in rows.items() if i not in problems]
    names = [name for name in (good[0] if good else {}) if OWN_NAME.fullmatch(name)]
    names = [name for name in names if name != "num-examples"][:OWN_METRICS]
    return {f"personal-{name}": fmean(row[name] for row in good) for name in names}


def _out_of_range(row: Mapping[str, float]) -> str:
    """Which of a client's numbers no model can have, in one line; empty: none."""
    for name, value in row.items():
        low, high = RANGES.get(name, (-LARGEST_METRIC, LARGEST_METRIC))
        if not low <= value <= high:
            return f"expected {name} from {low:g} to {high:g}, got {value:.4g}"
    return ""

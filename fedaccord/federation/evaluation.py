"""Evaluation of the output model at the server or the clients, and of personal models."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedaccord.core.metrics import (
    BROADCAST,
    FACTS,
    NAME,
    NODES,
    OUTPUT,
    PERSONAL,
    SHARE_UNIT,
    STD,
    deviation,
    over_clients,
)
from fedaccord.core.options import listed
from fedaccord.core.request import EvaluateRequest
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Vector
from fedaccord.federation.errors import FederationError, clean
from fedaccord.federation.method import Method
from fedaccord.federation.metrics import OK
from fedaccord.federation.replies import MAX_LOSS, OWN_METRICS, unusual
from fedaccord.federation.session import Session
from fedaccord.wire.messages import EXAMPLES

log = logging.getLogger("flwr")

EMPTY = "no samples"  # status of a client's evaluation, beside OK and reasons for none
RANGES = {  # of what clients report
    "loss": (-MAX_LOSS, MAX_LOSS),
    **{name: (0.0, 1.0) for name, facts in FACTS.items() if facts["unit"] == SHARE_UNIT},
}
LARGEST_METRIC = 1e30  # ranges of metrics with other names
Evaluate = Callable[[int, Vector, Vector | None], Mapping[str, Any]]
"""(round, model (d,), averaged buffers (d_b,)) -> its metrics"""
EvaluateOutput = Callable[[Vector, Vector | None, Mapping[str, float]], Mapping[str, float]]
"""(output model, averaged buffers, its metrics so far) -> more metrics of it"""


def evaluate_at_server(
    session: Session,
    s: RoundState,
    evaluate: Evaluate | None,
    evaluate_output: EvaluateOutput | None,
) -> dict[str, Any]:
    """Metrics of the output model and, if they differ from it, of the broadcast model and of the
    nodes' models (mean and deviation)."""
    method, topology = session.method, session.method.topology

    def metrics(w: Vector) -> dict[str, Any]:
        return dict(evaluate(s.t, w, s.buffers)) if evaluate else {}

    output = method.output_model(s.w, s.server)
    average = topology.average(output)
    row = metrics(average)
    if evaluate_output:
        row |= evaluate_output(average, s.buffers, row)
    if topology.is_decentralised and topology.eval_nodes and s.t:  # before round 1 all are equal
        nodes = [metrics(w_i) for w_i in output]
        for name in (name for name, value in nodes[0].items() if not isinstance(value, list)):
            values = [node[name] for node in nodes]
            row |= {f"{name}{NODES}": fmean(values), f"{name}{NODES}{STD}": deviation(values)}
    elif not topology.is_decentralised and output is not s.w:
        row |= {f"{name}{BROADCAST}": value for name, value in metrics(s.w).items()}
    return row


class Diverged(str):
    """Why a client's evaluation is dropped: a loss beyond every bound."""


class Evaluation(NamedTuple):
    """The clients' evaluation after a round."""

    metrics: dict[str, float]
    clients: list[dict[str, Any]]  # a row for each client with a request


def check_tests(method: Method, num_tests: int) -> None:
    """Raise ValueError, in one line, if the server, or clients with its data, are to evaluate
    without test samples."""
    who, instead = "the server", ", with devices that have some, evaluation=clients"
    if method.evaluation == "clients":
        who, instead = "the clients", " fraction-evaluate=0"
        if not method.fraction_evaluate:
            return
    if not num_tests:
        raise ValueError(
            f"evaluation={method.evaluation}: expected test samples for {who}, but the data set "
            f"has none: add some, set validation=0.1, or{instead}"
        )


def evaluate_at_clients(session: Session, s: RoundState, timeout: float) -> Evaluation:
    """The output model, unless only the server evaluates it, and personal models, on the clients'
    own samples; the metrics are of the clients that reply within ``timeout`` seconds.

    Raises FederationError if before round 1 no client at all has samples to evaluate on.
    """
    requests = session.evaluate_requests(s)
    if not requests:
        return Evaluation({}, [])
    outcomes = _ask(session, requests, timeout)
    none = all(outcome == EMPTY for outcome in outcomes.values())
    if s.t == 0 and none and len(outcomes) == s.num_clients:
        raise FederationError(
            f"evaluation: expected held-out samples at some of the clients {listed(outcomes)}, "
            "none has any: give them test samples, set validation=0.1, or, if the server has "
            "some, choose evaluation=server"
        )
    if s.t == 0 and none:
        log.warning("evaluation: the drawn clients %s have no samples", listed(outcomes))
    rows = [_row(i, outcome) for i, outcome in outcomes.items()]
    good = [row for row in rows if row["evaluation"] == OK]
    means: dict[str, float] = {
        "evaluation-replies": len(good),
        "evaluation-dropped": len(rows) - len(good) - [*outcomes.values()].count(EMPTY),
        "evaluation-empty": [*outcomes.values()].count(EMPTY),
    }
    asked = [outcome for outcome in outcomes.values() if outcome != EMPTY]
    has_diverged = all(isinstance(outcome, Diverged) for outcome in asked)
    least = min(2, s.num_clients)  # one of many does not end a run
    if has_diverged and len(asked) >= least and not requests[0].own_only:
        means[f"{OUTPUT}loss"] = math.inf  # otherwise an earlier evaluation would be the last one
    for name in dict.fromkeys(name for row in good for name in row):
        if name.startswith((OUTPUT, PERSONAL)):
            having = [row for row in good if name in row]
            weights = [row["evaluation-examples"] for row in having] if _is_output(name) else None
            means |= over_clients(name, [row[name] for row in having], weights)
    return Evaluation(means, rows)


def _is_output(name: str) -> bool:
    return name.startswith(OUTPUT)


def _ask(session: Session, requests: Sequence[EvaluateRequest], timeout: float) -> dict[int, Any]:
    """client -> its metrics by name, `EMPTY`, or the reason for none in one line."""
    own_only, most = requests[0].own_only, session.method.max_examples
    replies = session.fleet.evaluate(requests, timeout)
    outcomes: dict[int, Any] = {}
    for request, reply in zip(requests, replies, strict=True):
        result = reply if isinstance(reply, str) else _checked(reply, own_only, most)
        outcomes[request.instruction.client] = result
    for prefix, needed in ((OUTPUT, not own_only), (PERSONAL, own_only)):
        forms = {
            i: tuple(sorted(name for name in outcome if name.startswith(prefix)))
            for i, outcome in outcomes.items()
            if not isinstance(outcome, str)
        }
        outcomes |= unusual("the metrics", {i: form for i, form in forms.items() if form or needed})
    problems = [(i, o) for i, o in outcomes.items() if isinstance(o, str) and o != EMPTY]
    if problems:
        what = "their personal model" if own_only else "the model"
        log.warning(
            f"{len(problems)} of {len(requests)} clients did not evaluate {what}: "
            f"{clean(problems[0][1])}"
        )
    return outcomes


def _checked(reply: Mapping[str, float], own_only: bool, most: int) -> dict[str, float] | str:
    """The metrics of a reply by name, `EMPTY`, or the error in them."""
    examples = reply.get(EXAMPLES)
    if examples == 0:
        return EMPTY
    is_needed = not own_only or examples is not None
    if is_needed and not (type(examples) is int and 0 < examples <= most):
        return f"expected {EXAMPLES} to be an integer from 0 to {most}, got {examples!r:.40}"
    values = {} if examples is None else {"evaluation-examples": examples}
    names = [name for name in reply if name != EXAMPLES and NAME.fullmatch(name)]
    for name in sorted(names[:OWN_METRICS], key=lambda name: name != "loss"):
        plain, value = name.removeprefix(PERSONAL), reply[name]
        low, high = RANGES.get(plain, (-LARGEST_METRIC, LARGEST_METRIC))
        if not low <= value <= high:
            line = f"expected {name} from {low:g} to {high:g}, got {value:.4g}"
            return Diverged(line) if name == "loss" else line
        is_own = own_only or plain != name
        values[(PERSONAL if is_own else OUTPUT) + plain] = value
    return values


def _row(client: int, outcome: Mapping[str, float] | str) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"client": client, "evaluation": clean(outcome)}
    return {"client": client, "evaluation": OK, **outcome}

"""A method as a Flower Strategy: `start` makes a Run."""

import time
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedaccord.core.options import argument, check_dataclass, plain
from fedaccord.core.vectors import Vector
from fedaccord.federation.app_evaluation import (
    AggregateMetrics,
    ClientEvaluation,
    weighted_means,
)
from fedaccord.federation.errors import FederationError
from fedaccord.federation.flower_arguments import check_arguments
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.method import Method
from fedaccord.federation.metrics import measured, reported
from fedaccord.federation.policies import check_buffered
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.federation.session import Book
from fedaccord.wire.messages import EXAMPLES
from fedaccord.wire.records import CONFIG, METRICS

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def _refused(hook: str) -> Any:
    """A hook of Flower's: it would store state in the strategy between two calls."""

    def refuse(self: "FederatedStrategy", *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{hook}: expected a call of {type(self).__name__}.start, which runs the whole loop; a "
            "method has no state between two calls, so wrappers that call Flower's hooks do not "
            "work: use plug-ins instead"
        )

    return refuse


@dataclass(frozen=True, kw_only=True)
class FederatedStrategy(Method, Strategy, ABC):
    """The server half of a method.

    A subclass implements the paper: `rule` (its client half), `init`, `broadcast` and `aggregate`,
    all of them pure.
    Works in any Flower ServerApp: ``strategy.start(grid=..., initial_arrays=..., num_rounds=...)``
    with `fedaccord.train_locally` in the ClientApp. Accepts the arguments of Flower's own FedAvg.
    """

    weighted_by_key: str = argument(
        "",
        "num-examples: as weighting=examples, which not every method supports; empty: as weighting",
        shown=False,
    )
    train_metrics_aggr_fn: AggregateMetrics | None = argument(
        None,
        "more metrics of a round: called with a RecordDict of the metrics of each accepted reply, "
        "and 'num-examples'",
        shown=False,
    )
    evaluate_metrics_aggr_fn: AggregateMetrics | None = argument(
        None,
        "instead of means: called with the replies that evaluate, and 'num-examples'",
        shown=False,
    )
    arrayrecord_key: str = argument(
        "arrays", "name of the record with the model in messages that evaluate", shown=False
    )
    configrecord_key: str = argument(
        CONFIG, "name of the record with train_config or evaluate_config in messages", shown=False
    )

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        check_dataclass(cls)
        check_arguments(cls, positional, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.weighted_by_key not in ("", EXAMPLES):
            raise ValueError(
                f"weighted_by_key: expected {EXAMPLES!r}, got {self.weighted_by_key!r}: give other "
                "weights to train_locally(examples=...)"
            )
        if self.weighted_by_key and not self.takes_weights:
            raise ValueError(
                f"weighted_by_key: expected none with {type(self).__name__}, whose server step "
                f"counts clients equally, got {EXAMPLES!r}: leave it out (means of metrics are "
                "weighted by it anyway)"
            )
        if self.arrayrecord_key == self.configrecord_key:
            raise ValueError(
                "arrayrecord_key, configrecord_key: expected two names, got "
                f"{self.arrayrecord_key!r} twice"
            )
        if self.weighted_by_key:
            object.__setattr__(self, "weighting", "examples")
        super().__post_init__()
        if self.is_buffered:
            check_buffered(self)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the federation; arguments and result as Flower's own `Strategy.start`.

        ``initial_arrays`` may be of a whole state_dict, whose buffers follow ``buffers``.
        ``timeout`` (seconds, per round) replaces ``round_timeout``. ``evaluate_fn`` is called on
        the output model before round 1 and every ``eval_every`` rounds, and once more, its metrics
        ending in ``-broadcast``, if the broadcast model is another one. In the same rounds, but not
        before round 1, ``fraction_evaluate`` of the clients evaluate the output model by the
        @app.evaluate() of the ClientApp, as for Flower's strategies; with methods that have
        personal models, and with ``evaluation`` "clients" or "both", they evaluate by
        `fedaccord.evaluate_locally`. ``evaluate_config`` is in all these messages. With the plug-in
        `DP`, whose guarantee does not cover clients' evaluations, they evaluate only with
        ``write_client_metrics``.
        Raises ValueError on bad settings before any message is sent, FederationError if the clients
        do not connect or too many rounds fail in a row; its ``arrays`` are the model until then.
        """
        num_rounds, timeout = plain(num_rounds), plain(timeout)
        if type(num_rounds) is not int or num_rounds < 0:
            raise ValueError(f"num_rounds: expected an integer from 0, got {num_rounds!r}")
        if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):
            raise ValueError(f"timeout: expected seconds above 0, or None, got {timeout!r}")
        if not isinstance(initial_arrays, ArrayRecord):
            raise ValueError(
                "initial_arrays: expected an ArrayRecord, ArrayRecord(model.state_dict()), got "
                f"a {type(initial_arrays).__name__}"
            )
        key = self.configrecord_key
        fleet = MessageFleet(grid, train_config, config_key=key, evaluate_config=evaluate_config)
        evaluate_on_clients = ClientEvaluation(
            self,
            fleet,
            timeout=self.round_timeout if timeout is None else timeout,
            config=evaluate_config or {},
            arrays_key=self.arrayrecord_key,
            config_key=key,
            aggregate=self.evaluate_metrics_aggr_fn or weighted_means,
        )
        trained: dict[int, MetricRecord] = {}
        evaluated: dict[int, MetricRecord] = {}

        def on_round(round: Round) -> None:
            number = round.number
            for metrics_of, function, rows in (
                (trained, self.train_metrics_aggr_fn, reported(round.clients)),
                (evaluated, self.evaluate_metrics_aggr_fn, measured(round.evaluations)),
            ):
                replies = [RecordDict({METRICS: MetricRecord(row)}) for row in rows]
                if function and replies and (metrics := function(replies, EXAMPLES)) is not None:
                    metrics_of[number] = metrics
            due = number and run.is_evaluated(number) and not run.session.asks_clients
            if due and (means := evaluate_on_clients(number, run.output())):
                evaluated[number] = means

        def evaluate(number: int, w: Vector, buffers: Vector | None) -> Mapping[str, Any]:
            assert evaluate_fn is not None
            return evaluate_fn(number, run.session.arrays(w, buffers)) or {}

        run = Run(
            self,
            fleet,
            initial_arrays,
            num_rounds,
            timeout=timeout,
            evaluate=evaluate if evaluate_fn else None,
            on_round=on_round,
            # clients store states by federation, and refuse messages older than their last one
            book=Book(f"start-{uuid4().hex[:8]}", time.time_ns()),
        )
        try:
            result = run.play()
        except FederationError as error:
            error.arrays = run.output()
            raise
        for number in trained.keys() & result.train_metrics_clientapp.keys():
            result.train_metrics_clientapp[number].update(trained[number])
        for number, metrics in evaluated.items():
            result.evaluate_metrics_clientapp.setdefault(number, MetricRecord()).update(metrics)
        return result

    configure_train = _refused("configure_train")
    aggregate_train = _refused("aggregate_train")
    configure_evaluate = _refused("configure_evaluate")
    aggregate_evaluate = _refused("aggregate_evaluate")

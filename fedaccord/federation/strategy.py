"""A method as a Flower Strategy: `start` makes a Run."""

from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedaccord.federation.evaluation import EvaluateFn
from fedaccord.federation.fleet import MessageFleet
from fedaccord.federation.method import Method
from fedaccord.federation.run import Run


@dataclass(frozen=True, kw_only=True)
class FederatedStrategy(Method, Strategy, ABC):
    """The server half of a method.

    A subclass writes the paper: `rule` (its client half), `init`, `broadcast` and `aggregate`, all
    of them pure.
    Works in any Flower ServerApp: ``strategy.start(grid=..., initial_arrays=..., num_rounds=...)``
    with `fedaccord.train_locally` in the ClientApp.
    """

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

        ``timeout`` (seconds, per round) takes the place of ``round_timeout``. ``evaluate_fn`` is
        called on the output model before round 1 and every ``eval_every`` rounds, and once more,
        its metrics ending in ``-broadcast``, if the broadcast model is another one.
        Raises ValueError on bad settings before any message is sent, FederationError when the
        clients do not come or too many rounds fail in a row.
        """
        run = Run(
            self,
            MessageFleet(grid, train_config),
            initial_arrays,
            num_rounds,
            timeout=timeout,
            evaluate_fn=evaluate_fn,
        )
        return run.play()

    # Flower's hooks keep what they need between two calls in the strategy; a method keeps nothing.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        self._refuse("configure_train")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        self._refuse("aggregate_train")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        self._refuse("configure_evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        self._refuse("aggregate_evaluate")

    def _refuse(self, hook: str) -> NoReturn:
        raise RuntimeError(
            f"{hook}: expected a call of {type(self).__name__}.start, which has the whole loop; a "
            "method keeps nothing between two calls, so wrappers that call Flower's hooks do not "
            "fit: use plug-ins instead"
        )

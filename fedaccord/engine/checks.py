"""Checks of a run before a file is written."""

from typing import Any

from fedaccord.config import RunConfig
from fedaccord.core.cohort import Cohorts
from fedaccord.federation.budget import first_of
from fedaccord.federation.sampling import check_number
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.process import threads
from fedaccord.task import Task, load_task


def load_checked(
    config: RunConfig, cohorts: Cohorts | None = None, builds_model: bool = True
) -> Task:
    """The task. Raises ValueError, in one line, if settings, data and model do not fit together."""
    threads.check(config.threads)
    if cohorts is not None:
        check_number(cohorts, config.num_server_rounds)
    config.strategy.check_clients(config.num_clients, cohorts)
    config.strategy.topology.facts(config.num_clients)
    if (guarantee := config.strategy.guarantee) and not config.resume:
        share = config.strategy.fraction_train
        first_of(guarantee, share, config.num_server_rounds, config.num_clients)
    task = load_task(config.task, num_clients=config.num_clients)
    check_examples(task, config.strategy)
    if builds_model:
        task.model(config.strategy.model_settings)
    return task


def check_functions(**functions: Any) -> None:
    """Raise ValueError, in one line, for an argument that is neither a function nor None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(
                f"{name}: expected a function, or None, got a {type(function).__name__}"
            )


def check_examples(task: Task, method: FederatedStrategy) -> None:
    """Raise ValueError, in one line, if the reply of every client would be dropped."""
    least = min(map(task.num_examples, range(len(task.clients))))
    if least > method.max_examples:
        raise ValueError(
            f"max-examples: expected at least {least}, the samples of the smallest client, got "
            f"{method.max_examples}: all replies would be dropped"
        )

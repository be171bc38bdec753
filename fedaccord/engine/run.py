"""A run in this process, from a configuration to its run directory."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedaccord import recorded_run
from fedaccord.config import RunConfig
from fedaccord.core.cohort import Cohorts
from fedaccord.data import partition
from fedaccord.engine import fleet_choice, vectorize
from fedaccord.engine.checks import check_functions, load_checked
from fedaccord.engine.keywords import keys_of, make_config
from fedaccord.federation.round import Round
from fedaccord.process.allocator import give_back_memory
from fedaccord.runs import RunDirectory, logbook
from fedaccord.task import Clients, Task, forget_tasks, load_task
from fedaccord.task.multiplications import threads_of_task

log = logging.getLogger("flwr")


def run(
    config: RunConfig,
    *,
    on_round: Callable[[Round], None] | None = None,
    cohorts: Cohorts | None = None,
    on_client: Callable[[int], None] | None = None,
    at: int | None = None,
) -> RunDirectory:
    """Run a configuration in this process, without a ClientApp; see `recorded_run.run`.

    config: of `RunConfig.make`; on_round: called with each round, from the evaluation of w^0 as
    round 0; cohorts: the clients of each round, instead of drawn ones; on_client: called with a
    client's number after its local round; at: the round of the checkpoint from which a config with
    ``resume`` resumes, None: the last one. Raises ValueError, in one line, on settings that do not
    fit, FederationError if the run fails.
    """
    check_functions(on_round=on_round, on_client=on_client)
    if at is not None and not config.resume:
        raise ValueError(f"at: expected None without resume=true in the configuration, got {at}")
    task = load_checked(config, cohorts)  # errors are raised before a file is written
    report = partition_report(task)
    counts = {"duplicated": report.duplicated, "unused": report.unused}
    facts = {name: count for name, count in counts.items() if count is not None}
    chosen = threads_of_task(config.threads, task, config.strategy, config.workers)
    with chosen.in_use():
        setting = logbook.as_begun(config, at)
        size = config.strategy.cohort_size(config.num_clients)
        choice = vectorize.choose(setting, task, config.strategy, size)
        if setting == "auto":
            log.info("%s", choice)
        config = config.having("vectorize", choice.as_set)
        load = partial(load_task, config.task, num_clients=config.num_clients)
        try:
            with fleet_choice.choose(config, task, load, choice.vectorize, on_client) as fleet_for:
                return recorded_run.run(
                    fleet_for, config, task, on_round, at, cohorts=cohorts, partition=facts
                )
        finally:
            give_back_memory()  # another run may follow in this process


def run_with(algo: str = RunConfig.algo, **keys: Any) -> Path:
    """Run a federation as `fedaccord run` does, without its log, and return its run directory.

    algo, keys: as of `simulate`, whose other arguments are not run-config keys; one without effect
    is a warning. Raises ValueError on settings that do not fit, FederationError as `simulate`.
    """
    typed = keys_of(keys) | {"algo": algo}
    config = make_config(typed)
    for line in config.unread(explicit=typed):
        log.warning("%s", line)
    forget_tasks()  # files, and what functions read, may have changed
    with quiet():
        return run(config).path


def partition_report(task: Task) -> partition.Report:
    clients = task.clients
    assert isinstance(clients, Clients)
    assert clients.parts is not None
    assert isinstance(clients.y, Tensor)
    return partition.report(clients.parts, clients.y.numpy())


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Let only warnings, or only records of a higher level, through Flower's logger."""

    def loud(record: logging.LogRecord) -> bool:
        return record.levelno >= level

    log.addFilter(loud)  # a new one, so that blocks in several threads do not disturb each other
    try:
        yield
    finally:
        log.removeFilter(loud)

"""Gradients and hours of a study, before it begins."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedaccord.config import RunConfig
from fedaccord.data import datasets
from fedaccord.experiments.reproduce.study import CellRun, Study
from fedaccord.experiments.sweep.estimate import beside, timed
from fedaccord.task import load_task
from fedaccord.task.config import TaskConfig

STEPS = 2  # local steps of the timed client


class Pace(NamedTuple):
    """Times of a model on a data set, on this machine; in seconds."""

    gradient: float
    evaluation: float
    overhead: float  # of a run: to load the data, to start and to end


class Estimate:
    """Hours of runs; each model is timed once on each data set."""

    def __init__(self, study: Study, workers: int) -> None:
        self.study, self.workers = study, workers
        self.paces: dict[tuple[object, ...], Pace] = {}

    def hours(self, runs: Sequence[CellRun]) -> tuple[float, str] | None:
        """Hours of the missing ones of ``runs`` without other runs, and the number of processes, in
        words; None without their data."""
        if not all(has_data(RunConfig.make(run.job.settings).task) for run in runs):
            return None
        left = [run for run in runs if self.study.done(run) is None]
        seconds, processes = beside(sum(map(self._seconds, left)), len(left), self.workers)
        return seconds / 3600, processes

    def _seconds(self, run: CellRun) -> float:
        config = RunConfig.make(run.job.settings)
        pace, rounds = self._pace(config), config.num_server_rounds
        evaluations = rounds / max(1, config.strategy.eval_every)
        work = rounds * gradients(config) * pace.gradient + evaluations * pace.evaluation
        return work + pace.overhead

    def _pace(self, config: RunConfig) -> Pace:
        task, strategy = config.task, config.strategy
        key = (
            task.dataset,
            task.data_dir,
            task.image_size,
            task.model,
            task.stem,
            task.device,
            strategy.batch_size,
            strategy.precision,
        )
        if key not in self.paces:
            self.paces[key] = _time(config)
        return self.paces[key]


def gradients(config: RunConfig) -> float:
    """Gradient evaluations of a round, each of a batch, with equal clients."""
    strategy = config.strategy
    if not (steps := strategy.steps_of_round(0)):
        samples = _samples_of_client(config)
        steps = strategy.local_epochs * math.ceil(samples / (strategy.batch_size or samples))
    cohort = strategy.cohort_size(config.num_clients)
    return float(cohort * steps * strategy.cost.gradients)


def has_data(task: TaskConfig) -> bool:
    """Whether the data set is here; nothing is fetched. Raises FileNotFoundError if it is neither
    here nor known."""
    try:
        datasets.cached(task.dataset, task.data_dir, task.reading)
    except FileNotFoundError:
        if datasets.kind_of(task.dataset).facts is None:
            raise
        return False
    return True


def _samples_of_client(config: RunConfig) -> int:
    if has_data(config.task):
        return load_task(config.task, num_clients=config.num_clients).clients.size(0)
    facts = datasets.kind_of(config.task.dataset).facts
    assert facts is not None  # else `has_data` raised
    return config.task.samples_per_client or max(1, facts.samples // config.num_clients)


def _time(config: RunConfig) -> Pace:
    """One client of FedAvg: a round without and a round with an evaluation."""
    base = {k: v for k, v in config.flat.items() if "." not in k}
    own = {"algo": "fedavg", "fraction-train": 1 / config.num_clients, "local-steps": STEPS}
    rounds = {"num-server-rounds": 3, "eval-every": 3, "checkpoint-every": 3}
    *_, without, evaluated, rest = timed(base | own | rounds)
    return Pace(without / STEPS, max(0.0, evaluated - without), rest)

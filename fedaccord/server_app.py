"""The ServerApp: config in, strategy started, results out."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from fedaccord import threads
from fedaccord.config import RunConfig
from fedaccord.core.vectors import dtype_of
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import Fleet
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.runs import RunDirectory
from fedaccord.task import Task, load_task
from fedaccord.task.flat_model import FlatModel
from fedaccord.wire.tensor_array import to_record, to_tensor

log = logging.getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        config = RunConfig.make(context.run_config)
        threads.check(config.threads)
        task = load_task(config.task, num_clients=1, whole=True)  # its test samples
        chosen = threads.of_task(config.threads, task, config.strategy)
        log.info("%s", chosen)
        with chosen.in_use():
            run(grid, config, task)
    except (ValueError, FileNotFoundError, FederationError) as error:
        # without the traceback below `main`; a SystemExit would end a simulation as "completed"
        raise error.with_traceback(None) from None


def run(
    grid: Grid | Fleet,
    config: RunConfig,
    task: Task,
    on_round: Callable[[Round], None] | None = None,
    **facts: Any,
) -> RunDirectory:
    """One run of the configuration over ``grid``, written to its run directory.

    ``facts`` go into summary.json. An interrupted or failed run leaves a directory that can be
    read, with the model as it was then.
    """

    def record(round: Round) -> None:
        directory.record({"round": round.number, **round.metrics}, round.clients)
        if on_round:
            on_round(round)

    strategy = config.strategy
    strategy.on_round = record
    initial = initial_arrays(task, strategy.precision)
    directory = RunDirectory(config.out_dir, config.name, config.flat)
    log.info("run directory: %s", directory.path)
    status = "failed"
    try:
        start(strategy, grid, initial, task, config.num_server_rounds, config.eval_train)
        status = "completed"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        arrays = strategy.current() or initial
        directory.save_model({name: to_tensor(array) for name, array in arrays.items()})
        if strategy.state is not None:
            facts |= strategy.topology.facts(strategy.state.num_clients)
        directory.summarise(status, **facts)
        log.info("run %s: %s", status, directory.path)
    return directory


def start(
    strategy: FederatedStrategy,
    grid: Grid | Fleet,
    initial: ArrayRecord,
    task: Task,
    num_rounds: int,
    eval_train: bool = False,
) -> Result:
    """Run ``strategy`` with the task's test samples as its evaluation.

    ``eval_train``: evaluate the headline model on the training samples too; generalisation-gap is
    its train accuracy less its test accuracy, both in [0, 1].
    """
    layout = task.model(strategy.precision)

    def vector(arrays: ArrayRecord) -> torch.Tensor:
        return torch.cat([to_tensor(arrays[name]).reshape(-1) for name in layout.names])

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(task.evaluate(vector(arrays))))

    def evaluate_train(arrays: ArrayRecord, found: Mapping[str, float]) -> Mapping[str, float]:
        train = task.evaluate_train(vector(arrays))
        if "train-accuracy" in train and "test-accuracy" in found:
            train["generalisation-gap"] = train["train-accuracy"] - found["test-accuracy"]
        return train

    if eval_train:
        strategy.evaluate_headline_fn = evaluate_train
    return strategy.start(grid, initial, num_rounds, evaluate_fn=evaluate)


def initial_arrays(task: Task, precision: str) -> ArrayRecord:
    """The parameters of a fresh model under their names."""
    dtype = dtype_of(precision)
    return to_record(FlatModel(task.module(), dtype=dtype).state_dict())

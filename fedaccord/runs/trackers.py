"""Trackers beside the run directory: TensorBoard, MLflow or Weights & Biases.

A tracker receives the rows of metrics.csv, round by round. A failure is reported once and disables
the tracker; it never ends a run. The trackers' own environment variables apply
(MLFLOW_TRACKING_URI, WANDB_MODE, ...); without them they write beside the run.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from fedaccord.config import TRACKERS
from fedaccord.process.extras import install

NONE = TRACKERS[0]
PROJECT = "fedaccord"
log = logging.getLogger("flwr")


class Tracker(NamedTuple):
    """log: (round, its metrics); end: whether the run completed."""

    log: Callable[[int, Mapping[str, float]], None]
    end: Callable[[bool], None]


def check(name: str) -> None:
    """Raises ValueError, in one line, if the tracker's package is not installed."""
    if name != NONE and find_spec(name) is None:
        raise ValueError(f"tracker: expected the package of {name}, found none; {install(name)}")


def start(name: str, run: Path, settings: Mapping[str, Any], after: int = 0) -> Tracker:
    """The tracker called ``name`` of a run directory; after: rounds of a run that resumes."""
    if name == NONE:
        return Tracker(lambda *_: None, lambda _: None)
    starts = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
    return _harmless(name, lambda: starts[name](run, settings, after))


def _harmless(name: str, begin: Callable[[], Tracker]) -> Tracker:
    """A tracker that logs its first error and is then disabled."""
    tracker: Tracker | None = None

    def attempt(do: Callable[[], Any]) -> Any:
        nonlocal tracker
        try:
            return do()
        except Exception as error:  # of a network, a disk or a server
            log.warning("%s: %s; it is left out", name, " ".join(str(error).split()))
            tracker = None

    tracker = attempt(begin)
    return Tracker(
        lambda number, metrics: tracker and attempt(lambda: tracker.log(number, metrics)),
        lambda good: tracker and attempt(lambda: tracker.end(good)),
    )


def _tensorboard(run: Path, settings: Mapping[str, Any], after: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"), purge_step=after + 1 if after else None)
    if not after:
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        writer.add_text("settings", f"| key | value |\n| --- | --- |\n{rows}")

    def record(number: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, number)
        writer.flush()

    return Tracker(record, lambda _: writer.close())


def _mlflow(run: Path, settings: Mapping[str, Any], after: int) -> Tracker:
    from mlflow import MlflowClient

    place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.parent / 'mlflow.db'}")
    client, tag = MlflowClient(place), "fedaccord.run"
    existing = client.get_experiment_by_name(PROJECT)
    experiment = existing.experiment_id if existing else client.create_experiment(PROJECT)
    runs = client.search_runs([experiment], f"tags.`{tag}` = '{_id(run)}'") if after else []
    if runs:
        number = runs[0].info.run_id
        client.update_run(number, "RUNNING")
    else:
        tags = {tag: _id(run)}
        number = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        for key, value in settings.items():
            client.log_param(number, key, value)

    def record(step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            client.log_metric(number, key, value, step=step)

    return Tracker(
        record, lambda good: client.set_terminated(number, "FINISHED" if good else "FAILED")
    )


def _wandb(run: Path, settings: Mapping[str, Any], after: int) -> Tracker:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    file = run / "wandb" / "fedaccord-id"
    # a new run may be in the folder of an earlier one; versions without the file used its path
    number, place = _id(run) if after else uuid4().hex[:16], ""
    if after and file.exists():
        number, _, place = file.read_text(encoding="utf-8").partition("\n")
    if place not in ("", str(run)) and (Path(place) / "wandb" / file.name).exists():
        number = uuid4().hex[:16]  # of a copy
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{number}\n{run}", encoding="utf-8")
    begun = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name,
        id=number,
        dir=run,
        config=dict(settings),
        resume="allow",
        mode=mode,
        settings=wandb.Settings(console="off"),  # do not upload the output of the process
    )
    return Tracker(
        lambda number, metrics: begun.log(dict(metrics), step=number),
        lambda good: begun.finish(exit_code=0 if good else 1),
    )


def _id(run: Path) -> str:
    """The same for a resumed run."""
    return hashlib.sha256(str(run).encode()).hexdigest()[:16]

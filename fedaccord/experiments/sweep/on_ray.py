"""Jobs on Ray Tune, on this machine or a cluster; and ASHA, which stops trials by their timing.

A Ray actor takes one trial after another: it loads PyTorch and the data once.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C ends the sweep
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # gpus = 0: a trial sees none

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from fedaccord.engine.cluster import begin, environment
from fedaccord.experiments.sweep.plan import Options
from fedaccord.experiments.sweep.trial import FAILED, Job, execute, mean
from fedaccord.experiments.sweep.workers import OnRow, Workers, count
from fedaccord.process.allocator import keep_freed_memory

Ladder = Sequence[Sequence[Job]]  # a trial of Ray's: the jobs of each of its rungs
WORST = -1e30  # for a failed rung: ASHA takes no NaN


class Climb(tune.Trainable):
    """Does the jobs of a ladder, a rung a step."""

    def setup(self, config: dict[str, Any]) -> None:
        keep_freed_memory()
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.ladder, self.metric = new_config["ladder"], new_config["metric"]
        self.done = 0
        return True

    def step(self) -> dict[str, Any]:
        jobs = [Job(*job) for job in self.ladder[self.done]]
        rows = [execute(job) for job in jobs]
        score, self.done = mean(rows, self.metric), self.done + 1
        return {  # what `Tell` reads
            "jobs": list(map(tuple, jobs)),
            "rows": rows,
            "rounds": jobs[0].rounds,
            "score": WORST if score != score else score,
            "done": self.done == len(self.ladder),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}  # the run directories have theirs

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        pass


class Tell(tune.Callback):
    def __init__(self, on_row: OnRow) -> None:
        self.on_row = on_row

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes its callbacks to a file

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        for job, row in zip(result["jobs"], result["rows"], strict=True):
            self.on_row(Job(*job), row)


Climbing = Callable[[Sequence[Ladder], TrialScheduler | None, OnRow], None]


@contextmanager
def on_ray(options: Options) -> Iterator[Climbing]:
    """A block with Ray, in which ladders are climbed. Raises ValueError where no Ray is there."""
    with environment():
        begin(options.ray_address, max(count(options.workers), math.ceil(options.cpus)))

        def climb(
            ladders: Sequence[Ladder], scheduler: TrialScheduler | None, on_row: OnRow
        ) -> None:
            storage = Path(ladders[0][0][0].folder) / "ray"
            plain = [[[tuple(job) for job in rung] for rung in ladder] for ladder in ladders]
            resources = {"cpu": options.cpus, "gpu": options.gpus}
            tuner = tune.Tuner(
                tune.with_resources(Climb, resources),
                param_space={"ladder": tune.grid_search(plain), "metric": options.metric},
                tune_config=tune.TuneConfig(reuse_actors=True, scheduler=scheduler),
                run_config=tune.RunConfig(
                    storage_path=str(storage), verbose=0, callbacks=[Tell(on_row)]
                ),
            )
            try:
                found = tuner.fit()
            finally:
                shutil.rmtree(storage, ignore_errors=True)
            for result in map(found.__getitem__, range(len(found))):
                if result.error and result.config:
                    reason = str(result.error).strip().splitlines()[-1]
                    for job in result.config["ladder"][-1]:
                        on_row(Job(*job), {"status": FAILED, "reason": reason})

        try:
            _check_room(options)
            yield climb
        finally:
            ray.shutdown()


def _check_room(options: Options) -> None:
    """Raises ValueError where no trial could ever begin: Ray would wait for a machine."""
    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for key, what in (("cpus", "CPU"), ("gpus", "GPU")):
        most, asked = have.get(what, 0.0), getattr(options, key)
        if asked > most:
            raise ValueError(
                f"[sweep] {key}: expected at most {most:g}, the {what}s that Ray has at "
                f"{options.ray_address!r}, got {asked:g}"
            )


@contextmanager
def ray_workers(options: Options) -> Iterator[Workers]:
    """Every job as it is, in any order."""
    with on_ray(options) as climb:

        def work(jobs: Sequence[Job], on_row: OnRow) -> None:
            if jobs:
                climb([[[job]] for job in jobs], None, on_row)

        yield work


def asha(options: Options, methods: Sequence[Sequence[Ladder]], on_row: OnRow) -> None:
    """The ladders of each method by asynchronous successive halving (arXiv:1810.05934).

    Which trials stop depends on which are first at a rung, hence on the machine and its load: not
    reproducible.
    """
    with on_ray(options) as climb:
        for ladders in methods:
            scheduler = ASHAScheduler(
                time_attr="rounds",
                metric="score",
                mode="max",
                max_t=ladders[0][-1][0].rounds,
                grace_period=ladders[0][0][0].rounds,
                reduction_factor=options.eta,
            )
            climb(ladders, scheduler, on_row)

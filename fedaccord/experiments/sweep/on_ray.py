"""Jobs on Ray, on this machine or a cluster; and ASHA, which stops trials by their timing.

Ray reuses its worker processes: each loads PyTorch and the data once.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import ray

from fedaccord.engine.cluster import check_room, environment, started
from fedaccord.experiments.sweep.plan import SweepOptions
from fedaccord.experiments.sweep.trial import FAILED, Job, OnRow, Row, Workers, execute, mean
from fedaccord.process import threads
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.runs import lock

WORST = -1e30  # the score of a failed rung, which stops: NaN is below every quantile
Rung = Sequence[Job]  # a configuration up to a number of rounds, one job per seed
Ladder = Sequence[Rung]
Climbing = Callable[[Sequence[Ladder], Callable[[int, list[Row]], bool], OnRow], None]


def _rung(jobs: Rung) -> list[Row]:
    keep_freed_memory()
    end = time.monotonic() + lock.STALE + lock.BEAT
    while time.monotonic() < end and any(lock.is_locked(job.path) for job in jobs):
        time.sleep(1)  # the trial's earlier process, if its machine was lost
    return [execute(job) for job in jobs]


@contextmanager
def on_ray(options: SweepOptions) -> Iterator[Climbing]:
    """A block with Ray that climbs ladders: a finished rung is followed by the next one if the
    second argument, called with its number and its rows, returns true.

    Raises ValueError if there is no such cluster, or if it is too small.
    """
    cores = max(threads.processes(options.workers), math.ceil(options.cpus))
    of_caller = ray.is_initialized()  # its Ray stays as it is
    begun = nullcontext() if of_caller else started(options.ray_address, cores)
    with environment(zero_gpus="1"), begun:  # with gpus = 0 a trial sees none
        check_room("[sweep] cpus", options.cpus, "CPU")
        check_room("[sweep] gpus", options.gpus, "GPU")
        of_ray = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=1)
        task = of_ray(_rung)

        def climb(
            ladders: Sequence[Ladder], goes_on: Callable[[int, list[Row]], bool], on_row: OnRow
        ) -> None:
            running = {task.remote(ladder[0]): (ladder, 0) for ladder in ladders}
            while running:
                (future, *_), _ = ray.wait([*running])
                ladder, rung = running.pop(future)
                try:
                    rows = ray.get(future)
                except ray.exceptions.RayError as error:  # its process died, twice, or its files
                    ladder, rung = [ladder[-1]], 0
                    reason = str(error).strip().splitlines()[-1]
                    rows = [{"status": FAILED, "reason": reason}] * len(ladder[0])
                for job, row in zip(ladder[rung], rows, strict=True):
                    on_row(job, row)
                if rung + 1 < len(ladder) and goes_on(rung, rows):
                    running[task.remote(ladder[rung + 1])] = ladder, rung + 1

        yield climb


@contextmanager
def ray_workers(options: SweepOptions) -> Iterator[Workers]:
    """Every job, in any order."""
    with on_ray(options) as climb:
        yield lambda jobs, on_row: climb([[[job]] for job in jobs], lambda *_: False, on_row)


def asha(options: SweepOptions, methods: Sequence[Sequence[Ladder]], on_row: OnRow) -> None:
    """The ladders of each method by asynchronous successive halving (arXiv:1810.05934): a rung is
    followed by the next if it is among the best 1/eta that have reached it so far.

    The trials that stop depend on the order of arrival, hence on the machine and its load: not
    reproducible.
    """
    with on_ray(options) as climb:
        for ladders in methods:
            climb(ladders, best_so_far(options), on_row)


def best_so_far(options: SweepOptions) -> Callable[[int, list[Row]], bool]:
    """Whether a rung's rows are among the best 1/eta of this rung so far."""
    scores: dict[int, list[float]] = {}

    def goes_on(rung: int, rows: list[Row]) -> bool:
        score = mean(rows, options.metric)
        at_rung = scores.setdefault(rung, [])
        at_rung.append(WORST if math.isnan(score) else score)
        return bool(score >= np.quantile(at_rung, 1 - 1 / options.eta))

    return goes_on

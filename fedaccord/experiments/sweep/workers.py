"""Workers for the jobs: this process, processes of this machine, or Ray.

Each is a block with a function of many jobs, which reports every completed row. A trial's seed and
number of threads are fixed: it is the same on every machine.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import active_children, connection, get_context, parent_process
from os import _exit
from threading import Thread

from fedaccord.experiments.sweep.plan import SweepOptions
from fedaccord.experiments.sweep.trial import FAILED, Job, OnRow, Row, Workers, execute
from fedaccord.process import threads
from fedaccord.process.allocator import keep_freed_memory

DIED = "its process died, even when run alone: perhaps it needs more memory than is free"


def of(options: SweepOptions) -> AbstractContextManager[Workers]:
    """The workers of the plan. Raises ModuleNotFoundError if Ray is needed and not installed."""
    if options.ray_address:
        from fedaccord.experiments.sweep.on_ray import ray_workers

        return ray_workers(options)
    number = threads.processes(options.workers)
    return processes(number) if number > 1 else here()


@contextmanager
def here() -> Iterator[Workers]:
    """One job after another in this process."""

    def work(jobs: Sequence[Job], on_row: OnRow) -> None:
        for job in jobs:
            on_row(job, execute(job))

    yield work


@contextmanager
def processes(number: int) -> Iterator[Workers]:
    """``number`` processes, each of which runs one job after another; they end with this one.

    If the block is interrupted, their runs write a checkpoint. A job whose process dies is run once
    more, alone, and failed if it dies again.
    """
    pool = _pool(number)

    def work(jobs: Sequence[Job], on_row: OnRow) -> None:
        nonlocal pool
        left = dict(enumerate(jobs))
        while left:
            try:
                _each(pool, left, on_row)
            except BrokenProcessPool:
                for i in [*left][: number + 1]:  # one of the started jobs
                    _alone(left.pop(i), on_row)
                pool = _pool(number)

    try:
        yield work
    except BaseException:
        for child in active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _each(pool: ProcessPoolExecutor, left: dict[int, Job], on_row: OnRow) -> None:
    """Finished jobs are removed from ``left``."""
    futures: dict[Future[Row], int] = {pool.submit(_execute, job): i for i, job in left.items()}
    for future in as_completed(futures):
        row = future.result()
        on_row(left.pop(futures[future]), row)


def _alone(job: Job, on_row: OnRow) -> None:
    pool = _pool(1)
    try:
        _each(pool, {0: job}, on_row)
    except BrokenProcessPool:
        on_row(job, {"status": FAILED, "reason": DIED})
    finally:
        pool.shutdown(wait=False)


def _pool(number: int) -> ProcessPoolExecutor:
    context = get_context("spawn")  # PyTorch's threads do not survive a fork
    return ProcessPoolExecutor(number, mp_context=context, initializer=_begin)


def _begin() -> None:
    """In a worker: ignore Ctrl-C, as the sweep ends its workers; end if the sweep dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    _exit(1)


def _execute(job: Job) -> Row:
    try:
        return execute(job)
    except KeyboardInterrupt:  # SIGTERM, after the run's checkpoint: start no other job
        sys.stderr.flush()
        _exit(1)

"""Where the clients of a run in this process train: here, or in Ray workers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.backends import cpu

from fedaccord.config import RunConfig
from fedaccord.engine import store_choice
from fedaccord.engine.fleet import LocalFleet
from fedaccord.runs.logbook import Logbook
from fedaccord.task import Task

if TYPE_CHECKING:
    from fedaccord.engine.workers import WorkersFleet

log = logging.getLogger("flwr")


@contextmanager
def choose(
    config: RunConfig,
    task: Task,
    load: Callable[[], Task] | None,
    vectorize: bool,
    on_client: Callable[[int], None] | None = None,
    drawn: bool = True,
) -> Iterator[Callable[[Logbook | None], "LocalFleet | WorkersFleet"]]:
    """A function that makes the clients, in this process or in workers, from the run's logbook.

    load: makes a worker's task; None: this task is sent; drawn: whether cohorts are drawn.
    """
    if config.state_dir and not config.resume:
        why = "Flower's clients read it, client-state those of this process"
        log.warning("state-dir=%s has no effect here: %s", config.state_dir, why)
    if task.augment is not None and not config.strategy.batch_size:
        log.warning("batch-size=0: a batch is a client's samples as they are, not augmented")
    if not config.workers:
        _note_precision(config.strategy.precision, torch.device(task.device))

        def here(book: Logbook | None) -> LocalFleet:
            folder = book.directory.path if book else None
            setting, rounds = config.client_state, config.num_server_rounds
            store = store_choice.make_store(setting, config.strategy, task, rounds, folder, drawn)
            return LocalFleet(task, on_client, vectorize, store, task.device)

        yield here
        return
    loss = config.task.loss if load else ""  # otherwise the function is sent to the workers
    for key, value in (("metrics", config.task.metrics), ("loss", loss)):
        if "__main__:" in value:
            raise ValueError(
                f"{key}: expected functions of a module that workers can import, got {value!r}: "
                "write them into a file, or set workers=0"
            )
    try:
        from fedaccord.engine.workers import workers_fleet  # with Ray, which takes a second
    except ImportError as error:
        raise ValueError(
            f"workers: expected Ray, found none ({error}); pip install 'flwr[simulation]'"
        ) from None
    with workers_fleet(
        task,
        load,
        workers=config.workers,
        address=config.ray_address,
        threads=torch.get_num_threads(),
        gpus=config.gpus_per_worker,
        vectorize=vectorize,
        on_client=on_client,
    ) as fleet:
        yield lambda _: fleet


def _note_precision(precision: str, device: torch.device) -> None:
    """Warn about a precision that has no benefit on this device."""
    if precision == "tf32" and device.type != "cuda":
        log.warning("precision=tf32 has no effect on %s: it is float32 there", device)
    if precision == "bfloat16" and device.type == "cpu" and cpu.get_cpu_capability() == "AVX2":
        log.warning(
            "precision=bfloat16 is several times slower than float32 on a processor without "
            "AVX-512: set float32"
        )

"""The ServerApp, as Flower loads it: checks the run configuration, and plays a recorded run."""

import logging
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedaccord import recorded_run
from fedaccord.compat import flower
from fedaccord.config import RunConfig, defaults
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import Fleet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.run import check_real_time
from fedaccord.process import threads
from fedaccord.runs.logbook import Logbook, with_its_clients
from fedaccord.task import load_task
from fedaccord.task.multiplications import threads_of_task

log = logging.getLogger("flwr")

ON_DEVICES = {  # settings that mean something else there
    "state-dir": "no effect on devices, which store states in the state-dir of their --node-config",
    "eval-train": "these are the server's training samples: devices with their own do not use them",
    "validation": "devices hold out as many of their own samples, but the model is evaluated on "
    "training samples of the server",
}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        config = RunConfig.make(context.run_config)
        threads.check(config.threads)
        for line in config.unread():
            log.warning(line)
        for key in ("workers", "vectorize", "client-state"):
            value, usual = config.flat[key], defaults()[key]
            if value != usual and key not in config.unread_keys():
                log.warning(f"{key}={value} has no effect here: `fedaccord run` supports it")
        at_server = config.strategy.evaluation != "clients"
        if not flower.is_simulation(grid):
            unread = {*config.unread_keys(), *(() if at_server else ("validation",))}
            for key, why in ON_DEVICES.items():
                value = config.flat[key]
                if value != defaults()[key] and key not in unread:
                    log.warning(f"{key}={value}: {why}")
        if config.vectorize != "off":
            config = config.having("vectorize", "off")
        config = with_its_clients(config)
        check_real_time(config.strategy, not flower.is_simulation(grid))
        task, chosen = None, threads.Threads(config.threads or 1, "only the clients evaluate")
        if at_server:
            task = load_task(config.task, num_clients=1, whole=True)  # its test samples
            chosen = threads_of_task(config.threads, task, config.strategy)
        log.info("%s", chosen)
        with chosen.in_use():

            def fleet(book: Logbook) -> Fleet:
                return MessageFleet(
                    grid, partition_ids=book.partition_ids(), card=task.card if task else None
                )

            recorded_run.run(fleet, config, task, in_process=False)
    except (ValueError, FileNotFoundError, FederationError) as error:
        # one line for the user; Flower reports a SystemExit of a simulation as "completed"
        sys.tracebacklimit = 0  # Flower logs the exception, with its own frames
        raise error.with_traceback(None) from None

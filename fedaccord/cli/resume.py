"""`fedaccord resume`: continue a run from a checkpoint."""

from typing import Annotated, Any

import typer

from fedaccord.cli.console import make_console, refusing, stop
from fedaccord.cli.run import federate
from fedaccord.cli.settings import (
    Force,
    Pairs,
    RunDir,
    make_absolute,
    read_run,
    read_settings,
    unread_typed,
)
from fedaccord.process.interrupts import interruptible

AT_START = {"num-clients", "vectorize"}  # a checkpoint has their values at the start


@interruptible()
def resume(
    run: RunDir,
    pairs: Pairs = None,
    after: Annotated[
        int | None,
        typer.Option("--round", help="The checkpoint to resume from; by default the last."),
    ] = None,
    force: Force = False,
) -> None:
    """Resume an interrupted run from its last checkpoint, or a finished one for more rounds.

    Weights and metrics are those of a run without a break; the last round's evaluation stays, which
    `eval-every` alone might leave out. KEY=VALUE pairs may replace settings
    that do not change the mathematics, such as device, threads, eval-every, num-server-rounds:

    fedaccord resume ~/fedaccord-runs/first num-server-rounds=200
    """
    from fedaccord import runs
    from fedaccord.config import affecting
    from fedaccord.runs import lock
    from fedaccord.runs.checkpoint import Checkpoints
    from fedaccord.runs.logbook import FOLDER, is_changed

    path = run.expanduser().absolute()
    try:
        runs.status(path)
    except OSError as error:
        why = error.strerror
        stop(f"{path}: expected a run directory with summary.json, found none ({why})", 2)
    except (ValueError, KeyError, TypeError) as error:
        stop(f"{path}: expected a run directory, got a damaged summary.json ({error})", 2)
    with refusing(ValueError):
        settings = read_settings(pairs or [])
        for key in ("out-dir", "name", "resume"):
            if key in settings:
                raise ValueError(
                    f"resume: expected to resume {path} in place, got {key}={settings[key]}; leave "
                    "it out, or copy the directory and resume the copy"
                )
    if force:
        lock.force(path)
    try:
        lock.check(path)
    except lock.LockedError as error:  # before the data is loaded
        stop(error, 2)
    fixed = affecting("numbers")
    begun = Checkpoints(path / FOLDER).facts(after).get("settings", {})
    begun = {key: value for key, value in begun.items() if key in fixed}
    own = {"out-dir": str(path.parent), "name": path.name, "resume": True}

    def read() -> dict[str, Any]:
        written, before = read_run(path), dict(begun)
        make_absolute(before)
        for key in written:
            if key in before.keys() - settings.keys() - AT_START and written[key] != before[key]:
                raise is_changed(key, before[key], written[key])
        return written | begun | settings | own

    federate(make_console(), read, lambda config: unread_typed(config, settings), at=after)

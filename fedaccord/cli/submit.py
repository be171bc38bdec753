"""`fedaccord submit`: a run on a SuperLink, from its start to its end."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fedaccord.cli.console import refusing, stop, warn
from fedaccord.cli.flwr_config import differing, run_config
from fedaccord.cli.settings import ConfigFile, Pairs, Preset, checked
from fedaccord.process.interrupts import exit_code, interruptible

LOOK = 3.0  # seconds between two status requests
PATIENCE = 600.0  # seconds that a server may be unreachable
NOTHING = (  # of a run that stopped before its first checkpoint, or before it made its directory
    "expected a checkpoint, found none",
    "expected the directory of a run, found none",
)


@interruptible()
def submit(
    superlink: Annotated[
        str, typer.Argument(metavar="SUPERLINK", help="Its name in Flower's configuration.")
    ],
    pairs: Pairs = None,
    config: ConfigFile = None,
    preset: Preset = None,
    app: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A clone of FedAccord; by default this one."),
    ] = None,
    times: Annotated[
        int,
        typer.Option(
            "--resubmit", min=0, help="How many times to resume after the server stopped."
        ),
    ] = 3,
) -> None:
    """Run on a SuperLink by `flwr run`, show the log, and wait for the end.

    Settings are checked here first, and relative paths become absolute. The exit code is 0 if the
    run completed, else 1. If the SuperLink stops during the run and is started again, the run
    resumes from its last checkpoint. Two examples, the second in Flower's simulation here:

    fedaccord submit federation algo=scaffold dataset=npz data-dir=/data/test.npz

    fedaccord submit local num-clients=20
    """
    from fedaccord import runs
    from fedaccord.compat.flower import has_lost_superlink
    from fedaccord.config import RunConfig
    from fedaccord.storage.store import EARLIER_START

    if "=" in superlink:
        stop(
            f"SUPERLINK: expected a name of Flower's configuration first, got {superlink!r}; put "
            "it before the settings",
            2,
        )
    settings, typed = checked(pairs or [], config, preset)
    with refusing(ValueError, FileNotFoundError):
        folder = _app_folder(app)
        name = settings.name or runs.place(settings.out_dir, "", settings.flat).name
    typed |= {"name"}
    values, run = settings.flat | {"name": name}, None
    try:
        for attempt in range(times + 1):
            given = run_config(differing(RunConfig.make(values), typed))
            run = _start(folder, superlink, given, values["num-clients"], patient=attempt > 0)
            typer.echo(f"run {run} is called {values['name']}")
            # the log ends with the run, or with its server
            subprocess.run([FLWR, "log", run, superlink], check=False)
            ending = _wait(run, superlink)
            if ending.status == "completed":
                return
            if attempt and any(words in ending.details for words in NOTHING):
                values |= {"name": f"{name}-{attempt + 1}", "resume": False}
            elif EARLIER_START in ending.details or has_lost_superlink(ending.details):
                values |= {"resume": True}
            else:
                stop(f"run {run} {ending.status}: {ending.details}", 1)
            warn(f"run {run} stopped: {ending.details}")
            run = None
        last = values["name"]
        again = f"resume=true name={last} resumes" if values["resume"] else f"name={last} restarts"
        stop(f"the run stopped {times + 1} times; {again} it", 1)
    except KeyboardInterrupt as error:
        on = f"run {run} continues; flwr stop {run} {superlink} ends it"
        rest = on if run else "nothing runs"
        stop(f"interrupted: {rest}", exit_code(error))
    except (FlwrError, OSError) as error:
        stop(error, 1)


class FlwrError(Exception):
    """A `flwr` command failed; the message says why."""


class Ending(NamedTuple):
    status: str  # completed, failed or stopped
    details: str


def _app_folder(path: Path | None) -> Path:
    """The folder that `flwr run` packs. Raises FileNotFoundError if it is not a clone."""
    folder = (path or Path(__file__).parents[2]).absolute()
    if not (folder / "pyproject.toml").exists():
        raise FileNotFoundError(
            f"--app: expected a clone of FedAccord, found no {folder / 'pyproject.toml'}; name one"
        )
    return folder


def _start(folder: Path, superlink: str, given: str, num_clients: int, *, patient: bool) -> str:
    """The id of a new run. Raises FlwrError if it cannot be submitted."""
    from fedaccord.compat.flower import LOCAL

    words = ["run", str(folder), superlink, "--run-config", given]
    if superlink == LOCAL:
        clients = f"num-supernodes={num_clients} client-resources-num-cpus=1"
        words += ["--federation-config", clients]
    return str(_ask(words, patient=patient)["run-id"])


def _wait(run: str, superlink: str) -> Ending:
    """How a run ends. Raises FlwrError if the server stays unreachable."""
    while True:
        listed = _ask(["ls", superlink, "--run-id", run], patient=True).get("runs")
        if not listed:
            raise FlwrError(f"the server does not know run {run}; start it with its --database")
        entry = listed[0]
        state, _, status = str(entry["status"]).partition(":")
        if state == "finished":
            return Ending(status, str(entry["status-details"]))
        time.sleep(LOOK)


def _ask(words: Sequence[str], *, patient: bool) -> dict[str, Any]:
    """The JSON that a `flwr` command prints. patient: wait for a server that is unreachable.

    Raises FlwrError, in one line, if the command fails.
    """
    from fedaccord.compat.flower import is_superlink_away

    deadline = time.monotonic() + PATIENCE
    while True:
        process = subprocess.run(
            [FLWR, *words, "--format", "json"], capture_output=True, text=True, check=False
        )
        try:
            answer = dict(json.loads(process.stdout))
        except (ValueError, TypeError):
            answer = {"error-message": process.stderr or process.stdout}
        if answer.get("success"):
            return answer
        lines = str(answer.get("error-message")).strip().splitlines()
        problem = lines[-1] if lines else f"it ended with exit code {process.returncode}"
        if not patient or not is_superlink_away(problem) or time.monotonic() > deadline:
            raise FlwrError(f"flwr {words[0]}: {problem}")
        time.sleep(LOOK)


FLWR = str(Path(sys.executable).with_name("flwr"))  # of this environment

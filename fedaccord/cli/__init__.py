"""The command line, `fedaccord`: a module for each command.

Bad input gives one line on stderr and exit code 2. A command imports its packages when it runs:
PyTorch and Flower need seconds, `--help` must not.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from fedaccord import __version__
from fedaccord.cli import deploy, device, fedscale_traces
from fedaccord.cli.console import Commands
from fedaccord.process.threads import wait_passively

COMMANDS = (  # the module and the function of each
    "run",
    "resume",
    "sweep",
    "reproduce",
    "evaluate",
    "compare",
    "report",
    "measure",
    "presets",
    "methods",
    "doctor",
    "flwr_config",
    "submit",
)
app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for name in COMMANDS:
    app.command()(getattr(import_module(f"fedaccord.cli.{name}"), name))
app.command()(fedscale_traces.fedscale_traces)
app.command(context_settings={"ignore_unknown_options": True})(device.device)
app.add_typer(deploy.app, name="deploy")


def _after_packages() -> int:
    """The index in sys.path after installed packages and before a clone that was installed in
    place."""
    are_packages = [Path(path).name in ("site-packages", "dist-packages") for path in sys.path]
    return len(sys.path) - are_packages[::-1].index(True) if any(are_packages) else len(sys.path)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and exit.")
    ] = False,
) -> None:
    """Federated optimisation under client drift, for Flower."""
    wait_passively()  # FedAccord's own process; a command loads PyTorch later
    if "" not in sys.path:  # a setting's function may be in a file of this folder
        sys.path.insert(_after_packages(), "")
    if version:
        typer.echo(f"fedaccord {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())

"""The command line: `fedaccord run`, `fedaccord methods`, `fedaccord doctor`.

Bad input gives one line on stderr and exit code 2. A command imports what it needs when it runs:
PyTorch and Flower take seconds, which `--help` should not.
"""

import typer

from fedaccord.cli import doctor, methods, run
from fedaccord.cli.console import Commands
from fedaccord.threads import wait_passively

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(run.run)
app.command()(methods.methods)
app.command()(doctor.doctor)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Federated optimisation under client drift, for Flower."""
    wait_passively()  # this process is ours, and a command loads PyTorch later
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())

"""`fedaccord device`: a SuperNode whose ClientApps start without importing PyTorch and Flower."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedaccord.cli.console import refusing, stop

THIRD_PARTY = (  # the last one is imported by a ClientApp's first connection
    "numpy.random",
    "statistics",
    "safetensors.torch",
    "flwr.app",
    "flwr.clientapp",
    "httpcore",
)


def device(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR] [OPTION]...",
            help="A device's folder of `deploy init`, if there is one, and options of "
            "flower-supernode, e.g. --port 9095.",
        ),
    ] = None,
    short_pauses: Annotated[
        bool,
        typer.Option(
            help="Poll the server after a tenth of a second, later after a fifth of the idle time, "
            "instead of every three seconds as Flower does.",
        ),
    ] = True,
) -> None:
    """Start this device's SuperNode, with a process that has imported PyTorch and Flower.

    Flower starts a process for each message. Here it is forked from one that has imported them: a
    message costs a fraction of the time, and the memory of the imports is shared. Everything
    else is as with `flower-supernode`; its options follow the folder or replace it:

    fedaccord device ~/device-0

    fedaccord device --insecure --superlink 192.0.2.10:8000 --node-config 'partition-id=0 ...'
    """
    from importlib import import_module

    from fedaccord.process.allocator import forget_file_pages, uncollected
    from fedaccord.process.warm import warm

    options = words or []
    if not (options and options[0]):
        stop("expected a device's folder, or options of flower-supernode, got neither", 2)
    if not options[0].startswith("-"):
        from fedaccord.cli.deployments import folders

        folder = Path(options[0])
        with refusing(ValueError, OSError):
            options = [*folders.supernode(folder), *options[1:]]
            os.chdir(folder)
    with uncollected():
        for name in THIRD_PARTY:
            import_module(name)
        from fedaccord.compat import supernode

        commands = supernode.node_commands()
    os.environ.setdefault(supernode.TASK_POLL_VARIABLE, supernode.TASK_POLL)
    supernode.send_small_parts()
    with ExitStack() as stack:
        if short_pauses:
            stack.enter_context(supernode.part_pauses())  # also of the warm process
        with refusing(OSError):
            stack.enter_context(warm(commands, forget="fedaccord"))
        forget_file_pages()  # needed by the warm process, not by the SuperNode
        supernode.run_supernode(options, short_pauses)

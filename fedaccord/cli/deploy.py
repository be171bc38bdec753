"""`fedaccord deploy`: the files of a server and its devices, with certificates and keys."""

import ipaddress
import re
import socket
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedaccord.cli.console import Commands, refusing, stop

app = typer.Typer(
    cls=Commands,
    help="Write the files of a server and its devices: certificates, keys, start scripts. "
    "docs/secure-deployment.md of the repository describes every step of a deployment.",
    no_args_is_help=True,
)
LABEL, LONGEST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"), 253
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Name or address of the server; devices connect to the first. "
        "Default: this machine's name.",
    ),
]


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    supernodes: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    host: Hosts = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 8000,
) -> None:
    """Write the folders of a new deployment: `server`, a `device-N` for each device, `operator`.

    Each contains all files of its machine, except a device's key, which the device makes itself.
    The folder `authority` signs the server's certificates and stays on this machine. Example:

    fedaccord deploy init federation --supernodes 3 --host 192.0.2.10
    """
    from fedaccord.cli.deployments import folders

    hosts = _hosts(host)
    facts = folders.Facts(hosts[0], port, folders.versions())
    with refusing(ValueError, OSError):
        folders.make(folder.absolute(), hosts, supernodes, facts)
    typer.echo(f"{folder}: copy server to {hosts[0]}, and a device-N to each device")
    typer.echo("then, on each device, in its folder: fedaccord deploy key")
    home = quote(str(folder.absolute() / "operator"))
    typer.echo(f"to start runs here: export FLWR_HOME={home}")


@app.command("key")
def key(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The device's folder.")] = Path("."),
) -> None:
    """Make this device's key: the private half stays here, the public half must be registered.

    fedaccord deploy key
    """
    from fedaccord.cli.deployments import folders

    with refusing(ValueError, OSError):
        folders.read_facts(folder)
        public = folders.make_key(folder)
    typer.echo(public.read_text(encoding="utf-8"), nl=False)
    typer.echo(
        f"register it where runs are started: flwr supernode register {public.name} "
        f"{folders.CONNECTION}"
    )


@app.command("renew")
def renew(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of `deploy init`.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="New names instead of the present ones."),
    ] = None,
) -> None:
    """Make a new certificate for the server, for the same names or others, before the old one
    expires. Nothing changes on the devices, unless the first name does, to which they connect, or
    this machine's versions of the packages, which they compare: type it after an upgrade.

    fedaccord deploy renew federation
    """
    from fedaccord.cli.deployments import certificates, folders

    with refusing(ValueError, OSError):
        if not (folder / "server").is_dir():
            made = "the folder that `fedaccord deploy init` made"
            raise ValueError(f"{folder}: expected {made}, got one without `server`")
        file = folder / "server" / folders.CERTIFICATE
        hosts = _hosts(host or certificates.hosts_of(certificates.read_certificate(file)))
        facts = folders.read_facts(folder / "server")
        folders.renew(folder, hosts)
        new = facts._replace(host=hosts[0] if host else facts.host, versions=folders.versions())
        if new != facts:
            folders.write_facts(folder, new)
            facts_of = f"{folders.FACTS} to the server and to each device"
            typer.echo(f"{new.host}: copy {facts_of}, and {folders.START} to the server")
    files = f"{folders.CERTIFICATE} and {folders.SERVER_KEY}"
    typer.echo(f"{folder / 'server'}: copy {files} to the server, and start it again")


def _hosts(names: list[str] | None) -> list[str]:
    """The checked names, as start scripts contain them. A wrong one ends the command."""
    hosts = names or [socket.gethostname()]
    for host in hosts:
        if not (_is_address(host) or _is_name(host)):
            wanted = "a host name or an IP address, e.g. fed.example.org or 192.0.2.10"
            stop(f"--host: expected {wanted}, got {host!r:.80}", 2)
    return hosts


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host)) and "%" not in host  # no zone of this machine
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    """Whether it is a host name by RFC 1123, whose last label is not a number."""
    *_, last = labels = host.split(".")
    return (
        len(host) <= LONGEST_NAME
        and all(LABEL.fullmatch(label) for label in labels)
        and not last.isdecimal()
    )

"""The folders of a deployment: one for the server, one for each device, one for starting runs.

A folder is complete: it is copied to its machine, and its files refer only to each other. Private
keys are not copied: a device makes its own, and the authority's key stays on the machine that made
it.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedaccord.cli.deployments import certificates
from fedaccord.cli.deployments.certificates import as_pem
from fedaccord.runs import origin
from fedaccord.storage.files import replace

AUTHORITY, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"  # as in the scripts
DEVICE_KEY, PUBLIC_KEY, NODE_CONFIG = "device.key", "device.pub", "node-config"
FACTS, START = "deployment.toml", "start.sh"
SUPERLINK_UNIT, SUPERNODE_UNIT = "fedaccord-superlink.service", "fedaccord-supernode.service"
CONNECTION = "federation"  # the server's name for `flwr` commands
PRIVATE = 0o600  # mode of a file that only its owner can read
DAYS = 825  # days that a server's certificate is valid
COMPARED = ("fedaccord", "flwr", "torch")  # packages that are the same on all machines


class Facts(NamedTuple):
    """Facts for all machines of a deployment."""

    host: str  # the server's name or address
    port: int
    versions: dict[str, str]  # package -> version, of the machine that made the folders

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def versions() -> dict[str, str]:
    """This machine's versions of the packages that are `COMPARED`."""
    here = origin.versions()
    return {package: here[package] for package in COMPARED}


def make(folder: Path, hosts: Sequence[str], supernodes: int, facts: Facts) -> None:
    """Write all folders of a new deployment. Raises ValueError if the folder has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "one with files in it" if folder.is_dir() else "a file"
        raise ValueError(f"{folder}: expected a new or an empty folder, got {got}")
    authority, key = certificates.make_authority(folder.name or "FedAccord")
    write(folder / "authority" / AUTHORITY, as_pem(authority))
    write(folder / "authority" / "ca.key", as_pem(key), mode=PRIVATE)
    renew(folder, hosts)
    server, operator = folder / "server", folder / "operator"
    _fill(server / SUPERLINK_UNIT, "unit.service", what="SuperLink", name="server", seconds=5)
    devices = [folder / f"device-{i}" for i in range(supernodes)]
    for i, device in enumerate(devices):
        data = 'dataset="npz" data-dir="/data/train.npz"'
        write(device / NODE_CONFIG, f"partition-id={i} num-partitions={supernodes} {data}\n")
        _fill(device / START, "supernode.sh")
        unit = {"what": "SuperNode", "name": device.name, "seconds": 60}
        _fill(device / SUPERNODE_UNIT, "unit.service", **unit)
    for machine in (server, *devices, operator):
        write(machine / AUTHORITY, as_pem(authority))
    write_facts(folder, facts)


def write_facts(folder: Path, facts: Facts) -> None:
    """Write the server's address into the folders of all machines and into the server's script."""
    server, operator = folder / "server", folder / "operator"
    every = "::" if ":" in facts.host else "0.0.0.0"  # addresses of the server
    _fill(server / START, "superlink.sh", host=every, port=facts.port)
    for machine in (server, *folder.glob("device-*")):
        write(machine / FACTS, tomli_w.dumps(facts._asdict()))
    certificate = str((operator / AUTHORITY).absolute())
    connection = {"address": facts.address, "root-certificates": certificate}
    file, config = operator / "config.toml", {}
    if file.exists():  # the operator may have added others
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    links = config.setdefault("superlink", {"default": CONNECTION})
    if links.get(CONNECTION) != connection:
        links[CONNECTION] = connection
        write(file, tomli_w.dumps(config))


def renew(folder: Path, hosts: Sequence[str], days: float = DAYS) -> None:
    """Write a new certificate for the server, also for this machine's own names; devices trust it
    like the old one.

    Raises OSError if the authority's files are not in ``folder``.
    """
    authority = certificates.read_certificate(folder / "authority" / AUTHORITY)
    key = certificates.read_key(folder / "authority" / "ca.key")
    names = [*dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    certificate, server_key = certificates.make_server(authority, key, names, days)
    write(folder / "server" / SERVER_KEY, as_pem(server_key), mode=PRIVATE)
    write(folder / "server" / CERTIFICATE, as_pem(certificate))


def make_key(folder: Path) -> Path:
    """Write a device's key pair; the path of its public half.

    Raises ValueError if it is not a device's folder, and if there is a key: with a new key it would
    be another device.
    """
    _node_config(folder)
    if (folder / DEVICE_KEY).exists():
        raise ValueError(
            f"{folder / DEVICE_KEY} exists, and identifies this device to the server; "
            "move it away to make another"
        )
    private, public = certificates.make_device_key()
    write(folder / DEVICE_KEY, private, mode=PRIVATE)
    write(folder / PUBLIC_KEY, public)
    return folder / PUBLIC_KEY


def supernode(folder: Path) -> list[str]:
    """The options of `flower-supernode` for a device's folder.

    Raises ValueError, in one line, if it is not a device's folder or lacks its key.
    """
    folder, facts = folder.absolute(), read_facts(folder)
    config = _node_config(folder)
    if not (folder / DEVICE_KEY).exists():
        raise ValueError(f"{folder}: expected a {DEVICE_KEY}; `fedaccord deploy key` makes one")
    own_states = re.search(r"(^|\s)state-dir=", config)
    return [
        "--superlink",
        facts.address,
        "--root-certificates",
        str(folder / AUTHORITY),
        "--auth-supernode-private-key",
        str(folder / DEVICE_KEY),
        "--node-config",
        config if own_states else f'{config} state-dir="{folder / "state"}"',
    ]


def _node_config(folder: Path) -> str:
    """Raises ValueError, in one line, if it is not a device's folder."""
    try:
        return (folder / NODE_CONFIG).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: expected a device's folder, got {error}") from None


def read_facts(folder: Path) -> Facts:
    """Raises ValueError if it is not a folder of a deployment."""
    try:
        facts: Mapping[str, Any] = tomllib.loads((folder / FACTS).read_text(encoding="utf-8"))
        return Facts(str(facts["host"]), int(facts["port"]), dict(facts["versions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        raise ValueError(
            f"{folder}: expected the server's or a device's folder of `fedaccord deploy init`, "
            f"got one whose {FACTS} cannot be read ({reason})"
        ) from None


def write(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file, see `replace`, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content if isinstance(content, bytes) else content.encode(), mode=mode)


def _fill(path: Path, template: str, **values: object) -> None:
    """Write a file beside this one with each @name@ replaced."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    write(path, text, mode=0o755 if path.name == START else 0o644)

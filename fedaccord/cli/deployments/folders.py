"""The folders of a deployment: one for the server, one for each device, one for who starts runs.

A folder is complete: it is copied to its machine, and everything in it names files beside it. The
private keys are an exception to the copying: a device makes its own there, and the authority's
stays where it was made.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedaccord.cli.deployments import certificates

AUTHORITY, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"
DEVICE_KEY, PUBLIC_KEY, NODE_CONFIG = "device.key", "device.pub", "node-config"
FACTS, START, DATABASE = "deployment.toml", "start.sh", "superlink.db"
SUPERLINK_UNIT, SUPERNODE_UNIT = "fedaccord-superlink.service", "fedaccord-supernode.service"
CONNECTION = "federation"  # as `flwr` commands call the server
DAYS = 825  # that a server's certificate is valid
COMPARED = ("fedaccord", "flwr", "torch")  # packages that are the same on all machines


class Facts(NamedTuple):
    """What all machines of a deployment know."""

    host: str  # by which they reach the server
    port: int
    versions: dict[str, str]  # package -> version, of the machine that made the folders


def make(folder: Path, hosts: Sequence[str], supernodes: int, facts: Facts) -> None:
    """Write all folders of a new deployment. Raises ValueError where there is something already."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: expected a new or an empty folder, got one with files in it")
    authority, key = certificates.make_authority(folder.name or "FedAccord")
    write(folder / "authority" / AUTHORITY, certificates.as_pem(authority))
    write(folder / "authority" / "ca.key", certificates.as_pem(key), private=True)
    renew(folder, hosts)
    server = folder / "server"
    write(server / START, SUPERLINK.format(port=facts.port, **FILES), executable=True)
    write(server / SUPERLINK_UNIT, UNIT.format(what="SuperLink", name="server", seconds=5))
    shared = [server]
    address = f"[{facts.host}]:{facts.port}" if ":" in facts.host else f"{facts.host}:{facts.port}"
    for i in range(supernodes):
        shared.append(device := folder / f"device-{i}")
        config = f'partition-id={i} num-partitions={supernodes} dataset="npz" data-dir="{DATA}"'
        write(device / NODE_CONFIG, config + "\n")
        write(device / START, SUPERNODE.format(address=address, **FILES), executable=True)
        write(device / SUPERNODE_UNIT, UNIT.format(what="SuperNode", name=device.name, seconds=60))
    for place in shared:
        write(place / AUTHORITY, certificates.as_pem(authority))
        write(place / FACTS, tomli_w.dumps(facts._asdict()))
    connection = {
        "address": address,
        "root-certificates": str((folder / "operator" / AUTHORITY).absolute()),
    }
    config_toml = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write(folder / "operator" / AUTHORITY, certificates.as_pem(authority))
    write(folder / "operator" / "config.toml", tomli_w.dumps(config_toml))


def renew(folder: Path, hosts: Sequence[str], days: float = DAYS) -> None:
    """Write a new certificate for the server, for this machine's own names too; the devices trust
    it as they trusted the last.

    Raises OSError where the authority's files are not in ``folder``.
    """
    authority = certificates.read_certificate(folder / "authority" / AUTHORITY)
    key = certificates.read_key(folder / "authority" / "ca.key")
    names = [*dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    certificate, server_key = certificates.make_server(authority, key, names, days)
    write(folder / "server" / SERVER_KEY, certificates.as_pem(server_key), private=True)
    write(folder / "server" / CERTIFICATE, certificates.as_pem(certificate))


def make_key(folder: Path) -> Path:
    """Write a device's key pair; the path of its public half.

    Raises ValueError where there is a key: whoever holds another one is another device.
    """
    if (folder / DEVICE_KEY).exists():
        raise ValueError(
            f"{folder / DEVICE_KEY} is there already, and the server knows this device by it; "
            "move it away to make another"
        )
    private, public = certificates.make_device_key()
    write(folder / DEVICE_KEY, private, private=True)
    write(folder / PUBLIC_KEY, public)
    return folder / PUBLIC_KEY


def read_facts(folder: Path) -> Facts:
    """Raises ValueError where there is no folder of a deployment."""
    try:
        found: Mapping[str, Any] = tomllib.loads((folder / FACTS).read_text(encoding="utf-8"))
        return Facts(str(found["host"]), int(found["port"]), dict(found["versions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise ValueError(
            f"{folder}: expected the server's or a device's folder of `fedaccord deploy init`, "
            f"got one whose {FACTS} cannot be read ({reason})"
        ) from None


def write(
    path: Path, content: bytes | str, *, private: bool = False, executable: bool = False
) -> None:
    """A file, with its folder; a private one is nobody else's to read at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    mode = 0o600 if private else 0o755 if executable else 0o644
    data = content if isinstance(content, bytes) else content.encode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


DATA = "/data/train.npz"
FILES = {
    **{"ca": AUTHORITY, "certificate": CERTIFICATE, "key": SERVER_KEY, "device": DEVICE_KEY},
    **{"config": NODE_CONFIG, "database": DATABASE},
}
SUPERLINK = """\
#!/bin/sh
# The SuperLink: encrypted, and only for SuperNodes whose keys are registered.
cd "$(dirname "$0")" || exit 1
fedaccord doctor --deployment . || exit 1
exec flower-superlink --host 0.0.0.0 --port {port} --database "$PWD/{database}" \\
    --ssl-ca-certfile {ca} --ssl-certfile {certificate} --ssl-keyfile {key} \\
    --enable-supernode-auth --disable-runtime-dependency-installation "$@"
"""
SUPERNODE = """\
#!/bin/sh
# This device's SuperNode. What clients keep between rounds lies in ./state.
cd "$(dirname "$0")" || exit 1
fedaccord doctor --deployment . || exit 1
exec flower-supernode --superlink {address} --root-certificates {ca} \\
    --auth-supernode-private-key {device} \\
    --node-config "$(cat {config}) state-dir=\\"$PWD/state\\"" "$@"
"""
UNIT = """\
# For systemd, as a user's service. The folder lies in the home, FedAccord's environment in
# ~/fedaccord/.venv; edit the two paths where they lie elsewhere.
[Unit]
Description=Flower {what}
StartLimitIntervalSec=0

[Service]
WorkingDirectory=%h/{name}
Environment=PATH=%h/fedaccord/.venv/bin:/usr/local/bin:/usr/bin:/bin
ExecStart=/bin/sh start.sh
Restart=always
RestartSec={seconds}

[Install]
WantedBy=default.target
"""

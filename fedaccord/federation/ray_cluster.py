"""The Ray cluster that simulations on this machine join, if there is one."""

import os
import socket
from pathlib import Path
from typing import NamedTuple


class Cluster(NamedTuple):
    address: str  # empty: none, a simulation starts Ray for itself
    remedy: str  # what to do if it does not respond


def named() -> Cluster:
    """The cluster of RAY_ADDRESS, or of the file of `ray start`, which remains if Ray is killed."""
    if address := os.environ.get("RAY_ADDRESS", ""):
        return Cluster(address, "unset RAY_ADDRESS")
    file = folder() / "ray_current_cluster"
    return Cluster(file.read_text(encoding="utf-8").strip() if file.is_file() else "", f"rm {file}")


def folder() -> Path:
    """Where Ray writes: its sockets, logs and spilled objects. It may not exist yet."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def unreachable() -> str:
    """An error in one line if the cluster does not respond, with a remedy; empty: it does, or its
    address has another form than HOST:PORT."""
    address, remedy = named()
    try:
        connect(address, 1)
    except (OSError, ValueError):
        why = "and a simulation would wait for it for minutes"
        return f"no cluster answers at {address}, {why}; {remedy}"
    return ""


def connect(address: str, seconds: float) -> bool:
    """Whether the address is HOST:PORT. Raises OSError or ValueError if nothing listens there; Ray
    itself would silently retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host:  # no address, or another form
        return False
    socket.create_connection((host, int(port)), timeout=seconds).close()
    return True

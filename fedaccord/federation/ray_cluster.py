"""The Ray cluster that simulations on this machine join, if there is one."""

import os
import socket
from pathlib import Path
from typing import NamedTuple


class Cluster(NamedTuple):
    address: str  # empty: none, a simulation starts Ray for itself
    remedy: str  # what to type if it does not answer


def named() -> Cluster:
    """As RAY_ADDRESS says, or the file of `ray start`, which remains if Ray is killed."""
    if address := os.environ.get("RAY_ADDRESS", ""):
        return Cluster(address, "unset RAY_ADDRESS")
    tmp = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(tmp) / "ray" / "ray_current_cluster"
    return Cluster(file.read_text().strip() if file.is_file() else "", f"rm {file}")


def unreachable() -> str:
    """In one line that the named cluster does not answer, and what to do; empty: it does.

    Ray itself would try for minutes, without a word.
    """
    address, remedy = named()
    host, _, port = address.rpartition(":")
    if not host or "/" in host:  # no address, or one of another form
        return ""
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        why = "and a simulation would wait for it for minutes"
        return f"no cluster answers at {address}, {why}; {remedy}"
    return ""

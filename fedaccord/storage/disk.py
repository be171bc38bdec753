"""A client's memory on disk, which survives restarts of the process and of the machine.

``<state-dir>/<federation>/<client>/`` holds a file for each version of its state and
``memory.json``, written last, which names them with their checksums. Files are written under
another name, synced and renamed. Folders are readable by their user alone. A new federation removes
the folders of federations without a visit for some days.
"""

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedaccord.core.vectors import fill, leaves
from fedaccord.storage.files import of_file, read_json, replace
from fedaccord.storage.store import Memory, MissingStateError, Store, Version
from fedaccord.storage.tensors import crc32_of, map_tensors, write_tensors

log = logging.getLogger("flwr")

INDEX = "memory.json"
OWNER = "client.json"  # in a device's state-dir: whose states these are
OURS = re.compile(r"\d+\.safetensors|\.(memory\.json|\d+\.safetensors)\.\d+")


def prepare(folder: Path, owner: Mapping[str, Any] | None = None) -> None:
    """Make a state-dir; owner: the one client that it belongs to, or None in a simulation.

    Raises ValueError, in one line, if states cannot be stored there or belong to another client.
    """
    if not folder.is_absolute():
        raise ValueError(f"state-dir: expected an absolute path, got {str(folder)!r}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(folder))
        if owner is None:
            return
        file = folder / OWNER
        if not file.is_file():
            replace(file, json.dumps(owner).encode())
        holder = read_json(file)
    except OSError as error:
        raise ValueError(
            f"state-dir: expected a folder that can be written, got {folder} ({error.strerror})"
        ) from None
    except ValueError:
        holder = "a damaged file"
    if holder != owner:
        raise ValueError(
            f"state-dir: expected the folder of {json.dumps(owner)}, found that of {holder!r:.200} "
            f"in {folder}: name another folder, or remove {file} if the states are this "
            "client's"
        )


class VersionFile(NamedTuple):
    """A version's file."""

    path: Path
    crc32: int  # CRC-32 of its bytes


class DiskStore(Store):
    """The memories of clients of one federation below ``folder``.

    Raises OSError, which names the file, if one cannot be written; the memory is then unchanged.
    """

    def __init__(self, folder: Path, federation: str, days: float = math.inf) -> None:
        """days: after which other federations' states are removed."""
        self.folder = folder / (re.sub(r"[^\w.-]", "_", federation).strip(".") or "federation")
        self._days = days

    def load(self, client: int) -> Memory | None:
        """The memory; None before the first visit, and, with a warning, for a damaged index."""
        folder = self.folder / str(client)
        path = folder / INDEX
        try:
            index = read_json(path)
            latest, before, durable = (
                v and Version(v["round"], VersionFile(folder / v["name"], crc32_of(v)))
                for v in index["versions"]
            )
            return Memory(latest, before, index["attempt"], durable)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", path, error)
            return None

    def save(self, client: int, memory: Memory) -> None:
        content = {
            "versions": [
                v and {"round": v.round, "name": v.state.path.name, "crc32": v.state.crc32}
                for v in (memory.latest, memory.before, memory.durable)
            ],
            "attempt": memory.attempt,
        }
        folder = self._make_folder(client)
        replace(folder / INDEX, json.dumps(content).encode(), durable=True)
        named = {INDEX, *(v.state.path.name for v in memory.versions)}
        for path in folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in named and not path.is_dir():
                path.unlink(missing_ok=True)

    def pack(self, client: int, round: int, state: Any) -> VersionFile:
        path = self._make_folder(client) / f"{round}.safetensors"
        return VersionFile(path, write_tensors(path, dict(leaves(state))))

    def unpack(self, packed: VersionFile, like: Any) -> Any:
        try:
            return fill(like, map_tensors(*packed))
        except (OSError, ValueError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", packed.path, error)
            raise MissingStateError from None

    def _make_folder(self, client: int) -> Path:
        is_new = not self.folder.exists()
        own = self.folder / str(client)
        try:
            for folder in (self.folder.parent, self.folder, own):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise of_file(error, own) from None
        if is_new:
            _remove_old(self.folder, self._days)
        return own


def _remove_old(federation: Path, days: float) -> None:
    """Remove the folders of other federations that were last written before this time."""
    for other in federation.parent.iterdir():
        with suppress(OSError):  # another process removes it too
            files = [] if other == federation else _indices(other)
            if files and time.time() - max(file.stat().st_mtime for file in files) > days * 86400:
                log.info("%s is removed: its last visit is more than %g days ago", other, days)
                shutil.rmtree(other, ignore_errors=True)


def _indices(folder: Path) -> list[Path]:
    """The index files of a federation's folder; empty if it has files not written by a store."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    clients = [*folder.iterdir()]
    ours = all(client.name.isdecimal() and client.is_dir() for client in clients) and all(
        file.name == INDEX or OURS.fullmatch(file.name)
        for client in clients
        for file in client.iterdir()
    )
    return [*folder.glob(f"*/{INDEX}")] if ours else []

"""A client's memory on disk: it outlives the process and the machine's restarts.

``<state-dir>/<federation>/<client>/`` holds a file for each of the last two versions and
``memory.json``, written last, which names them with their checksums. Files are written beside
their place, synced and moved there.
"""

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedaccord.client.store import LostState, Memory, Version
from fedaccord.core.vectors import fill, leaves
from fedaccord.core.visit import TrainInstruction
from fedaccord.runs.files import of_file, replace

log = logging.getLogger("flwr")

INDEX = "memory.json"


class Kept(NamedTuple):
    """A version's file."""

    name: str
    sum: int  # CRC-32 of its bytes


class DiskStore:
    """The memory of one client of one federation below ``folder``.

    Raises OSError, which names the file, where one cannot be written; the memory stays as it was.
    """

    def __init__(self, folder: Path, asked: TrainInstruction) -> None:
        name = re.sub(r"[^\w.-]", "_", asked.federation).strip(".") or "federation"
        self.folder = folder / name / str(int(asked.client))

    def load(self) -> Memory | None:
        """None before the first visit, and where the index is damaged, with a warning."""
        path = self.folder / INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            versions = [Version(v["round"], Kept(v["name"], v["sum"])) for v in found["versions"]]
            before = versions[1] if len(versions) > 1 else None
            return Memory(versions[0], before, found["attempt"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", path, error)
            return None

    def save(self, memory: Memory) -> None:
        versions = [version for version in (memory.latest, memory.before) if version is not None]
        content = {
            "versions": [{"round": v.round, **v.state._asdict()} for v in versions],
            "attempt": memory.attempt,
        }
        self._write(INDEX, json.dumps(content).encode())
        named = {INDEX, *(version.state.name for version in versions)}
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)

    def pack(self, round: int, state: Any) -> Kept:
        content = save({name: v.detach().cpu().clone() for name, v in leaves(state)})
        name = f"{round}.safetensors"
        self._write(name, content)
        return Kept(name, zlib.crc32(content))

    def unpack(self, kept: Kept, like: Any) -> Any:
        path = self.folder / kept.name
        try:
            content = path.read_bytes()
            if zlib.crc32(content) != kept.sum:
                raise ValueError("not what was written")
            state = fill(like, load(content))
            if dict(leaves(state)).keys() < dict(leaves(like)).keys():
                raise ValueError("vectors are missing")
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", path, error)
            raise LostState from None
        return state

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise of_file(error, self.folder) from None
        replace(path, content)

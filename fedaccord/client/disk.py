"""A client's memory on disk: it outlives the process and the machine's restarts.

``<state-dir>/<federation>/<client>/`` holds a file for each version of its state and
``memory.json``, written last, which names them with their checksums. Files are written beside
their place, synced and moved there.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

from fedaccord.client.store import LostState, Memory, Version
from fedaccord.core.vectors import fill, leaves
from fedaccord.core.visit import TrainInstruction
from fedaccord.runs.files import of_file, replace
from fedaccord.runs.tensors import read_tensors, write_tensors

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
            latest, before, durable = (
                v and Version(v["round"], Kept(v["name"], v["sum"])) for v in found["versions"]
            )
            return Memory(latest, before, found["attempt"], durable)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", path, error)
            return None

    def save(self, memory: Memory) -> None:
        versions = (memory.latest, memory.before, memory.durable)
        content = {
            "versions": [v and {"round": v.round, **v.state._asdict()} for v in versions],
            "attempt": memory.attempt,
        }
        self._make_folder()
        replace(self.folder / INDEX, json.dumps(content).encode())
        named = {INDEX, *(v.state.name for v in versions if v is not None)}
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)

    def pack(self, round: int, state: Any) -> Kept:
        name = f"{round}.safetensors"
        self._make_folder()
        return Kept(name, write_tensors(self.folder / name, dict(leaves(state))))

    def unpack(self, kept: Kept, like: Any) -> Any:
        path = self.folder / kept.name
        try:
            state = fill(like, read_tensors(path, kept.sum))
            if dict(leaves(state)).keys() < dict(leaves(like)).keys():
                raise ValueError("vectors are missing")
        except (OSError, ValueError) as error:
            log.warning("%s is damaged (%s): the client's state is lost", path, error)
            raise LostState from None
        return state

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise of_file(error, self.folder) from None

"""Checkpoints, from which a run resumes bit for bit.

In a run's folder ``checkpoint/`` a checkpoint of N rounds is ``N.json``, written last, with
``N.safetensors`` and the files that it names. A client's state after a round never changes, so its
file ``clients/CLIENT-ROUND.safetensors`` is written once, even if several checkpoints name it; so
is the server's vector of a past round, whose name ends in the round, in
``rounds/NAME.safetensors``. The last two checkpoints are kept; the JSON has a checksum of every
file.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedaccord.storage.files import read_json, replace, sync_files, unfinished
from fedaccord.storage.tensors import crc32_of, map_tensors, read_tensors, write_tensors

FORMAT = 1  # of the files; another one is refused
KEPT = 2
MANY = 20  # files; the sync of a whole file system costs more than that of some
FILES = {  # folder -> pattern of the names of its files of tensors
    "": r"[0-9]+\.safetensors",
    "clients": r"[0-9]+-[0-9]+\.safetensors",
    "rounds": r".+\.[0-9]+\.safetensors",
}
Tensors = Mapping[str, Tensor]


def _own(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names match."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if re.fullmatch(pattern, path.name) and path.is_file()]


class Checkpoint(NamedTuple):
    """The state after ``number`` rounds."""

    number: int
    facts: dict[str, Any]  # JSON's types
    server: dict[str, Tensor]
    clients: "States"


class States(Mapping[int, tuple[int, dict[str, Tensor]]]):
    """client -> (round, its state after it), read on access."""

    def __init__(self, names: Mapping[str, str], read: Callable[[str], dict[str, Tensor]]) -> None:
        self._names = {int(client): name for client, name in names.items()}
        self._read = read

    def __getitem__(self, client: int) -> tuple[int, dict[str, Tensor]]:
        name = self._names[client]
        return int(Path(name).stem.partition("-")[2]), self._read(name)

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class DamagedError(ValueError):
    """A checkpoint that cannot be read; the message names the one before."""


class Checkpoints:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sums: dict[str, int] = {}  # checksums of the existing client files, by name

    def numbers(self) -> list[int]:
        """The rounds of the stored checkpoints, in order."""
        return sorted(int(path.stem) for path in _own(self.folder, r"[0-9]+\.json"))

    def save(
        self,
        number: int,
        facts: Mapping[str, Any],
        server: Tensors,
        clients: Mapping[int, tuple[int, Tensors]],
    ) -> None:
        """Raises OSError, which names the file, if one cannot be written."""
        for folder in ("clients", "rounds"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        past = {f"rounds/{n}.safetensors": n for n in server if n.rpartition(".")[2].isdigit()}
        names = {str(i): f"clients/{i}-{round}.safetensors" for i, (round, _) in clients.items()}
        lasting: dict[str, Tensors] = {n: {vector: server[vector]} for n, vector in past.items()}
        lasting |= {names[str(i)]: state for i, (_, state) in clients.items()}
        self._write({name: each for name, each in lasting.items() if name not in self._sums})
        server = {name: v for name, v in server.items() if name not in past.values()}
        server_file = f"{number}.safetensors"
        files = {server_file: write_tensors(self.folder / server_file, server)}
        files |= {name: self._sums[name] for name in lasting}
        content = {"facts": facts, "clients": names, "files": files}
        text = json.dumps(content)
        whole = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "content": content}
        replace(self.folder / f"{number}.json", json.dumps(whole).encode(), durable=True)
        self.forget(*self.numbers()[:-KEPT])

    def _write(self, files: Mapping[str, Tensors]) -> None:
        """Write new files, by name; many are synced together."""
        at_once = len(files) > MANY
        sums = {
            name: write_tensors(self.folder / name, tensors, synced=not at_once)
            for name, tensors in files.items()
        }
        if at_once:
            sync_files(self.folder / name for name in files)
        self._sums |= sums

    def load(self, number: int | None = None, client: int | None = None) -> Checkpoint:
        """The latest checkpoint, or the one after ``number`` rounds; client: the one whose state is
        read, None: all are.

        Raises FileNotFoundError if there is none, and DamagedError, in one line, if it is damaged
        or of another version.
        """
        numbers = self.numbers()
        if not numbers or (number is not None and number not in numbers):
            wanted = "" if number is None else f" of round {number}"
            have = "none: it stopped before its first, or they were removed; start another run"
            if numbers:
                which = "those of rounds" if len(numbers) > 1 else "the one of round"
                have = f"{which} {', '.join(map(str, numbers))}"
            raise FileNotFoundError(f"{self.folder}: expected a checkpoint{wanted}, found {have}")
        number = numbers[-1] if number is None else number
        try:
            content = self._content(number)
            self._sums = dict(content["files"])
            server = self._read(f"{number}.safetensors")
            for name in self._sums:
                if name.startswith("rounds/"):
                    server |= map_tensors(self.folder / name, self._sums[name])
            names = content["clients"]
            if client is not None:
                names = {i: name for i, name in names.items() if int(i) == client}
            clients = States(names, self._read)
            for i in clients:  # all are checked before one is used
                clients[i]
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            before = [n for n in numbers if n < number]
            instead = (
                f"the previous one is of round {before[-1]}" if before else "it has none before"
            )
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedError(
                f"{self.folder / f'{number}.json'}: expected a checkpoint, got a damaged one "
                f"({reason}); {instead}"
            ) from None
        return Checkpoint(number, content["facts"], server, clients)

    def facts(self, number: int | None = None) -> dict[str, Any]:
        """The plain values of a checkpoint; empty if it cannot be read."""
        try:
            return dict(self._content(self.numbers()[-1] if number is None else number)["facts"])
        except (ValueError, KeyError, TypeError, IndexError, OSError):
            return {}

    def resume_from(self, number: int) -> None:
        """Delete everything after a checkpoint."""
        self.forget(*(n for n in self.numbers() if n > number))

    def forget(self, *numbers: int) -> None:
        """Delete checkpoints, and every file that no other one names."""
        for number in numbers:
            (self.folder / f"{number}.json").unlink(missing_ok=True)
        named = set()
        for number in self.numbers():
            try:
                named |= set(self._content(number)["files"])
            except (ValueError, KeyError, TypeError):  # a damaged one names no files
                continue
        for folder, pattern in FILES.items():
            for path in _own(self.folder / folder, pattern):
                name = path.relative_to(self.folder).as_posix()
                if name not in named:
                    path.unlink(missing_ok=True)
                    self._sums.pop(name, None)
            for path in unfinished(self.folder / folder):
                path.unlink(missing_ok=True)

    def _content(self, number: int) -> dict[str, Any]:
        whole = read_json(self.folder / f"{number}.json")
        if whole["format"] != FORMAT:
            raise ValueError(f"format {whole['format']}, this version reads {FORMAT}")
        if zlib.crc32(json.dumps(whole["content"]).encode()) != crc32_of(whole):
            raise ValueError("expected the checksum that was written, got another")
        return dict(whole["content"])

    def _read(self, name: str) -> dict[str, Tensor]:
        return read_tensors(self.folder / name, self._sums[name])

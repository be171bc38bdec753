"""A run directory: the settings of a run, its measurements and its model.

``config.toml`` (settings, what "auto" became, machine, versions, commit), ``metrics.csv`` (a row a
round), ``clients.csv`` (a row a client a round), ``classes.csv`` (a row a client, if the data is
partitioned in process), ``summary.json``, ``model.safetensors`` and ``model.json`` (how to
build and feed the model); docs/metrics.md explains every number. Files are written under another
name, synced and renamed, and tables grow by whole lines: a crash or a full disk leaves the last
good version.

PyTorch is imported only to write or read a model: a report reads the tables without it.
"""

import csv
import io
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import tomli_w
from safetensors import SafetensorError

from fedaccord.runs import metrics, naming, origin
from fedaccord.runs.lock import Lock, LockedError, is_locked
from fedaccord.storage.files import of_file, read_bytes, read_json, replace, unfinished

if TYPE_CHECKING:
    from torch import Tensor

RUNNING, COMPLETED, FAILED = "running", "completed", "failed"
MODEL = "model.safetensors"
FILES = {  # of a run directory, written here and by `best`, `logbook` and `lock`; it needs them
    "config.toml",
    "metrics.csv",
    "clients.csv",
    "classes.csv",
    "summary.json",
    "model.json",
    MODEL,
    "best.safetensors",
    "attempt.json",
    "privacy.json",
    "nodes.json",
    ".lock",
}
CONTENTS = "contents."  # keys of [used]: hashes of what settings only name, see `named_contents`
SAMPLES = "samples"  # among these: the data set, before it was divided
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def tables(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables, as TOML has them."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        table = nested
        for group in groups:
            table = table.setdefault(group, {})
        table[name] = value
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: the inverse of `tables`. Raises ValueError on a key twice."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        is_table = isinstance(value, Mapping)
        found = flatten(value, f"{prefix}{name}.") if is_table else {prefix + name: value}
        if twice := sorted(flat.keys() & found.keys()):
            raise ValueError(
                f"{twice[0]}: expected one value, got two, in a table and as a key in quotes; "
                "remove one"
            )
        flat |= found
    return flat


class RunDirectory:
    """Writes one run and locks its folder until `close`. Raises ValueError if the folder cannot be
    made or has files, and OSError, which names the file, if one cannot be written.

    settings: by run-config keys; used: the values of those that were "auto", and the machine.
    """

    def __init__(
        self,
        out_dir: str,
        name: str,
        settings: Mapping[str, Any],
        used: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = naming.make(out_dir, name, settings)
        try:
            self._lock = Lock(self.path)
        except LockedError:  # of another new run of this name
            raise naming.taken(self.path) from None
        except OSError as error:
            with suppress(OSError):
                self.path.rmdir()
            raise naming.unwritable(self.path, error) from error
        if [*self.path.iterdir()] != [self._lock.path]:
            self.close()
            raise naming.taken(self.path)
        try:
            self._write_config(settings, used or {})
            self._open()
            self.summarise(RUNNING)
        except BaseException as error:  # also an interrupt: the name stays free
            shutil.rmtree(self.path, ignore_errors=True)
            self.close()
            if isinstance(error, OSError):
                raise naming.unwritable(self.path, error) from error
            raise

    @classmethod
    def reopen(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        used: Mapping[str, Any],
        number: int,
        position: Mapping[str, Any],
        lock: Lock,
        before_cut: Callable[[], None] = lambda: None,
    ) -> "RunDirectory":
        """The directory of a run that resumes after ``number`` rounds; later rows are cut off.

        position: as of `position` then. lock: of the folder; the directory releases it.
        before_cut: called after the tables were checked, before they change.
        Raises ValueError, in one line, before any change, if the tables were edited since.
        """
        self = cls.__new__(cls)
        self.path, self._lock = path, lock
        for file in unfinished(path):
            file.unlink()
        self._open()
        tables = {"metrics": self._metrics, "clients": self._clients}
        marks = position.get("marks", {})  # earlier versions wrote none
        texts = {n: t.until(number, position[n], marks.get(n)) for n, t in tables.items()}
        before_cut()
        self._write_config(settings, used)
        self._began -= position["seconds"]
        for name, table in tables.items():
            table.restore(texts[name])
        self._rows = [
            {name: _number(text) for name, text in row.items() if text}
            for row in self._metrics.read()
        ]
        self.summarise(RUNNING)
        return self

    @property
    def position(self) -> dict[str, Any]:
        """The position for `reopen`, in JSON's types; syncs the tables."""
        tables = {"metrics": self._metrics.columns, "clients": self._clients.columns}
        marks = {"metrics": self._metrics.mark(), "clients": self._clients.mark()}
        return {"seconds": time.monotonic() - self._began, "marks": marks} | tables

    def _open(self) -> None:
        self._metrics = _Table(self.path / "metrics.csv")
        self._clients = _Table(self.path / "clients.csv")
        self._rows: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def _write_config(self, settings: Mapping[str, Any], used: Mapping[str, Any]) -> None:
        config = {
            "commit": origin.commit(),
            "run": tables(settings),
            "used": tables(used),
            "versions": origin.versions(),
        }
        self._write("config.toml", tomli_w.dumps(config).encode())

    def record(self, metrics: Mapping[str, Any], clients: Iterable[Mapping[str, Any]]) -> None:
        """One row of metrics.csv, which has its ``round``, and the clients' rows."""
        self._rows.append(dict(metrics))
        self._metrics.append([metrics])
        self._clients.append(clients)

    def save_classes(self, names: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
        """classes.csv: the number of training samples of each class, a row a client."""
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(["client", *map(_cell, names)])
        writer.writerows([i, *row] for i, row in enumerate(counts))
        self._write("classes.csv", file.getvalue().encode())

    def save_model(
        self, state_dict: "Mapping[str, Tensor]", card: Mapping[str, Any], name: str = MODEL
    ) -> None:
        """The model; ``card``: how to build and feed it, in JSON's types."""
        from safetensors.torch import save

        tensors = {name: tensor.cpu().contiguous() for name, tensor in state_dict.items()}
        text = json.dumps(card)
        # one key: safetensors writes several in a random order
        self._write(name, save(tensors, metadata={"model": text}))
        self._write("model.json", json.dumps(card, indent=2).encode())

    def close(self) -> None:
        """Let other processes write the folder."""
        self._lock.release()

    def summarise(self, status: str, **more: Any) -> None:
        """``status``: running, completed, interrupted or failed."""
        rounds = [row for row in self._rows if row["round"] > 0]  # not the untrained model
        summary: dict[str, Any] = {"status": status, "rounds": len(rounds)}
        summary["rounds-counted"] = sum(row.get("counted", 0) for row in rounds)
        summary["seconds"] = round(time.monotonic() - self._began, 3)
        columns = dict.fromkeys(key for row in rounds for key in row)
        for key in (*metrics.of_kind(metrics.EVALUATED), *metrics.own(columns)):
            if _is_gone(key, rounds):
                continue
            values = [row[key] for row in rounds if key in row]
            finite = [value for value in values if math.isfinite(value)]
            if values:
                summary[key + metrics.LAST] = values[-1]
            if values and key in metrics.METRIC and metrics.METRIC[key].better:
                last = values[-metrics.WINDOW :]
                summary[key + metrics.MEAN] = sum(last) / len(last)
                summary[key + metrics.BEST] = metrics.best(key)(finite) if finite else None
        for key in metrics.of_kind(metrics.SUMMED):
            if any(key in row for row in rounds) or key != "peer-bytes":
                summary[key] = sum(row.get(key, 0) for row in rounds)
        text = json.dumps({key: _json(value) for key, value in (summary | more).items()}, indent=2)
        self._write("summary.json", text.encode())

    def _write(self, name: str, content: bytes) -> None:
        replace(self.path / name, content)


def _is_gone(key: str, rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last evaluation lacks this metric, as after a resume with other metrics."""
    loss = f"{key.partition('-')[0]}-loss"
    last: Mapping[str, Any] = next((r for r in reversed(rounds) if key in r or loss in r), {})
    return loss != "train-loss" and loss in last and key not in last


def status(path: Path) -> str:
    """running, completed, interrupted, failed, or dead: running without a process that writes it.
    Raises OSError if there is no run."""
    written = str(read_json(path / "summary.json")["status"])
    return "dead" if written == RUNNING and not is_locked(path) else written


def load_model(path: Path, name: str = MODEL) -> "dict[str, Tensor]":
    """The parameters of the model in a run directory, by name.

    Raises OSError if there is none that can be read, and ValueError if its file is damaged.
    """
    from safetensors.torch import load_file

    try:
        (path / name).open("rb").close()  # safetensors calls a missing permission a missing file
        return load_file(path / name)
    except SafetensorError as error:
        raise ValueError(f"{path / name}: expected a model, got a damaged file ({error})") from None


class Mark(TypedDict):
    """The state of a file."""

    size: int  # bytes
    crc32: int


class _Table:
    """A CSV file that grows by rows; it is rewritten when a row has a new column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._marked = Mark(size=0, crc32=0)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = [{name: _cell(value) for name, value in row.items()} for row in rows]
        new = [c for c in dict.fromkeys(c for row in rows for c in row) if c not in self.columns]
        if new:
            columns = [*self.columns, *new]
            replace(self.path, _text(chain(self._lines(), rows), columns, header=True).encode())
            self.columns, self._marked = columns, Mark(size=0, crc32=0)  # it has them now
        elif rows:
            size = self.path.stat().st_size
            try:
                with self.path.open("a", encoding="utf-8", newline="") as file:
                    file.write(_text(rows, self.columns))
            except OSError as error:
                os.truncate(self.path, size)  # no torn row
                raise of_file(error, self.path) from None

    def mark(self) -> Mark:
        """Sync the file and return its state; reads only its new part."""
        if self.columns:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
                file.seek(self._marked["size"])
                new = file.read()
            size, crc32 = self._marked["size"] + len(new), zlib.crc32(new, self._marked["crc32"])
            self._marked = Mark(size=size, crc32=crc32)
        return self._marked

    def until(self, number: int, columns: Iterable[str], mark: Mark | None) -> bytes:
        """The file after ``number`` rounds, with these columns, without later rows and columns.
        Raises ValueError if it was changed."""
        self.columns = [*columns]
        if not self.columns:
            return b""
        try:
            content = read_bytes(self.path)
            first = content[: mark["size"]] if mark else b""
            is_marked = mark is not None and zlib.crc32(first) == mark["crc32"]
            if is_marked and all(int(row["round"]) <= number for row in _parsed(first)):
                return first  # otherwise the disk was full within a round
            every = _parsed(first if is_marked else content)  # one by one: there may be millions
            kept = (row for row in every if int(row["round"]) <= number)
            rows = ({name: row[name] for name in self.columns} for row in kept)
            prefix = _text(rows, self.columns, header=True).encode()
            if is_marked or mark in (None, Mark(size=len(prefix), crc32=zlib.crc32(prefix))):
                return prefix
            reason = "it was edited or truncated"
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            reason = str(error) or type(error).__name__
        raise ValueError(
            f"{self.path}: expected the rows that the run wrote until round {number}, got "
            f"others ({reason}); restore the file that the run wrote"
        )

    def restore(self, content: bytes) -> None:
        """Write the result of `until`."""
        if content:
            replace(self.path, content)
        else:
            self.path.unlink(missing_ok=True)

    def read(self) -> list[dict[str, Any]]:
        return [*self._lines()]

    def _lines(self) -> Iterator[dict[str, Any]]:
        return _parsed(self.path.read_bytes() if self.columns else b"")


def _parsed(content: bytes) -> Iterator[dict[str, Any]]:
    return iter(csv.DictReader(io.StringIO(content.decode(), newline="")))


def _text(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, header: bool = False
) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    """Put a quote before a text that a spreadsheet would read as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null replaces them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

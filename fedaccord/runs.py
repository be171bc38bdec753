"""A run directory: what a run was, what it measured, what it trained.

``config.toml`` (every setting, versions, commit), ``metrics.csv`` (a row a round), ``clients.csv``
(a row a client a round), ``summary.json``, ``model.safetensors``. Whole files are written beside
their place and moved there, tables grow by whole lines: a crash leaves the last good version.
"""

import csv
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save
from torch import Tensor

PACKAGES = ("fedaccord", "flwr", "torch", "torchvision", "numpy")
WINDOW = 10  # last evaluations behind the window mean


class RunDirectory:
    """Writes one run. Raises ValueError where the folder cannot be made or holds a run already."""

    def __init__(self, out_dir: str, name: str, settings: Mapping[str, Any]) -> None:
        folder = Path(out_dir) if out_dir else Path.home() / "fedaccord-runs"
        if not folder.is_absolute():
            raise ValueError(
                f"out-dir: expected an absolute path, got {out_dir!r}: "
                f"a run may execute in another folder than yours; try {str(folder.absolute())!r}"
            )
        stamp = time.strftime("%Y%m%d-%H%M%S")
        default = f"{settings['algo']}-{settings['dataset']}-seed{settings['seed']}-{stamp}"
        self.path = folder / (name or default)
        if (self.path / "config.toml").exists():
            raise ValueError(
                f"name: {self.path} holds a run already; choose another name or move it away"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            config = {"run": _tables(settings), "versions": _versions(), "commit": _commit()}
            self._write("config.toml", tomli_w.dumps(config).encode())
        except OSError as error:
            raise ValueError(
                f"out-dir: cannot write to {self.path} ({error.strerror}); choose another folder"
            ) from error
        self._metrics = _Table(self.path / "metrics.csv")
        self._clients = _Table(self.path / "clients.csv")
        self._rows: list[dict[str, Any]] = []
        self._began = time.time()
        self.summarise("running")

    def record(self, metrics: Mapping[str, Any], clients: Iterable[Mapping[str, Any]]) -> None:
        """One row of metrics.csv and the clients' rows."""
        self._rows.append(dict(metrics))
        self._metrics.append([metrics])
        self._clients.append(clients)

    def save_model(self, state_dict: Mapping[str, Tensor]) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state_dict.items()}
        self._write("model.safetensors", save(tensors))

    def summarise(self, status: str, **more: Any) -> None:
        """``status``: running, completed, interrupted or failed."""
        summary: dict[str, Any] = {"status": status, "rounds": max(len(self._rows) - 1, 0)}
        summary["seconds"] = round(time.time() - self._began, 3)
        for key in ("test-accuracy", "test-loss"):
            seen = [row[key] for row in self._rows if key in row]
            if seen:
                summary[f"{key}-last"] = seen[-1]
                summary[f"{key}-mean-of-last-{WINDOW}"] = sum(seen[-WINDOW:]) / len(seen[-WINDOW:])
                summary[f"{key}-best"] = max(seen) if key == "test-accuracy" else min(seen)
        for key in ("down-bytes", "up-bytes"):
            summary[key] = sum(row.get(key, 0) for row in self._rows)
        self._write("summary.json", json.dumps(summary | more, indent=2).encode())

    def _write(self, name: str, content: bytes) -> None:
        beside = self.path / f".{name}.{os.getpid()}"
        beside.write_bytes(content)
        beside.replace(self.path / name)


class _Table:
    """A CSV file that grows by rows; it is written anew when a row brings a new column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = list(rows)
        new = [c for c in dict.fromkeys(c for row in rows for c in row) if c not in self.columns]
        if new:
            rows = [*self._read(), *rows]
            self.columns += new
            beside = self.path.with_suffix(".new")
            self._append(beside, rows, header=True)
            beside.replace(self.path)
        elif rows:
            self._append(self.path, rows)

    def _append(self, path: Path, rows: Iterable[Mapping[str, Any]], header: bool = False) -> None:
        with path.open("w" if header else "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if header:
                writer.writeheader()
            writer.writerows(rows)

    def _read(self) -> list[dict[str, Any]]:
        if not self.columns:
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))


def _tables(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots as nested tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        table = nested
        for group in groups:
            table = table.setdefault(group, {})
        table[name] = value
    return nested


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {p: version(p) for p in PACKAGES}


def _commit() -> str:
    """The commit of the code, where it runs from a checkout; else empty."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()

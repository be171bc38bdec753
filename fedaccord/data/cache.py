"""Decoded data sets: one safetensors file each, which every process maps into memory.

The cache folder is $FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord; it
may be deleted at any time. safetensors maps a file instead of reading it, so all processes
share one copy in memory. A file holds a checksum, which every reader compares (about 0.3 s a GB).
Files of the user's own data can be read by their owner alone, and a source that has changed leaves
no copy of its earlier content, whatever the settings with which it was decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedaccord.data.fingerprint import of_tensors
from fedaccord.data.kind import Arrays, Dataset, PerChannel

CACHE_FORMAT = 4  # raise it when the decoding changes: older cache files are then ignored
ABANDONED = 600  # seconds without a write after which a part of a file counts as abandoned


def cache_folder() -> Path:
    """$FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord."""
    if own := os.environ.get("FEDACCORD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedaccord"


def fingerprint(paths: tuple[Path, ...], settings: Mapping[str, Any], code: Sequence[Path]) -> str:
    """Short hashes of the source (paths), of its present state (the names, sizes and times of the
    files in the paths and in their folders), of the settings, and of the code that decodes it. No
    source has more levels, and a link to a parent folder would be endless."""
    entries = [str(path) for path in paths]
    for path in entries.copy():
        for folder, folders, files in os.walk(path, followlinks=True):
            entries += [f"{folder}/{entry}" for entry in folders + files]
            if folder != path:
                folders.clear()  # do not descend
    state, decoder = ([_size_and_time(str(e)) for e in sorted(each)] for each in (entries, code))
    return "-".join(map(_hash, ((CACHE_FORMAT, paths), state, settings, decoder)))


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()[:12]


def _size_and_time(entry: str) -> tuple[str, int, int]:
    try:
        stat = os.stat(entry)
    except OSError:  # a link to nothing
        return entry, -1, 0
    return entry, stat.st_size, stat.st_mtime_ns


def read(path: Path, name: str) -> Dataset | None:
    """Map a cache file; None if there is none, or it is damaged."""
    try:
        if not path.is_file():  # a pipe would block
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        samples = of_tensors(tensors)
        if metadata["checksum"] != _checksum(metadata["facts"], samples):
            return None
    except (OSError, SafetensorError, KeyError, TypeError):  # gone, truncated, or foreign
        return None
    facts = json.loads(metadata["facts"])
    return Dataset(
        name,
        **tensors,
        classes=facts["classes"],
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        class_names=tuple(facts["class_names"]),
        vocabulary=facts["vocabulary"],
        checksum=samples,
    )


def write(
    path: Path,
    data: Arrays,
    scale: tuple[PerChannel, PerChannel] | None,
    *,
    private: bool = False,
) -> None:
    """Write a cache file under another name, then rename it: readers see all of it or nothing.
    Files of the same source in an earlier state are removed, whatever their settings, as are those
    with the same settings and earlier code.

    scale: mean and std of the channels; None: those of the training images. private: whether only
    the owner may read it.
    """
    tensors = {
        "x_train": _channel_first(data.x_train),
        "y_train": _targets(data.y_train),
        "x_test": _channel_first(data.x_test),
        "y_test": _targets(data.y_test),
    }
    if data.owners is not None:
        tensors["owners"] = torch.from_numpy(data.owners.astype(np.int64))
    mean, std = scale or channel_stats(tensors["x_train"])
    numbers = {"classes": data.classes, "mean": mean, "std": std, "vocabulary": data.vocabulary}
    facts = json.dumps(numbers | {"class_names": data.class_names})
    metadata = {"facts": facts, "checksum": _checksum(facts, of_tensors(tensors))}
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # safetensors has its own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # a rename does not replace it
            raise IsADirectoryError(f"{path} is a folder: remove it")
        part.mkdir(0o700)
        usual, file = part / "usual", part / path.name
        usual.touch()
        save_file(tensors, file, metadata=metadata)
        # the mode that safetensors writes differs between its versions
        file.chmod(0o600 if private else usual.stat().st_mode)
        file.replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the cache folder {path.parent} cannot be written ({error}): set FEDACCORD_CACHE to "
            "a writable folder with enough space"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    source, state, settings, _ = path.name.rsplit("-", 3)
    for other in path.parent.glob(f"{source}-*.safetensors"):
        *_, its_state, its_settings, _ = other.name.rsplit("-", 3)
        if other != path and (its_state != state or its_settings == settings):
            with suppress(OSError):  # a process that has mapped it keeps it
                other.unlink()


def remove_abandoned(folder: Path) -> None:
    """Remove the parts of files whose writers were killed."""
    for part in folder.glob(".*.safetensors.*"):
        with suppress(OSError):  # another process removes it too, or it is not ours
            latest = max(each.stat().st_mtime for each in (part, *part.glob("*"), *part.glob(".*")))
            if time.time() - latest > ABANDONED:
                shutil.rmtree(part) if part.is_dir() else part.unlink()


def _checksum(facts: str, samples: str) -> str:
    """The checksum of a cache file's content."""
    return f"{zlib.crc32(facts.encode(), int(samples, 16)):08x}"


def _targets(y: NDArray[Any]) -> torch.Tensor:
    """Class labels as int64, numbers to predict as float32."""
    return torch.from_numpy(y.astype(np.float32 if y.dtype.kind == "f" else np.int64))


def _channel_first(x: NDArray[Any]) -> torch.Tensor:
    """(n, h, w[, c]) images as (n, c, h, w); features and tokens are unchanged."""
    if x.dtype == np.uint8:
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def channel_stats(x: torch.Tensor) -> tuple[PerChannel, PerChannel]:
    """Mean and standard deviation per channel of uint8 images, exactly, from their histograms."""
    if x.dtype != torch.uint8:
        return (), ()
    level = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean.append(float(share @ level))
        std.append(float((share @ (level - mean[-1]) ** 2).sqrt()) or 1.0)  # constant: only centre
    return tuple(mean), tuple(std)

"""Decoded data sets: one safetensors file each, which every process maps into memory.

The cache folder is $FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord; it
may be deleted at any time. safetensors maps a file rather than reads it, so that all processes
share one copy in memory. A file holds a checksum, which every reader compares (about 0.3 s a GB).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# Mean and standard deviation per channel; where none are given they are those of the images.
CONSTANTS = {
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
AUGMENTED = {"cifar10", "cifar100", "image-folder"}  # natural images: a mirrored one is as good
MAX_IMAGE_SIZE = 4096  # pixels of a side, of images that are resized
CACHE_FORMAT = 2  # raise it when the decoding changes: older cache files are then left aside
ABANDONED = 600  # seconds without a write after which a part of a file is nobody's any more


class Dataset(NamedTuple):
    """Training and test data in memory, mapped from the cache file: writes stay in the process."""

    name: str
    x_train: torch.Tensor  # (n, channels, height, width) uint8, or (n, ...) float32 features
    y_train: torch.Tensor  # (n,) int64, 0 <= y < classes
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: tuple[float, ...]  # per channel, of training pixels in [0, 1]; empty for features
    std: tuple[float, ...]
    augment: bool  # whether `augment` suits these images
    class_names: tuple[str, ...] = ()  # of label 0, 1, ...; empty: unknown


class Decoded(NamedTuple):
    """What a source gives: channel-last uint8 images or float32 features, and their labels."""

    x_train: NDArray[Any]  # (n, height, width[, channels]) uint8, or (n, ...) float32
    y_train: NDArray[Any]  # (n,) integers
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    classes: int
    class_names: tuple[str, ...] = ()  # of label 0, 1, ...; empty: unknown


class Source(NamedTuple):
    """Where data was found, and how to decode it."""

    paths: tuple[Path, ...]  # files and folders whose change makes the cache stale
    decode: Callable[[], Decoded]


def cache_folder() -> Path:
    """$FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord."""
    if own := os.environ.get("FEDACCORD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedaccord"


def fingerprint(paths: tuple[Path, ...], image_size: int) -> str:
    """Short hash of the paths and of the names, sizes and times of what lies in them and in their
    folders; no source has more levels, and a link to a folder above has no end of them."""
    entries = [str(path) for path in paths]
    for path in entries.copy():
        for folder, folders, files in os.walk(path, followlinks=True):
            entries += [f"{folder}/{entry}" for entry in folders + files]
            if folder != path:
                folders.clear()  # which ends the walk here
    facts = [_size_and_time(entry) for entry in sorted(entries)]
    text = repr((CACHE_FORMAT, image_size, facts))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _size_and_time(entry: str) -> tuple[str, int, int]:
    try:
        stat = os.stat(entry)
    except OSError:  # a link to nothing
        return entry, -1, 0
    return entry, stat.st_size, stat.st_mtime_ns


def check_fits(what: str, size: int) -> None:
    """Raises ValueError where so many bytes are more than this machine's memory: the system would
    not refuse them, and end the process when they are filled."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(
            f"{what}: expected what fits into the {memory / 1e9:,.0f} GB of memory here, got "
            f"{size / 1e9:,.0f} GB: take less of it, or smaller images"
        )


def read(path: Path, name: str) -> Dataset | None:
    """Map a cache file; None where there is none, or none that is as it was written."""
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in ARRAYS}
        if metadata["checksum"] != _checksum(metadata["facts"], tensors):
            return None
    except (OSError, SafetensorError, KeyError, TypeError):  # gone, cut short, or another's
        return None
    facts = json.loads(metadata["facts"])
    return Dataset(
        name,
        **tensors,
        classes=facts["classes"],
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        augment=name in AUGMENTED,
        class_names=tuple(facts["class_names"]),
    )


def write(path: Path, name: str, data: Decoded) -> None:
    """Write a cache file under another name, then rename it: readers see all of it or nothing."""
    tensors = {
        "x_train": _channel_first(data.x_train),
        "y_train": torch.from_numpy(data.y_train.astype(np.int64)),
        "x_test": _channel_first(data.x_test),
        "y_test": torch.from_numpy(data.y_test.astype(np.int64)),
    }
    mean, std = CONSTANTS.get(name) or _channel_stats(tensors["x_train"])
    numbers = {"classes": data.classes, "mean": mean, "std": std}
    facts = json.dumps(numbers | {"class_names": data.class_names})
    metadata = {"facts": facts, "checksum": _checksum(facts, tensors)}
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # a rename does not replace it
            raise IsADirectoryError(f"{path} is a folder: remove it")
        save_file(tensors, part, metadata=metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        if path.parent.is_dir():
            part.unlink(missing_ok=True)
        raise ValueError(
            f"the cache folder {path.parent} cannot be written ({error}): set FEDACCORD_CACHE to "
            "a writable folder with enough space"
        ) from error


def remove_abandoned(folder: Path) -> None:
    """Remove the parts of files whose writers were killed."""
    for part in folder.glob(".*.safetensors.*"):
        with suppress(OSError):  # another process removes it too, or it is not ours
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def _checksum(facts: str, tensors: dict[str, torch.Tensor]) -> str:
    """CRC-32 of all that a cache file holds, shapes and types included."""
    crc = zlib.crc32(facts.encode())
    for key, tensor in tensors.items():
        crc = zlib.crc32(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.numpy().reshape(-1).data, crc)
    return f"{crc:08x}"


def _channel_first(x: NDArray[Any]) -> torch.Tensor:
    """(n, h, w[, c]) images as (n, c, h, w); features as they are."""
    if x.dtype == np.uint8:
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def _channel_stats(x: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
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

"""Files of tensors with checksums."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from fedaccord.storage.files import read_bytes, regular, replace


def write_tensors(path: Path, tensors: Mapping[str, Tensor], synced: bool = True) -> int:
    """Write tensors, which may share memory, by name; returns the CRC-32. Raises OSError.

    synced: as of `replace`.
    """
    places = set[int]()
    separate = {}
    for name, tensor in tensors.items():  # safetensors refuses two names for the same memory
        host = tensor.detach().cpu().contiguous()
        place = host.untyped_storage().data_ptr()
        separate[name] = host.clone() if place in places else host
        places.add(place)
    content = save(separate)
    replace(path, content, synced=synced)
    return zlib.crc32(content)


def crc32_of(entry: Mapping[str, Any]) -> int:
    """The checksum in an entry of JSON; earlier versions called it a sum. Raises KeyError."""
    return int(entry["crc32"] if "crc32" in entry else entry["sum"])


def map_tensors(path: Path, crc32: int) -> dict[str, Tensor]:
    """As `read_tensors`, but unused tensors need no memory; the file may be deleted."""
    actual = 0
    with regular(path).open("rb") as file:
        while block := file.read(2**20):
            actual = zlib.crc32(block, actual)
    return _loaded(path, actual == crc32, lambda: load_file(path))


def read_tensors(path: Path, crc32: int) -> dict[str, Tensor]:
    """The tensors of `write_tensors`. Raises OSError, or ValueError if the checksum differs."""
    content = read_bytes(path)
    return _loaded(path, zlib.crc32(content) == crc32, lambda: load(content))


def _loaded(path: Path, same: bool, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    if not same:
        raise ValueError(
            f"expected {path.name} with the checksum that was written, got another: the file was "
            "changed or cut"
        )
    try:
        return read()
    except SafetensorError as error:
        raise ValueError(f"{path.name} holds no tensors: {error}") from None

"""Files of tensors, with a checksum: what was read is what was written."""

import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedaccord.runs.files import replace


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors, which may share memory, by name; the CRC-32 of the file. Raises OSError."""
    content = save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
    replace(path, content)
    return zlib.crc32(content)


def read_tensors(path: Path, sum: int) -> dict[str, Tensor]:
    """What `write_tensors` wrote. Raises OSError, or ValueError where the file has another sum."""
    content = path.read_bytes()
    if zlib.crc32(content) != sum:
        raise ValueError(f"{path.name} is not what was written")
    try:
        return dict(load(content))
    except SafetensorError as error:
        raise ValueError(f"{path.name} holds no tensors: {error}") from None

"""Checksums of data and partition: with other data a run is another one, and does not resume."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedaccord.data.parts import Cut, Drawn


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the names, values, shapes and types of tensors, as eight hexadecimal digits."""
    crc32 = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype == torch.bfloat16:  # NumPy has none
            tensor = tensor.view(torch.int16)
        array = np.ascontiguousarray(tensor.detach().cpu().numpy())
        crc32 = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc32)
        crc32 = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc32)
    return f"{crc32:08x}"


def of_parts(parts: Sequence[np.ndarray]) -> int:
    """CRC-32 of the partition. Parts that clients draw for themselves are not read: they follow
    from the samples and the settings."""
    if isinstance(parts, Drawn):
        return 0
    crc32 = zlib.crc32(str(len(parts)).encode())
    for part in [parts.samples] if isinstance(parts, Cut) else parts:
        indices = np.ascontiguousarray(part, dtype=np.int64)
        crc32 = zlib.crc32(indices.view(np.uint8).data, zlib.crc32(str(len(part)).encode(), crc32))
    return crc32

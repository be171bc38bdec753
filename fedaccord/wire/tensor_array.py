"""Tensors as Flower Arrays, without copying while a message stays in its process."""

import io
import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedaccord.compat.flower_1_41 import TensorArray


def to_tensor(array: Array) -> Tensor:
    """The tensor of an Array: the very one it holds in process, else a copy of its bytes.

    Raises ValueError where they are no numbers that PyTorch knows, or not as many as declared.
    """
    if isinstance(array, TensorArray):
        return cast(Tensor, array.__dict__["tensor"])
    try:
        _check_size(array)
        return torch.from_numpy(array.numpy())
    except Exception as error:  # whatever NumPy makes of bytes that others wrote
        raise ValueError(
            f"expected an array of numbers, got {str(array.dtype)[:40]} as "
            f"{str(array.stype)[:40]}, which cannot be read ({type(error).__name__})"
        ) from None


def _check_size(array: Array) -> None:
    """Raise ValueError where the .npy header says other than the message, or than its bytes hold.

    Before anything is allocated: a header may declare any size.
    """
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    shape, _, dtype = HEADERS[version](file)
    size = math.prod(shape) * dtype.itemsize
    said, read = (array.dtype, *array.shape), (str(dtype), *shape)
    if said != read or dtype.hasobject or len(array.data) - file.tell() != size:
        raise ValueError


HEADERS = {  # of .npy files, by version
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def to_record(tensors: Mapping[str, Tensor], array: type[TensorArray] = TensorArray) -> ArrayRecord:
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = array(tensor)
    return record

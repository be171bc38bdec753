"""Tensors as Flower Arrays, without copying what a message holds."""

import io
import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedaccord.compat.flower_1_41 import NUMPY, TensorArray
from fedaccord.compat.read_only import over


def to_tensor(array: Array) -> Tensor:
    """The tensor of an Array: the very one it holds in process, else one over its bytes, which is
    not to be changed.

    Raises ValueError where they are no numbers that PyTorch knows, or not as many as declared.
    """
    if isinstance(array, TensorArray):
        return cast(Tensor, array.__dict__["tensor"])
    try:
        return over(_checked(array))
    except Exception as error:  # whatever NumPy makes of bytes that others wrote
        raise ValueError(
            f"expected an array of numbers, got {str(array.dtype)[:40]} as "
            f"{str(array.stype)[:40]}, which cannot be read ({type(error).__name__})"
        ) from None


def _checked(array: Array) -> np.ndarray:
    """The array over its bytes. Raises ValueError if the .npy header contradicts the message or
    the number of bytes.

    Before anything is allocated: a header may declare any size.
    """
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    shape, by_columns, dtype = HEADERS[version](file)
    size = math.prod(shape) * dtype.itemsize
    said, read = (array.dtype, *array.shape), (str(dtype), *shape)
    wrong = dtype.hasobject or array.stype != NUMPY
    if wrong or said != read or len(array.data) - file.tell() != size:
        raise ValueError
    if not size:
        return np.empty(shape, dtype)
    numbers = np.frombuffer(array.data, dtype, offset=file.tell())
    numbers = numbers.reshape(shape, order="F" if by_columns else "C")
    return numbers if numbers.flags.aligned else numbers.copy()


HEADERS = {  # of .npy files, by version
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def to_record(tensors: Mapping[str, Tensor], array: type[TensorArray] = TensorArray) -> ArrayRecord:
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = array(tensor)
    return record

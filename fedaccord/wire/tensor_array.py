"""Tensors as Flower Arrays, without a copy of the message's content."""

import io
import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedaccord.compat.flower import NUMPY, TensorArray
from fedaccord.compat.read_only import over


def to_tensor(array: Array) -> Tensor:
    """The tensor of an Array: in process the same object, else one over its bytes; do not change
    it.

    Raises ValueError if PyTorch does not support the type, or the number of bytes is wrong.
    """
    if isinstance(array, TensorArray):
        return cast(Tensor, array.__dict__["tensor"])
    try:
        return over(_checked(array))
    except Exception as error:  # NumPy may raise anything for untrusted bytes
        raise ValueError(
            f"expected an array of numbers, got {str(array.dtype)[:40]} as "
            f"{str(array.stype)[:40]}, which cannot be read ({type(error).__name__})"
        ) from None


def _checked(array: Array) -> np.ndarray:
    """The array over its bytes. Raises ValueError if the .npy header does not match the message or
    the number of bytes.

    Checked before any allocation, as a header may declare any size.
    """
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    shape, by_columns, dtype = HEADERS[version](file)
    size = math.prod(shape) * dtype.itemsize
    declared, actual = (array.dtype, *array.shape), (str(dtype), *shape)
    wrong = dtype.hasobject or array.stype != NUMPY
    if wrong or declared != actual or len(array.data) - file.tell() != size:
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

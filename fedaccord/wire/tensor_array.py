"""Tensors as Flower Arrays, without copying while a message stays in its process."""

import io
import math
import warnings
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor


class TensorArray(Array):
    """An Array that holds a tensor and writes its bytes when a runtime first asks for them.

    In process nobody asks, so vectors pass by reference: do not change one after packing it. Ray,
    which pickles what it carries, takes the tensor's memory as it is, and what is read lies in
    Ray's, which cannot be changed.
    """

    __qualname__ = "Array"  # Flower names the type of an object on the wire by its class

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(  # not one by one: Array checks what it is told of itself
            tensor=tensor.detach(),
            dtype=_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stype="numpy.ndarray",
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]  # Array keeps its bytes in a field
        if "bytes" not in self.__dict__:
            self.__dict__["bytes"] = Array(self.__dict__["tensor"].cpu().numpy()).data
        return cast(bytes, self.__dict__["bytes"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.__dict__["tensor"].cpu().numpy(),)


class KeptArray(TensorArray):
    """One that outlasts its message: whoever unpickles it has a copy outside of Ray's memory."""

    __qualname__ = "Array"

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.__dict__["tensor"].cpu().numpy(),)


def _received(array: np.ndarray) -> TensorArray:
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return TensorArray(torch.from_numpy(array))


def _copied(array: np.ndarray) -> KeptArray:
    return KeptArray(torch.from_numpy(array.copy()))


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


_NAMES: dict[torch.dtype, str] = {}


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return _NAMES[dtype]

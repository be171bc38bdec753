"""Tensors over read-only memory, as Ray's."""

import numpy as np
import torch
from torch import Tensor


class _Writable:
    """An array's NumPy interface without its read-only flag."""

    def __init__(self, array: np.ndarray) -> None:
        shown = array.__array_interface__
        self.array = array  # its memory lives as long as this
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


def over(array: np.ndarray) -> Tensor:
    """The tensor that shares an array's memory: not to be changed, as that may be Ray's.

    PyTorch would warn of memory that cannot be written, and a filter of warnings is the process's.
    """
    return torch.from_numpy(np.asarray(_Writable(array)) if array.size else array.copy())

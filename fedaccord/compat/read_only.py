"""Tensors over read-only memory, as Ray's."""

import numpy as np
import torch
from torch import Tensor


class _Writable:
    """An array's NumPy interface without its read-only flag."""

    def __init__(self, array: np.ndarray) -> None:
        shown = array.__array_interface__
        self.array = array  # keeps the memory alive
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


def over(array: np.ndarray) -> Tensor:
    """A tensor that shares an array's memory; do not change it, as it may be Ray's.

    PyTorch would warn about read-only memory, and a warning filter would affect the whole process.
    """
    return torch.from_numpy(np.asarray(_Writable(array)) if array.size else array.copy())

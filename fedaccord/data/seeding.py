"""Blocks in which the default random numbers of PyTorch, NumPy and Python come from a seed."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch

# held in such a block, and in blocks of other settings of the process
ALONE = RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed those of the CPU and restore their states; other threads wait. seed: from 0."""
    with ALONE:
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            with torch.random.fork_rng(devices=[]):
                # Not torch.manual_seed: it would also reseed the accelerators, which are not forked
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
                yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def each_seeded(items: Iterable[Any], seed: Callable[[], int]) -> Iterator[Any]:
    """The items, each made in its own block; ``seed``: called before each."""
    with seeded(seed()):
        own = iter(items)
    while True:
        with seeded(seed()):
            try:
                item = next(own)
            except StopIteration:
                return
        yield item

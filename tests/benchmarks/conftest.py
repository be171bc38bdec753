"""What scripts set for their own process is as before after each test."""

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    log, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = log.level
    yield
    log.setLevel(level)
    torch.set_num_threads(threads)

"""Fixtures: a grid of nodes that come and go, a clock without waits, the log's warnings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.net import Clock, Net


@pytest.fixture
def net() -> Iterator[Net]:
    with Net() as net:
        yield net


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No test sleeps real seconds."""
    clock = Clock()
    monkeypatch.setattr("time.sleep", clock.sleep)
    return clock


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What Flower's logger is given at a level or above."""
    lines: list[str] = []
    handler, log = logging.Handler(level), logging.getLogger("flwr")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with logged(logging.INFO) as lines:
        yield lines


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    with logged(logging.WARNING) as lines:
        yield lines

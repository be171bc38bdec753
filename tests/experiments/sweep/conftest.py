"""Worker processes of sweeps that begin at once."""

from multiprocessing import get_context

import pytest

from fedaccord.experiments.sweep import workers


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import PyTorch again: with one thread it survives a fork."""
    monkeypatch.setattr(workers, "get_context", lambda _: get_context("fork"))

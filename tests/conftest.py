"""Fixtures for all tests: the folders of real and of decoded data."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from benchmarks import data

hypothesis.settings.register_profile(  # the same examples on every machine, fast or slow
    "the same everywhere",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("the same everywhere")


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    """Keep decoded data from one test run to the next."""
    data.keep_decoded()


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> Iterator[None]:
    """One thread: sums do not depend on the machine, and tests use one core each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def traceback_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ServerApp that is refused shortens tracebacks, as its process then ends."""
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk in this process: no test simulates a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("fedaccord.storage.files.syncfs", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with CIFAR-10 (cifar10/train/<class>/*, cifar10/test/...) and FashionMNIST/raw/*."""
    try:
        return data.find()
    except FileNotFoundError as error:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(str(error))


@pytest.fixture(scope="session")
def some_of_cifar10(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to the first images of every class: 200 for training, 20 for testing."""
    root = tmp_path_factory.mktemp("cifar10")
    for split, count in (("train", 200), ("test", 20)):
        for folder in (real_data / "cifar10" / split).iterdir():
            (root / split / folder.name).mkdir(parents=True)
            for name in sorted(os.listdir(folder))[:count]:
                (root / split / folder.name / name).symlink_to(folder / name)
    return root

"""Fixtures for all tests: where real data and decoded data lie."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    """Keep decoded data from one test run to the next."""
    os.environ.setdefault("FEDACCORD_CACHE", str(Path("~/.cache/fedaccord-tests").expanduser()))


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> Iterator[None]:
    """Sums that do not depend on the machine, and no more than one core at work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with CIFAR-10 (cifar10/train/<class>/*, cifar10/test/...) and FashionMNIST/raw/*."""
    if given := os.environ.get("FEDACCORD_DATA"):
        return Path(given)
    unpack = REPOSITORY.parent / "shared" / "data" / "unpack"
    if not unpack.exists():
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"no real data: FEDACCORD_DATA is not set and there is no {unpack}")
    folder = Path("~/.cache/fedaccord-test-data").expanduser()
    subprocess.run([unpack, folder], check=True, stdout=subprocess.DEVNULL)
    return folder

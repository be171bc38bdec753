"""Fixtures for all tests: where real data and decoded data lie."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def cache() -> None:
    """Keep decoded data from one test run to the next."""
    os.environ.setdefault("FEDACCORD_CACHE", str(Path("~/.cache/fedaccord-tests").expanduser()))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with CIFAR-10 (cifar10/train/<class>/*, cifar10/test/...) and FashionMNIST/raw/*."""
    if given := os.environ.get("FEDACCORD_DATA"):
        return Path(given)
    unpack = REPOSITORY.parent / "shared" / "data" / "unpack"
    if not unpack.exists():
        pytest.skip(f"no real data: FEDACCORD_DATA is not set and there is no {unpack}")
    folder = Path("~/.cache/fedaccord-test-data").expanduser()
    subprocess.run([unpack, folder], check=True, stdout=subprocess.DEVNULL)
    return folder

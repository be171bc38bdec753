"""Where tests and benchmarks find real data: one look-up for both; runs that use them."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def keep_decoded() -> None:
    """Decoded data goes to $FEDACCORD_CACHE, else ~/.cache/fedaccord-tests, and stays there."""
    os.environ.setdefault("FEDACCORD_CACHE", str(Path("~/.cache/fedaccord-tests").expanduser()))


def find() -> Path:
    """A folder with CIFAR-10 (cifar10/train/<class>/*, cifar10/test/...) and FashionMNIST/raw/*.

    $FEDACCORD_DATA, else what ../shared/data/unpack beside the checkout lays out; it does nothing
    the second time.

    Raises FileNotFoundError, in one line, where neither is there.
    """
    keep_decoded()
    if name := os.environ.get("FEDACCORD_DATA"):
        folder = Path(name).expanduser().resolve()
        if not folder.is_dir():
            raise FileNotFoundError(f"no real data: FEDACCORD_DATA={name} is not a folder")
        return folder
    unpack = REPOSITORY.parent / "shared" / "data" / "unpack"
    if not unpack.exists():
        raise FileNotFoundError(
            f"no real data: set FEDACCORD_DATA to a folder with cifar10/train/<class>/* "
            f"(there is no {unpack} either)"
        )
    folder = Path("~/.cache/fedaccord-test-data").expanduser()
    subprocess.run([unpack, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def arguments(doc: str) -> argparse.ArgumentParser:
    """The options of a benchmark that is many runs and a page."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("folder", type=lambda path: Path(path).expanduser().resolve())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="write the page, run nothing")
    return parser


def complete(folder: Path, settings: dict[str, Any]) -> None:
    """Run ``settings`` in ``folder``, or resume it; no more if it is completed. An error of the
    federation is a line: other runs follow.
    """
    from fedaccord.config import RunConfig
    from fedaccord.engine import quiet, run
    from fedaccord.federation.errors import FederationError
    from fedaccord.runs import COMPLETED, reader, status

    path = folder / settings["name"]
    if reader.is_run(path) and status(path) == COMPLETED:
        return
    print(path.name, flush=True)
    place = {"data-dir": str(find()), "out-dir": str(folder), "resume": path.exists()}
    try:
        with quiet():
            run(RunConfig.make(settings | place))
    except FederationError as error:
        print(error, file=sys.stderr)

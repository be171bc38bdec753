"""Another process that has a folder's lock."""

import time
from pathlib import Path

LOCK = (  # python -c LOCK FOLDER: locks the folder until it is killed
    "import sys, time; from pathlib import Path; from fedaccord.runs.lock import Lock\n"
    "Lock(Path(sys.argv[1])); time.sleep(60)"
)


def wait_for_lock(folder: Path) -> None:
    """Until the other process has written its name."""
    end = time.monotonic() + 30
    while not ((folder / ".lock").exists() and (folder / ".lock").stat().st_size):
        assert time.monotonic() < end
        time.sleep(0.01)

"""Rounds of runs that other processes are at, as their directories tell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from rich.console import Console

from fedaccord.federation.eta import Eta

ON_TERMINAL, ELSEWHERE = 2.0, 60.0  # seconds between two looks
LONGEST_ROW = 1 << 13  # bytes


@contextmanager
def watched(
    console: Console, count: Callable[[], int], show: Callable[[int], None]
) -> Iterator[None]:
    """A block in which ``show`` is told, in a thread, what ``count`` gives: of a terminal often,
    elsewhere every minute."""
    over, seconds = Event(), ON_TERMINAL if console.is_terminal else ELSEWHERE

    def look() -> None:
        while not over.wait(seconds):
            show(count())

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def progress(number: int, left: Eta) -> str:
    """As "120 of 2000 rounds  0:12:03 left"."""
    return "  ".join(filter(None, [f"{number} of {left.rounds} rounds", left(number)]))


def rounds(run: Path) -> int:
    """Those of which a run directory has the row; 0 before the first, and where there is none."""
    try:
        with (run / "metrics.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LONGEST_ROW))
            rows = file.read().splitlines()[1:]
        return int(rows[-1].partition(b",")[0])
    except (OSError, IndexError, ValueError):  # ValueError: its header is being written
        return 0

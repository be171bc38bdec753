"""Long commands: their progress and their end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from rich.console import Console

from fedaccord.cli.console import stop
from fedaccord.federation.eta import Eta
from fedaccord.process.interrupts import exit_code

ON_TERMINAL, ELSEWHERE = 2.0, 60.0  # seconds between two reports
LONGEST_ROW = 1 << 13  # bytes


@contextmanager
def resumable(folder: Path | None) -> Iterator[None]:
    """End the command with one line if the block fails: exit code 2 on bad input, 1 on errors of
    the disk. folder: from which an interrupted command resumes, if it writes anything."""
    try:
        yield
    except KeyboardInterrupt as error:
        rest = f"; {folder} has the finished part: the same command resumes"
        stop(f"interrupted{rest if folder and folder.exists() else ''}", exit_code(error))
    except (ValueError, FileNotFoundError) as error:
        stop(error, 2)
    except OSError as error:
        stop(f"{error}; the same command resumes", 1)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make the folder of ``--out``; if the block leaves a new one empty, it is removed.

    Raises ValueError, in one line, if it cannot be made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: cannot write to {folder} ({error.strerror}); name another folder"
        ) from None
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()


@contextmanager
def watched(
    console: Console, count: Callable[[], int], show: Callable[[int], None]
) -> Iterator[None]:
    """A block during which a thread calls ``show`` with the result of ``count``, every two seconds
    on a terminal, else every minute."""
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
    """The number of the last row in a run directory's metrics; 0 if there is none."""
    try:
        with (run / "metrics.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LONGEST_ROW))
            rows = file.read().splitlines()[1:]
        return int(rows[-1].partition(b",")[0])
    except (OSError, IndexError, ValueError):  # ValueError: its header is being written
        return 0

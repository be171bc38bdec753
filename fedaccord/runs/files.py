"""Files that are whole, whatever happens while they are written."""

import hashlib
import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the whole of its old or of its new content.

    Raises OSError, which names the file.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a machine that stops does not leave an empty file
        beside.replace(path)
    except OSError as error:
        raise of_file(error, path) from None
    finally:
        beside.unlink(missing_ok=True)  # there only where something above failed


def contents(path: Path) -> str:
    """A hash of a file's content, or of the names and sizes of the files below a folder; it stays
    when the path is moved. Where nothing lies: the path."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        text = repr([(file.relative_to(path).as_posix(), file.stat().st_size) for file in files])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return str(path)


def of_file(error: OSError, path: Path) -> OSError:
    """The same error, told of this file."""
    return OSError(error.errno, error.strerror, str(path))

"""Files that are whole, whatever happens while they are written."""

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


def of_file(error: OSError, path: Path) -> OSError:
    """The same error, told of this file."""
    return OSError(error.errno, error.strerror, str(path))

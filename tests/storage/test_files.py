"""Files that are replaced as a whole."""

import errno
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from fedaccord.storage import files
from fedaccord.storage.files import replace, syncfs  # as they are, before a fixture


def test_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for content in (b"one", b"two"):
        replace(link, content)
        assert link.is_symlink()
        assert file.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_the_unfinished_file_of_a_killed_process_of_the_same_number_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / f".file.{os.getpid()}").write_bytes(b"half")
    replace(tmp_path / "file", b"whole", mode=0o600)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """As /dev/stdout, here a pipe."""
    pipe, contents = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: contents.append(pipe.read_bytes()), daemon=True)
    reader.start()
    replace(pipe, b"text")
    reader.join(10)
    assert contents == [b"text"]
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path, b"text")


def test_a_pipe_without_a_path_is_written_to() -> None:
    """As /dev/stdout where the output is piped on."""
    out, into = os.pipe()
    replace(Path(f"/dev/fd/{into}"), b"text")
    assert os.read(out, 10) == b"text"
    os.close(out)
    os.close(into)


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(files, "syncfs", fails)
    with pytest.raises(OSError, match=r"Input/output error: ") as raised:
        files.sync_files(tmp_path / "a" / name for name in ("x", "y"))
    assert raised.value.filename == str(tmp_path / "a")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's function")
def test_an_error_of_syncfs_is_raised() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        syncfs(-1)

"""Files that are replaced as a whole."""

import os
import stat
import threading
from pathlib import Path

import pytest

from fedaccord.storage.files import replace


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

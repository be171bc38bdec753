"""Freed memory stays with the process that asks for it; nothing is searched for while it loads."""

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from fedaccord.process import allocator
from fedaccord.process.allocator import (
    forget_file_pages,
    give_back_memory,
    keep_freed_memory,
    uncollected,
)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_memory_is_used_again_without_a_page_fault() -> None:
    import resource

    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")
    keep_freed_memory()

    def faults_of_twenty() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(20):
            torch.zeros(1 << 23)  # 32 MB, 8192 pages
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    faults_of_twenty()  # the heap may grow a few times before it has room for the same again
    assert faults_of_twenty() < 8192


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has malloc_trim")
def test_freed_memory_below_what_is_used_goes_back() -> None:
    """As of client states that were allocated before something that stays."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    keep_freed_memory()  # from here on everything is in the heap, whatever ran before
    states = [torch.ones(200_000) for _ in range(250)]  # 200 MB
    stays = torch.ones(200_000)
    states.clear()
    before = resident("RssAnon:")
    give_back_memory()
    assert resident("RssAnon:") < before - 150
    assert stays.sum() == 200_000


def test_the_search_for_unreachable_objects_rests_and_leaves_out_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # as before its import
    frozen = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
            objects = [object()]
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        assert not any(objects is each for each in gc.get_objects())  # which lists what is searched
    finally:
        gc.unfreeze()


def test_a_process_with_pytorch_is_searched_as_before() -> None:
    frozen = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/smaps")
def test_clean_pages_of_files_are_dropped_and_written_ones_stay(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(empty := bytes(1 << 24))
    with file.open("rb") as stream:
        clean, dirty = (mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) for _ in range(2))
    dirty[5] = 7
    assert [clean[:], sum(dirty[:])] == [empty, 7]  # all pages are there
    before = resident("RssFile:")
    forget_file_pages()
    assert resident("RssFile:") < before - 12  # of `clean`; others are mapped again meanwhile
    assert [clean[:], sum(dirty[:])] == [empty, 7]
    assert torch.ones(3).sum() == 3
    clean.close()
    dirty.close()


@pytest.mark.parametrize("content", [None, b"\n", b"00-10 r--p 0 0:0 0 /home/jos\xe9/lib.so\n"])
def test_file_pages_stay_if_they_are_not_listed(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the file, with an empty line, with a name that is not UTF-8."""
    smaps = tmp_path / "smaps"
    if content is not None:
        smaps.write_bytes(content)
    monkeypatch.setattr(allocator, "Path", lambda name: smaps)
    forget_file_pages()


def resident(kind: str) -> float:
    """MB of this process's memory: RssFile:, of files; RssAnon:, its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(it.split()[1]) / 1024 for it in lines if it.startswith(kind))

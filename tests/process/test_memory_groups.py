"""The memory that a container or a batch job leaves to this process."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fedaccord.data.kind import check_fits
from fedaccord.process import memory_groups
from fedaccord.process.allocator import free_memory

GB = 10**9
Tree = Callable[[dict[str, object]], None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Write files in place of /sys/fs/cgroup; "processes" is /proc/self/cgroup."""
    monkeypatch.setattr(memory_groups, "ROOT", tmp_path)
    monkeypatch.setattr(memory_groups, "OF_THIS_PROCESS", tmp_path / "processes")

    def write(files: dict[str, object]) -> None:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    return write


CONTAINER = {  # with half a GB of processes, and the page cache of the files that they have read
    "memory.max": 4 * GB,
    "memory.current": 39 * GB // 10,
    "memory.stat": f"anon {GB // 2}\nfile {34 * GB // 10}\ninactive_file {3 * GB}\n"
    f"active_file {4 * GB // 10}",
}
VERSION_1 = {
    "processes": "4:cpu,memory:/docker/abc\n0::/",
    "memory/memory.limit_in_bytes": 2 * GB,
    "memory/memory.usage_in_bytes": GB,
    "memory/memory.stat": f"cache 5\ninactive_file 7\ntotal_inactive_file {GB // 2}",
}
JOB = {  # as of Slurm, or systemd-run -p MemoryMax=2G
    "processes": "0::/job/step",
    "job/memory.max": 2 * GB,
    "job/memory.current": GB,
    "job/step/memory.max": "max",
    "job/step/memory.current": GB // 2,
}
EXPECTED = [(CONTAINER, 4, 3.5), (VERSION_1, 2, 1.5), (JOB, 2, 1.0)]


@pytest.mark.parametrize(("files", "limit", "free"), EXPECTED, ids=["container", "v1", "job"])
def test_the_smallest_group_decides(
    files: dict[str, object], limit: int, free: float, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.data.kind.os.sysconf", lambda name: 10**6)
    tree(files)
    assert free_memory() == free * GB
    check_fits("these", limit * GB)
    with pytest.raises(ValueError, match=re.escape(f"these: expected at most the {limit:.1f} GB")):
        check_fits("these", limit * GB + 1)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max", "memory.current": GB},
        {"processes": "0::/../other\nno group", "memory/memory.limit_in_bytes": 2**63 - 4096},
    ],
)
def test_without_a_limit_the_machine_decides(
    files: dict[str, object], tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    tree(files)
    assert free_memory() == available.available
    check_fits("these", 1000)

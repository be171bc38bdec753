"""The control groups of this process that limit its memory, as of a container or a batch job."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OF_THIS_PROCESS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


class Group(NamedTuple):
    """Bytes of a group and all groups in it."""

    limit: int
    free: int  # with the page cache of files, which the system drops first


class Version(NamedTuple):
    """The names of files, and of the entries of memory.stat for the page cache."""

    limit: str
    used: str
    cached: tuple[str, str]


V1 = Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def groups() -> Iterator[Group]:
    """The groups with a limit that have this process, and those above them; none without Linux."""
    for top, name, version in _names():
        group = top / name.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                with suppress(OSError, ValueError):  # a container's own tree, or no limit
                    limit = int((folder / version.limit).read_text())
                    free = limit - int((folder / version.used).read_text())
                    yield Group(limit, free + _cached(folder, version))


def _names() -> Iterator[tuple[Path, str, Version]]:
    """The tree, the name and the version of each group that counts this process's memory."""
    yield ROOT, "", V2  # if /proc does not name them
    yield ROOT / "memory", "", V1
    with suppress(OSError):
        for line in OF_THIS_PROCESS.read_text(errors="replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, name = rest.partition(":")
            if not controllers:
                yield ROOT, name, V2
            elif "memory" in controllers.split(","):
                yield ROOT / "memory", name, V1


def _cached(folder: Path, version: Version) -> int:
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        entries = dict(line.split() for line in lines)
        return sum(int(entries.get(name, 0)) for name in version.cached)
    return 0

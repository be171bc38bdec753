"""The origin of results: versions, commit, machine and process."""

import json
import platform
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

PACKAGES = ("fedaccord", "flwr", "torch", "torchvision", "numpy")
NAME = "fedaccord"
DIRTY = "-dirty"  # Git's end of the name of a commit with changes that were not committed


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # for example, Flower runs the app's files without installing them
        return ""


@cache  # of what this process has imported, whatever is committed later
def commit() -> str:
    """The commit of the code, with `DIRTY` if it has changes; empty: unknown.

    Flower runs a copy of the package without its history: the commit is then that of the checkout
    or repository from which the installed package comes, if its files are the same.
    """
    package = Path(__file__).parents[1]
    if (package.parent / ".git").exists():  # not that of a project that contains our files
        return _describe(package.parent)
    try:
        installed = distribution(NAME)
        source = json.loads(installed.read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    return _installed_commit(package, installed, source)


def _installed_commit(package: Path, installed: Distribution, source: Mapping[str, Any]) -> str:
    """source: of PEP 610."""
    if "vcs_info" in source:
        files = Path(str(installed.locate_file(NAME)))
        return str(source["vcs_info"]["commit_id"]) if same_files(package, files) else ""
    checkout = Path(url2pathname(urlparse(source.get("url", "")).path))
    is_checkout = (checkout / ".git").exists() and same_files(package, checkout / NAME)
    return _describe(checkout) if is_checkout else ""


def same_files(one: Path, other: Path) -> bool:
    """Whether the Python files of one folder, at least one, are the same in another.

    The app's bundle lacks packages that the apps do not import.
    """

    def files(folder: Path) -> dict[Path, bytes]:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.py")}

    mine = files(one)
    return bool(mine) and mine.items() <= files(other).items()


def _describe(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        git = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return git.stdout.strip()


def processor() -> str:
    """The CPU's name, if the system reports one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def process() -> dict[str, Any]:
    """This process, for `is_alive` in another one."""
    import psutil

    me = psutil.Process()
    where = {"host": socket.gethostname(), "boot": _boot()}
    return where | {"pid": me.pid, "started": me.create_time()}


def _boot() -> str:
    """Id of this boot of the machine, which its containers share; empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_here(of: Mapping[str, Any]) -> bool:
    """Whether a `process` is, or was, one of this machine or of a container on it."""
    return is_same_host(of) or of.get("boot", "") == _boot() != ""


def is_same_host(of: Mapping[str, Any]) -> bool:
    """Whether a `process` is, or was, one of this machine or of this container."""
    return bool(of["host"] == socket.gethostname())


def is_alive(of: Mapping[str, Any]) -> bool:
    """Whether a `process` of this machine still runs.

    A later process with the same number has another start time.
    """
    import psutil

    try:
        now = psutil.Process(of["pid"])
        same = abs(now.create_time() - of["started"]) < 2  # seconds: clocks are corrected
        return same and now.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it runs under another user
        return True

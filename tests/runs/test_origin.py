"""The origin of results: the commit, also of a copy of the package; versions; live processes."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedaccord.runs import origin

PACKAGE = Path(origin.__file__).parents[1]


@pytest.fixture(autouse=True)
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "commit", origin.commit.__wrapped__)


def git(*words: str, folder: Path) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    result = subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, check=True)
    return result.stdout.decode().strip()


def test_the_commit_is_that_of_this_checkout() -> None:
    checkout = PACKAGE.parent
    head = git("rev-parse", "HEAD", folder=checkout) if (checkout / ".git").exists() else ""
    assert origin.commit().removesuffix(origin.DIRTY) == head


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package that runs as Flower runs it: from a copy without history."""
    package = tmp_path / "apps" / "fedaccord.1.0" / "fedaccord"
    (package / "runs").mkdir(parents=True)
    (package / "runs" / "origin.py").touch()
    monkeypatch.setattr(origin, "__file__", str(package / "runs" / "origin.py"))
    return package


def install(monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], files: Path) -> None:
    """Make the environment report that the package was installed from ``source`` into ``files``."""

    class Installed(Distribution):
        def read_text(self, filename: str) -> str | None:
            return json.dumps(source) if filename == "direct_url.json" else None

        def locate_file(self, path: Any) -> Any:
            return files / path

    monkeypatch.setattr(origin, "distribution", lambda _: Installed())


def test_a_copy_has_the_commit_of_the_checkout_it_was_made_from(
    tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(copy, checkout / "fedaccord")
    (checkout / "fedaccord" / "cli.py").touch()  # which the app's bundle leaves out
    git("init", "-q", folder=checkout)
    git("add", ".", folder=checkout)
    git("commit", "-q", "-m", "x", folder=checkout)
    install(monkeypatch, {"url": checkout.as_uri(), "dir_info": {"editable": True}}, tmp_path)
    commit = git("rev-parse", "HEAD", folder=checkout)
    assert origin.commit() == commit
    for package in (copy, checkout / "fedaccord"):
        (package / "more.py").write_text("x = 1")
        # first they differ; then both are what was changed since the commit
        assert origin.commit() == ("" if package == copy else commit)
    git("add", ".", folder=checkout)
    assert origin.commit() == f"{commit}-dirty"


def test_a_copy_of_what_was_installed_from_a_repository_has_its_commit(
    tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}
    shutil.copytree(copy, tmp_path / "site-packages" / "fedaccord")
    install(monkeypatch, source, tmp_path / "site-packages")
    assert origin.commit() == "a" * 40
    (copy / "more.py").touch()
    assert origin.commit() == ""


def test_the_commit_of_a_project_that_holds_the_files_is_not_taken(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy.parents[1] / ".git").mkdir()
    install(monkeypatch, {}, copy)
    assert origin.commit() == ""


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PACKAGES", ("torch", "no-such-package-anywhere"))
    versions = origin.versions()
    assert versions["torch"] == torch.__version__.partition("+")[0]
    assert versions["no-such-package-anywhere"] == ""
    assert origin.processor()


def test_a_process_is_alive_until_it_ends() -> None:
    me = origin.process()
    assert me["pid"] == os.getpid()
    assert origin.is_alive(me)
    assert not origin.is_alive(me | {"started": me["started"] - 100})  # who had the number before
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not origin.is_alive(me | {"pid": child.pid, "started": me["started"] - 100})
    start = psutil.Process(child.pid).create_time()
    process = me | {"pid": child.pid, "started": start}
    assert origin.is_alive(process)
    assert child.stdin is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not origin.is_alive(process)  # a zombie
    child.wait()
    assert not origin.is_alive(process)

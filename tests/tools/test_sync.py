"""`tools/sync.py`: the committed files are up to date, and it finds stale ones."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pages
import pytest
import sync

from fedaccord.plugins import PLUGINS
from fedaccord.strategies import BUILT_IN

WRITTEN = (
    *("pyproject.toml", "README.md", "docs/methods", "docs/metrics.md"),
    *("docs/results/reproduction.md", "docs/results/reproduction.csv"),
    *("fedaccord/strategies/__init__.py", "fedaccord/plugins/__init__.py"),
    "fedaccord/experiments/analysis/options.json",
)


@pytest.fixture(scope="module", autouse=True)
def made_once() -> Iterator[None]:
    """What is derived from the code alone is computed once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pages", "readme_list"):
            patch.setattr(pages, name, cache(getattr(pages, name)))
        yield


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that it writes, used as the repository."""
    for name in WRITTEN:
        source, target = sync.ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["sync.py", *arguments])
    return sync.main()


def test_the_committed_files_are_what_it_writes() -> None:
    """Fix them with `uv run python tools/sync.py`."""
    assert [str(path) for path in sync.stale(sync.ROOT)] == []


def test_a_page_for_every_method_and_plugin() -> None:
    names = {path.stem for path in (sync.ROOT / "docs" / "methods").iterdir()}
    assert names == {"README", *BUILT_IN, *PLUGINS}


def test_stale_files_are_named_and_then_written(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: (copy / name).read_text() for name in WRITTEN[:2]}
    for name, old, new in (
        ("pyproject.toml", "num-clients = 20", "num-clients = 21"),
        ("README.md", "[fedavg](docs", "[fedavg](documents"),
        ("docs/methods/fedinit.md", "relaxed", "tense"),
        ("docs/results/reproduction.md", "82.52", "83.52"),
        ("fedaccord/strategies/__init__.py", "FedAvg as FedAvg", "FedAvg as FedAverage"),
        ("fedaccord/plugins/__init__.py", "SAM as SAM", "SAM as Sam"),
        ("fedaccord/experiments/analysis/options.json", '"num-clients": [20', '"num-clients": [21'),
    ):
        text = (copy / name).read_text()
        assert old in text
        (copy / name).write_text(text.replace(old, new))
    (copy / "docs" / "methods" / "gone.md").write_text("of a method that is gone")
    (copy / "docs" / "methods" / "sam.md").unlink()
    files = ["README.md", "docs/methods/fedinit.md", "docs/methods/gone.md"]
    files += ["docs/methods/sam.md", "docs/results/reproduction.md"]
    files += ["fedaccord/experiments/analysis/options.json"]
    files += ["fedaccord/plugins/__init__.py", "fedaccord/strategies/__init__.py", "pyproject.toml"]

    assert run(monkeypatch, "--check") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(f"{name} is stale" for name in files), "run `uv run python tools/sync.py`"]
    assert "(documents" in (copy / "README.md").read_text()  # nothing is written

    assert run(monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name} written" for name in files]
    assert {name: (copy / name).read_text() for name in before} == before
    assert not (copy / "docs" / "methods" / "gone.md").exists()
    assert run(monkeypatch, "--check") == 0
    assert capsys.readouterr().out == ""


def test_a_file_without_its_marked_line_is_not_changed(copy: Path) -> None:
    (copy / "README.md").write_text("# FedAccord\n")
    with pytest.raises(
        SystemExit, match=r"README.md: expected a line that begins with '<summary>The'"
    ):
        sync.stale(copy)


def test_methods_of_other_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync, "METHODS", {**BUILT_IN, "theirs": BUILT_IN["fedavg"]})
    assert run(monkeypatch) == 1
    assert "'theirs' too: uninstall its package" in capsys.readouterr().out

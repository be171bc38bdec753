"""The text that each mutant of tests/mutants.toml replaces occurs in its file."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
MISTAKES = [(file, name) for file, mistakes in TABLE.items() for name in mistakes]


@pytest.mark.parametrize(("file", "name"), MISTAKES)
def test_the_text_of_a_mutant_occurs_once(file: str, name: str) -> None:
    old, new, tests = TABLE[file][name]
    assert (ROOT / file).read_text("utf-8").count(old) == 1
    assert new != old
    assert (ROOT / "tests" / tests.split()[0].partition("::")[0]).exists()

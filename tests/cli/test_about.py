"""The parts of the docstring of a method's file; it may lack some."""

import sys
import types

import pytest

from fedaccord.cli.about import about


@pytest.mark.parametrize(
    ("text", "title", "source"),
    [
        (None, "Theirs", ""),
        ("One line.", "One line", ""),
        ("Title.\n\nThey. 2024,\narXiv:2401.00001.", "Title", "They. 2024, arXiv:2401.00001."),
    ],
)
def test_a_docstring_without_the_usual_parts(
    monkeypatch: pytest.MonkeyPatch, text: str | None, title: str, source: str
) -> None:
    monkeypatch.setitem(sys.modules, "theirs", types.ModuleType("theirs", text))
    kind = type("Theirs", (), {"__module__": "theirs"})
    assert about(kind)[:2] == (title, source)
    assert about(kind).arxiv == ("2401.00001" if "arXiv" in source else "")
    assert about(kind)[3:] == ([], "", "")

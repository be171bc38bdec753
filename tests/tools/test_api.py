"""The API page: whole, the same on every machine, and importable as it says."""

import re
from importlib import import_module

import api

import fedaccord


def test_what_it_names_can_be_imported_so() -> None:
    names = re.findall(r"^### (\S+)$", api.page(), re.MULTILINE)
    assert len(names) == sum(len(part.objects) for part in api.PARTS)
    assert {f"fedaccord.{name}" for name in fedaccord.__all__ if name[0] != "_"} <= {*names}
    for name in names:
        home = next(n for n in range(name.count("."), 0, -1) if _is_module(name, n))
        thing = import_module(".".join(name.split(".")[:home]))
        for part in name.split(".")[home:]:
            thing = getattr(thing, part)


def _is_module(name: str, length: int) -> bool:
    try:
        import_module(".".join(name.split(".")[:length]))
    except ModuleNotFoundError:
        return False
    return True


def test_it_has_signatures_and_docstrings_without_addresses() -> None:
    page = api.page()
    assert "    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,\n" in page
    assert "def " not in page
    assert " at 0x" not in page
    assert page.count("```") % 2 == 0


def test_what_has_no_docstring_is_not_shown() -> None:
    class Thing:
        """A thing."""

        def told(self, x: int = 3) -> "Thing":
            """What it does.

            x: a number
               and more
            """
            return self

        def untold(self) -> None: ...

    assert [*api._body(Thing)] == [
        "A thing.",
        "```python\ntold(x: int = 3) -> Thing\n```",
        "What it does.",
        "```text\nx: a number\n   and more\n```",
    ]

"""Functions that settings name: what is imported, what they are given, and what is refused."""

import importlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fedaccord.core import named

CODE = """
size = 3

def nothing():
    return "nothing"

def some(classes, width=4):
    return classes, width

def two(shape, *, classes, **rest):
    return shape, classes, rest

def other(width, shape):
    return width

def wrong():
    raise KeyError("a\\nb")
"""
OFFERED = {"shape": (3,), "classes": 2}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that can be imported, by a name that no other test uses."""
    name = f"own_{abs(hash(tmp_path.name)) % 10**8}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "nets.py").write_text(CODE)
    (tmp_path / name / "broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("function", "expected"), [("nothing", "nothing"), ("some", (2, 4)), ("two", ((3,), 2, {}))]
)
def test_a_function_gets_what_it_has_parameters_for(
    package: str, function: str, expected: Any
) -> None:
    assert named.call("model", f"{package}.nets:{function}", OFFERED) == expected


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "absent.nets:net",
            r"model: expected a module .*, absent.nets of .* \(ModuleNotFoundError",
        ),
        ("{}.broken:net", r"{}.broken of .* cannot \(ModuleNotFoundError: .*'no_such_package' at "),
        (
            "{}.nets:nothin",
            r"function of {}.nets, it has no 'nothin' \(did you mean 'nothing'\?\)$",
        ),
        ("{}.nets:size", r"model: expected a function, {}.nets:size is a int$"),
        ("{}.nets:other", r"no parameters, or of shape, classes, .*; {}.nets:other has 'width': "),
        ("{}.nets:wrong", r"model: {}.nets:wrong failed: KeyError: 'a\\nb' at .*nets.py:17$"),
    ],
)
def test_what_is_wrong_is_one_line(package: str, name: str, line: str) -> None:
    with pytest.raises(ValueError, match=line.replace("{}", package)) as error:
        named.call("model", name.replace("{}", package), OFFERED)
    assert str(error.value).startswith("model: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "is_function"),
    [
        ("a:b", True),
        ("a.b_c.d1:E", True),
        ("a", False),
        ("a.b", False),
        (":b", False),
        ("a:", False),
        ("a:b.c", False),
        ("a:b:c", False),
        ("a..b:c", False),
        ("1a:b", False),
        ("a:b()", False),
        ("../a:b", False),
        (3, False),
    ],
)
def test_the_form_of_a_name(name: Any, is_function: bool) -> None:
    assert (name in named.Functions()) == is_function


def test_an_entry_point_has_a_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("tiny", "no_such_package.nets:tiny", "fedaccord.models")

    def found(group: str, name: str) -> tuple[EntryPoint, ...]:
        return (entry,) * ((group, name) == ("fedaccord.models", "tiny"))

    monkeypatch.setattr(named, "entry_points", found)
    assert named.Functions("fedaccord.models").path("tiny") == entry.value
    assert named.Functions("fedaccord.datasets").path("tiny") == ""
    assert "tiny" not in named.Functions()
    assert "no_such_package" not in sys.modules  # nothing is imported


def test_code_is_that_of_the_last_import(package: str) -> None:
    path = f"{package}.nets:nothing"
    before = named.code("model", path)
    module = sys.modules[f"{package}.nets"]
    assert module.__file__ is not None
    Path(module.__file__).write_text(CODE + "# changed\n")
    assert named.code("model", path) == before
    importlib.reload(module)
    after = named.code("model", path)
    assert after != before
    assert named.code("model", path) == after


def test_code_without_a_file_is_the_source_of_the_object(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose cells have a source."""
    module = named.import_module(f"{package}.nets")
    monkeypatch.delattr(module, "__file__")
    one, other = (named.code("metrics", f"{package}.nets:{name}") for name in ("nothing", "some"))
    assert one
    assert other not in (one, "")
    assert named.code("metrics", f"{package}.nets:size") == ""  # a number has none

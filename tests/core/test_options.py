"""Options: their types and ranges, what leaves one unread, and the docstrings made of them."""

from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.core.options import (
    argument,
    check_option,
    describe,
    option,
    options,
    range_text,
    unread,
)


@dataclass(kw_only=True)
class Drawing:
    shape: str = option("round", "of what is drawn", choices=("round", "square"))
    radius: float = option(1.0, "of a round one", above=0, only={"shape": ["round"]})
    side: int = option(0, "of a square one", low=0, only={"shape": ["square"], "radius": [1.0]})
    start: float = option(-1.0, "-1: by itself", low=0, high=5, besides=-1, tried="2")
    name: str = argument("", "what it is called")
    draft: int = 0


def check(name: str, value: Any) -> Any:
    return check_option(name, value, next(f for f in fields(Drawing) if f.name == name))


@pytest.mark.parametrize("value", [-1.0, 0, 5.0, -1])
def test_one_value_beside_the_range_is_taken(value: float) -> None:
    assert check("start", value) == value


@pytest.mark.parametrize("value", [-0.3, -2.0, -1.0000001, 5.1])
def test_values_between_it_and_the_range_are_not(value: float) -> None:
    line = f"^start: expected at least 0 and at most 5, or -1, got {value}$"
    with pytest.raises(ValueError, match=line):
        check("start", value)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("side", 2**63, r"side: expected an integer below 2\^63, got 9223372036854775808"),
        ("side", -(10**400), "side: expected at least 0, got -1000"),
        ("start", 10**400, "start: expected a number below 3.4e38"),
        ("radius", 0, "radius: expected above 0, got 0.0"),
        ("radius", "1", "radius: expected a number, got '1'"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_the_option(
    name: str, value: Any, line: str
) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        check(name, value)
    assert check("side", 2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("scalar", [np.float32, np.float64, np.int64, np.array, torch.tensor])
def test_a_scalar_of_numpy_or_pytorch_is_pythons(scalar: Any) -> None:
    value = check("start", scalar(2))
    assert (type(value), value) == (float, 2.0)
    with pytest.raises(ValueError, match=r"^side: expected an integer, got 2\.5$"):
        check("side", np.float64(2.5))
    with pytest.raises(ValueError, match=r"^side: expected an integer, got True$"):
        check("side", np.bool_(True))


def test_an_option_that_others_leave_unread_is_told_with_what_would_read_it() -> None:
    assert unread(Drawing()) == {"side": "shape=square"}
    assert unread(Drawing(shape="square")) == {"radius": "shape=round"}
    assert unread(Drawing(shape="square", radius=2.0)) == {
        "radius": "shape=round",
        "side": "radius=1.0",
    }


def test_a_docstring_tells_meaning_range_and_default_of_every_argument() -> None:
    describe(Drawing)
    assert Drawing.__doc__ is not None
    title, _, table = Drawing.__doc__.partition("Arguments, by keyword, with their defaults:\n")
    assert title.startswith("Options: their types and ranges")
    assert table.splitlines() == [
        "  shape = 'round': of what is drawn (round, square)",
        "  radius = 1.0: of a round one (above 0)",
        "  side = 0: of a square one (at least 0)",
        "  start = -1.0: -1: by itself (at least 0 and at most 5, or -1); tried: 2",
        "  name = '': what it is called",
    ]


def test_own_arguments_stand_before_shared_ones_and_a_docstring_stays() -> None:
    @dataclass(kw_only=True)
    class Mine(Drawing):
        """My own words."""

        more: int = option(3, "of mine", low=1)

    describe(Mine, common=Drawing)
    assert Mine.__doc__ is not None
    lines = Mine.__doc__.splitlines()
    assert lines[0] == "My own words."
    assert lines[3] == "  more = 3: of mine (at least 1)"
    assert lines[4].startswith("  shape = 'round'")


def test_an_argument_is_no_option() -> None:
    assert "name" not in [f.name for f in options(Drawing)]
    assert [range_text(f) for f in options(Drawing)][1] == "above 0"


@pytest.mark.parametrize(
    ("kind", "default", "line"),
    [
        (float, 1, "Wrong.mu: expected a float, .*, got float and 1$"),
        ("float", 1, "Wrong.mu: expected a float, .*, got float and 1$"),
        (float, None, "Wrong.mu: expected a float, .*, got float and None$"),
        (tuple, (0.1, 0.2), r"Wrong.mu: expected a float, .*, got tuple and \(0.1, 0.2\)$"),
    ],
)
def test_a_default_of_another_type_than_the_option_is_one_line(
    kind: Any, default: Any, line: str
) -> None:
    """``mu: float = option(1, ...)`` would refuse 0.5."""
    wrong = make_dataclass("Wrong", [("mu", kind, option(default, "a strength"))])
    with pytest.raises(TypeError, match=f"^{line}"):
        options(wrong)
    assert options(make_dataclass("Right", [("mu", "float", option(1.0, "a strength"))]))

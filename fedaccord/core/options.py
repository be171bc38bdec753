"""Options: dataclass fields that are also run-config keys, with their meaning and range."""

import dataclasses
import difflib
import inspect
import math
import sys
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

FREE = ("records", "speed", "place")  # no number of a run depends on them
LARGEST = (2 - 2**-23) * 2.0**127  # number that float32 holds: above it a step is inf
AFFECTS = ("numbers", "rounds", *FREE)
TYPES = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}
# how the names of files end
FILES = (".py", ".npz", ".npy", ".csv", ".json", ".jsonl", ".toml", ".txt", ".pt", ".pth")
_OPTIONS: "WeakKeyDictionary[type, tuple[dataclasses.Field[Any], ...]]" = WeakKeyDictionary()


def key_of(name: str) -> str:
    """The run-config key of a field: local_steps -> local-steps."""
    return name.replace("_", "-")


def option(
    default: Any,
    doc: str,
    *,
    affects: str = "numbers",
    path: bool = False,
    node: bool = False,
    managed: bool = False,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    besides: float | None = None,
    choices: Sequence[str] = (),
    also: Container[str] = (),
    tried: str = "",
    auto: bool = False,
    only: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """A dataclass field that is also a run-config key: its default, meaning and range.

    affects: "numbers", the model after a round; "rounds", their number, and which rounds and
    replies count; "records", what is measured; "speed"; "place", where processes and files are.
    A run may resume with other values of all options but "numbers", and runs that differ only
    in "records", "speed" and "place" are repetitions of each other.
    path: the value is a path; node: a device's node config may have its own value; managed: a
    sweep or a study sets it for each of its runs.
    also: values allowed beside ``choices``, as a `named.Functions`, which describes them.
    low, high: inclusive bounds; above: an exclusive lower bound; besides: one more value, outside
    the bounds; tried: values of the papers' experiments, empty if none are known; auto: a
    plug-in's option whose run-config default is "auto", the method's own choice; only: other
    options of the same class, and the values with which this one is read, their ``also`` among them
    if it is read with any of those.
    """
    bounds = {"low": low, "high": high, "above": above, "besides": besides}
    rule = {**bounds, "choices": tuple(choices), "also": also, "only": dict(only or {})}
    assert affects in AFFECTS, affects
    facts = {"affects": affects, "path": path, "node": node, "managed": managed}
    facts |= {"tried": tried, "auto": auto}
    return dataclasses.field(default=default, metadata={"doc": doc, **facts, **rule})


def argument(default: Any, doc: str, *, shown: bool = True) -> Any:
    """A documented dataclass field that is not a run-config key; shown: in the repr."""
    return dataclasses.field(default=default, repr=shown, metadata={"argument": doc})


def check_option(name: str, value: Any, field: "dataclasses.Field[Any]") -> Any:
    """``value`` as the option's type. Raises ValueError, in one line, on a wrong type or range."""
    kind: Any = type(field.default)
    value = plain(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _float(name, value)
    rule = field.metadata
    if isinstance(value, bool) and (word := str(value).lower()) in rule["choices"]:
        value = word  # as TOML reads it
    if type(value) is not kind:
        got = " ".join(repr(value).split())  # of an object, e.g. a PyTorch optimiser
        raise ValueError(f"{name}: expected {TYPES[kind]}, got {got:.80}")
    if kind is str and "\0" in value:
        what = "a path" if rule["path"] else "a text"
        raise ValueError(f"{name}: expected {what} without the character NUL, got {value!r}")
    if rule["choices"] and value not in rule["choices"] and value not in rule["also"]:
        near = did_you_mean(value, rule["choices"], rule["also"])
        raise ValueError(f"{name}: expected one of {range_text(field)}, got {value!r}{near}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if kind is float and abs(value) > LARGEST:
        raise ValueError(f"{name}: expected a number that float32 holds, up to 3.4e38, got {value}")
    if value == rule["besides"]:
        return value
    if (
        (rule["low"] is not None and value < rule["low"])
        or (rule["high"] is not None and value > rule["high"])
        or (rule["above"] is not None and value <= rule["above"])
    ):
        raise ValueError(f"{name}: expected {range_text(field)}, got {value}")
    if kind is int and abs(value) >= 2**63:  # the range of messages and generators
        raise ValueError(f"{name}: expected an integer below 2^63, got {value}")
    return value


def check_options(settings: Any) -> None:
    """Check every option of a dataclass, and store it as the option's type: 1 becomes 1.0."""
    for field in options(type(settings)):
        value = check_option(field.name, getattr(settings, field.name), field)
        object.__setattr__(settings, field.name, value)


def plain(value: Any) -> Any:
    """A scalar or 0-d array of NumPy or PyTorch as Python's scalar; other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_path(value: Any, field: "dataclasses.Field[Any]") -> bool:
    """Whether a value of an option is a path, not one of the option's choices."""
    rule = field.metadata
    return bool(rule["path"] and value and (not rule["choices"] or value in rule["also"]))


def range_text(field: "dataclasses.Field[Any]") -> str:
    """The allowed values of an option in words."""
    rule = field.metadata
    choices: Sequence[str] = rule["choices"]
    if choices:
        return ", ".join(choices) + (f", or {rule['also']}" if rule["also"] != () else "")
    words = {"low": "at least", "above": "above", "high": "at most"}
    text = " and ".join(f"{w} {rule[k]:g}" for k, w in words.items() if rule[k] is not None)
    return text if rule["besides"] is None else f"{text}, or {rule['besides']:g}"


def meaning(field: "dataclasses.Field[Any]", allowed: str = "") -> str:
    """An option's meaning, the ``allowed`` values in brackets, and the papers' values."""
    doc: str = field.metadata["doc"]
    tried: str = field.metadata["tried"]
    return doc + (f" ({allowed})" if allowed else "") + (f"; tried: {tried}" if tried else "")


def options(kind: type) -> "tuple[dataclasses.Field[Any], ...]":
    """The options of a dataclass.

    Raises TypeError, in one line, as `check_dataclass`, and for a default of another type than the
    option's: the default's type is that of all values, so ``mu: float = option(1, ...)`` would
    refuse 0.5.
    """
    if kind not in _OPTIONS:
        check_dataclass(kind)
        found = tuple(f for f in dataclasses.fields(kind) if "doc" in f.metadata)
        for field in found:
            declared = getattr(field.type, "__name__", str(field.type))
            if type(field.default) not in TYPES or declared != type(field.default).__name__:
                raise TypeError(
                    f"{kind.__name__}.{field.name}: expected a float, an int, a str or a bool as "
                    f"the type of an option, and a default of this type, got {declared} and "
                    f"{field.default!r}"
                )
        _OPTIONS[kind] = found
    return _OPTIONS[kind]


def check_dataclass(kind: type) -> None:
    """Raise TypeError, in one line, for a subclass of a dataclass with a field, but without
    @dataclass above it: its options would be unknown, and its defaults hold silently."""
    for cls in kind.__mro__:
        if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" in vars(cls):
            continue
        for name, of in inspect.get_annotations(cls).items():
            if "ClassVar" not in str(of):
                raise TypeError(
                    f"{cls.__name__}: expected @dataclass(...) above the class, as above "
                    f"{cls.__mro__[1].__name__}, for its field {name}"
                )


def unread(settings: Any) -> dict[str, str]:
    """The options of ``settings`` without effect beside its other options, and the setting that
    would give them one: ``{"classes_per_client": "partition=pathological"}``."""
    needs, every = {}, {field.name: field for field in options(type(settings))}
    for field in every.values():
        for name, values in field.metadata["only"].items():
            value, rule = getattr(settings, name), every[name].metadata
            also = () if value in rule["choices"] else rule["also"]
            if value not in values and not (also in values and value in also):
                needs[field.name] = f"{name.replace('_', '-')}={'|'.join(map(str, values))}"
    return needs


def describe(kind: type, common: type = object) -> None:
    """Write a dataclass's arguments into its docstring: meaning, range and default.

    Those that it shares with ``common`` are last. If the class has no docstring of its own, the
    title of its module is first.
    """
    title = inspect.cleandoc(kind.__doc__ or "")
    if not title or title.startswith(f"{kind.__name__}("):  # what `dataclass` writes
        module = sys.modules[kind.__module__]
        title = (module.__doc__ or kind.__name__).strip().splitlines()[0]
        title += f"\n\nPseudo-code, use, differences from the paper: help({kind.__module__})."
    shared = {f.name for f in dataclasses.fields(common)} if common is not object else set()
    lines = [title, "", "Arguments, by keyword, with their defaults:"]
    for field in sorted(dataclasses.fields(kind), key=lambda f: f.name in shared):
        if "doc" in field.metadata:
            text = meaning(field, range_text(field))
        elif "argument" in field.metadata:
            text = field.metadata["argument"]
        else:
            continue
        lines += _indented(f"{field.name} = {field.default!r}: {text}")
    kind.__doc__ = "\n".join(lines) + "\n"


@cache  # most arguments are those of all methods
def _indented(text: str) -> list[str]:
    return textwrap.wrap(
        text, 92, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )


def did_you_mean(word: str, names: Iterable[str], also: Container[str] = ()) -> str:
    """A suggestion for a word that is not among the known ones, in any case; may be empty.

    also: other words, such as module:function, of which a user may have typed module.function; a
    word that ends as the name of a file is none of these.
    """
    path = ":".join(word.rsplit(".", 1))
    if "." in word and not word.lower().endswith(FILES) and path in also:
        return f" (did you mean {path!r}?)"
    by_lower = {name.lower(): name for name in names}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[match[0]]!r}?)" if match else ""


def listed(items: Iterable[Any], most: int = 10) -> str:
    """The items in brackets, the first ``most`` of them, as "[0, 1, 2, and 990 more]"."""
    every = [*items]
    more = [f"and {len(every) - most} more"] if len(every) > most else []
    return f"[{', '.join([*map(repr, every[:most]), *more])}]"


def _float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number below 3.4e38, got a larger integer") from None

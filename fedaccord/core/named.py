"""Functions that a setting names: ``package.module:function``, or an entry point of a package."""

import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fedaccord.core.options import did_you_mean

WORD = r"[^\W\d]\w*"
PATH = re.compile(rf"{WORD}(\.{WORD})*:{WORD}")
FORM = "package.module:function"
_HASHES: WeakKeyDictionary[ModuleType, tuple[Any, str]] = WeakKeyDictionary()


class Functions(NamedTuple):
    """Functions that a setting accepts beside its choices."""

    group: str = ""  # of entry points: a name -> package.module:function; empty: no group

    def __str__(self) -> str:
        return FORM

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.path(name) != ""

    def path(self, name: str) -> str:
        """``package.module:function`` for this name; empty if there is none."""
        if PATH.fullmatch(name):
            return name
        entries = entry_points(group=self.group, name=name) if self.group else ()
        return next((entry.value.replace(" ", "") for entry in entries), "")


def behind(rule: Mapping[str, Any], value: str) -> list[str]:
    """``package.module:name`` of each function that a value names; rule: of its option."""
    if not isinstance(rule["also"], Functions) or value in rule["choices"]:
        return []
    return [path for name in value.split(",") if (path := rule["also"].path(name.strip()))]


def load(key: str, path: str) -> Any:
    """The object that ``package.module:name`` refers to; imports the module.

    key: the setting. Raises ValueError, in one line, if the module cannot be imported or lacks it.
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # the module's own code may raise anything
        raise ValueError(
            f"{key}: expected a module that can be imported here, {module_name} of {path!r} cannot "
            f"({one_line(error)}): install its package, or start from the folder that has it"
        ) from error
    if not hasattr(module, name):
        near = did_you_mean(name, [n for n in vars(module) if not n.startswith("_")])
        raise ValueError(f"{key}: expected a function of {module_name}, it has no {name!r}{near}")
    target = getattr(module, name)
    for each in _modules(path, target):
        _hash(each)
    return target


def function(key: str, path: str) -> Any:
    """As `load`; raises ValueError, in one line, for an object that cannot be called."""
    target = load(key, path)
    if not callable(target):
        raise ValueError(f"{key}: expected a function, {path} is a {type(target).__name__}")
    return target


def code(key: str, path: str) -> str:
    """A hash of the code of an object: of the files of its module and of the module that defines
    it, as they were at the first `load` in this process, or after a reload; without files, as in a
    notebook, of the object's source. Empty if there is no code. Raises as `load`."""
    target = load(key, path)
    texts = [_hash(module) or _hash_of_source(target) for module in _modules(path, target)]
    return hashlib.sha256(" ".join(texts).encode()).hexdigest() if all(texts) else ""


def files(key: str, path: str) -> list[Path]:
    """The files behind `code`. Raises as `load`."""
    file_names = (getattr(module, "__file__", None) for module in _modules(path, load(key, path)))
    return [Path(file) for file in file_names if file]


def _modules(path: str, target: Any) -> list[ModuleType]:
    """The module that a path names, and the module that defines the object."""
    while isinstance(target, partial):
        target = target.func
    of = getattr(inspect.unwrap(target) if callable(target) else type(target), "__module__", None)
    names = dict.fromkeys([path.partition(":")[0], of or ""])
    return [sys.modules[name] for name in names if name in sys.modules]


def _hash(module: ModuleType) -> str:
    """A hash of its file, read at the first call and after a reload; empty without a file."""
    spec, digest = _HASHES.get(module, (None, ""))
    if not digest or spec is not module.__spec__:
        file = Path(getattr(module, "__file__", None) or "")
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        _HASHES[module] = module.__spec__, digest
    return digest


def _hash_of_source(target: Any) -> str:
    """A hash of an object's source; empty if it has none."""
    try:
        return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def call(key: str, path: str, offered: Mapping[str, Any]) -> Any:
    """Call the function with those of the ``offered`` arguments that it has parameters for.

    Raises ValueError, in one line, as `load`, for a parameter that is not offered, and if the
    function fails.
    """
    called = function(key, path)
    takes = inspect.signature(called).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_name = [p.name for p in takes if p.kind in kinds]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in takes if p.default is p.empty and p.kind not in variadic]
    if strange := [name for name in required if name not in offered or name not in by_name]:
        some = f", or of {', '.join(offered)}, in any order" if offered else ""
        raise ValueError(
            f"{key}: expected a function of no parameters{some}; {path} has {strange[0]!r}: give "
            "it a default"
        )
    try:
        return called(**{name: offered[name] for name in by_name if name in offered})
    except Exception as error:
        raise ValueError(f"{key}: {path} failed: {one_line(error)}") from error


def call_unchanged(function: Any, *tensors: Any) -> Any:
    """The function's value. Raises TypeError if it changes one of the tensors in place."""
    before = [tensor._version for tensor in tensors]
    value = function(*tensors)
    if before != [tensor._version for tensor in tensors]:
        raise TypeError("it changes its arguments in place; copy them")
    return value


def one_line(error: Exception) -> str:
    """Type, text and place of an error in the user's code."""
    text = " ".join(str(error).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    places = [f" at {f.filename}:{f.lineno}" for f in frames if not f.filename.startswith("<")]
    return f"{type(error).__name__}: {text}{places[-1] if places[1:] else ''}"

"""Tables derived from a folder: one class per file."""

import inspect
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any


def classes(package: str, path: Iterable[str], base: Any) -> dict[str, Any]:
    """The one subclass of ``base`` in each file of a package, by the file's name with - for _.

    Files whose names begin with an underscore are skipped. Raises TypeError as `class_of`, and if
    two files name their class alike.
    """
    table, files = dict[str, Any](), dict[str, str]()
    for file in sorted(module.name for module in pkgutil.iter_modules(path)):
        if file.startswith("_"):
            continue
        kind = class_of(import_module(f"{package}.{file}"), base)
        if (other := files.setdefault(kind.__name__, file)) != file:
            raise TypeError(
                f"{package}.{file}: expected a class with a name of its own, got {kind.__name__}, "
                f"also that of {package}.{other}; rename one of them"
            )
        table[file.replace("_", "-")] = kind
    return table


def class_of(module: ModuleType, base: Any) -> Any:
    """The one subclass of ``base`` that a file defines. Raises TypeError for none or several."""
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and kind.__module__ == module.__name__
        and issubclass(kind, base)
        and not inspect.isabstract(kind)
    ]
    if len(kinds) != 1:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise TypeError(
            f"{module.__name__}: expected one subclass of {base.__name__} with all its methods, "
            f"got {names}; if it has none, begin the file's name with an underscore"
        )
    return kinds[0]

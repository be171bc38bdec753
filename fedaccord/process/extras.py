"""Packages that only some commands need, and the extras that install them."""

import re
from contextlib import suppress

PACKAGES = {"ray": "flwr", "sklearn": "scikit-learn"}  # module -> its package


def extra_of(module: str) -> str | None:
    """The smallest extra of FedAccord that installs an imported module; None: no extra does."""
    from importlib.metadata import PackageNotFoundError, requires

    name = module.partition(".")[0]
    extras: dict[str, list[str]] = {}
    with suppress(PackageNotFoundError):
        for line in requires("fedaccord") or []:
            if match := re.fullmatch(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line):
                extras.setdefault(match[2], []).append(match[1])
    having = [extra for extra, names in extras.items() if PACKAGES.get(name, name) in names]
    return min(having, key=lambda extra: len(extras[extra]), default=None)


def install(extra: str) -> str:
    """The advice in messages about a missing package."""
    return f"in the clone of FedAccord type `uv sync --extra {extra} --inexact`"

"""Hashes of what settings only name: of files, and of the code of functions and methods."""

import hashlib
from contextlib import suppress
from pathlib import Path

from fedaccord.config import RunConfig, affecting, in_use, keys, paths
from fedaccord.core import named
from fedaccord.core.options import FREE
from fedaccord.storage.files import contents

OF_DATA = ("dataset", "tokenizer")  # keys of functions that make the samples


def of_names(config: RunConfig, samples_known: bool) -> dict[str, str]:
    """By key, eight hexadecimal digits for each setting that affects the numbers and names a file
    or code that can be imported here. Known samples have `data.kind.Dataset.checksum` instead."""
    values, free = in_use(config), affecting(*FREE)
    found = {key: contents(Path(values[key])) for key in paths(values) if key not in free}
    for key, path in functions(config).items():
        if key in OF_DATA and samples_known:
            continue
        with suppress(ValueError):  # devices alone have it
            found[key] = of_code(key, path)
    return {key: digest[:8] for key, digest in found.items()}


def functions(config: RunConfig) -> dict[str, str]:
    """By key, ``package.module:name`` of each function that affects the numbers, and of a method
    of another package."""
    found, free = {}, affecting(*FREE)
    for key, value in in_use(config).items():
        rule = keys()[key].metadata
        if isinstance(rule["also"], named.Functions) and value not in rule["choices"]:
            found[key] = rule["also"].path(value)
    method = type(config.strategy)
    if not method.__module__.startswith("fedaccord."):  # whose code `origin.commit` has
        found["algo"] = f"{method.__module__}:{method.__qualname__}"
    return {key: path for key, path in found.items() if path and key not in free}


def of_code(key: str, path: str) -> str:
    """The files that define it, as a whole; files that these import do not count. Raises
    ValueError, in one line, if it cannot be imported."""
    digests = " ".join(contents(file) for file in named.files(key, path))
    return hashlib.sha256(digests.encode()).hexdigest()

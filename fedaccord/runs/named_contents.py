"""Hashes of the contents that settings name: files, and the code of functions and methods."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedaccord.config import RunConfig, affecting, in_use, keys, paths
from fedaccord.core import named
from fedaccord.core.options import FREE
from fedaccord.runs.directory import SAMPLES
from fedaccord.storage.files import contents

OF_DATA = ("dataset", "tokenizer")  # keys of functions that make the samples


def of_run(config: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """``data``, as `Task.fingerprint`, and by key eight hexadecimal digits for each setting that
    affects the numbers and names a file or code that can be imported here. Functions that make
    samples are left out if ``data`` has the samples' checksum."""
    values, free = in_use(config), affecting(*FREE)
    digests = {key: contents(Path(values[key])) for key in paths(values) if key not in free}
    for key, each in functions(config).items():
        if key in OF_DATA and SAMPLES in data:
            continue
        with suppress(ValueError):  # only devices have it
            digests[key] = of_code(key, each)
    return {**data, **{key: digest[:8] for key, digest in digests.items() if digest}}


def functions(config: RunConfig) -> dict[str, list[str]]:
    """By key, ``package.module:name`` of each function that affects the numbers or is a metric, and
    of a method of another package."""
    by_key, free, fields = {}, affecting(*FREE) - {"metrics"}, keys()
    for key, value in in_use(config).items():
        by_key[key] = named.behind(fields[key].metadata, value)
    method = type(config.strategy)
    if not method.__module__.startswith("fedaccord."):  # `origin.commit` has the code of ours
        by_key["algo"] = [f"{method.__module__}:{method.__qualname__}"]
    return {key: paths for key, paths in by_key.items() if paths and key not in free}


def of_code(key: str, paths: Sequence[str]) -> str:
    """A hash of functions, see `named.code`; empty if one has none. Raises ValueError, in one line,
    if one cannot be imported."""
    digests = dict.fromkeys(named.code(key, path) for path in paths)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest() if all(digests) else ""

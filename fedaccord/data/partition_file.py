"""A partition that the user wrote: JSON, {"0": [indices], "1": [...]} or a list of lists."""

import json
import logging
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from fedaccord.data.parts import Ints

log = logging.getLogger("flwr")  # what a run prints


def read(file: str, num_clients: int, num_samples: int) -> list[Ints]:
    """The samples of every client in the file.

    Samples with more than one holder are named in a warning. Raises ValueError, in one line, for
    anything else than num_clients non-empty lists of integers below num_samples.
    """
    if not file:
        raise ValueError("partition-file: expected a JSON file with partition=file, got no path")
    content = _parse(file)
    if isinstance(content, dict):
        keys = [str(i) for i in range(len(content))]
        if set(content) != set(keys):
            wrong = sorted(set(content) - set(keys))[0]
            raise ValueError(
                f"partition-file: expected the clients in {file!r} to be named '0' to "
                f"'{len(content) - 1}', got {short(wrong)}"
            )
        content = [content[key] for key in keys]
    if not isinstance(content, list):
        raise ValueError(
            f'partition-file: expected {{"0": [indices], ...}} or a list of lists in {file!r}, '
            f"got {type(content).__name__}"
        )
    if len(content) != num_clients:
        raise ValueError(
            f"partition-file: expected {num_clients} clients in {file!r}, got {len(content)}; "
            "set num-clients to the number in the file"
        )
    parts = [
        _indices(part, f"client {i} in {file!r}", num_samples) for i, part in enumerate(content)
    ]
    _warn_of_duplicates(parts, file)
    return parts


def _parse(file: str) -> Any:
    path = Path(file).expanduser()
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError("not a file")
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_each_once)
    except OSError as error:
        raise ValueError(
            f"partition-file: cannot read {file!r} ({error.strerror}); check the path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"partition-file: cannot read {file!r} as JSON: {error}; rewrite it"
        ) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two equal names, of which Python would use the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the client {short(twice)} occurs twice")
    return content


def _warn_of_duplicates(parts: list[Ints], file: str) -> None:
    """Warn in one line about samples in several places, which may be intended, with an example."""
    samples, times = np.unique(np.concatenate(parts), return_counts=True)
    if (times > 1).any():
        sample = samples[times > 1][0]
        holders = [i for i, part in enumerate(parts) if sample in part]
        whose = f"clients {holders[0]} and {holders[1]}" if holders[1:] else f"client {holders[0]}"
        log.warning(
            f"partition-file: {file!r} gives {(times > 1).sum()} of the samples more than once, "
            f"e.g. sample {sample} to {whose}"
        )


def _indices(part: object, whose: str, num_samples: int) -> Ints:
    if not isinstance(part, list) or not part:
        got = "an empty one" if part == [] else type(part).__name__
        raise ValueError(
            f"partition-file: expected a non-empty list of indices for {whose}, got {got}"
        )
    for index in part:
        if type(index) is not int or not 0 <= index < num_samples:
            raise ValueError(
                f"partition-file: expected integers from 0 to {num_samples - 1} for {whose}, "
                f"got {short(index)}"
            )
    return np.array(part, dtype=np.int64)

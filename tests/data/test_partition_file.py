"""Partitions that the user wrote: what is read, and what is refused in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedaccord.data import partition_file

SAMPLES = 1000


def test_file_of_a_dictionary_or_of_lists(tmp_path: Path) -> None:
    parts = [[4, 0], [1, 2, 3], *[[i] for i in range(4, 13)]]
    for name, content in [("l", parts), ("d", {str(i): p for i, p in enumerate(parts)})]:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        found = partition_file.read(str(path), len(parts), SAMPLES)
        assert [part.tolist() for part in found] == parts
        assert all(part.dtype == np.int64 for part in found)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([[4, 0], [1, 2, 3]], None),
        ([[4, 0, 7], [1, 7, 4]], "2 of the samples .* as sample 4 to clients 0 and 1$"),
        ([[0], [3, 3]], "1 of the samples .* as sample 3 to client 1$"),
    ],
)
def test_samples_held_twice_by_a_file_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: list[list[int]], line: str | None
) -> None:
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(parts))
    found = partition_file.read(str(path), 2, SAMPLES)
    assert [part.tolist() for part in found] == parts
    assert len(caplog.messages) == (line is not None)
    assert line is None or re.search(line, caplog.messages[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0], [1]", "as JSON"),
        ("[" * 100_000, "as JSON"),  # deeper than a reader can go
        ("3", "list of lists in .* got int"),
        ("[[0]]", "^partition-file: expected 2 clients in .* got 1"),
        ('{"0": [0], "2": [1]}', "named '0' to '1', got '2'"),
        ("[[0], []]", "client 1 in .* got an empty one"),
        ("[[0], 1]", "client 1 in .* got int"),
        ("[[0], [1000]]", "from 0 to 999 for client 1 in .* got 1000"),
        ("[[0], [-1]]", "got -1"),
        ("[[0], [1.0]]", "got 1.0"),
        ("[[0], [true]]", "got True"),
        ('{"0": [0], "1": [1], "0": [2]}', "the client '0' is there twice"),
    ],
)
def test_errors_in_a_file_name_the_client(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "parts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        partition_file.read(str(path), 2, SAMPLES)
    assert "\n" not in str(error.value)

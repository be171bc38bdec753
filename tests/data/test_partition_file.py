"""Partitions that the user wrote; tests/data/nasty has those that are refused."""

import json
from pathlib import Path

import numpy as np

from fedaccord.data import partition_file

SAMPLES = 1000


def test_file_of_a_dictionary_or_of_lists(tmp_path: Path) -> None:
    parts = [[4, 0], [1, 2, 3], *[[i] for i in range(4, 13)]]
    for name, content in [("l", parts), ("d", {str(i): p for i, p in enumerate(parts)})]:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        arrays = partition_file.read(str(path), len(parts), SAMPLES)
        assert [part.tolist() for part in arrays] == parts
        assert all(part.dtype == np.int64 for part in arrays)

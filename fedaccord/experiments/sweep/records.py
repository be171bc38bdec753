"""Files of a sweep's folder, and the defaults that the names of its trials leave out."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fedaccord import config
from fedaccord.experiments.analysis.groups import DEFAULTS
from fedaccord.storage.files import read_json

AGAIN = "restore it, or choose another --out"  # advice on a damaged file


def read_table(file: Path, *keys: str, advice: str = AGAIN) -> dict[str, Any]:
    """A JSON file of a sweep, with these keys. Raises ValueError, which names it, for another."""
    with suppress(ValueError):
        content = read_json(file)
        if isinstance(content, dict) and {*keys} <= {*content}:
            return content
    raise ValueError(f"{file}: expected a file of a sweep, got a damaged one; {advice}")


def naming_defaults(folder: Path | None = None) -> dict[str, Any]:
    """The defaults that names leave out, of the keys that affect the numbers of a run and its
    records: those of the version that began the trials in ``folder``, and today's of newer keys."""
    free = config.affecting("speed", "place")
    today = {key: value for key, value in config.defaults().items() if key not in free}
    file = folder / DEFAULTS if folder else None
    before = read_table(file) if file and file.exists() else {}
    return {key: before.get(key, value) for key, value in today.items()}

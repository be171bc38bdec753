"""The results of the cells' runs: a CSV file, a row a run, extended by every start."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedaccord.experiments.reproduce.measures import OF_RUN, of_run
from fedaccord.experiments.reproduce.table import Cell
from fedaccord.experiments.sweep.trial import DIVERGED, Job, Row
from fedaccord.runs import COMPLETED, reader
from fedaccord.storage.files import replace

ACCURACIES = ("last", "mean-of-last-10", "best")  # of the evaluations after a round, in percent
KEY = ["table", "cell", "seed", "changed"]
WRITTEN = [*KEY, "rounds", "status", *ACCURACIES, "gradients", "hours", "device", "reason"]
COLUMNS = [*WRITTEN, *OF_RUN]  # earlier versions wrote only the first ones


def result(
    table: str, cell: Cell, seed: int, changes: Mapping[str, Any], rounds: int, job: Job, row: Row
) -> dict[str, Any]:
    """changes: keys with other values than in the table."""
    try:
        run = reader.read(job.path)
    except ValueError:  # it failed before its first round, or is damaged
        run = None
    accuracies = {name: row.get(f"test-accuracy-{name}") for name in ACCURACIES}
    return {
        "table": table,
        "cell": cell.name,
        "seed": seed,
        "changed": _ordered(" ".join(f"{key}={value}" for key, value in changes.items())),
        "rounds": rounds,
        "status": row["status"],
        **{name: x and round(100 * x, 8) for name, x in accuracies.items()},
        "gradients": row.get("gradients"),
        "hours": round((row.get("seconds") or 0) / 3600, 3),
        "device": device_of(run.used) if run else "",
        "reason": row.get("reason"),
        **(of_run(run, cell.target) if run else {}),
    }


def merged(file: Path, results: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The file's rows merged with these; of two runs of a cell and seed the one with more rounds. A
    diverged model is a result; a run that failed otherwise counts only if there is no result.

    Raises ValueError if the file contains something else.
    """
    rows = pd.DataFrame(list(results), columns=COLUMNS)
    if file.exists():
        try:
            before = pd.read_csv(file, dtype={"changed": str})
            before = before[WRITTEN].join(before.reindex(columns=[*OF_RUN]))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{file}: expected results of `fedaccord reproduce`, got a file without them "
                f"({error}); choose another --page"
            ) from None
        rows = pd.concat([before, rows]) if len(rows) else before
    rows["changed"] = rows["changed"].fillna("").map(_ordered)
    is_result = (rows["status"] == COMPLETED) | rows["reason"].astype(str).str.contains(DIVERGED)
    rows = rows.assign(is_result=is_result).sort_values(["is_result", "rounds"])
    rows = rows.drop(columns="is_result").drop_duplicates(KEY, keep="last")
    return rows.sort_values(KEY, ignore_index=True)


def _ordered(changed: str) -> str:
    """Pairs key=value in the order of their keys; a value may have blanks."""
    return " ".join(sorted(re.split(r" (?=[\w.-]+=)", changed)))


def write(file: Path, results: pd.DataFrame) -> None:
    replace(file, results.to_csv(index=False).encode())


def device_of(used: Mapping[str, Any]) -> str:
    """The device of a run, a GPU by its name; empty: unknown."""
    return str(used.get("gpu") or used.get("device", ""))

"""Run directories with given numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaccord.experiments.analysis.groups import Group, groups_of
from fedaccord.runs import RunDirectory, reader
from fedaccord.runs.directory import CONTENTS

SETTINGS = {"algo": "fedavg", "dataset": "digits", "seed": 0, "lr": 0.1, "out-dir": "", "name": ""}


def write(
    folder: Path,
    accuracies: Sequence[float | None],
    clock: float | None = None,
    epsilon: float | None = None,
    brier: float | None = None,
    contents: Mapping[str, str] | None = None,
    used: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A run with these test accuracies from round 0 on; keys: settings, with _ for -; clock,
    epsilon: simulated seconds and privacy that a round costs; brier: a metric of the user's own;
    contents: hashes of what settings only name; used: of config.toml.

    A round sends 10 bytes down and 5 up and takes 2 s; two clients take 3 and 4 steps, of 2
    gradients each and t and t + 1 s in round t; client 1 fails in round 2.
    """
    settings = SETTINGS | {key.replace("_", "-"): value for key, value in keys.items()}
    name = "-".join(str(settings[key]) for key in ("algo", "lr", "seed"))
    name = "".join(c if c.isprintable() else "_" for c in name)
    behind = {f"{CONTENTS}{key}": digest for key, digest in (contents or {}).items()}
    behind |= {"gradients-per-step": 2, **(used or {})}
    run = RunDirectory(str(folder), name, settings, behind)
    run.save_classes(["cat", "dog"], [[3, 0], [1, 2]])
    for number, accuracy in enumerate(accuracies):
        row: dict[str, Any] = {"round": number}
        if accuracy is not None:
            row |= {"test-accuracy": accuracy, "test-loss": 1 - accuracy}
        if brier is not None:
            row["test-brier"] = brier
        if clock is not None:
            row["clock"] = clock * number
        if epsilon is not None and number:
            row["dp-epsilon"] = epsilon * number
        if number:
            row |= {"down-bytes": 10, "up-bytes": 5, "seconds": 2.0, "dropped": 0, "drift": 0.5}
        clients = [
            {"round": number, "client": i, "status": "ok", "steps": 3 + i, "seconds": number + i}
            for i in range(2)
        ]
        if number == 2:
            clients[1] = {"round": number, "client": 1, "status": "no reply"}
        run.record(row, clients if number else [])
    run.summarise("completed")
    return run.path


def groups(folder: Path) -> list[Group]:
    """Of the runs in a folder."""
    return groups_of([reader.read(path) for path in reader.find([folder])])

"""`fedaccord evaluate`: the model of a run directory on the test samples again."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedaccord.cli.console import make_console, refusing, warn
from fedaccord.cli.progress import written
from fedaccord.cli.settings import Pairs, RunDir, read_place, read_run, read_toml, unread_typed

ALIKE = 0.01  # differences of machines, devices and precisions are smaller


def evaluate(
    run: RunDir,
    pairs: Pairs = None,
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the best model, of a run with keep-best.")
    ] = False,
) -> None:
    """Evaluate the model of a run on its test samples, beside the values that the run reported.

    KEY=VALUE pairs replace the run's data-dir, device, download or threads:

    fedaccord evaluate ~/fedaccord-runs/first data-dir=/data/cifar10 device=cuda
    """
    from fedaccord.runs import COMPLETED, metrics, status
    from fedaccord.runs.best import BEST
    from fedaccord.runs.directory import MODEL

    console, run = make_console(), run.expanduser()
    with refusing(ValueError, OSError):
        places = read_place(pairs or [])
        if not (run / "config.toml").is_file():
            raise ValueError(f"{run}: expected a run directory with model.safetensors, found none")
        reported = _reported(run)
        if best and not (run / BEST).is_file() and not read_run(run).get("keep-best"):
            raise ValueError(
                f"{run}: expected a run directory with {BEST}, found none: keep-best was off; "
                "leave out --best"
            )
        with console.status("evaluating"):
            values, others = _evaluate(run, places, BEST if best else MODEL)
        if not values:
            raise ValueError(f"{run}: expected test samples, found none: add data-dir=FILE")
        before = {name: reported.get(f"{name}{metrics.LAST}") for name in values}
        if best:
            before = dict.fromkeys(values) | _of_best(run, reported, values)
    table, moved = Table.grid(padding=(0, 2)), []
    for name, earlier in before.items():
        title, value, text = name.replace("-", " "), values.get(name), written(name, earlier)
        if value is None:
            table.add_row(title, "", f"reported: {text}; not measured here")
            continue
        table.add_row(title, written(name, value), f"reported: {text}")
        if earlier is not None and not math.isclose(value, earlier, rel_tol=ALIKE, abs_tol=ALIKE):
            moved.append(name)
    console.print(table)
    if others:
        warn(f"{', '.join(others)}: changed since the run, see [used.contents] in its config.toml")
    elif moved and (state := status(run)) != COMPLETED:
        names = ", ".join(moved)
        warn(f"{names}: not as reported; the run is {state}, its model from another round")
    elif moved and "data-dir" not in places:
        warn(
            f"{', '.join(moved)}: not as reported; the data, or the code of the model, loss or "
            "metrics, changed since the run, or the last rounds were not evaluated"
        )


def _reported(run: Path) -> dict[str, Any]:
    """The run's summary. Raises OSError, and ValueError, in one line, if it is damaged."""
    from fedaccord.storage.files import read_json

    file = run / "summary.json"
    try:
        summary = read_json(file)
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from None
    if not isinstance(summary, dict):
        raise ValueError(f"{file}: expected the summary of a run, got a damaged file")
    best = summary.get("best-model", {"metric": "", "value": None, "round": 0})
    is_best = isinstance(best, dict) and isinstance(best.get("metric"), str)
    is_best = is_best and best.keys() >= {"value", "round"}
    numbers = [value for key, value in summary.items() if key.endswith("-last")]
    numbers += [best["value"]] if is_best else []
    if not is_best or not all(isinstance(number, int | float | None) for number in numbers):
        raise ValueError(f"{file}: expected numbers as metrics, got a damaged file")
    return summary


def _of_best(run: Path, reported: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What the run reported of its best model, with the metric by which it is the best, which may
    not be measured here; empty before the run ended. Raises ValueError if a table is damaged."""
    from fedaccord.runs import reader

    if not (best := reported.get("best-model")):
        return {}
    rows = reader.read(run).metrics
    row = rows[rows["round"] == best["round"]].dropna(axis="columns")
    row = row[[name for name in names if name in row]]
    return {name: row[name].item() for name in row} | {best["metric"]: best["value"]}


def _contents(run: Path) -> dict[str, str]:
    """[used.contents], by dotted keys; may be absent. Raises ValueError, in one line, if
    damaged."""
    from fedaccord.runs import flatten

    used = read_toml(run / "config.toml").get("used", {})
    table = used.get("contents", {}) if isinstance(used, Mapping) else None
    contents = flatten(table) if isinstance(table, Mapping) else None
    if contents is None or not all(isinstance(digest, str) for digest in contents.values()):
        raise ValueError(
            f"{run / 'config.toml'}: expected texts in [used.contents], got a damaged file"
        )
    return contents


def _evaluate(
    run: Path, more: dict[str, Any], model_file: str
) -> tuple[dict[str, float], list[str]]:
    """The values, and the keys of [used.contents] that differ now. Raises ValueError, in one line,
    if it is not a run or cannot have these settings."""
    from fedaccord.config import RunConfig
    from fedaccord.experiments.analysis.measures import saved_vectors
    from fedaccord.process import threads
    from fedaccord.runs.directory import SAMPLES
    from fedaccord.runs.named_contents import of_run
    from fedaccord.task import load_task
    from fedaccord.task.multiplications import threads_of_task

    settings, contents = RunConfig.make(read_run(run) | more), _contents(run)
    for line in unread_typed(settings, more):
        warn(line)
    threads.check(settings.threads)
    task = load_task(settings.task, num_clients=1, whole=True)
    model = settings.strategy.model_settings
    w, buffers = saved_vectors(run, task, model, model_file)
    with threads_of_task(settings.threads, task, settings.strategy).in_use():
        values = task.evaluate(w, model, buffers=buffers)
        if settings.eval_train:
            train = task.evaluate_train(w, model, 1, buffers)
            values |= {name: v for name, v in train.items() if "loss" not in name}
    now = of_run(settings, task.fingerprint if SAMPLES in contents else {})
    last = {key: digest.rpartition("+")[2] for key, digest in contents.items()}
    return values, [key for key in last if now.get(key, last[key]) != last[key]]

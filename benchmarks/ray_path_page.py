"""The tables and the page of what ray_path.py measured."""

import argparse
import json
import os
import statistics
import sys
from itertools import chain
from pathlib import Path

import flwr
import ray
import torch
from timing import spread

Seconds = dict[str, list[float]]  # of each repetition, by contestant
CLIENTS = 10
SIZES = {0.25: 625, 3.0: 7_500, 45.0: 112_000}  # MB of float32: outputs of a layer of 100 inputs
TARGETS = (  # what, contestant, base, at most; a difference is in seconds a client
    ("steps", "two workers", "one thread", 1 / 1.7),
    ("steps", "two workers", "two threads", 1.0),
    *((f"{size} MB", "this package's FedAvg", "Flower's FedAvg", 1.1) for size in SIZES),
)
OVERHEAD = 0.020  # seconds a client at 45 MB


def table(name: str, seconds: Seconds) -> str:
    base = next(iter(seconds))
    lines = [
        "",
        f"| {name} | seconds a round: median (min to max) | ratio to {base}, likewise |",
        "| --- | --: | --: |",
    ]
    for contestant, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds[base], strict=True)]
        lines.append(f"| {contestant} | {spread(values, 3)} | {spread(ratios, 3)} |")
    if name == "visits":
        lines += ["", f"Overhead of a client: {1e3 * overhead(seconds):.1f} ms, the median."]
    return "\n".join(lines)


def overhead(seconds: Seconds) -> float:
    """Seconds a client that a worker takes more than this process, the median."""
    pairs = zip(seconds["one worker"], seconds["this process"], strict=True)
    return statistics.median((a - b) / CLIENTS for a, b in pairs)


def missed_targets(measurements: dict[str, Seconds]) -> list[str]:
    lines = []
    for name, contestant, base, allowed in TARGETS:
        if name in measurements:
            pairs = zip(measurements[name][contestant], measurements[name][base], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            if ratio > allowed:
                lines.append(
                    f"missed: {name}: {contestant} takes {ratio:.3f} x {base}, "
                    f"allowed {allowed:.3f}"
                )
    if "visits" in measurements and (cost := overhead(measurements["visits"])) > OVERHEAD:
        lines.append(f"missed: visits: {1e3 * cost:.1f} ms a client, allowed {1e3 * OVERHEAD:.0f}")
    return lines


COMPARED = """## Beside an earlier version

{earlier}
and this version by turns, the first one alternately; in each turn new processes. CPU seconds of a
round, of all processes together, and the ratio of the medians of each turn. Flower's FedAvg has
no code of either: its ratios show what other load does.

| | contestant | turns | before | now | now / before |
| --- | --- | --: | --: | --: | --: |
"""


def comparison(files: list[Path], earlier: str) -> str:
    """A row for each contestant; files: before, now, before, now, ..."""
    contents = [json.loads(file.read_text()) for file in files]
    if any(content.get("clock", "cpu") != "cpu" for content in contents):
        sys.exit("--compare: expected CPU seconds, got others: measure with --clock cpu")
    results = [content.get("seconds", content) for content in contents]  # earlier ones are bare
    rows = []
    for name, contestants in results[0].items():
        for contestant in contestants:
            values = [result[name][contestant] for result in results if name in result]
            medians = [*map(statistics.median, values)]
            ratios = [now / before for before, now in zip(medians[::2], medians[1::2], strict=True)]
            cells = [spread([*chain(*values[k::2])], 3) for k in (0, 1)] + [spread(ratios, 2)]
            rows.append(f"| {name} | {contestant} | {len(ratios)} | {' | '.join(cells)} |\n")
    return COMPARED.format(earlier=earlier) + "".join(rows)


def page(
    measurements: dict[str, Seconds], options: argparse.Namespace, what: str, command: str
) -> str:
    """what: how rounds are timed; command: what makes the page."""
    versions = f"torch {torch.__version__}, ray {ray.__version__}, flwr {flwr.__version__}"
    kind = "Wall-clock" if options.clock == "wall" else "CPU (of all processes together)"
    missed = missed_targets(measurements)
    verdict = "All targets met." if not missed else "\n".join(f"- {line}" for line in missed)
    return f"""# Ray workers

{os.cpu_count()} cores; {versions}; {options.repetitions} repetitions. {kind} seconds.

- steps: LeNet on CIFAR-10, 10 clients x 20 steps of batch 50.
- visits: one step of one sample on a linear layer of 45 MB, 10 clients, one thread.
- MB: the same step over Flower's simulation with two Ray actors, 10 clients: Flower's own FedAvg
  with a client by hand, this package's FedAvg with `train_locally`, and this package's two workers.

{what}
{"".join(table(name, seconds) + chr(10) for name, seconds in measurements.items())}
Targets (medians): two workers at most 1/1.7 of one thread and at most two threads; overhead of a
client at most {1e3 * OVERHEAD:.0f} ms; over Flower's simulation at most 1.1 x Flower's FedAvg.

{verdict}

Made by `{command}`.
"""

"""The page of what peers.py measured."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import timing
from peers_settings import CONTESTANTS, OURS, SETTINGS, THREADS, Setting

Results = dict[str, dict[str, Any]]  # contestant -> what `contest` returns


def page(results: Path) -> str:
    files = {name: results / f"{name}.json" for name in SETTINGS}
    measured = {n: json.loads(f.read_text()) for n, f in files.items() if f.exists()}
    if not measured:
        sys.exit(f"--results: expected results of a setting in {results}, found none")
    versions: dict[str, str] = {}
    for facts in measured.values():
        versions |= facts["versions"]
    cores = {str(facts["cores"]) for facts in measured.values()}
    used = {c for facts in measured.values() for r in facts["repetitions"] for c in r}
    lines = [
        "# Beside other simulators",
        "",
        "Whole runs on CIFAR-10, in float32, on the same samples of the same clients, the same "
        "clients a round and the same steps; PyTorch has one thread unless stated otherwise. Each "
        "contestant is a process of its own; they take turns, and every ratio is taken within a "
        "repetition. Seconds are of a round, after the first evaluation, until the last one; CPU "
        "seconds are of all processes together. The start is the time before that: imports, data, "
        "processes, the first evaluation. Where wall-clock seconds of one process exceed its CPU "
        "seconds, the machine had other load. "
        f"Hardware: CPU, {'/'.join(sorted(cores))} cores, without "
        "AMX.",
        "",
        *(f"- {name}: {text}" for name, text in CONTESTANTS.items() if name in used),
        "",
        "Versions: " + "; ".join(f"{n} {v}" for n, v in sorted(versions.items())) + ".",
    ]
    for name, facts in measured.items():
        lines += ["", f"## {name}", "", SETTINGS[name].about + ".", "", *section(name, facts)]
    if missing := [name for name in SETTINGS if name not in measured]:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def section(name: str, facts: dict[str, Any]) -> list[str]:
    runs = facts["repetitions"]
    total = sum(facts["clients"])
    lines = [
        f"Rounds: {facts['rounds']}, with {total} visits of clients in all; in each row the median "
        "(and the range) of the repetitions in which it took part.",
        "",
        "| contestant | repetitions | wall s a round | CPU s a round | start s | accuracy in % "
        f"| {' | '.join(f'wall, x {ours}' for ours in OURS)} | CPU, x fedaccord |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for contestant in CONTESTANTS:
        own = [run for run in runs if contestant in run]
        if not own:
            continue
        wall, cpu = ([run[contestant]["round"][c] for run in own] for c in ("wall", "cpu"))
        start = [run[contestant]["start"]["wall"] for run in own]
        accuracy = [100 * run[contestant]["accuracy"][-1][1] for run in own]
        columns = [
            contestant,
            str(len(own)),
            spread(wall, 2),
            spread(cpu, 2),
            spread(start, 1),
            spread(accuracy, 1),
            *(spread(ratios(own, contestant, ours, "wall"), 2) for ours in OURS),
            spread(ratios(own, contestant, "fedaccord", "cpu"), 2),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return [*lines, "", *verdicts(SETTINGS[name], runs)]


def spread(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "–"
    return timing.spread(values, digits)


def ratios(runs: list[Results], contestant: str, ours: str, clock: str) -> list[float]:
    """Its seconds over ours, each taken within a repetition that has both."""
    both = [run for run in runs if contestant in run and ours in run]
    return [r[contestant]["round"][clock] / r[ours]["round"][clock] for r in both]


def verdicts(setting: Setting, runs: list[Results]) -> list[str]:
    """One thread beside one thread, both cores beside both cores."""
    lines = []
    one, both = OURS
    for peer, factor in setting.targets.items():
        threads = f"{peer}{THREADS}"
        alike = {both: peer}  # a peer that takes both cores as it is
        if threads in setting.contestants:
            alike = {one: peer, both: threads}
        for ours, rival in alike.items():
            by_clock = {c: ratios(runs, rival, ours, c) for c in ("wall", "cpu")}
            if not by_clock["wall"]:
                continue
            wall, cpu = (
                f"{'met' if statistics.median(of) >= factor else 'missed'} by {clock} with "
                f"{statistics.median(of):.2f}"
                for clock, of in zip(("wall-clock", "CPU seconds"), by_clock.values(), strict=True)
            )
            lines += [
                f"Target: {ours} at least {factor:g} x as fast as {rival}: {wall}, {cpu}.",
                "",
            ]
    return lines[:-1]

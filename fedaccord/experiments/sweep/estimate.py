"""Runs, rounds and time of a sweep, estimated before it begins."""

import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.experiments.analysis.groups import TEST, TUNE
from fedaccord.experiments.sweep import space
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.plan import LADDERS, Plan
from fedaccord.experiments.sweep.search import budget
from fedaccord.experiments.sweep.trial import Job, check_measured, summary_of
from fedaccord.process import threads
from fedaccord.runs import trackers

TIMED = 3  # rounds: the first one creates states, the last one is evaluated


class Part(NamedTuple):
    """A method at a stage."""

    method: str
    stage: str
    configurations: int
    runs: int  # one per rung, configuration and seed
    rounds: int  # of all of them
    local: str  # local steps or epochs
    gradients_a_step: float


def parts(plan: Plan) -> list[Part]:
    """The budget of each method; asha, which depends on timing, may use more or less."""
    every = []
    for stage in (TUNE, TEST) if plan.tunes else (TEST,):
        for method in plan.methods:
            first = plan.first(method)
            if stage == TUNE:
                sizes = _tuned(plan, method, first)
            elif plan.tunes:
                sizes = [(1, first.rounds)]
            else:
                sizes = _whole(plan.configurations(method))
            rungs = plan.options.search in LADDERS and stage == TUNE
            configurations = sizes[0][0] if rungs else sum(count for count, _ in sizes)
            seeds = len(plan.seeds if stage == TUNE else plan.test_seeds)
            runs = seeds * sum(count for count, _ in sizes)
            rounds = seeds * sum(n * rounds for n, rounds in sizes)
            local = first.config.strategy.local_length
            sums = (configurations, runs, rounds, local, first.gradients)
            every.append(Part(method, stage, *sums))
    return every


def _tuned(plan: Plan, method: str, first: Configuration) -> list[tuple[int, int]]:
    """(configurations, rounds of each), rung by rung."""
    options = plan.options
    if options.search == "optuna":
        most = space.size(plan.of(method))  # a configuration that is proposed again is not run
        return [(int(min(plan.trials(method), most)), first.rounds)]
    configurations = plan.configurations(method)
    if options.search not in LADDERS:
        return _whole(configurations)
    sizes, alive, before = [], len(configurations), 0
    for rung in range(options.rungs):
        rounds = budget(first.rounds, options.eta, options.rungs - 1 - rung)
        sizes.append((alive, rounds - before))
        alive, before = math.ceil(alive / options.eta), rounds
    return sizes


def _whole(configurations: Sequence[Configuration]) -> list[tuple[int, int]]:
    return [(n, rounds) for rounds, n in Counter(c.rounds for c in configurations).items()]


def estimate(plan: Plan, plan_parts: Sequence[Part], share: float = 1.0) -> str:
    """The time of a share of the rounds, from a run of the first method: its round, rounds of other
    methods by their gradients, the evaluations, and the overhead of every run. Raises ValueError if
    that run does not measure what ranks the trials."""
    method = plan.methods[0]
    first = plan.first(method)
    settings = first.settings | {"seed": 0, "num-server-rounds": TIMED, "eval-every": TIMED}
    job = Job("", "", settings, plan.options.metric)
    *_, seconds, evaluated, rest = timed(
        settings, lambda path: check_measured(job, summary_of(path))
    )
    evaluation = max(0.0, evaluated - seconds) / first.config.strategy.eval_every
    one = _work(plan_parts[0])
    each = (
        rest * part.runs + (seconds * _work(part) / one + evaluation) * part.rounds
        for part in plan_parts
    )
    total = share * sum(each)
    if plan.options.ray_address:
        return f"{_words(total)} of one trial after another, {seconds:.2g} s a round"
    total, processes = beside(total, sum(part.runs for part in plan_parts), plan.options.workers)
    return f"about {_words(total)} with {processes}, {seconds:.2g} s a round of {method}"


def beside(seconds: float, runs: int, workers: int) -> tuple[float, str]:
    """The time of ``runs`` that take so many seconds one after another, and the number of processes
    in which they run, in words."""
    number = max(1, min(threads.processes(workers), runs))
    words = f"{number} process{'es' if number > 1 else ''}"
    return seconds / number + (_start_of_process() if number > 1 else 0), words


def _words(seconds: float) -> str:
    """A time in words: 90 seconds, 45 minutes, 12 hours."""
    units = {"seconds": 1, "minutes": 60, "hours": 3600}
    name = next((name for name in units if seconds < 120 * units[name]), "hours")
    return f"{seconds / units[name]:.3g} {name}"


def _work(part: Part) -> float:
    return float(part.local.split()[0]) * part.gradients_a_step


@cache
def _start_of_process() -> float:
    """Seconds until a worker can start its first run."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import fedaccord.experiments.sweep.workers"], check=False
    )
    return time.perf_counter() - began


def timed(settings: Mapping[str, Any], look: Callable[[Path], None] | None = None) -> list[float]:
    """Seconds of a run's rounds in this process, each with its evaluation, then those of its
    overhead: to load the data, to start and to end. look: at its directory, which is removed."""
    began = time.perf_counter()
    ends: list[float] = []
    with TemporaryDirectory() as folder, engine.quiet():
        config = RunConfig.make({**settings, "out-dir": folder, "name": "timed"})
        trackers.check(config.tracker)
        untracked = config.having("tracker", trackers.NONE)  # it is no run of the sweep
        engine.run(untracked, on_round=lambda _: ends.append(time.perf_counter()))
        whole = time.perf_counter() - began
        if look:
            look(Path(folder) / "timed")
    rounds = [end - begin for begin, end in pairwise(ends)]
    return [*rounds, whole - sum(rounds)]

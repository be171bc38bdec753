"""The page and picture of a sweep that tunes every method: docs/results/tuned.md.

fedaccord sweep benchmarks/tuned.toml --out DIR     # stops and resumes
python benchmarks/tuned.py DIR                      # from the methods whose tests are completed
python benchmarks/tuned.py DIR --page full-length   # of benchmarks/full-length.toml

The same file in another setting, on a page of its own:

fedaccord sweep benchmarks/tuned.toml dirichlet-alpha=0.6 --out DIR
python benchmarks/tuned.py DIR dirichlet-alpha=0.6 --file tuned --page tuned-06
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import accuracy
import archive
import pandas as pd
from decentralised import difference, markdown, verdict

from fedaccord.cli.settings import read_settings
from fedaccord.config import affecting
from fedaccord.experiments.analysis.costs import reached, with_costs
from fedaccord.experiments.sweep import Plan
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.table import at_edges
from fedaccord.runs import COMPLETED, flatten, reader
from fedaccord.runs.directory import FAILED
from fedaccord.runs.metrics import WINDOW

TARGET = 0.8  # test accuracy up to which costs count if there is no FedAvg
FELL = 2.0  # percentage points
VALIDATION = f"validation-accuracy-mean-of-last-{WINDOW}"  # of a summary
BEGINNING = (
    " These runs are the beginning of a training: the papers' end at 70 to 85%, after 500 or more "
    "rounds of five times as many steps, and the order there may differ."
)
WORDS = {"yes": "above", "no": "below", "open": "open", "equal": "equal"}
OF_EARLIER_MUON = ("tuned-all", "full-length-200")  # pages whose FedMuon has not run again since
EARLIER_MUON = (
    "FedMuon's runs here iterated in bfloat16, as it did then; in float32, as it does now, the "
    "test of seed 0 in [tuned-all](tuned-all.md) has 83.96% where it had 83.85%."
)
SECOND_GRID = (  # of the sweep full-length
    "FedDeper's grid here is its second. The first, `feddeper.rho` 0.002 and 0.01, had diverged: "
    "in tuning with 10% of 100 clients ([runs](runs/full-length-feddeper.tar.xz)), and with 5% of "
    "200 ([runs](runs/full-length-200-feddeper.tar.xz)) in tuning and, after 755 to 770 rounds, in "
    "all three tests of its winner."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as given to the sweep")
    parser.add_argument("--page", default="tuned", help="name of the page")
    parser.add_argument("--file", help="name of the sweep's file; by default the page's")
    parser.add_argument("--results", type=Path, default=accuracy.RESULTS, help="folder of the page")
    options = parser.parse_args()
    try:
        recipe = Recipe.by(options.file or options.page, options.settings)
        report(recipe, options.sweep.expanduser(), options.results, options.page)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


class Recipe(NamedTuple):
    """A sweep: its plan, the name of its file, and what was set after it."""

    plan: Plan
    file: str
    settings: Sequence[str] = ()

    @classmethod
    def by(cls, file: str, settings: Sequence[str]) -> "Recipe":
        content = accuracy.read_file(file)
        run = flatten(content["run"]) | read_settings(settings, None)
        return cls(Plan.make(content | {"run": run}), file, settings)

    def commands(self, page: str) -> str:
        settings = "".join(f" {setting}" for setting in self.settings)
        options = "" if page == "tuned" else f" --page {page}"
        options = options if page == self.file else f" --file {self.file}{options}"
        return (
            f"`fedaccord sweep benchmarks/{self.file}.toml{settings} --out DIR` and "
            f"`python benchmarks/tuned.py DIR{settings}{options}`"
        )


class Tested(NamedTuple):
    """A method with its tuned values, tested with every seed."""

    method: accuracy.Method
    configuration: Configuration  # the winner's
    validation: float  # of its longest tuning run, in percent
    best: float  # mean of the best WINDOW evaluations of that run in a row, in percent
    tables: list[pd.DataFrame]  # of each test: metrics.csv with costs
    rounds: int  # of the tests

    @property
    def accuracies(self) -> dict[int, float]:
        return {seed: 100 * run.mean for seed, run in self.method.runs.items()}


def read(runs: Sequence[reader.StoredRun], plan: Plan) -> list[Tested]:
    """The methods whose tests are completed, the best first.

    Of two tested configurations, as a sweep that was extended has, the better one on validation.
    """
    completed = [run for run in runs if run.summary["status"] == COMPLETED]
    winners = []
    for name in plan.methods:
        tests: dict[tuple[Any, ...], dict[int, list[reader.StoredRun]]] = {}
        own = [run for run in completed if run.settings["algo"] == name]
        tuning = [run for run in own if run.settings["validation"]]
        for run in own:
            if not run.settings["validation"]:
                point = tuple(run.settings[key] for key in plan.of(name))
                tests.setdefault(point, {}).setdefault(run.settings["seed"], []).append(run)
        every = [
            _tested(plan, name, [run for seed in plan.test_seeds for run in seeds[seed]], tuning)
            for seeds in tests.values()
            if {*seeds} >= {*plan.test_seeds} and all(len(same) == 1 for same in seeds.values())
        ]
        if every:
            winners.append(max(every, key=lambda each: each.validation))
    return sorted(winners, key=lambda each: -each.method.mean)


def failures(runs: Sequence[reader.StoredRun]) -> dict[str, list[int]]:
    """By method, the rounds of its tests that failed."""
    by_method: dict[str, list[int]] = {}
    for run in runs:
        if run.summary["status"] == FAILED and not run.settings["validation"]:
            by_method.setdefault(run.settings["algo"], []).append(int(run.summary["rounds"]))
    return by_method


def _tested(
    plan: Plan, name: str, tests: Sequence[reader.StoredRun], tuning: Sequence[reader.StoredRun]
) -> Tested:
    settings = tests[0].settings
    configurations = plan.configurations(name)
    fitting = (c for c in configurations if c.point.items() <= settings.items())
    if not (winner := next(fitting, None)):
        raise ValueError(f"{name}: expected tests of the sweep's configurations, got other values")
    free = {"validation", *affecting("speed", "place")}
    for key, value in winner.settings.items():
        others = {run.settings.get(key) for run in tests} - {value}
        if others and key not in free:
            raise ValueError(
                f"{name}: expected tests with {key}={value}, as in the file and the settings after "
                f"it, got {others.pop()}; give the settings that the sweep was given"
            )
    same = [run for run in tuning if all(run.settings[k] == v for k, v in winner.point.items())]
    longest = max(same, key=lambda run: run.settings["num-server-rounds"])
    validation = longest.summary[VALIDATION]
    method = accuracy.Method(name, {run.settings["seed"]: _run(run) for run in tests})
    curve = longest.metrics["validation-accuracy"].dropna()
    best = 100 * curve.rolling(WINDOW).mean().max()
    tables, rounds = [*map(with_costs, tests)], settings["num-server-rounds"]
    return Tested(method, winner, 100 * validation, best, tables, rounds)


def _run(run: reader.StoredRun) -> accuracy.Run:
    curve = run.metrics.set_index("round")["test-accuracy"].dropna()
    used = {key: value for key, value in run.used.items() if key in run.settings}  # for "auto"
    return accuracy.Run(run.settings | used, curve, curve.iloc[-WINDOW:].mean(), float("nan"))


def report(recipe: Recipe, sweep: Path, results: Path, page: str) -> None:
    """Write the page and its picture. Raises FileNotFoundError if no method is tested."""
    plan = recipe.plan
    runs = [*map(reader.read, reader.find([sweep]))]
    winners = read(runs, plan)
    if not winners:
        raise FileNotFoundError(f"{sweep} holds no method that is tested: sweep first")
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{page}.md").write_text(text(recipe, winners, page, runs))
    accuracy.plot([each.method for each in winners], results / f"{page}.png", WINDOW)
    print(f"{len(winners)} of {len(plan.methods)} methods in {results / page}.md and {page}.png")


def text(
    recipe: Recipe, winners: Sequence[Tested], page: str, runs: Sequence[reader.StoredRun]
) -> str:
    """The page; runs: all of the sweep."""
    plan, failed = recipe.plan, failures(runs)
    options, run, baseline = plan.options, plan.run, accuracy.BASELINE
    base = next((each for each in winners if each.method.name == baseline), None)
    target = math.floor(round(100 * base.method.mean, 6)) / 100 if base else TARGET
    head = [
        *("method", "tuned values", f"accuracy, mean of last {WINDOW}", f"points over {baseline}"),
        *("", "validation", f"rounds to {target:.0%}", "gradients to it", "GB to it", "gradients"),
    ]
    rows = [[each.method.name, *cells(each, base, target)] for each in winners]
    left = [name for name in plan.methods if name not in {each.method.name for each in winners}]
    first = max(1, round(run["num-server-rounds"] / options.eta ** (options.rungs - 1)))
    whole = part(first // run["eval-every"])
    many = math.ceil(options.trials / options.eta) > 1
    best = f"The best {math.ceil(options.trials / options.eta)}" if many else "The best"
    lines = [
        f"# Tuned methods on {accuracy.NAMES[run['dataset']]}: {run['num-server-rounds']} rounds, "
        f"{run['fraction-train']:.0%} of {run['num-clients']} clients, Dirichlet "
        f"{run['dirichlet-alpha']:g}",
        "",
        f"![test accuracy by round]({page}.png)",
        "",
        setting(plan),
        "",
        f"Every method was tuned alike: {options.trials} configurations of the local rate, "
        f"{rates(plan, winners)}, and of its own keys, drawn as a Latin hypercube from "
        f"`benchmarks/{recipe.file}.toml`: each rate is paired with one value of these keys, so "
        f"a better pair or value may be missing. They were ranked by the mean of the last {WINDOW} "
        f"accuracies up to round {first}{whole}, on {options.validation:.0%} of the training "
        f"samples, held out, with seed {', '.join(map(str, plan.seeds))}; a configuration that "
        f"starts fast has an advantage there. {best} continued to round {run['num-server-rounds']}"
        f"{', where the better was chosen' if many else ''}; the test images were not seen. It "
        "was then trained on all training samples with the seeds "
        f"{', '.join(map(str, plan.test_seeds))} and evaluated on the test images. "
        f"{options.trials} configurations are few: a method may be better than here.",
        "",
        *markdown(head, rows),
        "",
        f"An accuracy is the mean of the last {WINDOW} evaluations of a run, then mean ± standard "
        "deviation over the seeds. Points over FedAvg are differences between runs of the same "
        "seed, which have the same partition, first model, cohorts and batches: above or below "
        "if they are so with 95% confidence by Student's t, without a correction for multiple "
        "tests, else open. Deviation and confidence are over the seeds of this configuration; they "
        "do not include its choice. The model that a method returns is evaluated: "
        f"{accuracy.RETURNED}. `validation` is the winner's accuracy on the held-out samples at "
        "the end. Rounds, batch gradients and bytes (both ways) count up to the first evaluation "
        f"at {target:.0%} or above{', the whole percent below FedAvg' if base else ''}, mean ± "
        "standard deviation over the seeds that reached it, at a resolution of "
        f"{run['eval-every']} rounds; a run may end below it; "
        "`gradients` are those of the whole run.",
        "",
        *at_edge(plan, winners),
        *beside(runs, winners),
        *fallen(winners),
        *at_defaults(winners),
    ]
    if lost := [name for name in left if name in failed]:
        ends = {name: ", ".join(map(str, sorted({*failed[name]}))) for name in lost}
        each = (f"{name} (after {rounds} rounds)" for name, rounds in ends.items())
        lines += [f"Failed in their tests, with their best configuration: {', '.join(each)}.", ""]
    if waiting := [name for name in left if name not in failed]:
        lines += [f"Not tested yet: {', '.join(waiting)}.", ""]
    if page in OF_EARLIER_MUON:
        lines += [EARLIER_MUON, ""]
    if recipe.file == "full-length":
        lines += [SECOND_GRID, ""]
    end = f"Made by {recipe.commands(page)}, on a CPU.{archive.sentence(page, runs)}"
    return "\n".join([*lines, end, ""])


def part(evaluations: int) -> str:
    """Whether the last ``WINDOW`` of so many evaluations are all of them."""
    if evaluations <= WINDOW:
        return ", which is all of them"
    return ", which is nearly all of them" if evaluations == WINDOW + 1 else ""


def rates(plan: Plan, winners: Sequence[Tested]) -> str:
    """Which methods had the same rates."""
    names = [name for name in plan.methods if name in {each.method.name for each in winners}]
    tried = {
        m: [c.point["lr"] for c in plan.configurations(m)] for m in (accuracy.BASELINE, *names)
    }
    others = [name for name, own in tried.items() if own != tried[accuracy.BASELINE]]
    return f"alike for all but {', '.join(others)}" if others else "alike for all"


def setting(plan: Plan) -> str:
    run: dict[str, Any] = dict(plan.run)
    length = plan.configurations(plan.methods[0])[0].config.strategy.local_length
    own = [f"{k} {run[k]:g}" for k in run if k.partition(".")[0] in plan.methods]
    return (
        f"{accuracy.NAMES[run['dataset']]}, {accuracy.NAMES[run['model']]}, Dirichlet partition "
        f"with alpha {run['dirichlet-alpha']:g} and replacement `{run['replacement']}`, "
        f"{run['num-clients']} clients, {run['fraction-train']:.0%} of them a round, "
        f"{run['num-server-rounds']} rounds of {length} of batch {run['batch-size']}; the rate is "
        f"multiplied by {run['lr-decay']:g} a round, weight decay {run['weight-decay']:g}, "
        f"gradient norms clipped at {run['clip-norm']:g}"
        + accuracy.augmentation(run["dataset"])
        + (f" ({', '.join(own)})." if own else ".")
        + f" Models are evaluated every {run['eval-every']} rounds."
        + (BEGINNING if run["dataset"] == "cifar10" else "")
    )


def cells(tested: Tested, base: Tested | None, target: float) -> list[str]:
    """A row's words after the method's name."""
    point = tested.configuration.point
    values = ", ".join(f"{key} {value:.3g}" for key, value in point.items())
    own, gains = tested.accuracies, ["–", ""]
    if base and base is not tested:
        each = [own[seed] - base.accuracies[seed] for seed in sorted(own)]
        gains = [difference(each), WORDS[verdict(each)]]
    rows = [reached(table, "test-accuracy", target) for table in tested.tables]
    met = [row for row in rows if row is not None]
    count = f" ({len(met)} of {len(rows)})" if 0 < len(met) < len(rows) else ""
    rounds, gradients, sent = (
        [float(row[cost]) for row in met] for cost in ("round", "gradients", "bytes")
    )
    return [
        values,
        f"{statistics.mean(own.values()):.2f} ± {statistics.stdev(own.values()):.2f}%",
        *gains,
        f"{tested.validation:.1f}%",
        spread(rounds, ".0f") + count,
        spread(gradients, ",.0f"),
        spread([value / 1e9 for value in sent], ".2f"),
        f"{tested.tables[0]['gradients'].iloc[-1]:,.0f}",
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation, of a single value itself; a dash if one is not known."""
    if not values or any(map(math.isnan, values)):
        return "–"
    std = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{std}"


def beside(runs: Sequence[reader.StoredRun], winners: Sequence[Tested]) -> list[str]:
    """Tuning runs of full length that the search did not reach, and that are better than the
    winner's: of an earlier rule for ties."""
    lines = []
    for each in winners:
        winner = each.configuration.point
        for run in runs:
            settings = run.settings
            if settings["algo"] != each.method.name or not settings["validation"]:
                continue
            if settings["num-server-rounds"] < each.rounds or winner.items() <= settings.items():
                continue
            value = 100 * run.summary.get(VALIDATION, 0)
            if value > each.validation:
                point = ", ".join(f"{key} {settings[key]:.3g}" for key in winner)
                lines.append(f"{each.method.name} with {point} ({value:.1f}%)")
    if not lines:
        return []
    return [
        "Of tied configurations one continues, by a rule that does not depend on them. Another "
        "one, tied with one that continued, ended better on the held-out samples than the winner "
        f"when it was trained outside the search: {'; '.join(lines)}. It was not tested.",
        "",
    ]


def fallen(winners: Sequence[Tested]) -> list[str]:
    """The winners whose accuracy on the held-out samples falls towards the end."""
    lines = [
        f"{each.method.name} (from {each.best:.1f} to {each.validation:.1f}%)"
        for each in winners
        if each.best - each.validation > FELL
    ]
    if not lines:
        return []
    return [
        f"The tuning run of a winner ends more than {FELL:g} points below its best {WINDOW} "
        "consecutive evaluations; another length may choose other values: "
        f"{', '.join(lines)}.",
        "",
    ]


def at_defaults(winners: Sequence[Tested]) -> list[str]:
    """The methods' own keys that were not tuned, and their values."""
    lines = []
    for each in winners:
        settings, tuned = each.method.runs[min(each.method.runs)].settings, each.configuration.point
        own = {k: v for k, v in settings.items() if "." in k and k not in tuned}
        if own:
            lines.append(f"{each.method.name}: {', '.join(f'{k} {v}' for k, v in own.items())}")
    return [f"Not tuned, at their values here: {'; '.join(lines)}.", ""] if lines else []


def at_edge(plan: Plan, winners: Sequence[Tested]) -> list[str]:
    """The winners' values that are the least or largest of those that were tried."""
    lines = [
        line.partition(" is the ")[0].replace("the winner's ", "")
        for each in winners
        for line in at_edges(
            each.configuration, [c.point for c in plan.configurations(each.method.name)]
        )
    ]
    if not lines:
        return []
    return [
        "The tuned value is the smallest or largest that was tried, so a better one may be "
        f"outside, for {'; '.join(lines)}.",
        "",
    ]


if __name__ == "__main__":
    main()

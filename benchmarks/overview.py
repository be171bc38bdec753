"""What every tuned comparison says of every method, side by side: docs/results/overview.md.

python benchmarks/overview.py    # from the pages of benchmarks/tuned.py
"""

import argparse
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import accuracy
import matplotlib.pyplot as plt
from decentralised import markdown
from scipy.stats import t as student

from fedaccord.config import RunConfig, settings_of

PAGE = "overview"
FULL = ("full-length", "full-length-06", "full-length-200", "full-length-200-06")
SHORT = ("tuned", "tuned-all", "tuned-06", "tuned-200", "tuned-200-06", "low-participation")
CIFAR10 = ("tuned-cifar10", "tuned-cifar10-06", "tuned-cifar10-200", "tuned-cifar10-200-06")
SEEDS = 3
MARKERS = ("o", "s", "^", "D")
TITLE = re.compile(
    r"# Tuned methods on (?P<data>.+): (?P<rounds>\d+) rounds, (?P<share>\d+%) of "
    r"(?P<clients>\d+) clients, Dirichlet (?P<alpha>[\d.]+)"
)
EVERY = re.compile(r"evaluated every (\d+) rounds")


class Gain(NamedTuple):
    """A method beside FedAvg, as a page has it; the costs are FedAvg's multiples."""

    points: float  # mean over the seeds of the difference in test accuracy
    deviation: float  # over the seeds
    verdict: str  # above, open, below
    rounds: float  # to the page's target; NaN if a seed did not reach it
    gradients: float  # of the whole run
    sent: float  # bytes of a round up to the target; NaN if it was not reached

    @property
    def text(self) -> str:
        mark = {"above": "**", "below": "*"}.get(self.verdict, "")
        return f"{mark}{self.points:+.2f}{mark} ± {self.deviation:.2f}"


class Page(NamedTuple):
    name: str
    title: Mapping[str, str]
    gains: Mapping[str, Gain]  # by method, without FedAvg
    values: Mapping[str, Mapping[str, float]]  # by method, the tuned ones by key

    @property
    def setting(self) -> str:
        of = self.title
        return f"{of['share']} of {of['clients']}, Dirichlet {of['alpha']}, {of['rounds']} rounds"

    @property
    def column(self) -> str:
        return f"[{self.setting}]({self.name}.md)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=accuracy.RESULTS, help="folder of pages")
    results = parser.parse_args().results
    (results / f"{PAGE}.md").write_text(text(results))
    plot([read(results, name) for name in FULL], results / f"{PAGE}.png")


def read(results: Path, name: str) -> Page:
    """A page of benchmarks/tuned.py. Raises ValueError for another one."""
    lines = (results / f"{name}.md").read_text().splitlines()
    title, interval = TITLE.fullmatch(lines[0]), EVERY.search("".join(lines))
    if title is None or interval is None:
        raise ValueError(f"{name}.md: expected a page of tuned methods, got {lines[0]!r}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    cells = {row[0]: row for row in rows[2:]}
    base = cells.pop(accuracy.BASELINE)
    gains = {name: gain(row, base, int(interval[1])) for name, row in cells.items()}
    return Page(name, title.groupdict(), gains, {name: tuned(row) for name, row in cells.items()})


def gain(row: Sequence[str], base: Sequence[str], every: int) -> Gain:
    """Of a page's rows: the method's and FedAvg's; their models are evaluated ``every`` rounds."""
    points, deviation = map(float, row[3].split(" ± "))
    (rounds, sent, steps), (rounds_0, sent_0, steps_0) = (
        [number(each[column]) for column in (6, 8, 9)] for each in (row, base)
    )
    costs = (
        unrounded(rounds, every) / unrounded(rounds_0, every),
        steps / steps_0,
        sent / rounds / (sent_0 / rounds_0),
    )
    return Gain(points, deviation, row[4], *costs)


def tuned(row: Sequence[str]) -> dict[str, float]:
    pairs = (pair.split(" ") for pair in row[1].split(", "))
    return {key: float(value) for key, value in pairs}


def number(cell: str) -> float:
    """The mean in a cell; NaN of a dash, and where not all seeds count."""
    if cell == "–" or " of " in cell:
        return math.nan
    return float(cell.partition(" ± ")[0].replace(",", ""))


def unrounded(mean: float, every: int) -> float:
    """The mean over the seeds of rounds that are multiples of ``every``, from its whole number."""
    return mean if math.isnan(mean) else round(mean * SEEDS / every) * every / SEEDS


def text(results: Path) -> str:
    full, short, cifar10 = (
        [read(results, name) for name in names] for names in (FULL, SHORT, CIFAR10)
    )
    pages = [*full, *short, *cifar10]
    verdicts = [each.verdict for page in pages for each in page.gains.values()]
    lines = [
        "# The tuned comparisons side by side",
        "",
        f"![points over FedAvg by method]({PAGE}.png)",
        "",
        "Points of test accuracy over FedAvg, mean ± standard deviation over three seeds of the "
        "differences between runs of the same seed. **Bold** is above FedAvg, *italic* below, with "
        "95% confidence by Student's t for each number alone: of the "
        f"{len(verdicts)} numbers here {len(verdicts) * 0.05:.0f} would be bold or italic by "
        f"chance if nothing differed, and {len(verdicts) - verdicts.count('open')} are. Each "
        "column is a page of its own, which says how its methods were tuned and has their values, "
        "spreads and costs. All are small models of two data sets.",
        "",
        "## In how many settings",
        "",
        *words(full, [*short, *cifar10]),
        "",
        f"Of all {len(pages)} columns below: in how many a method was tested, and is above FedAvg, "
        "open, and below.",
        "",
        *counts(pages),
        "",
        "## At the length of the papers' runs",
        "",
        "Fashion-MNIST, an MLP, 5 epochs a round, 4 configurations a method; the picture above. "
        "The order is that of the mean gain over the settings in which a method was tested.",
        "",
        *table(full),
        "",
        "Rounds until FedAvg's accuracy (the whole percent below it) is reached, as a multiple of "
        "FedAvg's, and what a round costs, likewise: batch gradients, and bytes both ways up to "
        "there, each client's first message included. A dash: not tested, or not all seeds reached "
        "it.",
        "",
        *costs(full),
        "",
        "## Short trainings",
        "",
        "Fashion-MNIST, an MLP, 10 steps a round: 16 configurations a method, but for all methods "
        "(the second column) 4, and for 500 rounds 8.",
        "",
        *table(short),
        "",
        "CIFAR-10, LeNet-5, one epoch a round, 4 configurations a method, short runs.",
        "",
        *table(cifar10),
        "",
        "## The values that won",
        "",
        "For each tuned key except the local rate: its default here, and the tuned values with the "
        "number of columns, the most frequent first. Each page lists the values that were tried; "
        "on many pages the best is the smallest or the largest.",
        "",
        *winners(pages),
        "",
        "Made by `python benchmarks/overview.py` from the pages.",
        "",
    ]
    return "\n".join(lines)


def words(full: Sequence[Page], others: Sequence[Page]) -> list[str]:
    """What the columns have in common."""
    every = [*full, *others]

    def has(pages: Sequence[Page], name: str, verdict: str) -> bool:
        return any(each.verdict == verdict for each in gains(pages, name))

    known = [name for name in order(every) if 2 * len(gains(every, name)) > len(every)]
    safe = [name for name in known if not has(every, name, "below")]
    turned = [name for name in known if has(others, name, "above") and has(full, name, "below")]
    return [
        "- Tested in more than half of the columns, and below FedAvg in none with that confidence: "
        f"{', '.join(safe)}. Three seeds cannot show every loss: with CIFAR-10, Dirichlet 0.1, "
        "scaffold is 4 to 12 points below FedAvg in each seed of both columns.",
        f"- Above FedAvg in a short training, and below it at full length: {', '.join(turned)}. A "
        "short comparison says little of a long training.",
        "- FedInit's loss with CIFAR-10 and 5% of 200 clients is that of a tuned beta of 0.1, "
        "which won after a quarter of the rounds and is above its [bound](../methods/fedinit.md) "
        "there.",
        "- FedDeper's gain in the 80 rounds of all methods is that of a tuned rho of 0.01 with lam "
        "0.8, which is above its [bound](../methods/feddeper.md): with 5 epochs a round the same "
        "two diverged after 71 and 73 rounds with [10% of 100](runs/full-length-feddeper.tar.xz) "
        "clients, and after 104 and 156 with [5% of 200](runs/full-length-200-feddeper.tar.xz).",
    ]


def order(pages: Sequence[Page]) -> list[str]:
    """The methods of the pages, that of the largest mean gain first."""
    means = {
        name: statistics.mean(each.points for each in gains(pages, name)) for name in names(pages)
    }
    return sorted(means, key=lambda name: -means[name])


def names(pages: Sequence[Page]) -> list[str]:
    return [*dict.fromkeys(name for page in pages for name in page.gains)]


def gains(pages: Sequence[Page], name: str) -> list[Gain]:
    return [page.gains[name] for page in pages if name in page.gains]


def table(pages: Sequence[Page]) -> list[str]:
    rows = [
        [name, *(page.gains[name].text if name in page.gains else "–" for page in pages)]
        for name in order(pages)
    ]
    return markdown(["method", *(page.column for page in pages)], rows)


def costs(pages: Sequence[Page]) -> list[str]:
    rows = []
    for name in order(pages):
        own = [page.gains.get(name) for page in pages]
        rounds = [each.rounds if each else math.nan for each in own]
        sent = [each.sent for each in own if each and not math.isnan(each.sent)]
        gradients = {each.gradients for each in own if each}
        cells = ["–" if math.isnan(cell) else f"{cell:.2f}" for cell in rounds]
        cells += [f"{statistics.mean(each):.1f}" if each else "–" for each in (gradients, sent)]
        rows.append([name, *cells])
    return markdown(["method", *(page.setting for page in pages), "gradients", "bytes"], rows)


def counts(pages: Sequence[Page]) -> list[str]:
    rows = []
    for name in order(pages):
        verdicts = [each.verdict for each in gains(pages, name)]
        above, still, below = map(verdicts.count, ("above", "open", "below"))
        rows.append((below - above, [name, *map(str, (len(verdicts), above, still, below))]))
    rows.sort(key=lambda row: row[0])
    return markdown(["method", "tested", "above", "open", "below"], [row for _, row in rows])


def winners(pages: Sequence[Page]) -> list[str]:
    by_key: dict[tuple[str, str], list[float]] = {}
    for name in sorted(names(pages)):
        for page in pages:
            for key, value in page.values.get(name, {}).items():
                by_key.setdefault((name, key), []).append(value)
    rows = []
    for (name, key), own in by_key.items():
        if key != "lr":
            default = settings_of(RunConfig.make({"algo": name}).strategy)[key]
            won = (f"{value:g} ({many})" for value, many in Counter(sorted(own)).most_common())
            rows.append([name, key, f"{default:g}", ", ".join(won)])
    return markdown(["method", "key", "default", "tuned values"], rows)


def plot(pages: Sequence[Page], path: Path) -> None:
    """Gains with their confidence, a row a method and a marker a setting."""
    methods = order(pages)[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(methods) + 1.2), layout="constrained")
    colours = [*accuracy.LEADING.values()]
    wide = student.ppf(0.975, SEEDS - 1) / SEEDS**0.5
    for place, page in enumerate(pages):
        own = [(row, page.gains[name]) for row, name in enumerate(methods) if name in page.gains]
        axes.errorbar(
            [each.points for _, each in own],
            [row + 0.18 * (1.5 - place) for row, _ in own],
            xerr=[wide * each.deviation for _, each in own],
            fmt=MARKERS[place],
            color=colours[place],
            markerfacecolor="white" if place % 2 else None,  # in grey, too
            markersize=4,
            linewidth=0.9,
            label=page.setting,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.set_xlim(-5, 4)
    axes.set_xlabel("points over FedAvg: mean over the seeds, and its 95% confidence interval")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    accuracy.save(figure, path)


if __name__ == "__main__":
    main()

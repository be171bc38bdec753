"""The output of `fedaccord run`: a bar or a line a round, and the table at the end."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedaccord.cli.console import even_unread, print_progress
from fedaccord.federation.eta import Eta

if TYPE_CHECKING:
    from fedaccord.config import RunConfig
    from fedaccord.federation.round import Round


def make_bar(console: Console) -> Progress:
    """A bar between a description and the field `text`; hidden if the console is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        disable=not console.is_terminal,
    )


class Display:
    """Show a run while it trains: on a terminal by a bar, else by a line a round."""

    def __init__(self, console: Console, settings: "RunConfig", heading: list[str]) -> None:
        self.heading = heading  # lines to show after the start of the run
        self.rounds = settings.num_server_rounds
        self.cohort = settings.strategy.cohort_size(settings.num_clients)
        self.number = self.replies = 0
        self.left: Eta | None = None  # from the first round on
        self.shown: dict[str, tuple[int, str]] = {}  # the latest of each metric, and its round
        self.bar = make_bar(console)
        self.task = self.bar.add_task("", total=self.rounds, text="")

    def on_round(self, round: "Round") -> None:
        from fedaccord.runs import metrics

        with even_unread():
            for line in self.heading:
                self.bar.console.print(line, soft_wrap=True)
        self.heading = []
        self.number, self.replies = round.number, 0
        general = (f"{split}-<metric>" for split in (*metrics.SPLITS, "personal"))
        measured = [
            n for n in (*metrics.named(general), *metrics.own(round.metrics)) if n in round.metrics
        ]
        for name in ("train-loss", *(measured or ["test-loss", "client-loss"])):
            if name in round.metrics:
                form = ".2%" if metrics.is_share(name) else ".5g"
                text = f"{name.replace('-', ' ')} {round.metrics[name]:{form}}"
                self.shown[name] = round.number, text
        if (spent := round.metrics.get("dp-epsilon")) is not None:
            self.shown["dp-epsilon"] = round.number, f"epsilon {spent:.4g}"
        self.left = self.left or Eta(round.number, self.rounds)
        number, latest = f"round {round.number}/{self.rounds}", "  ".join(self._latest())
        self.bar.update(self.task, completed=round.number, description=number, text=latest)
        if self.bar.disable:
            words = (number, latest, self.left(round.number))
            print_progress("  ".join(filter(None, words)))

    def _latest(self) -> list[str]:
        """The latest metrics, with the round if it is an earlier one."""
        return [
            text if number == self.number else f"{text} (round {number})"
            for number, text in self.shown.values()
        ]

    def on_client(self, client: int) -> None:
        self.replies += 1
        share = min(self.replies / self.cohort, 1)  # Bernoulli cohorts may be larger
        self.bar.update(self.task, completed=self.number + share)


def written(name: str, number: float | None) -> str:
    """A metric's value, a share as a percentage; None: there is none."""
    from fedaccord.runs import metrics

    form = "{:.2%}" if metrics.is_share(name) else "{:.4f}"
    return "none" if number is None else form.format(number)


def summary_table(algo: str, run: Path) -> Table:
    """The summary in a run's directory."""
    from fedaccord.runs import metrics

    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))

    def value(name: str, end: str) -> str:
        return written(name, summary.get(f"{name}{end}"))

    table = Table.grid(padding=(0, 2))
    table.add_row("method", algo)
    rounds, counted = summary["rounds"], summary["rounds-counted"]
    table.add_row("rounds", str(rounds) if counted == rounds else f"{rounds}, {counted} counted")
    replies = summary["replies"] + summary["dropped"]
    table.add_row("replies dropped", f"{summary['dropped']} of {replies}")
    last = [key.removesuffix(metrics.LAST) for key in summary if key.endswith(metrics.LAST)]
    for split in [split for split in metrics.SPLITS if f"{split}-loss" in last] or ["test"]:
        measured = metrics.named([f"{split}-<metric>"])
        evaluated = [name for name in measured if name in last]
        for name in evaluated or measured[: f"{split}-loss" not in last]:
            for end in (metrics.LAST, metrics.MEAN, metrics.BEST):
                title = f"{metrics.METRIC[name].title}, {end[1:].replace('-', ' ')}"
                table.add_row(title, value(name, end))
        table.add_row(f"{split} loss, last", value(f"{split}-loss", metrics.LAST))
    for name in [*metrics.of_kind(metrics.EVALUATED), *metrics.own(last)]:
        if name in last and name not in metrics.RANKED and "-loss" not in name:
            table.add_row(f"{metrics.column_of(name).title}, last", value(name, metrics.LAST))
    if "dp" in summary:
        spent, privacy = summary["dp"]["epsilon"], summary["dp"]
        epsilon = "none: no noise" if spent is None else f"{spent:.4g} (delta {privacy['delta']:g})"
        table.add_row("epsilon", f"{epsilon}, noise from the {privacy['noise']}")
    for way, key in (("down", "down"), ("up", "up"), ("between peers", "peer")):
        if (count := summary.get(f"{key}-bytes")) is not None:
            table.add_row(f"MB {way}", f"{count / 1e6:{'.1f' if count >= 1e6 else '.2g'}}")
    table.add_row("seconds", f"{summary['seconds']:.1f}")
    return table

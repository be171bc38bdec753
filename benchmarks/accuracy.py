"""The page and picture of a sweep over all methods: docs/results/accuracy*.md.

fedaccord sweep benchmarks/accuracy.toml --out DIR    # or another accuracy-*.toml; it resumes
python benchmarks/accuracy.py DIR                     # from the runs that are completed
"""

import argparse
import math
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import archive
import data
import matplotlib
import pandas as pd
from PIL import Image

from fedaccord.config import RunConfig
from fedaccord.core.options import options as options_of
from fedaccord.experiments.sweep.space import of_method
from fedaccord.runs import flatten, reader

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGES = {
    "accuracy": "Fashion-MNIST",
    "accuracy-all-clients": "Fashion-MNIST, all clients in every round",
}
NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "mlp": "an MLP with two hidden layers of 200",
    "lenet": "LeNet",
    "lenet5": "LeNet-5",
}
RETURNED = (
    "the one that it broadcasts next, but for A-FedPD and A-FedPDSAM the mean of the local models, "
    "for FedExP that of the last two models, and for FedGloSS the one without its perturbation"
)
WINDOW = 3  # last evaluations behind a run's mean
RESULTS = data.REPOSITORY / "docs" / "results"
BASELINE = "fedavg"
# The methods of the picture that leads, in colours that the colour-blind can tell apart (Okabe and
# Ito's); every other method has a small picture beside it.
LEADING = {
    "afedpd": "#d55e00",
    "feddyn": "#cc79a7",
    "fedinit": "#0072b2",
    "scaffold": "#009e73",
    BASELINE: "#000000",
}
STYLES = ("solid", "dashed", "dashdot", (0, (5, 1, 1, 1, 1, 1)), "dotted")  # read in grey, too
DASHES = dict(zip(LEADING, STYLES, strict=True))
# Methods whose defaults were chosen in short runs of the setting on CIFAR-10, seed 0.
CHOSEN = ("fedadagrad", "fedadam", "fedyogi", "mofedsam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args()
    try:
        report(options.sweep.expanduser(), options.results)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


def common(page: str) -> dict[str, Any]:
    """The settings of the sweep's file; those of one method alone begin with its name."""
    return flatten(read_file(page)["run"])


def augmentation(dataset: str) -> str:
    """How local steps augment the data set, at the end of a list; empty: not at all."""
    return ", random crops and mirrored images" if dataset == "cifar10" else ""


def read_file(page: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{page}.toml").read_text("utf-8"))


# --- the report -----------------------------------------------------------------------------------


class Run(NamedTuple):
    settings: dict[str, Any]  # every key with its value
    curve: pd.Series  # test accuracy by round
    mean: float  # of the last evaluations
    train_loss: float


class Method(NamedTuple):
    name: str
    runs: dict[int, Run]  # by seed

    @property
    def mean(self) -> float:
        return sum(run.mean for run in self.runs.values()) / len(self.runs)

    @property
    def curves(self) -> pd.DataFrame:
        """Test accuracy in percent, a row a round and a column a seed."""
        return 100 * pd.DataFrame({seed: run.curve for seed, run in self.runs.items()})


def read(run: reader.StoredRun) -> Run:
    curve = run.metrics.set_index("round")["test-accuracy"].dropna()
    train_loss = run.metrics["train-loss"].iloc[-WINDOW * run.settings["eval-every"] :].mean()
    return Run(run.settings, curve, curve.iloc[-WINDOW:].mean(), train_loss)


def report(sweep: Path, results: Path) -> None:
    """Write the page and its picture from the completed runs of a sweep, the best method first.

    Raises FileNotFoundError where there is none, ValueError where their settings differ.
    """
    runs = [*map(reader.read, reader.find([sweep]))]
    completed_runs = [read(run) for run in runs if run.summary["status"] == "completed"]
    if not completed_runs:
        raise FileNotFoundError(f"{sweep} holds no completed run: sweep first")
    name = page_name(completed_runs[0].settings)
    for run in completed_runs:
        for key, value in of_method(common(name), run.settings["algo"]).items():
            if run.settings[key] != value and key != "download":
                raise ValueError(
                    f"the runs in {sweep} and benchmarks/{name}.toml differ in {key}: a run of "
                    f"{run.settings['algo']} has {run.settings[key]}; move it away"
                )
    by_name: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in completed_runs:
        by_name[run.settings["algo"]][run.settings["seed"]] = run
    methods = [Method(name, runs) for name, runs in by_name.items()]
    methods.sort(key=lambda method: -method.mean)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.md").write_text(text(methods, name, runs))
    plot(methods, results / f"{name}.png")
    print(f"{len(methods)} methods in {results / name}.md and {name}.png")


def page_name(settings: dict[str, Any]) -> str:
    return "accuracy-all-clients" if settings["fraction-train"] == 1 else "accuracy"


def text(methods: list[Method], name: str, every: Sequence[reader.StoredRun] = ()) -> str:
    """The page; every: the runs behind it."""
    setting = common(name)
    rounds, step = setting["num-server-rounds"], setting["eval-every"]
    active = round(setting["fraction-train"] * setting["num-clients"])
    baseline = next((method for method in methods if method.name == BASELINE), None)
    pages = ", ".join(f"[{PAGES[other]}]({other}.md)" for other in PAGES if other != name)
    lines = [
        f"# Accuracy on {PAGES[name]}",
        "",
        f"![test accuracy by round]({name}.png)",
        "",
        f"{NAMES[setting['dataset']]}, {NAMES[setting['model']]}, Dirichlet partition with alpha "
        f"{setting['dirichlet-alpha']:g} and replacement `{setting['replacement']}` (an exhausted "
        "class starts again from its first sample, as in the simulator of the papers), "
        f"{setting['num-clients']} clients, {active} a round, {setting['local-steps']} local steps "
        f"of batch {setting['batch-size']}, {rounds} rounds. Local rate {setting['lr']:g} with "
        f"decay {setting['lr-decay']:g} a round, weight decay {setting['weight-decay']:g}, "
        f"gradient norms clipped at {setting['clip-norm']:g}. "
        "For one seed every method sees the same clients, cohorts and batches, and starts from the "
        f"same model. {rounds} rounds are the beginning of a training: the order may change "
        "later.",
        "",
        defaults(methods, setting),
        "",
        f"| method | defaults | accuracy, mean of last {WINDOW} | of each seed | train loss | "
        f"points over {BASELINE}, of each seed |",
        "| --- | --- | --: | --- | --: | --- |",
    ]
    for method in methods:
        runs = method.runs
        losses = [run.train_loss for run in runs.values()]
        lines.append(
            f"| {method.name} | {own_settings(method, setting)} | {method.mean:.1%} | "
            f"{', '.join(f'{run.mean:.1%}' for _, run in sorted(runs.items()))} | "
            f"{sum(losses) / len(losses):.2f} | {gains(method, baseline)} |"
        )
    lines += [
        "",
        f"The model that a method returns is evaluated every {step} rounds on the 10,000 test "
        f"images: {RETURNED}. An "
        f"accuracy is the mean of the evaluations of rounds {rounds - step * (WINDOW - 1)} to "
        f"{rounds} of a run, then of the seeds; train loss (of local steps, before each step) is "
        f"the mean of the last {WINDOW * step} rounds. {seeds_of(methods, name)} "
        "Methods without a server have a benchmark of their own (`benchmarks/decentralised.py`); "
        f"FedPD and Scaffnew need all clients in every round. See also: {pages}, "
        "[CIFAR-10, tuned](tuned-cifar10.md), [personal models](personal.md).",
        "",
        f"Made by `fedaccord sweep benchmarks/{name}.toml --out DIR` and `python "
        f"benchmarks/accuracy.py DIR`, on a CPU.{archive.sentence(name, every)}",
        "",
    ]
    return "\n".join(lines)


def defaults(methods: list[Method], setting: dict[str, Any]) -> str:
    """Where the settings in the second column come from."""
    sentences = [
        "Every method runs with its defaults, which are in the second column: those of the papers "
        "and of the code of FedInit's authors, or our own if these give none. None was tuned "
        "for this table."
    ]
    if chosen := [method for method in CHOSEN if method in {m.name for m in methods}]:
        sentences.append(
            f"Those of {', '.join(chosen)} were chosen from a few values in short runs on CIFAR-10 "
            "with LeNet, as their pages explain."
        )
    if slower := [key.partition(".")[0] for key in setting if key.endswith(".lr")]:
        sentences.append(
            f"The local rate of {', '.join(slower)} is a usual one of their local optimisers, "
            "AdamW and Muon."
        )
    return " ".join(sentences)


def own_settings(method: Method, of_page: dict[str, Any]) -> str:
    """The settings of the method and of its plug-ins, as ``alpha 0.1``; of_page: see `common`."""
    settings = next(iter(method.runs.values())).settings | of_page
    prefix = f"{method.name}."
    own = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    if own.get("server-lr") == 1:
        del own["server-lr"]  # the plain average
    bare = RunConfig.make({"algo": method.name, "fraction-train": 1.0}).strategy
    for plugin in bare.active_plugins:
        strength = options_of(type(plugin))[0].name
        own[f"{type(plugin).__name__} {strength}"] = getattr(plugin, strength)
    return ", ".join(f"{key} {value}" for key, value in own.items()) or "–"


def gains(method: Method, baseline: Method | None) -> str:
    """Percentage points over the baseline's run of the same seed."""
    if baseline is None or method is baseline:
        return "–"
    both = sorted(method.runs.keys() & baseline.runs.keys())
    points = (100 * (method.runs[seed].mean - baseline.runs[seed].mean) for seed in both)
    return ", ".join(f"{gain:+.1f}" for gain in points)


def seeds_of(methods: list[Method], page: str) -> str:
    """Which seeds there are, of which methods, and which methods are missing."""
    by_seeds: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for method in methods:
        by_seeds[tuple(sorted(method.runs))].append(method.name)
    (usual, names), *others = sorted(by_seeds.items(), key=lambda item: -len(item[1]))
    sentence = f"Seeds: {listed(usual)}"
    sentence += "".join(f"; {listed(seeds)} of {', '.join(of)}" for seeds, of in others) + "."
    names = [method.name for method in methods]
    missing = [name for name in read_file(page)["space"]["algo"] if name not in names]
    return sentence + (f" Not yet run: {', '.join(missing)}." if missing else "")


def listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


def plot(methods: list[Method], path: Path, window: int = WINDOW) -> None:
    """Test accuracy by round: the leading methods in one picture, every other in a small one."""
    others = [method for method in methods if method.name not in LEADING]
    columns = min(5, math.ceil(math.sqrt(len(others))))
    widths = [5.8, *([max(1.44 * columns, 3.2)] if others else [])]
    figure = plt.figure(figsize=(sum(widths), 6.4), layout="constrained")
    left, *right = figure.subfigures(1, len(widths), squeeze=False, width_ratios=widths)[0]
    main = left.subplots()
    leading = [method for method in methods if method.name in LEADING]
    for method in leading:
        draw(main, method, LEADING[method.name], width=2.2)
    main.set_ylim(*limits(leading))
    label_ends(main, leading)
    main.set(xlabel="round", ylabel="test accuracy (%)")
    main.legend(loc="lower right", fontsize=9, handlelength=4)
    main.set_title("mean and range of the seeds", fontsize=10)
    main.grid(alpha=0.3)
    main.spines[["top", "right"]].set_visible(False)
    for part in right:
        small_pictures(part, others, methods, columns)
    figure.supxlabel(
        f"percentages: mean of the last {window} evaluations", fontsize=9, x=0.99, ha="right"
    )
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    with Image.open(path) as picture:  # with a palette it is a third of the size
        picture.convert("RGB").quantize(128).save(path, optimize=True)


def small_pictures(figure: Any, others: list[Method], methods: list[Method], columns: int) -> None:
    """One for each of the others."""
    rows = math.ceil(len(others) / columns)
    baseline = next((method for method in methods if method.name == BASELINE), None)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, method in zip(grid, others, strict=False):
        if baseline:
            axes.plot(baseline.curves.mean(axis=1), color="0.6", linewidth=1.2)
        draw(axes, method, LEADING["fedinit"], width=1.6)
        axes.set_title(f"{method.name}  {method.mean:.1%}", fontsize=9)
        axes.set_ylim(*limits(methods))
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    for axes in list(figure.axes)[len(others) :]:
        axes.set_axis_off()
    figure.suptitle(f"the other methods, {BASELINE} in grey", fontsize=10)


def limits(methods: list[Method]) -> tuple[float, float]:
    """The range of the curves after their first evaluation, the untrained model's."""
    trained = pd.concat([method.curves.iloc[1:] for method in methods])
    low, high = float(trained.min().min()), float(trained.max().max())
    return low - (high - low) / 20, high + (high - low) / 20


def draw(axes: Axes, method: Method, colour: str, width: float) -> None:
    curves = method.curves
    dashes = DASHES.get(method.name, "solid")
    mean = curves.mean(axis=1)
    axes.plot(mean, color=colour, linewidth=width, linestyle=dashes, label=method.name)
    axes.fill_between(
        curves.index, curves.min(axis=1), curves.max(axis=1), color=colour, alpha=0.18, linewidth=0
    )


def label_ends(axes: Axes, methods: list[Method]) -> None:
    """The name of each line at its end, apart from one another."""
    low, high = axes.get_ylim()
    gap, above = (high - low) / 22, math.inf
    ends = sorted(((m.curves.mean(axis=1).iloc[-1], m) for m in methods), key=lambda end: -end[0])
    for height, method in ends:
        above = min(height, above - gap)
        axes.annotate(
            f"{method.name}  {method.mean:.1%}",
            (method.curves.index[-1], above),
            xytext=(6, 0),
            textcoords="offset points",
            color=LEADING[method.name],
            va="center",
            annotation_clip=False,
        )


if __name__ == "__main__":
    main()

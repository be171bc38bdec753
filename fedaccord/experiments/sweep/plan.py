"""The plan of a sweep: its file, read and checked, and the configurations that it may run."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedaccord import config
from fedaccord.config import RunConfig
from fedaccord.core.metrics import METRICS, OUTPUT, PERSONAL, WORST
from fedaccord.core.options import check_option, did_you_mean, key_of, option, options
from fedaccord.core.privacy import Guarantee
from fedaccord.experiments.sweep import space
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.records import naming_defaults
from fedaccord.experiments.sweep.space import Choices, Space, Values
from fedaccord.process import threads
from fedaccord.runs import flatten
from fedaccord.runs.metrics import AT, is_loss, is_share, metric_of
from fedaccord.strategies import METHODS

SEARCHES = ("grid", "random", "optuna", "halving", "asha")
LADDERS = ("halving", "asha")  # searches that train some configurations further
LISTS = ("seeds", "test-seeds")  # keys of [sweep] beside the options
MEASURES = (
    *METRICS,
    "loss",
    f"{OUTPUT}loss",
    f"{OUTPUT}accuracy{WORST}",
    *(f"{of}{name}" for of in (PERSONAL, OUTPUT) for name in METRICS),
)
SAME = {"threads": 1}  # for the same last bits of a trial on every machine


class AtSeconds:
    """The metrics of a run's last evaluation up to so many simulated seconds."""

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, str)
            and AT.search(value) is not None
            and AT.sub("", value) in MEASURES
        )

    def __str__(self) -> str:
        return "one at simulated seconds, e.g. accuracy-at-3600"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The table [sweep], beside the lists of seeds."""

    search: str = option("grid", "how configurations are chosen", choices=SEARCHES)
    tune: bool = option(
        True,
        "choose the best configuration of each method on validation samples; false: test every "
        "one, for example if [space] contains graphs or partitions",
    )
    trials: int = option(20, "configurations of each method (random, optuna, halving, asha)", low=1)
    sampler_seed: int = option(0, "seed of the draws of random, optuna, halving and asha", low=0)
    batch: int = option(4, "optuna: configurations of a method proposed at once", low=1)
    eta: int = option(3, "halving, asha: one in eta configurations passes a rung", low=2)
    rungs: int = option(3, "halving, asha: budgets T, T/eta, T/eta^2, ...", low=1)
    metric: str = option(
        "accuracy-mean-of-last-10",
        "metric that ranks configurations, mean over the seeds, on validation samples; personal: "
        "of the clients' own models, if every method has them; client: evaluated by clients",
        choices=[f"{measure}-{end}" for measure in MEASURES for end in ("mean-of-last-10", "last")],
        also=AtSeconds(),
    )
    validation: float = option(
        0.1,
        "share of the training samples for validation, held out of the clients' data",
        above=0,
        high=0.9,
    )
    target: float = option(
        0.0,
        "rounds, bytes, gradients and seconds of the tests are counted up to this test accuracy "
        "(or loss, as metric); 0: nine tenths of the best, a loss: a tenth of its size above it",
        low=0,
    )
    fair: str = option(
        "steps",
        "equal gradient evaluations: a method that needs g times as many a step gets 1/g of the "
        "local steps (or epochs), or of the configurations; none: no correction",
        choices=("steps", "trials", "none"),
    )
    workers: int = option(
        0, "processes on this machine; 0: one a core, a single one with a GPU", low=0
    )
    ray_address: str = option(
        "", "run on Ray: local, auto or a cluster's address; empty: without Ray"
    )
    cpus: float = option(1.0, "Ray: CPUs of a trial", above=0)
    gpus: float = option(0.0, "Ray: GPUs of a trial; 0.5: two trials share one", low=0)


@dataclass(frozen=True)
class Plan:
    """A checked sweep. Make one with `make`."""

    options: SweepOptions
    seeds: tuple[int, ...]
    test_seeds: tuple[int, ...]
    run: Mapping[str, Any]  # [run] by dotted keys
    space: Space  # [space], without algo
    methods: tuple[str, ...]
    usual: Mapping[str, Any] | None = None  # as of `Configuration`

    @staticmethod
    def make(content: Mapping[str, Any]) -> "Plan":
        """Check the content of a sweep's file.

        Raises ValueError, in one line, for any error in it, before anything is run.
        """
        if unknown := [name for name in content if name not in ("sweep", "run", "space")]:
            near = did_you_mean(unknown[0], ("sweep", "run", "space"))
            raise ValueError(f"expected the tables sweep, run and space, got {unknown[0]!r}{near}")
        tables = {name: content.get(name, {}) for name in ("sweep", "run", "space")}
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                raise ValueError(f"expected a table [{name}], got {table!r}")
        own, run, free = tables["sweep"], flatten(tables["run"]), space.read(tables["space"])
        managed = managed_keys()
        for key in (*run, *free):
            if key.rpartition(".")[2] in managed:
                raise ValueError(
                    f"{key}: a sweep sets it for each of its runs; leave it out, and choose by "
                    "seeds and validation of [sweep], and --out"
                )
        algo = free.pop("algo", None)
        if both := [key for key in run if key in {*free, *(["algo"] if algo else [])}]:
            raise ValueError(
                f"{both[0]}: expected it in [run] or in [space], got both; leave one out"
            )
        for key, value in run.items():
            if isinstance(value, list):
                raise ValueError(
                    f"[run] {key}: expected one value, got {value}; move it to [space]"
                )
        methods = algo.ends if algo else (run.get("algo", RunConfig.algo),)
        for key in run:
            method, _, name = key.partition(".")
            if method in methods and name in free:
                raise ValueError(
                    f"{key}: expected it in [run.{method}] or {name} in [space], got both; use "
                    f"[space.{method}], or leave one out"
                )
        for name in methods:
            if not isinstance(name, str) or name not in METHODS:
                RunConfig.make({"algo": name})  # raises, with the list of known ones
        seeds = _seeds("seeds", own, (0,))
        tests = _seeds("test-seeds", own, seeds)
        plan = Plan(_options(own), seeds, tests, run, free, tuple(methods))
        plan._check()
        return plan

    def _check(self) -> None:
        for key in self.space:
            first = key.partition(".")[0]
            if first in METHODS and first not in self.methods:
                raise ValueError(f"[space] {key}: {first} is not among the methods of the sweep")
        varied = [key for key in self.space if key.rpartition(".")[2] == "num-server-rounds"]
        if varied and self.options.search in LADDERS:
            raise ValueError(
                f"[space] {varied[0]}: expected it in [run] with search={self.options.search}"
                ", whose rungs have equal rounds; move it there"
            )
        metric = self.options.metric
        measured = metric_of(metric) or metric_of(f"test-{metric}")
        if self.space.get("loss") and is_loss(measured):
            raise ValueError(
                f"[sweep] metric={metric}: expected a metric other than the loss, "
                "which [space] varies, e.g. accuracy-last or mae-last"
            )
        for method in self.methods:
            every = []
            if self.options.search != "grid":
                every += [self.configuration(method, p) for p in space.corners(self.of(method))]
            if self.options.search != "optuna":
                every += self.configurations(method)
            for run_config in (configuration.config for configuration in every):
                run_config.strategy.check_clients(run_config.num_clients)
                self._check_privacy(run_config.strategy.guarantee)
                self._check_evaluation(run_config.strategy.evaluation)
                if AT.search(self.options.metric) and run_config.strategy.device_profile == "none":
                    raise ValueError(
                        f"[sweep] metric={self.options.metric}: expected [run] device-profile, "
                        'which gives simulated seconds, got "none"'
                    )
            if self.options.metric.startswith(PERSONAL) and not self._has_personal(method):
                raise ValueError(
                    f"[sweep] metric={self.options.metric}: expected methods whose clients have "
                    f"models of their own, got {method}; use another metric or remove the method"
                )

    def _check_privacy(self, guarantee: Guarantee | None) -> None:
        """Raise ValueError, in one line, if each rung would have noise of its own."""
        has_rungs = self.tunes and self.options.search in LADDERS
        if guarantee and guarantee.multiplier < 0 and has_rungs:
            raise ValueError(
                f"[run] dp.epsilon: expected dp.noise-multiplier with search={self.options.search}"
                f", got {guarantee.epsilon:g}: as a budget of the fewer rounds of a rung it would "
                "set less noise"
            )

    def _check_evaluation(self, evaluation: str) -> None:
        """Raise ValueError, in one line, if the ranking metric is not measured."""
        metric = self.options.metric
        if metric.startswith(OUTPUT) and evaluation == "server":
            needed = '"clients" or "both"'
        elif not metric.startswith((OUTPUT, PERSONAL)) and evaluation == "clients":
            needed = f'"both" or "server", or metric="{OUTPUT}{metric}"'
        else:
            return
        raise ValueError(
            f"[sweep] metric={metric}: expected [run] evaluation = {needed}, got {evaluation!r}"
        )

    def of(self, method: str) -> dict[str, Values]:
        """The space of one method."""
        return space.of_method(self.space, method)

    def configurations(self, method: str) -> list[Configuration]:
        """The configurations of a grid, or random ones."""
        own = self.of(method)
        if self.options.search == "grid":
            points = [*space.grid(own)]
        else:
            points = space.draw(own, self.trials(method), self.options.sampler_seed)
        candidates = [self.configuration(method, point) for point in points]
        return list({configuration.name: configuration for configuration in candidates}.values())

    def first(self, method: str) -> Configuration:
        """One configuration of a method."""
        return self.configuration(method, next(space.corners(self.of(method))))

    def configuration(self, method: str, point: Mapping[str, Any]) -> Configuration:
        settings = space.of_method(self.run, method) | {"algo": method, **point}
        settings["validation"] = self.options.validation
        settings = SAME | settings
        if self.options.fair == "steps":
            run_config = RunConfig.make(settings)
            if (share := run_config.strategy.cost.gradients / self.cheapest) != 1:
                settings |= _fewer(run_config, share)
        used = {key: settings[key] for key in point}
        return Configuration(method, used, settings, self.usual, dict(point))

    def tested(self, configuration: Configuration) -> Configuration:
        """The same on all training samples, evaluated on the test samples."""
        settings = configuration.settings | {"validation": 0.0}
        return dataclasses.replace(configuration, settings=settings)

    def at(self, folder: Path) -> "Plan":
        """The plan with the names that its trials have in a folder."""
        return dataclasses.replace(self, usual=naming_defaults(folder))

    @cached_property
    def run_names(self) -> frozenset[str]:
        """The names of all possible runs; empty with optuna, which proposes configurations by the
        scores of earlier ones."""
        if self.tunes and self.options.search == "optuna":
            return frozenset()
        every = [each for method in self.methods for each in self.configurations(method)]
        tuned = every if self.tunes else []
        names = {each.run_name(seed) for each in tuned for seed in self.seeds}
        tests = map(self.tested, every)
        return frozenset(names | {each.run_name(s) for each in tests for s in self.test_seeds})

    def trials(self, method: str) -> int:
        """The number of configurations of a method, if there is no grid."""
        shares = max(self.costs[method]) / self.cheapest if self.options.fair == "trials" else 1
        return max(1, round(self.options.trials / shares))

    @cached_property
    def costs(self) -> dict[str, list[float]]:
        """Gradient evaluations per local step of each method, at the corners of its space."""
        return {
            method: [
                RunConfig.make(own | point).strategy.cost.gradients
                for point in space.corners(self.of(method))
            ]
            for method in self.methods
            for own in [space.of_method(self.run, method) | {"algo": method}]
        }

    @cached_property
    def cheapest(self) -> float:
        """Gradient evaluations per local step of the cheapest configuration."""
        return min(cost for costs in self.costs.values() for cost in costs)

    def warnings(self) -> list[str]:
        """A line for each key that was set for a method that does not read it, and one for methods
        whose clients have models of their own if the mean model ranks them."""
        others = METHODS.keys() - {*self.methods}
        first = (key.partition(".")[0] for key in self.run)
        lines: dict[str, None] = {
            f"[run.{method}] has no effect: {method} is not among the methods of the sweep": None
            for method in first
            if method in others
        }
        for method in self.methods:
            explicit = {*space.of_method(self.run, method), *self.of(method)}
            for point in space.corners(self.of(method)):
                run_config = self.configuration(method, point).config
                lines |= dict.fromkeys(f"{method}: {line}" for line in run_config.unread(explicit))
        metric = self.options.metric
        own = [method for method in self.methods if self._has_personal(method)]
        if own and not metric.startswith((PERSONAL, OUTPUT, "loss")):
            line = f"ranked by the mean model; {PERSONAL}accuracy-last reports the clients' own"
            if len(own) == len(self.methods):
                line += f", and metric={PERSONAL}{metric} in [sweep] ranks by them"
            lines[f"{', '.join(own)}: {line}"] = None
        return [*lines]

    def _has_personal(self, method: str) -> bool:
        config = self.first(method).config
        return config.strategy.has_personal

    @property
    def tunes(self) -> bool:
        """Whether some method has more than one configuration to choose from."""
        return self.options.tune and any(
            any(not isinstance(v, Choices) or len(v.values) > 1 for v in self.of(m).values())
            for m in self.methods
        )


def managed_keys() -> set[str]:
    """The keys that a sweep or a study sets for each of its runs."""
    return {key for key, field in config.keys().items() if field.metadata["managed"]}


def _fewer(run_config: RunConfig, share: float) -> dict[str, int]:
    """The share of the local steps, or epochs, that needs as many gradients."""
    key = "local-steps" if run_config.flat["local-steps"] else "local-epochs"
    value = run_config.flat[key] / share
    if value != int(value):
        raise ValueError(
            f"{key}: expected a multiple of {share:g} with fair=steps, since {run_config.algo} "
            f"needs {share:g} times the gradients a step, got {run_config.flat[key]}; choose "
            "another number, fair=trials or fair=none"
        )
    return {key: int(value)}


def _options(table: Mapping[str, Any]) -> SweepOptions:
    fields = dict(keys())
    for key in table:
        if key not in fields and key not in LISTS:
            near = did_you_mean(key, (*fields, *LISTS))
            known = ", ".join((*fields, *LISTS))
            raise ValueError(f"[sweep]: unknown key {key!r}{near}; known: {known}")
    checked = SweepOptions(
        **{
            field.name: check_option(f"[sweep] {key}", table[key], field)
            for key, field in fields.items()
            if key in table
        }
    )
    if checked.ray_address in ("", "local"):  # machines of a cluster have other cores
        threads.check(checked.workers, "[sweep] workers")
    measured = metric_of(checked.metric) or metric_of(f"test-{checked.metric}")
    if is_share(measured) and checked.target > 1:
        raise ValueError(
            f"[sweep] target: expected a share in [0, 1], e.g. 0.9, since metric={checked.metric}, "
            f"got {checked.target:g}"
        )
    if checked.search == "grid" and checked.fair == "trials":
        raise ValueError("[sweep] fair=trials: expected a search other than grid; set fair=steps")
    if not checked.tune and checked.search not in ("grid", "random"):
        raise ValueError(
            f"[sweep] tune=false: expected search grid or random, got {checked.search}, which "
            "chooses by validation samples"
        )
    if checked.search == "asha" and not checked.ray_address:
        raise ValueError('[sweep] search=asha: expected a ray-address, e.g. "local", got none')
    return checked


def _seeds(key: str, table: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    seeds = table.get(key, [*default])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise ValueError(f"[sweep] {key}: expected a list of integers, e.g. [0, 1], got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"[sweep] {key}: expected different seeds, got {seeds!r}")
    for seed in seeds:
        RunConfig.make({"seed": seed})
    return tuple(seeds)


def keys() -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """The keys of [sweep] with the option behind each, beside the lists of seeds."""
    for field in options(SweepOptions):
        yield key_of(field.name), field

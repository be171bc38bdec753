"""The searches: each requests scores of configurations at budgets of rounds, batch by batch.

A search is a generator that yields a batch and receives its scores; larger is better, NaN if a
trial failed. It depends only on the scores: a restarted sweep requests the same and resumes at the
first missing score. It returns the configurations that may win.
"""

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from fedaccord.experiments.sweep import space
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.plan import Plan


class Ask(NamedTuple):
    configuration: Configuration
    rounds: int


Asks = list[Ask]
Search = Generator[Asks, list[float], Asks]


def search(plan: Plan, method: str) -> Search:
    """The search of one method, by the plan."""
    if plan.options.search == "halving":
        return halving(plan.configurations(method), plan.options.eta, plan.options.rungs)
    if plan.options.search == "optuna":
        return tpe(plan, method)
    return all_of(plan.configurations(method))


def all_of(configurations: Sequence[Configuration]) -> Search:
    """Every configuration to its last round: a grid, or random ones."""
    asks = [Ask(c, c.rounds) for c in configurations]
    yield asks
    return asks


def halving(configurations: Sequence[Configuration], eta: int, rungs: int) -> Search:
    """Synchronous successive halving (arXiv:1502.07943): a rung starts when the last one has ended.

    One in eta passes each rung, the best at its budget; ties by the smaller hash.
    """
    alive = list(configurations)
    for rung in range(rungs):
        asks = [Ask(c, budget(c.rounds, eta, rungs - 1 - rung)) for c in alive]
        scores = yield asks
        alive = ranked(asks, scores)[: math.ceil(len(alive) / eta)]
    return asks


def budget(rounds: int, eta: int, below: int) -> int:
    """Rounds at the rung that is ``below`` rungs under the last one."""
    return max(1, round(rounds / float(eta) ** below))


def ranked(asks: Sequence[Ask], scores: Sequence[float]) -> list[Configuration]:
    """Sort from best to worst, failed ones last, ties by name. Scores tie if nine digits are equal,
    as those of sums of the same accuracies in another order."""

    def place(pair: tuple[Ask, float]) -> tuple[bool, float, str]:
        ask, score = pair
        failed = math.isnan(score)
        return failed, 0.0 if failed else -float(f"{score:.9g}"), ask.configuration.name

    return [ask.configuration for ask, _ in sorted(zip(asks, scores, strict=True), key=place)]


def tpe(plan: Plan, method: str) -> Search:
    """Optuna's tree-structured Parzen estimator, in batches; reproducible by its seed.

    Raises ModuleNotFoundError if Optuna is not installed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=plan.options.sampler_seed, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    spaces = {key: _distribution(optuna, values) for key, values in plan.of(method).items()}
    left, every = plan.trials(method), []
    while left > 0:
        trials = [study.ask(spaces) for _ in range(min(left, plan.options.batch))]
        left -= len(trials)
        points = [
            {k: _value(plan.of(method)[k], v) for k, v in trial.params.items()} for trial in trials
        ]
        asks = [Ask(c, c.rounds) for c in (plan.configuration(method, p) for p in points)]
        scores = yield asks
        every += asks
        for trial, score in zip(trials, scores, strict=True):
            if math.isnan(score):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
    return every


def _distribution(optuna: Any, values: space.Values) -> Any:
    if isinstance(values, space.Choices):
        return optuna.distributions.CategoricalDistribution(range(len(values.values)))
    kind = "IntDistribution" if values.is_int else "FloatDistribution"
    return getattr(optuna.distributions, kind)(values.low, values.high, log=values.log)


def _value(values: space.Values, chosen: Any) -> Any:
    return values.values[chosen] if isinstance(values, space.Choices) else chosen

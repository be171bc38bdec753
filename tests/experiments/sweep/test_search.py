"""Searches, without a run: the configurations that they request, and their budgets."""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import fmean

import pytest

from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.search import Ask, Asks, Search, budget, halving, ranked, search
from tests.experiments.sweep.plans import make

Objective = Callable[[Ask], float]
NEEDS_OPTUNA = pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra sweep")
LR = {"lr": {"low": 0.01, "high": 1.0, "log": True}}


def carry_out(generator: Search, objective: Objective) -> tuple[list[Asks], Asks]:
    """Its batches, and the requests that may win."""
    batches = [next(generator)]
    while True:
        try:
            batches.append(generator.send([*map(objective, batches[-1])]))
        except StopIteration as end:
            return batches, end.value


def lr(ask: Ask) -> float:
    return float(ask.configuration.config.flat["lr"])


def configurations(count: int, rounds: int = 27) -> Sequence[Configuration]:
    run = {"num-server-rounds": rounds}
    values = {"lr": [0.01 * (i + 1) for i in range(count)]}
    return make(values, run).configurations("fedinit")


def test_a_grid_requests_all_configurations_once_to_the_last_round() -> None:
    plan = make({"lr": [0.1, 0.2, 0.3]})
    (batch,), last = carry_out(search(plan, "fedinit"), lr)
    assert [(lr(ask), ask.rounds) for ask in batch] == [(0.1, 3), (0.2, 3), (0.3, 3)]
    assert last == batch


def test_halving_keeps_one_in_eta_at_each_rung() -> None:
    batches, last = carry_out(halving(configurations(9), eta=3, rungs=3), lr)
    assert [[ask.rounds for ask in batch] for batch in batches] == [[3] * 9, [9] * 3, [27]]
    assert [[round(100 * lr(ask)) for ask in batch] for batch in batches[1:]] == [[9, 8, 7], [9]]
    assert last == batches[-1]
    batches, _ = carry_out(halving(configurations(10), eta=3, rungs=2), lr)
    assert len(batches[1]) == 4  # rounded up
    assert [budget(30, 3, below) for below in (0, 1, 2, 5)] == [30, 10, 3, 1]


def test_halving_uses_the_score_at_the_rung() -> None:
    """The best of the first rung may be the worst of the second."""

    def objective(ask: Ask) -> float:
        return lr(ask) if ask.rounds == 9 else -lr(ask)

    batches, _ = carry_out(halving(configurations(9), eta=3, rungs=3), objective)
    assert [round(100 * lr(ask)) for ask in batches[1]] == [1, 2, 3]
    assert [round(100 * lr(ask)) for ask in batches[2]] == [3]


def test_equal_scores_are_ranked_by_name_and_failures_last() -> None:
    asks = [Ask(c, 3) for c in configurations(5)]
    by_name = sorted(asks, key=lambda ask: ask.configuration.name)
    assert ranked(asks, [1.0] * 5) == [ask.configuration for ask in by_name]
    sums = [0.6850333333333332, 0.6850333333333334] * 2 + [0.6850333333333332]
    assert ranked(asks, sums) == [ask.configuration for ask in by_name]
    scores = [math.nan, 0.5, math.nan, -1e9, 0.7]
    assert ranked(asks, scores)[:3] == [asks[i].configuration for i in (4, 1, 3)]


@NEEDS_OPTUNA
def test_optuna_repeats_its_proposals() -> None:
    """A restarted sweep gets the same proposals, so that it finds their rows."""

    def points(seed: int, objective: Objective = lr) -> list[float]:
        plan = make(LR, search="optuna", trials=14, batch=4, sampler_seed=seed)
        batches, last = carry_out(search(plan, "fedinit"), objective)
        assert [len(batch) for batch in batches] == [4, 4, 4, 2]
        assert last == [ask for batch in batches for ask in batch]
        return [lr(ask) for ask in last]

    first = points(0)
    assert points(0) == first != points(1)
    assert points(0, lambda ask: -lr(ask)) != first  # it learns
    assert points(0, lambda ask: math.nan)[:4] == first[:4]  # failures do not end it


@NEEDS_OPTUNA
def test_optuna_goes_to_better_scores_and_not_to_failures() -> None:
    def share_of_large(objective: Objective) -> float:
        plan = make(LR, search="optuna", trials=40)
        _, asks = carry_out(search(plan, "fedinit"), objective)
        return fmean(lr(ask) > 0.3 for ask in asks[20:])

    assert share_of_large(lr) > 0.6
    assert share_of_large(lambda ask: -lr(ask)) < 0.3
    assert share_of_large(lambda ask: math.nan if lr(ask) > 0.3 else -1 - lr(ask)) < 0.5


@NEEDS_OPTUNA
def test_optuna_proposes_choices_and_integers() -> None:
    space = {"local-epochs": {"low": 1, "high": 3}, "model": ["linear", "mlp"], **LR}
    plan = make(space, search="optuna", trials=6)
    _, asks = carry_out(search(plan, "fedinit"), lr)
    points = [ask.configuration.point for ask in asks]
    assert {point["model"] for point in points} == {"linear", "mlp"}
    assert {type(point["local-epochs"]) for point in points} == {int}

"""The tables, computed from rows by hand."""

import math
from typing import Any

import pandas as pd
import pytest

from fedaccord.experiments.analysis.groups import TEST, TUNE
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.table import (
    Trial,
    Winner,
    as_text,
    at_edges,
    trials_table,
    winners_table,
)
from tests.experiments.sweep.plans import make

PLAN = make({"algo": ["fedprox", "fedavg"], "lr": [0.1, 0.2], "fedprox": {"mu": [1.0]}})
BY_METHOD = {method: PLAN.configurations(method)[0] for method in PLAN.methods}
METRIC = "accuracy-last"


def trial(method: str, seed: int, value: float | None, **more: Any) -> Trial:
    row = {"status": "completed", f"test-{METRIC}": value, "seconds": 1.0} | more
    return Trial(BY_METHOD[method], seed, TEST, 3, row)


def winners(score: float = 0.5) -> list[Winner]:
    return [Winner(best, score, 2) for best in BY_METHOD.values()]


def test_gains_are_of_the_same_seed() -> None:
    values = {"fedavg": (0.5, 0.7, 0.9), "fedprox": (0.6, 0.9, 0.8)}
    tests = [trial(m, seed, v) for m, each in values.items() for seed, v in enumerate(each)]
    table = winners_table(winners(), tests[::-1], METRIC).set_index("algo")
    assert [*table.index] == ["fedprox", "fedavg"]
    row = table.loc["fedprox"]
    assert row[f"test-{METRIC}"] == pytest.approx(2.3 / 3)
    assert row[f"test-{METRIC}-std"] == pytest.approx(math.sqrt(7 / 300))
    assert row["over-fedavg"] == pytest.approx(0.2 / 3)
    assert row["over-fedavg-std"] == pytest.approx(math.sqrt(7 / 300))
    assert (row.better, row.seeds, row.settings) == ("2 of 3", 3, "lr=0.1, fedprox.mu=1")
    assert math.isnan(table.loc["fedavg"]["over-fedavg"])


def test_fedavg_is_compared_at_its_own_choices() -> None:
    other = PLAN.configurations("fedavg")[1]
    assert other.point != {"lr": BY_METHOD["fedprox"].point["lr"]}
    tests = [trial("fedprox", 0, 0.75), trial("fedavg", 0, 0.5)._replace(configuration=other)]
    table = winners_table([winners()[0], Winner(other, 0.5, 2)], tests, METRIC).set_index("algo")
    assert table.loc["fedprox"][["over-fedavg", "better"]].tolist() == [0.25, "1 of 1"]


def test_an_equal_value_is_not_better() -> None:
    tests = [trial(method, 0, 0.5) for method in BY_METHOD]
    assert winners_table(winners(), tests, METRIC).set_index("algo").better["fedprox"] == "0 of 1"


def test_a_failed_seed_is_left_out_of_pairs_and_counted() -> None:
    tests = [trial("fedavg", 0, 0.5), trial("fedavg", 1, 0.6), trial("fedprox", 1, 0.7)]
    tests.append(trial("fedprox", 0, 0.9, status="failed"))
    row = winners_table(winners(), tests, METRIC).set_index("algo").loc["fedprox"]
    assert (row.seeds, row.better) == (1, "1 of 1")
    assert row["over-fedavg"] == pytest.approx(0.1)
    assert math.isnan(row[f"test-{METRIC}-std"])


def test_a_failed_seed_of_fedavg_is_in_no_pair() -> None:
    tests = [trial("fedavg", 0, 0.5, status="failed"), trial("fedavg", 1, 0.6)]
    tests += [trial("fedprox", seed, 0.7) for seed in (0, 1)]
    row = winners_table(winners(), tests, METRIC).set_index("algo").loc["fedprox"]
    assert (row.seeds, row.better) == (2, "1 of 1")


def test_a_smaller_loss_is_better() -> None:
    loss = "loss-last"
    tests = [trial("fedavg", 0, None, **{"test-loss-last": 2.0})]
    tests.append(trial("fedprox", 0, None, **{"test-loss-last": 1.0}))
    table = winners_table(winners(score=-3.0), tests, loss)
    assert [*table.algo] == ["fedprox", "fedavg"]
    assert [*table[f"validation-{loss}"]] == [3.0, 3.0]
    assert table["over-fedavg"][0] == -1.0
    assert table.better[0] == "1 of 1"
    assert as_text(table)[1][0][:2] == ["fedprox", "1"]  # no percentage


def test_the_same_choices_are_those_before_equal_gradients() -> None:
    """FedSAM has half the steps of a choice, because each has two gradients."""
    plan = make({"algo": ["fedavg", "fedsam"], "local-steps": [2, 4]}, tune=False)
    every = [c for method in plan.methods for c in plan.configurations(method)]
    assert [c.point["local-steps"] for c in every] == [2, 4, 1, 2]
    tests = [
        Trial(c, 0, TEST, 3, {"status": "completed", f"test-{METRIC}": value})
        for c, value in zip(every, (0.5, 0.8, 0.6, 0.7), strict=True)
    ]
    table = winners_table([Winner(c, math.nan, 1) for c in every], tests, METRIC)
    gains = dict(zip(table.settings + table.algo, table["over-fedavg"], strict=True))
    assert gains["local-steps=1fedsam"] == pytest.approx(0.1)
    assert gains["local-steps=2fedsam"] == pytest.approx(-0.1)


def test_if_all_are_tested_gains_are_over_the_same_choices() -> None:
    every = [c for method in PLAN.methods for c in PLAN.configurations(method)]
    values = {("fedavg", 0.1): 0.5, ("fedavg", 0.2): 0.8, ("fedprox", 0.1): 0.6}
    values |= {("fedprox", 0.2): 0.7}
    rows = {c: {f"test-{METRIC}": values[c.algo, c.point["lr"]]} for c in every}
    tests = [Trial(c, 0, TEST, 3, {"status": "completed"} | row) for c, row in rows.items()]
    table = winners_table([Winner(c, math.nan, 1) for c in every], tests, METRIC)
    assert [*table.algo] == ["fedavg", "fedprox", "fedprox", "fedavg"]
    assert [*table["over-fedavg"][[1, 2]]] == pytest.approx([-0.1, 0.1])
    assert table["over-fedavg"][[0, 3]].isna().all()
    assert [*table.trial] == [every[i].name for i in (3, 1, 0, 2)]


def test_the_table_has_every_key_and_stopped_trials() -> None:
    def tuned(configuration: Configuration, rounds: int, status: str) -> Trial:
        return Trial(configuration, 0, TUNE, rounds, {"status": status, "reason": "why"})

    both = BY_METHOD["fedavg"], BY_METHOD["fedprox"]
    rows = [tuned(both[0], 3, "completed"), tuned(both[1], 1, "completed")]
    rows += [tuned(both[1], 3, "failed")]
    table = trials_table(rows)
    assert [*table.columns][:6] == ["trial", "stage", "algo", "lr", "fedprox.mu", "seed"]
    assert [*table.columns][-2:] == ["seconds", "reason"]
    assert [*table.status] == ["completed", "stopped", "failed"]
    assert [*table["fedprox.mu"]] == [None, 1.0, 1.0]


def test_the_printed_table_has_no_nan_and_joins_means_with_spreads() -> None:
    tests = [trial("fedavg", 0, 0.123456), trial("fedavg", 1, 0.1), trial("fedprox", 0, 0.1)]
    heading, rows = as_text(winners_table(winners(), tests, METRIC))
    assert heading[:2] == ["algo", "test accuracy last"]
    assert [row[:2] for row in rows] == [["fedavg", "11.17 ± 1.66%"], ["fedprox", "10.00%"]]
    assert [row[heading.index("validation accuracy last")] for row in rows] == ["50.00%"] * 2
    assert [row[heading.index("seeds")] for row in rows] == ["2 (0, 1)", "1 (0)"]
    assert [row[heading.index("over fedavg")] for row in rows] == ["", "-2.35%"]
    assert all(isinstance(cell, str) and cell != "nan" for row in rows for cell in row)
    assert not any(name.endswith("std") for name in heading)


def test_costs_stand_behind_the_accuracy_with_the_target_in_their_heading() -> None:
    table = winners_table(winners(), [trial("fedavg", 0, 0.1), trial("fedprox", 0, 0.2)], METRIC)
    row = {"target": 0.15, "bytes-to-target": 12.35e6, "bytes-to-target-std": math.nan}
    costs = pd.DataFrame([row], index=[BY_METHOD["fedprox"].name])
    heading, rows = as_text(table.join(costs, on="trial"))
    assert [row[heading.index("bytes sent to 15.00%")] for row in rows] == ["12.35M", "-"]
    assert "target" not in heading


def test_accuracies_of_clients_are_in_percent_too() -> None:
    name = "client-accuracy-last"
    table = winners_table(winners(), [trial("fedavg", 0, None, **{name: 0.25})], name)
    heading, rows = as_text(table)
    assert (heading[1], rows[0][:2]) == ("test client accuracy last", ["fedavg", "25.00%"])


@pytest.mark.parametrize(
    ("key", "chosen", "tried", "which"),
    [
        ("lr", 0.3, (0.1, 0.2, 0.3), "largest of 3"),
        ("lr", 0.1, (0.1, 0.2, 0.3), "least of 3"),
        ("lr", 0.2, (0.1, 0.2, 0.3), ""),
        ("lr", 0.2, (0.2,), ""),
        ("lr-decay", 1.0, (1.0, 0.9), ""),  # the end of what is allowed
        ("eval-train", True, (True, False), ""),  # no number
    ],
)
def test_a_winner_at_the_edge_of_what_was_tried(
    key: str, chosen: float, tried: tuple[float, ...], which: str
) -> None:
    [winner] = make({key: [chosen], "algo": ["fedavg"]}).configurations("fedavg")
    lines = [*at_edges(winner, [{key: value, "algo": "fedavg"} for value in tried])]
    words = [f"fedavg: the winner's {key}={chosen} is the {which} values tried"] if which else []
    assert [line.partition(";")[0] for line in lines] == words

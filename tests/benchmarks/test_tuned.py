"""The page of benchmarks/tuned.py, from run directories made by hand; its sweeps."""

from pathlib import Path
from typing import Any

import accuracy
import pytest
import tuned

from fedaccord.experiments.sweep import Plan
from fedaccord.runs import RunDirectory


def plan_of(page: str, *methods: str) -> Plan:
    content = accuracy.read_file(page)
    own = {k: v for k, v in content["space"].items() if not isinstance(v, dict) or k in methods}
    space = own | {"lr": content["space"]["lr"], "algo": [*methods]}
    return Plan.make(content | {"space": space})


PLAN = plan_of("full-length", "fedavg", "fedinit", "scaffold", "feddyn", "fedcm")


def write_run(out: Path, method: str, which: int, seed: int, final: float, **other: Any) -> None:
    """A test of a method's configuration, or with ``validation`` a run that tunes it."""
    own = PLAN.configurations(method)[which].settings | {"validation": 0.0, "seed": seed} | other
    name = f"{method}-{which}-{seed}-{own['validation']}"
    run = RunDirectory(str(out / "runs"), name, own)
    split = "validation" if own["validation"] else "test"
    for number in range(21):
        share = number / 20
        row = {"round": 5 * number, f"{split}-accuracy": final * (0.5 if number < 11 else 1)}
        run.record(row | {"up-bytes": 10**6, "down-bytes": 0, "seconds": 1.0, "drift": share}, [])
    run.summarise("completed", **{f"{split}-accuracy-mean-of-last-10": final})


def test_a_method_is_tested_with_its_tuned_values_and_compared_by_seed(tmp_path: Path) -> None:
    untuned = {"scaffold": {"scaffold.server-lr": 0.7}}
    for method, which, gain in (("fedavg", 1, 0.0), ("fedinit", 2, 0.02), ("scaffold", 0, -0.02)):
        write_run(tmp_path, method, which, 0, 0.75, validation=0.1)
        for seed in range(3):
            mean = 0.79 + seed / 100 + gain * (1 + seed / 10)
            write_run(tmp_path, method, which, seed, mean, **untuned.get(method, {}))
    write_run(tmp_path, "feddyn", 0, 0, 0.9)  # of one seed: not tested yet
    for seed in range(3):
        write_run(tmp_path, "fedcm", 0, seed, 0.9)
        summary = tmp_path / "runs" / f"fedcm-0-{seed}-0.0" / "summary.json"
        summary.write_text(summary.read_text().replace('"completed"', '"failed"'))
    tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")
    page = (tmp_path / "tuned.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["fedinit", "fedavg", "scaffold"]
    assert rows[2][1:7] == [
        *("lr 0.231, relaxed-init.beta 0.1", "82.20 ± 1.20%", "+2.20 ± 0.20", "above"),
        *("75.0%", "55 ± 0"),
    ]
    assert rows[3][1:7] == [*("lr 0.0545", "80.00 ± 1.00%", "–", "", "75.0%", "55 ± 0 (2 of 3)")]
    assert rows[4][3:5] == ["-2.20 ± 0.20", "below"]
    assert "fedinit: lr=0.2305; fedinit: relaxed-init.beta=0.1" in page
    assert "Not tested yet: feddyn." in page
    assert "Failed in their tests, with their best configuration: fedcm (after 20 rounds)" in page
    assert "ends more than 2 points below its best 10" not in page
    assert "Not tuned, at their values here: scaffold: scaffold.server-lr 0.7." in page
    assert (tmp_path / "tuned.png").stat().st_size > 10_000


def test_tests_of_an_earlier_winner_do_not_hide_those_of_the_present_one(tmp_path: Path) -> None:
    for which, validation, test in ((0, 0.7, 0.9), (1, 0.8, 0.6)):
        write_run(tmp_path, "fedavg", which, 0, validation, validation=0.1)
        for seed in range(3):
            write_run(tmp_path, "fedavg", which, seed, test + seed / 100)
    tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")
    page = (tmp_path / "tuned.md").read_text()
    assert "| 61.00 ± 1.00% |" in page
    assert "Not tested yet: fedavg" not in page


def test_runs_of_another_setting_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, 0, 0.75, validation=0.1)
    for seed in range(3):
        write_run(tmp_path, "fedavg", 0, seed, 0.75, **{"dirichlet-alpha": 0.6, "threads": 2})
    with pytest.raises(
        ValueError, match=r"^fedavg: expected tests with dirichlet-alpha=0.1, .* 0.6"
    ):
        tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")


def test_a_winner_that_falls_is_named(tmp_path: Path) -> None:
    for method, mean in (("fedavg", 0.75), ("fedinit", 0.7)):
        write_run(tmp_path, method, 0, 0, 0.75, validation=0.1)
        for seed in range(3):
            write_run(tmp_path, method, 0, seed, 0.8)
        (summary,) = tmp_path.glob(f"runs/{method}-0-0-0.1/summary.json")
        key = '"validation-accuracy-mean-of-last-10": '
        summary.write_text(summary.read_text().replace(f"{key}0.75", f"{key}{mean}"))
    tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")
    page = (tmp_path / "tuned.md").read_text()
    assert "may choose other values: fedinit (from 75.0 to 70.0%)." in page


def test_a_better_run_beside_the_search_is_named(tmp_path: Path) -> None:
    for which, mean in ((0, 0.75), (1, 0.8), (2, 0.7)):
        write_run(tmp_path, "fedinit", which, 0, mean, validation=0.1)
    for seed in range(3):
        write_run(tmp_path, "fedinit", 0, seed, 0.74)
    tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")
    page = (tmp_path / "tuned.md").read_text()
    point = PLAN.configurations("fedinit")[1].point
    words = ", ".join(f"{key} {value:.3g}" for key, value in point.items())
    assert f"outside the search: fedinit with {words} (80.0%). It was not tested." in page
    assert " The 6 runs are of 1 commit" in page


def test_a_page_says_how_it_is_made() -> None:
    recipe = tuned.Recipe(PLAN, "tuned", ["dirichlet-alpha=0.6"])
    assert recipe.commands("tuned-06") == (
        "`fedaccord sweep benchmarks/tuned.toml dirichlet-alpha=0.6 --out DIR` and "
        "`python benchmarks/tuned.py DIR dirichlet-alpha=0.6 --file tuned --page tuned-06`"
    )
    assert tuned.Recipe(PLAN, "full-length").commands("full-length") == (
        "`fedaccord sweep benchmarks/full-length.toml --out DIR` and "
        "`python benchmarks/tuned.py DIR --page full-length`"
    )
    own = tuned.Recipe.by("low-participation", ["dirichlet-alpha=0.6"]).plan
    assert own.run["dirichlet-alpha"] == 0.6


def test_the_ranking_says_whether_it_reads_all_evaluations() -> None:
    words = (", which is all of them", ", which is nearly all of them", "")
    assert tuple(map(tuned.part, (10, 11, 12))) == words
    assert tuned.part(9) == words[0]


def test_a_folder_without_a_tested_method_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, 0, 0.9, validation=0.1)
    with pytest.raises(FileNotFoundError, match="holds no method that is tested: sweep first"):
        tuned.report(tuned.Recipe(PLAN, "tuned"), tmp_path, tmp_path, "tuned")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "methods", "trials"),
    [
        ("tuned", 10, 16),
        ("tuned-all", 29, 4),
        ("full-length", 29, 4),
        ("tuned-cifar10", 10, 4),
        ("low-participation", 5, 8),
    ],
)
def test_every_method_has_as_many_configurations(page: str, methods: int, trials: int) -> None:
    plan = Plan.make(accuracy.read_file(page))
    assert len(plan.methods) == methods
    assert {len(plan.configurations(method)) for method in plan.methods} == {trials}

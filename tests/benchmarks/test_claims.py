"""The page of benchmarks/claims.py, from run directories made by hand; its sweeps."""

from pathlib import Path
from typing import Any

import accuracy
import claims
import pytest

from fedaccord.runs import RunDirectory


def write_run(
    out: Path, sweep: str, seed: int, accuracy: float, status: str = "completed", **settings: Any
) -> None:
    config = {"seed": seed} | {key.replace("_", "-"): value for key, value in settings.items()}
    if "beta" in config:
        config["relaxed-init.beta"] = config.pop("beta")
    name = "-".join(map(str, (sweep, *config.values())))
    run = RunDirectory(str(out / sweep / "runs"), name, config)
    for number in range(12):
        late = number > 6  # the last five evaluations
        row = {"round": number, "test-accuracy": accuracy if late else 0.1}
        run.record(row | {"consistency": 1 - accuracy}, [])
    run.summarise(status)


def page(out: Path) -> dict[str, list[str]]:
    """The cells of each line of the page's tables, by the claim."""
    claims.report(out, out)
    lines = (out / "claims.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_a_claim_is_tested_on_differences_between_runs_of_the_same_seed(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.02, 0.03, 0.04)):
        base = 0.5 + seed / 10
        write_run(tmp_path, "relaxed", seed, base, algo="fedavg")  # without a table of its own
        write_run(tmp_path, "relaxed", seed, base + gain, algo="fedavg", beta=0.1)
        write_run(tmp_path, "relaxed", seed, base, algo="scaffold")
        write_run(tmp_path, "relaxed", seed, base - gain, algo="scaffold", beta=0.1)
        for algo, share, more in (("feddyn", 0.02, 2 * gain), ("feddyn", 0.2, gain)):
            of = {"algo": algo, "fraction_train": share}
            write_run(tmp_path, "participation", seed, base, **of)
            write_run(tmp_path, "participation", seed, base + more, **of | {"algo": "afedpd"})
    write_run(tmp_path, "relaxed", 3, 0.9, "failed", algo="fedavg")
    write_run(tmp_path, "tuned", 0, 0.9, algo="fedavg", validation=0.1)
    rows = page(tmp_path)
    text = next(tmp_path.rglob("claims.md")).read_text()
    assert "over the seeds 0, 1, 2, and" in text
    assert rows["relaxed initialisation with beta 0.1 gains on fedavg, Dirichlet 0.1"] == [
        *(
            "72.53 → 75.95",
            "60.00 ± 10.00 → 63.00 ± 11.00",
            "+3.00 ± 1.00",
            "`relaxed`",
            "**holds**",
        )
    ]
    of_scaffold = rows["relaxed initialisation with beta 0.1 gains on scaffold, Dirichlet 0.1"]
    assert of_scaffold[2:] == ["-3.00 ± 1.00", "`relaxed`", "**does not hold**"]
    assert rows["A-FedPD gains more on FedDyn with 2% than with 20%"][1:] == [
        *("+6.00 ± 2.00, +3.00 ± 1.00", "+3.00 ± 1.00", "`participation`", "**holds**")
    ]
    assert rows["A-FedPD above FedDyn, 2%, 500 rounds, both tuned"][1:] == [
        "not run",
        "",
        "[low-participation](low-participation.md)",
        "open",
    ]
    counts = (tmp_path / "claims.md").read_text()
    assert " claims of the papers 2 hold, 1 do not, " in counts
    assert " questions of our own 4 hold, 0 do not, " in counts


def test_an_eigenvalue_is_that_of_the_measured_runs(tmp_path: Path) -> None:
    sweep = "gallery-decentralised"
    for algo, value in (("dfedavg", 16.0), ("dfedsam", 14.0), ("dfedsam-mgs", None)):
        for seed in range(3):
            write_run(tmp_path, sweep, seed, 0.5, algo=algo)
            run = tmp_path / sweep / "runs" / f"{sweep}-{seed}-{algo}"
            if value is not None:
                (run / "measures.json").write_text(f'{{"hessian-top-eigenvalue": {value + seed}}}')
    rows = page(tmp_path)
    assert rows["the largest eigenvalue of DFedAvg above that of DFedSAM"] == [
        *("–", "15.00 ± 1.00 → 17.00 ± 1.00", "+2.00 ± 0.00"),
        *("[gallery-decentralised](../gallery.md)", "**holds**"),
    ]
    assert rows["the largest eigenvalue of DFedSAM above that of DFedSAM-MGS"][1] == "not run"
    (run / "measures.json").write_text('{"hessian-top-eigenvalue": null}')  # it was not finite
    assert page(tmp_path) == rows


def test_broadcast_models_are_compared_too_and_another_window_is_in_brackets(
    tmp_path: Path,
) -> None:
    for seed in range(3):
        base = 0.5 + seed / 100
        write_run(tmp_path, "total-5", seed, base, algo="feddyn")
        run = RunDirectory(str(tmp_path / "total-5" / "runs"), f"afedpd-{seed}", afedpd(seed))
        for number in range(12):
            score = base + 0.1 if number > 6 else 0.1 * seed
            broadcast = {"test-accuracy-broadcast": base - 0.1 - seed / 1000}
            run.record({"round": number, "test-accuracy": score} | broadcast, [])
        run.summarise("completed")
    rows = page(tmp_path)
    text = "A-FedPD above FedDyn, K = 5, 120 rounds"
    assert rows[text][2:] == ["+10.00 ± 0.00", "`total-5`", "**holds** (open)"]
    assert rows[f"{text}, broadcast models"][2] == "-10.10 ± 0.10"


def afedpd(seed: int) -> dict[str, Any]:
    return {"seed": seed, "algo": "afedpd"}


def test_a_verdict_that_many_tests_explain_is_not_bold(tmp_path: Path) -> None:
    gains = {"fedavg": (1, -1, 2), "scaffold": (2, -2, 3), "fedsam": (13, 20, 28)}
    for algo, each in gains.items():
        for seed, gain in enumerate(each):
            write_run(tmp_path, "relaxed", seed, 0.5, algo=algo)
            write_run(tmp_path, "relaxed", seed, 0.5 + gain / 1000, algo=algo, beta=0.1)
    rows = page(tmp_path)
    of = "relaxed initialisation with beta 0.1 gains on {}, Dirichlet 0.1".format
    assert [rows[of(algo)][-1] for algo in gains] == ["open", "open", "holds"]
    assert ": the 0 verdicts in bold remain " in (tmp_path / "claims.md").read_text()


def test_consistency_is_that_of_the_last_round(tmp_path: Path) -> None:
    for seed in range(3):
        for beta, share in ((0.0, 0.5), (0.1, 0.6 + seed / 100)):
            write_run(tmp_path, "gallery-beta", seed, share, algo="fedinit", beta=beta)
    assert page(tmp_path)["consistency at beta 0 above that at 0.1"][1:] == [
        *("0.390 ± 0.010 → 0.500 ± 0.000", "+0.110 ± 0.010"),
        *("[gallery-beta](../gallery.md)", "**holds**"),
    ]


def test_two_runs_of_one_seed_and_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no completed run of relaxed, "):
        claims.report(tmp_path, tmp_path)
    write_run(tmp_path, "relaxed", 0, 0.5, algo="fedavg", lr=0.1)
    write_run(tmp_path, "relaxed", 0, 0.5, algo="fedavg", lr=0.2)
    with pytest.raises(ValueError, match=r"two runs of seed 0 with .*'algo': 'fedavg'"):
        claims.report(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"--run: expected names among relaxed, .*, got figure"):
        claims.plan("figure")


@pytest.mark.parametrize("name", claims.sweeps())
def test_a_sweep_has_one_configuration_for_each_side_of_its_claims(name: str) -> None:
    plan = claims.plan(name)
    assert not plan.tunes
    every = [c.settings for method in plan.methods for c in plan.configurations(method)]
    sides = [
        side
        for group in claims.GROUPS
        for claim in group.claims
        for side in (claim.low, claim.high, *(claim.than or ()))
        if claim.sweep == name
    ]
    assert sides
    for side in sides:
        assert sum(side.items() <= settings.items() for settings in every) == 1


@pytest.mark.parametrize("name", ["tuned", "full-length", "tuned-cifar10", "low-participation"])
def test_a_claim_of_tuned_methods_names_methods_of_its_sweep(name: str) -> None:
    methods = accuracy.read_file(name)["space"]["algo"]
    own = [c for group in claims.GROUPS for c in group.claims if c.sweep == name]
    assert own
    assert {side["algo"] for claim in own for side in (claim.low, claim.high)} <= {*methods}


def test_a_claim_of_a_table_has_the_order_of_the_paper() -> None:
    assert claims.fedinit_table1("tuned-200", "scaffold")[:5] == (
        *("FedInit above SCAFFOLD", "74.24 → 74.92", "tuned-200"),
        *({"algo": "scaffold"}, {"algo": "fedinit"}),
    )
    below = claims.afedpd_table2("tuned", "fedavg", "fedcm")
    assert (below.text, below.paper) == ("FedAvg above FedCM", "72.89 → 75.57")

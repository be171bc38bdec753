"""keep-best: the model of the best round by a metric, also of interrupted and resumed runs."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from fedaccord.config import RunConfig
from fedaccord.engine import quiet, run
from fedaccord.federation.round import Round
from fedaccord.runs import RunDirectory, load_model
from fedaccord.runs.best import BEST, Best
from fedaccord.runs.metrics import best
from tests.cli.shell import invoke, success, summary

SMALL: dict[str, Any] = {
    **{"num-clients": 4, "model": "linear", "local-epochs": 1, "threads": 1, "device": "cpu"},
    **{"lr": 0.5, "lr-decay": 1.0, "evaluation": "both", "checkpoint-every": 2},
}
W = torch.zeros(3)


def federate(folder: Path, rounds: int, on_round: Any = None, **more: Any) -> Path:
    config = SMALL | {"out-dir": str(folder), "num-server-rounds": rounds} | more
    with quiet():
        return run(RunConfig.make(config), on_round=on_round).path


def kept(path: Path) -> dict[str, Any]:
    return dict(summary(path)["best-model"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("metric", ["client-accuracy", "test-loss", "client-loss-worst-tenth"])
def test_the_best_model_is_that_of_a_run_that_ends_there(metric: str, tmp_path: Path) -> None:
    path = federate(tmp_path, 6, name="long", algo="afedpd", **{"keep-best": metric})
    values = pd.read_csv(path / "metrics.csv")[metric].iloc[1:]
    record = kept(path)
    number = int((values == best(metric)(values)).idxmax())
    assert record == {"file": BEST, "metric": metric, "round": number, "value": values[number]}
    short = federate(tmp_path, number, name="short", algo="afedpd")
    assert same(load_model(path, BEST), load_model(short))


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(first: float) -> None:
    best = Best(RunConfig.make(SMALL | {"keep-best": "test-loss"}))
    session: Any = SimpleNamespace(
        method=SimpleNamespace(averaged_output=lambda w, server: w), buffer_layout=None, like=W
    )
    values = (2.3, first, 0.5, first, 0.4, 0.7)  # from round 0 on
    for t, value in enumerate(values):
        s: Any = SimpleNamespace(t=t, w=W + t, server=None, buffers=None)
        is_new = best.is_new(Round(s, s.w, {"test-loss": value}, []), session)
        assert is_new == (t in (2, 4))
        assert bool(best.facts()) == (t >= 2)
    assert best.facts() == {"file": BEST, "metric": "test-loss", "round": 4, "value": 0.4}
    assert torch.equal(best.vectors(session)[0], W + 4)


def test_a_run_that_resumes_keeps_the_best_of_the_rounds_that_count(tmp_path: Path) -> None:
    """The best round may be before, at or after the checkpoint from which it resumes."""
    more = {"keep-best": "client-loss", "algo": "scaffold", "lr": 2.0, "clip-norm": 0.0}
    whole = federate(tmp_path, 7, name="whole", **more)

    def stop(round: Round) -> None:
        if round.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path, 7, stop, name="parts", **more)
    parts = federate(tmp_path, 7, name="parts", resume=True, **more)
    assert kept(parts) == kept(whole)
    assert same(load_model(parts, BEST), load_model(whole, BEST))
    # a metric of another kind begins here
    for rounds, metric in ((8, "test-accuracy"), (9, "client-loss")):
        result = invoke("resume", parts, f"num-server-rounds={rounds}", f"keep-best={metric}")
        assert result.exit_code == 0, result.output
        assert kept(parts)["round"] == rounds
        line = f"resume: keep-best={metric} keeps the best model of the rounds from now on"
        assert line in " ".join(result.stderr.split())
    result = invoke("resume", parts, "num-server-rounds=10")
    assert "keeps the best" not in result.stderr


def test_a_full_disk_at_a_resume_leaves_the_best_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = federate(tmp_path, 2, name="x", **{"keep-best": "test-accuracy"})
    before = (path / BEST).read_bytes()
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(RunDirectory, "save_model", full)
    assert invoke("resume", path, "num-server-rounds=3").exit_code == 1
    assert (path / BEST).read_bytes() == before


def test_a_run_that_resumes_without_the_metric_keeps_the_file(tmp_path: Path) -> None:
    path = federate(tmp_path, 2, name="x", **{"keep-best": "test-accuracy"})
    before, value = (path / BEST).read_bytes(), kept(path)["value"]
    result = success(invoke("resume", path, "num-server-rounds=3", "keep-best="))
    assert "resume: without keep-best=test-accuracy the best model stays" in result.stderr
    assert (path / BEST).read_bytes() == before
    success(invoke("evaluate", path, "--best"))
    assert "without keep-best" not in invoke("resume", path, "num-server-rounds=4").stderr
    assert kept(path)["round"] <= 2
    result = success(invoke("resume", path, "num-server-rounds=5", "keep-best=test-accuracy"))
    assert "from now on" not in result.stderr
    assert (path / BEST).exists()
    assert kept(path)["value"] >= value


def test_a_value_of_another_metric_is_not_restored() -> None:
    """A loss of 1.5 would be better than any accuracy."""
    best = Best(RunConfig.make(SMALL | {"keep-best": "test-accuracy"}))
    facts = {"file": BEST, "metric": "test-loss", "round": 2, "value": 1.5}
    best.restore(facts, {"best.2": W})
    assert best.facts() == {}


def test_evaluate_finds_the_best_model(tmp_path: Path) -> None:
    path = federate(tmp_path, 3, name="x", **{"keep-best": "test-accuracy"})
    result = invoke("evaluate", path, "--best")
    assert result.exit_code == 0, result.output
    value = f"{kept(path)['value']:.2%}"
    assert f"test accuracy  {value}  reported: {value}" in " ".join(result.output.split("\n"))
    of_clients = federate(tmp_path, 3, name="z", **{"keep-best": "client-accuracy"})
    text = " ".join(invoke("evaluate", of_clients, "--best").output.split())
    assert f"client accuracy reported: {kept(of_clients)['value']:.2%}; not measured here" in text
    assert "test accuracy" in text
    other = federate(tmp_path, 1, name="y")
    result = invoke("evaluate", other, "--best")
    assert result.exit_code == 2
    line = "expected a run directory with best.safetensors, found none: keep-best was off"
    assert line in result.stderr


@pytest.mark.parametrize(
    ("metric", "line"),
    [
        ("client-acuracy", r"keep-best: expected an evaluated metric, .* \(did you mean 'client-a"),
        ("train-loss", "keep-best: expected an evaluated metric"),
        ("drift", "keep-best: expected an evaluated metric"),
        ("client-accuracy-std", "keep-best: expected an evaluated metric"),
        ("train-accuracy", "keep-best: .* got 'train-accuracy': .* set eval-train=true$"),
        ("client-loss", "keep-best: .* set evaluation=clients or evaluation=both$"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(metric: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line):
        federate(tmp_path, 2, name="x", **{"keep-best": metric, "evaluation": "server"})
    assert not (tmp_path / "x").exists()


def test_a_function_of_ones_own_chooses_no_best_model(tmp_path: Path) -> None:
    keys = {"keep-best": "test-brier", "metrics": "accuracy, tests.own:brier"}
    with pytest.raises(
        ValueError, match=r"^keep-best: .* better direction .* a function of your own$"
    ):
        federate(tmp_path, 2, name="x", **keys)


@pytest.mark.parametrize(
    ("metric", "more", "needs"),
    [
        ("test-mae", {}, "metrics=mae"),
        ("personal-accuracy", {}, "a method whose clients have their own models"),
        ("personal-mae-worst-tenth", {"algo": "ditto"}, "metrics=mae"),
        ("test-accuracy-nodes", {}, "gossip.topology and gossip.eval-nodes=true"),
        ("test-loss-nodes", {"algo": "dfedavg", "gossip.eval-nodes": False}, "gossip.topology"),
        ("test-loss-broadcast", {}, "a method that returns another model"),
        ("client-accuracy", {"fraction-evaluate": 0.0}, "fraction-evaluate above 0"),
        ("test-accuracy", {"validation": 0.1}, "validation=0"),
        ("validation-accuracy", {}, "validation above 0"),
        ("test-loss", {"evaluation": "clients"}, "evaluation=server or evaluation=both"),
    ],
)
def test_the_needs_of_a_metric_are_checked_before_the_directory_is_made(
    metric: str, more: dict[str, Any], needs: str, tmp_path: Path
) -> None:
    line = "^keep-best: expected a metric that this run measures, got .*: choose another or set "
    with pytest.raises(ValueError, match=line + needs) as error:
        federate(tmp_path, 2, name="x", **{"keep-best": metric}, **more)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        ("personal-accuracy", {"algo": "ditto"}),
        ("personal-loss", {"local-parameters": "1.bias"}),
        ("test-accuracy-nodes", {"algo": "dfedavg", "gossip.eval-nodes": True}),
        ("test-loss-broadcast", {"algo": "afedpd"}),
        ("validation-accuracy", {"validation": 0.1}),
        ("train-loss-of-model", {"eval-train": True}),
    ],
)
def test_a_metric_that_only_some_runs_measure(
    metric: str, more: dict[str, Any], tmp_path: Path
) -> None:
    path = federate(tmp_path, 1, name="x", **{"keep-best": metric}, **more)
    assert kept(path)["metric"] == metric

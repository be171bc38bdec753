"""Measures of real run directories."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from fedaccord.experiments.analysis import curvature, measures
from fedaccord.experiments.analysis.figures import save_landscapes
from fedaccord.experiments.analysis.measures import FILE, Measure, MeasureOptions, Saved
from fedaccord.experiments.analysis.ranking import Spread
from fedaccord.experiments.analysis.table import text
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.runs.directory import MODEL
from fedaccord.task.flat_model import FlatModel
from tests.cli.shell import invoke, refusal, run, success
from tests.experiments.analysis.made import write

QUICK = ("--samples", "200", "--probes", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: pd of A-FedPD, kept of FedDyn with a head at each client, long and short of FedAvg."""
    folder = tmp_path_factory.mktemp("measures")
    double = ("precision=float64", "local-epochs=2")
    for name, words in {
        "pd": ("algo=afedpd", "num-server-rounds=4", "weight-decay=0.01", *double),
        "kept": (
            "algo=feddyn",
            "model=mlp",
            "local-parameters=5.*",
            "num-server-rounds=2",
            *double,
        ),
        "long": ("algo=fedavg", "num-server-rounds=6", "eval-train=true"),
        "short": ("algo=fedavg", "num-clients=25"),
    }.items():
        success(run(folder, f"name={name}", *words))
    return folder / "runs"


def by_name(results: list[Measure]) -> dict[str, float]:
    return {measure.name: measure.value for measure in results}


def test_excess_risk_is_split_against_the_best_train_loss_or_a_reference(folder: Path) -> None:
    saved = Saved(folder / "long", {})
    own = by_name([*measures.risk(saved, None)])
    assert own["optimisation-error"] >= 0
    report = saved.run.summary
    assert own["generalisation-gap"] == pytest.approx(report["generalisation-gap-last"])
    assert own["test-loss"] == pytest.approx(report["test-loss-last"])
    short = Saved(folder / "short", {})
    assert "excess-risk" not in by_name([*measures.risk(short, None)])  # no train loss is known
    against = by_name([*measures.risk(short, folder / "long")])
    error = against["train-loss"] - own["train-loss"]
    assert against["optimisation-error"] == pytest.approx(error)
    total = against["test-loss"] - own["train-loss"]
    assert against["excess-risk"] == pytest.approx(total)


def test_a_reference_changes_no_other_measure(tmp_path: Path) -> None:
    """Its averaged statistics are those of its own excess risk alone."""
    small = ("model=tests.own:pocket", "buffers=mean", "num-server-rounds=2")
    for name, more in (("own", "lr=0.1"), ("other", "lr=0.3")):
        success(run(tmp_path, f"name={name}", more, *small))
    folder, values = tmp_path / "runs", []
    for reference in (None, folder / "other"):
        saved = Saved(folder / "own", {})
        by_name([*measures.risk(saved, reference)])
        values.append(by_name([*measures.fairness(saved)]))
        assert torch.equal(saved.model.read_buffers(), saved.buffers)
    assert values[0] == values[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def test_attention_has_a_second_derivative() -> None:
    torch.manual_seed(0)
    model = FlatModel(Attention(), dtype=torch.float64)
    x, y = torch.randn(6, 5, 4, dtype=torch.float64), torch.arange(6) % 3
    surface = curvature.Surface(model, F.cross_entropy, [(x, y)])
    v = torch.randn(len(model.w), dtype=torch.float64)
    step = 1e-5 * v
    difference = surface.gradient(model.w + step) - surface.gradient(model.w - step)
    expected = difference / 2e-5
    torch.testing.assert_close(surface.product(model.w)(v), expected, rtol=1e-6, atol=1e-8)


def test_a_run_without_test_samples_has_the_other_measures(tmp_path: Path) -> None:
    words = ("dataset=tests.own:no_test", "model=linear", "num-clients=3", "fraction-evaluate=0")
    success(run(tmp_path, "name=x", "algo=fedavg", "evaluation=clients", *words))
    result = invoke("measure", str(tmp_path / "runs" / "x"), *QUICK)
    assert result.exit_code == 0, result.output
    assert "train-loss" in result.stdout
    assert "test-loss" not in result.stdout


def test_outputs_that_are_no_scores_of_classes_have_the_other_measures(tmp_path: Path) -> None:
    words = ("dataset=digits", "model=tests.own:one_logit", "loss=tests.own:is_large")
    success(run(tmp_path, "name=x", "algo=fedavg", "metrics=tests.own:is_found", *words))
    result = success(invoke("measure", str(tmp_path / "runs" / "x"), *QUICK))
    assert "hessian-top-eigenvalue" in result.stdout
    assert "accuracy" not in result.stdout


def test_a_landscape_of_a_loss_below_0_is_filled(tmp_path: Path) -> None:
    at = [-1.0, 0.0, 1.0]
    heights = torch.tensor(at)[:, None] ** 2 + torch.tensor(at) ** 2 - 9
    colours = []
    for shift in (0.0, 10.0):
        picture = tmp_path / f"{shift}.png"
        save_landscapes(picture, {"fedavg": measures.Landscape(at, heights + shift)})
        pixels = np.asarray(Image.open(picture).convert("RGB"))
        colours.append(len(np.unique(pixels[:, : pixels.shape[1] // 2].reshape(-1, 3), axis=0)))
    assert colours[0] > 0.8 * colours[1]


def test_fairness_is_over_the_clients_shares_of_the_test_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(folder / "short", {})
    equal = saved.task.client_test

    def unequal(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        samples = equal(i)
        assert isinstance(samples, tuple)
        return samples[0][i % 5 :], samples[1][i % 5 :]

    monkeypatch.setattr(saved.task, "client_test", unequal)
    values = by_name([*measures.fairness(saved)])
    accuracies, sizes = [], []
    for i in range(25):
        x, y = unequal(i)
        inputs = saved.task.prepare(x, torch.float32)
        saved.model.w.copy_(saved.w)
        hits = saved.model.module(inputs).argmax(1) == y
        accuracies.append(float(hits.double().mean()))
        sizes.append(len(y))
    assert values["client-accuracy"] == pytest.approx(np.average(accuracies, weights=sizes))
    assert values["client-accuracy-std"] == pytest.approx(np.std(accuracies))
    worst = np.mean(sorted(accuracies)[:3])  # a tenth of 25, rounded up
    assert values["client-accuracy-worst-tenth"] == pytest.approx(worst)


def missed(server: Mapping[str, torch.Tensor], t: int) -> torch.Tensor:
    """What a client of A-FedPD whose last round was t has missed."""
    return server["server.lam_bar"] - server[f"server.lam_bar_after.{t}"]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_duals_are_compared_with_those_of_a_stationary_point(
    folder: Path, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are equal the drift is zero; if they are ``factor`` times as long, it is
    (factor - 1)^2."""
    assert not [*measures.duals(Saved(folder / "long", {}))]  # FedAvg has no duals
    saved = Saved(folder / "pd", {})
    assert by_name([*measures.duals(saved)])["dual-drift"] > 1e-3
    last = Checkpoints(saved.path / "checkpoint").load()

    def exact(client: int) -> torch.Tensor:
        return -(saved.of_client(client).gradient(saved.w) + 0.01 * saved.w)

    duals = {i: factor * exact(i) for i in last.clients}
    states = {  # less what the client has missed, which it receives when it returns
        i: (t, {"lam": duals[i] - missed(last.server, t)}) for i, (t, _) in last.clients.items()
    }
    monkeypatch.setattr(
        Checkpoints, "load", lambda self: last._replace(clients=states), raising=True
    )
    values = by_name([*measures.duals(saved)])
    assert values["dual-drift"] == pytest.approx((factor - 1) ** 2, abs=1e-20)
    rows = torch.stack([*duals.values()])
    size = float(rows.square().sum(1).mean()) / factor**2  # of the stationary ones
    assert values["dual-mean"] == pytest.approx(float(rows.mean(0).square().sum()) / size)


def test_dual_drift_is_of_the_parts_at_the_clients(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(folder / "kept", {})
    last = Checkpoints(saved.path / "checkpoint").load()

    def exact(client: int, local: torch.Tensor) -> torch.Tensor:
        saved.model.write_local(local.double())
        return -(saved.of_client(client).gradient(saved.w) + 0.001 * saved.w)

    states = {
        i: (t, state | {"base.lam": exact(i, state["local"])})
        for i, (t, state) in last.clients.items()
    }
    assert not any(torch.equal(s["local"], saved.model.initial_local) for _, s in states.values())
    monkeypatch.setattr(Checkpoints, "load", lambda self: last._replace(clients=states))
    assert by_name([*measures.duals(saved)])["dual-drift"] < 1e-20
    assert torch.equal(saved.model.read_local(), saved.model.initial_local)
    reset = last._replace(server=last.server | {"accepted": -2 - last.server["accepted"].abs()})
    monkeypatch.setattr(Checkpoints, "load", lambda self: reset)
    assert not [*measures.duals(saved)]  # those of before a reset count no more
    monkeypatch.undo()
    result = success(invoke("measure", folder / "kept", *QUICK))
    assert "warning: feddyn" in result.stderr
    assert "of w with the local parts from before round 1" in result.stderr


def test_mean_of_the_virtual_duals_is_the_servers(folder: Path) -> None:
    """lam_bar is the mean of all duals, each with the steps that its client has missed."""
    last = Checkpoints(folder / "pd" / "checkpoint").load()
    server = last.server["server.lam_bar"]
    absent = 4 - len(last.clients)  # their duals are all virtual: lam_bar
    total = sum(state["lam"] + missed(last.server, t) for t, state in last.clients.values())
    torch.testing.assert_close((total + absent * server) / 4, server)


def test_the_command_prints_and_writes_every_measure(folder: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "m.json", tmp_path / "l.png"
    words = ("--out", out, "--landscape", picture, *QUICK)
    result = success(invoke("measure", folder / "pd", *words))
    values = json.loads(out.read_text())
    lines = [line.split()[0] for line in result.stdout.splitlines()]
    assert lines == [*values]
    assert {"hessian-top-eigenvalue", "hessian-trace", "sharpness", "dual-drift"} <= {*values}
    assert all(math.isfinite(value) for value in values.values())
    assert values["hessian-top-eigenvalue"] > 0
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50


def test_several_runs_are_rows_and_their_landscapes_are_on_one_scale(
    folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "with=sign"
    for name in ("long", "pd"):
        shutil.copytree(folder / name, runs / name)
    shutil.copytree(runs / "long", runs / "other")
    config = runs / "other" / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    path = write(runs, [0.1], algo="scaffold")
    shutil.copytree(runs / "long", runs / "stopped")
    config = runs / "stopped" / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 2"))
    summary = runs / "stopped" / "summary.json"
    summary.write_text(summary.read_text().replace('"completed"', '"interrupted"'))
    picture = tmp_path / "l.png"
    words = (runs, "download=true", "--landscape", picture, *QUICK)
    result = success(invoke("measure", *words))
    assert result.stderr.count("\n") == 3
    assert result.stderr.count("warning: download=true has no effect: it needs") == 1
    assert f"left out: {path}: expected a completed run with model.safetensors" in result.stderr
    assert f"left out: {runs / 'stopped'}: expected a completed run with" in result.stderr
    each = [json.loads((runs / name / FILE).read_text()) for name in ("long", "other", "pd")]
    names = {*each[0], *each[2]}
    assert {"sharpness", "dual-drift"} <= names
    assert all(name in result.stdout for name in names)
    top = Spread.of([values["hessian-top-eigenvalue"] for values in each[:2]])
    assert text(top) in result.stdout
    assert text(Spread.of([each[2]["dual-drift"]])) in result.stdout
    image = Image.open(picture)
    assert image.size[0] > 1.8 * image.size[1]  # two panels
    assert picture.stat().st_size <= 200_000
    failure = invoke("measure", runs, "--out", tmp_path / "m.json", *QUICK)
    assert failure.exit_code == 2
    assert "--out: expected one run, got 5" in failure.stderr


def test_an_eigenvalue_that_is_not_converged_is_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("long", "pd"):
        shutil.copytree(folder / name, tmp_path / name)
    assert "not converged" not in success(invoke("measure", tmp_path, *QUICK)).stderr
    top_eigenvalue = curvature.top_eigenvalue
    monkeypatch.setattr(curvature, "top_eigenvalue", lambda *a: top_eigenvalue(*a[:-1], 1))
    warning = success(invoke("measure", tmp_path, *QUICK)).stderr
    assert "hessian-top-eigenvalue of 2 of 2 runs is not converged" in warning


def test_measures_are_reproducible_because_the_seed_draws_the_samples(folder: Path) -> None:
    options = MeasureOptions(samples=100, probes=2)
    saved = Saved(folder / "short", {})
    assert [*measures.shape(saved, options)] == [*measures.shape(saved, options)]
    assert saved.surface(options).num_samples == 100
    assert saved.surface(MeasureOptions(samples=0)).num_samples == sum(
        saved.task.num_examples(i) for i in range(25)
    )


def test_a_run_that_has_not_ended_has_no_measures(folder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder / "short", tmp_path / "x"))
    (path / "summary.json").write_text('{"status": "failed"}')
    with pytest.raises(ValueError, match=r"got one that is failed: wait for it, or resume it$"):
        Saved(path, {})


@pytest.mark.parametrize("option", ["--out", "--landscape"])
def test_a_folder_without_permission_is_refused_before_measuring(
    folder: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.png").touch()  # it would be replaced, which needs the folder
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)  # Matplotlib asks, too
    monkeypatch.delattr("fedaccord.experiments.analysis.measures.measure")
    line = refusal(tmp_path, invoke("measure", folder / "pd", option, tmp_path / "m.png"))
    assert f"{option}: expected a file that can be written, got {tmp_path}/m.png" in line


def test_a_model_without_permission_is_not_called_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder / "pd" / MODEL
    opened = Path.open

    def open_(path: Path, *mode: Any, **more: Any) -> IO[Any]:
        if path == model:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *mode, **more)

    monkeypatch.setattr(Path, "open", open_)  # a superuser may read everything
    line = refusal(tmp_path, invoke("measure", folder / "pd", *QUICK))
    assert line == f"fedaccord: [Errno 13] Permission denied: '{model}'\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("{tmp}",), "expected a run directory"),
        (("lr=3",), "expected a run directory, got 'lr=3'"),
        (("{run}", "lr=3"), "expected only data-dir, device, download, threads"),
        (("{run}", "--landscape", "x.gif"), "expected a file that ends in .png or .pdf"),
        (("{run}", "--out", "{tmp}/no/m.json"), "expected a file in an existing folder"),
        (("{run}", "--reference", "{tmp}"), "expected a run directory with model.safetensors"),
    ],
)
def test_invalid_arguments_give_one_line(
    folder: Path, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    arguments = [word.format(tmp=tmp_path, run=folder / "long") for word in words]
    result = invoke("measure", *arguments, *QUICK)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1

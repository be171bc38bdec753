"""The ServerApp: what it reports, and what it refuses."""

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from fedaccord import client_app, config, recorded_run, server_app
from tests.grid import InProcessGrid
from tests.test_recorded_run import SMALL, rows


@pytest.mark.parametrize(
    ("key", "value"), [("workers", 2), ("client-state", "disk"), ("vectorize", "on")]
)
def test_keys_without_effect_are_reported_under_flower(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower passes all keys, also those with the app's defaults."""
    monkeypatch.setattr(recorded_run, "run", lambda *_, **__: None)
    set_by_a_user = {"partition": "iid", "classes-per-client": 3, "fedprox.mu": 0.2, key: value}
    run_config = {**config.defaults(), "model": "linear", "algo": "fedavg", **set_by_a_user}
    context: Any = SimpleNamespace(run_config=run_config)
    grid: Any = SimpleNamespace()
    server_app.main(grid, context)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "classes-per-client=3 has no effect: it needs partition=pathological",
        "fedprox.mu=0.2 has no effect: it needs algo=fedprox",
        f"{key}={value} has no effect here: `fedaccord run` supports it",
    ]


@pytest.mark.parametrize("is_simulation", [False, True])
def test_keys_with_another_meaning_on_devices_are_reported(
    is_simulation: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorded_run, "run", lambda *_, **__: None)
    keys = {"algo": "fedavg", "state-dir": "/states", "eval-train": True, "validation": 0.2}
    context: Any = SimpleNamespace(run_config=config.defaults() | {"model": "linear"} | keys)
    grid: Any = SimpleNamespace(**{"pull_interval": 0.1} if is_simulation else {})
    server_app.main(grid, context)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in lines] == (
        [] if is_simulation else ["state-dir=/states", "eval-train=True", "validation=0.2"]
    )


def test_validation_is_that_of_the_devices_if_only_they_evaluate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorded_run, "run", lambda *_, **__: None)
    keys = {"algo": "fedavg", "model": "linear", "validation": 0.2, "evaluation": "clients"}
    context: Any = SimpleNamespace(run_config=config.defaults() | keys)
    server_app.main(SimpleNamespace(), context)  # type: ignore[arg-type]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_flowers_log_of_a_wrong_setting_is_one_line() -> None:
    """Flower logs an exception of a ServerApp with the frames of its own code."""
    values = {"algo": "fedinot"}
    own = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=values)
    with pytest.raises(ValueError, match=r"^algo: ") as error:
        server_app.app(InProcessGrid(ClientApp(), 2), own)
    (line,) = traceback.format_exception(error.value)
    assert line.startswith("ValueError: algo: expected one of ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"schedule": "buffered"}, "schedule: expected synchronous without simulated devices"),
        (
            {"schedule": "buffered", "device-profile": "lognormal"},
            "device-profile: expected none under Flower",
        ),
    ],
)
def test_simulated_time_is_refused_before_a_directory_is_made(
    keys: dict[str, str], line: str, tmp_path: Path
) -> None:
    values = SMALL | keys | {"out-dir": str(tmp_path)}
    own = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=values)
    grid = InProcessGrid(ClientApp(), 2)
    vars(grid)["pull_interval"] = 0.1  # as Flower's simulation
    with pytest.raises(ValueError, match=f"^{line}"):
        server_app.app(grid, own)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("algo", ["scaffold", "fedinit", "fedavg"])
def test_states_that_ended_with_a_simulation_give_one_warning(
    algo: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for all clients; the first round after it is not lost."""

    def simulate(rounds: int, resume: bool, state_dir: str = "") -> list[str]:
        values = SMALL | {"algo": algo, "num-server-rounds": rounds, "resume": resume}
        values |= {"out-dir": str(tmp_path / f"runs{len(state_dir)}"), "state-dir": state_dir}
        values |= {"fraction-train": 1.0, "checkpoint-every": 1}
        caplog.clear()
        with InProcessGrid(client_app.app, 2, run_config=values) as grid:
            vars(grid)["pull_interval"] = 0.1
            server_app.main(grid, Context(1, 0, {}, RecordDict(), values))
        return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    line = "resume: the clients' states were in the memory of the last simulation and are lost"
    assert simulate(1, False) == []
    assert [x[: len(line)] for x in simulate(3, True)] == [line] * (algo != "fedavg")
    assert [row["replies"] for row in rows(tmp_path / "runs0" / "x")] == ["", "2", "2", "2"]
    if algo == "scaffold":  # the node config of a simulated client does not name the folder
        folder = str(tmp_path / "states")
        simulate(1, False, folder)
        assert not any(x.startswith(line) for x in simulate(2, True, folder))

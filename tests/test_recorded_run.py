"""How runs end: completed with a trained model, failed or interrupted, and their files."""

import csv
import gc
import os
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedaccord import engine, recorded_run, runs
from fedaccord.config import RunConfig
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.checkpoint import Pace
from fedaccord.federation.errors import FederationError
from fedaccord.federation.round import Round
from fedaccord.runs import RunDirectory
from fedaccord.runs.logbook import Logbook
from fedaccord.task import load_task
from tests.cli.shell import invoke, run, summary

SMALL: dict[str, Any] = {
    **{"num-clients": 4, "num-server-rounds": 2, "model": "linear", "local-epochs": 1},
    **{"threads": 1, "algo": "fedavg", "name": "x"},
}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Path]:
    """Run a small configuration in process, with a callback; its run directory."""

    def begin(values: Mapping[str, Any], on_round: Callable[[Round], None] | None = None) -> Path:
        config = RunConfig.make(SMALL | dict(values) | {"out-dir": str(tmp_path)})
        with engine.quiet():
            return engine.run(config, on_round=on_round).path

    return begin


def rows(path: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (path / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_summary_of_a_run_that_goes_on_has_its_number_of_clients(
    start: Callable[..., Path], tmp_path: Path
) -> None:
    def read(round: Round) -> None:
        if round.number == 3:
            facts = summary(tmp_path / "x")
            assert (facts["status"], facts["clients"]) == ("running", 4)

    start({"num-server-rounds": 3, "checkpoint-every": 1}, read)


# --- failed ---------------------------------------------------------------------------------------


DIVERGING = {"lr": 1e30, "clip-norm": 0.0}
GOSSIP: dict[str, Any] = {
    **{"algo": "dfedavg", "model": "mlp", "lr": 1e13, "clip-norm": 0.0},
    **{"local-steps": 1, "num-server-rounds": 1, "num-clients": 2},
}
ONE_LONG_STEP = {"lr": 1e17, "clip-norm": 1.0, "local-steps": 1, "num-server-rounds": 1}


@pytest.mark.parametrize(
    ("values", "reason", "drops"),
    [
        (DIVERGING, "none of 2 rounds counted", [2, 2]),
        (DIVERGING | {"max-failed-rounds": 2}, "2 rounds in a row failed", [2, 2]),
        (
            ONE_LONG_STEP,
            "the model diverged: its test loss is ",
            [0],
        ),  # finite, but no test loss of a model that has learnt anything
        (GOSSIP, "the model diverged: its test loss is ", [0]),
    ],
)
def test_a_run_without_a_trained_model_fails_with_its_reason(
    tmp_path: Path, start: Callable[..., Path], values: Any, reason: str, drops: list[int]
) -> None:
    with pytest.raises(FederationError, match=reason):
        start(values)
    facts = summary(tmp_path / "x")
    assert facts["status"] == "failed"
    assert facts["reason"].startswith(reason)
    assert (facts["rounds"], facts["rounds-counted"]) == (len(drops), drops.count(0))
    assert (facts["replies"], facts["dropped"]) == (2 * len(drops) - sum(drops), sum(drops))
    assert [row["dropped"] for row in rows(tmp_path / "x")] == ["", *map(str, drops)]
    assert (tmp_path / "x" / "model.safetensors").exists()


def test_held_out_samples_replace_the_test_samples(start: Callable[..., Path]) -> None:
    last = rows(start({"validation": 0.2, "eval-train": True}))[-1]
    gap = float(last["train-accuracy"]) - float(last["validation-accuracy"])
    assert float(last["generalisation-gap"]) == pytest.approx(gap)
    assert not any(key.startswith("test-") for key in last)
    with pytest.raises(FederationError, match="the model diverged: its validation loss is "):
        start(ONE_LONG_STEP | {"validation": 0.2, "name": "diverged"})


def test_a_model_that_is_not_finite_fails(
    tmp_path: Path, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(self: Any, w: Any, state: Any) -> Any:
        return w * float("inf")

    monkeypatch.setattr("fedaccord.strategies.FedAvg.output_model", overflow)
    with pytest.raises(FederationError, match="the model diverged: it holds NaN or Inf after 2"):
        start({})
    assert summary(tmp_path / "x")["status"] == "failed"


def test_a_full_disk_ends_the_run_with_a_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunDirectory, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(self.path / "metrics.csv"))

    monkeypatch.setattr(RunDirectory, "record", full)
    result = run(tmp_path, "name=x")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "No space left on device: '" in result.stderr
    assert "/x/metrics.csv'" in result.stderr
    assert summary(tmp_path / "runs" / "x")["status"] == "failed"


def test_the_model_of_a_checkpoint_counts_in_its_time(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., Path]
) -> None:
    events: list[str] = []

    @contextmanager
    def timed(pace: Pace) -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    monkeypatch.setattr(Pace, "timed", timed)
    monkeypatch.setattr(recorded_run, "save", lambda *_: events.append("model"))
    start({"checkpoint-every": 2, "num-server-rounds": 3})
    assert events == ["begins", "model", "ends", "model"]


def test_a_model_that_cannot_be_saved_is_a_failure(
    tmp_path: Path, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunDirectory, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(self.path / "model.safetensors"))

    monkeypatch.setattr(RunDirectory, "save_model", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x/model.safetensors'"):
        start({})
    facts = summary(tmp_path / "x")
    assert facts["status"] == "failed"
    assert "model.safetensors" in facts["reason"]


@pytest.mark.parametrize("what", ["clients", "model"])
def test_an_error_before_the_first_message_gives_a_failed_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is not "running", without a process."""
    settings = RunConfig.make(SMALL | {"out-dir": str(tmp_path)})
    task = load_task(settings.task, num_clients=4)

    def fleet(book: Logbook) -> LocalFleet:
        if what == "clients":
            (book.directory.path / "nodes.json").write_text("[]")
            book.partition_ids()
        return LocalFleet(task)

    def no_model(*_: Any) -> None:
        raise ValueError("expected a model, got a damaged file")

    if what == "model":
        monkeypatch.setattr(recorded_run, "initial_arrays", no_model)
    with pytest.raises(ValueError, match=r"got a damaged file$") as error:
        recorded_run.run(fleet, settings, task)
    facts = summary(tmp_path / "x")
    assert (facts["status"], facts["reason"]) == ("failed", str(error.value))
    assert runs.status(tmp_path / "x") == "failed"


# --- interrupted ----------------------------------------------------------------------------------


@pytest.fixture
def foreground() -> Iterator[None]:
    """Signal handlers of a process in the foreground of a shell."""
    numbers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    numbers |= {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_and_twenty_more_do_not_interrupt_the_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    record, save = RunDirectory.record, RunDirectory.save_model

    def record_and_send(self: RunDirectory, metrics: Any, clients: Any) -> None:
        if metrics["round"] == 3:
            os.kill(os.getpid(), number)  # within the writing of a row
        record(self, metrics, clients)

    def send_and_save(self: RunDirectory, *model: Any) -> None:
        for _ in range(20):
            os.kill(os.getpid(), number)
        save(self, *model)

    monkeypatch.setattr(RunDirectory, "record", record_and_send)
    monkeypatch.setattr(RunDirectory, "save_model", send_and_save)
    result = run(tmp_path, "num-server-rounds=1000", "name=x", "algo=fedavg")
    path = tmp_path / "runs" / "x"
    assert result.exit_code == code, result.output
    assert result.stderr == (
        f"fedaccord: interrupted: {path} has the finished rounds; "
        f"fedaccord resume {path} continues it\n"
    )
    assert "\x1b" not in result.stdout
    assert not [*path.glob(".*")]
    assert runs.status(path) == "interrupted"
    assert summary(path)["rounds"] == 3
    assert [row["round"] for row in rows(path)] == ["0", "1", "2", "3"]
    interrupted = load_file(path / "model.safetensors")
    monkeypatch.undo()
    assert run(tmp_path, "num-server-rounds=3", "name=y", "algo=fedavg").exit_code == 0
    completed = load_file(tmp_path / "runs" / "y" / "model.safetensors")
    assert all(torch.equal(interrupted[name], completed[name]) for name in completed)


def test_a_run_that_flower_ends_is_interrupted(tmp_path: Path, start: Callable[..., Path]) -> None:
    def leave(round: Round) -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        start({}, leave)
    assert runs.status(tmp_path / "x") == "interrupted"
    assert (tmp_path / "x" / "model.safetensors").exists()


# --- completed ------------------------------------------------------------------------------------


def test_config_toml_has_the_machine_and_reproduces_the_same_bytes(tmp_path: Path) -> None:
    words = ("algo=dfedavg", "gossip.topology=random", "sam.rho=0.05", "name=first")
    assert run(tmp_path, *words).exit_code == 0
    first = tmp_path / "runs" / "first"
    used = tomllib.loads((first / "config.toml").read_text())["used"]
    assert (used["device"], used["threads"]) == ("cpu", 1)
    assert used["cpu"]
    assert (used["sam"]["rho"], used["gossip"]["steps"]) == (0.05, 1)
    assert invoke("run", "--config", first / "config.toml", "name=again").exit_code == 0
    again = tmp_path / "runs" / "again"
    for name in ("model.safetensors", "model.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    for name in ("metrics.csv", "clients.csv"):
        assert without_seconds(first, name) == without_seconds(again, name)
    assert summary(first)["clients"] == 4


def without_seconds(path: Path, name: str) -> list[dict[str, str]]:
    table = rows(path, name)
    return [{key: value for key, value in row.items() if key != "seconds"} for row in table]


def test_the_memory_of_a_run_is_freed_at_its_end(start: Callable[..., Path]) -> None:
    """Without the garbage collector: the next run needs the memory."""
    gc.collect()
    gc.disable()
    try:
        start({"algo": "afedpd", "keep-best": "test-accuracy"})
        assert [o for o in gc.get_objects() if isinstance(o, LocalFleet)] == []
    finally:
        gc.enable()

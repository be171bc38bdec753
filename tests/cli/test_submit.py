"""`fedaccord submit`, with a stub of `flwr` that responds like Flower 1.41."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedaccord.cli import submit as module
from fedaccord.storage.store import EARLIER_START
from tests.cli.shell import REPOSITORY, invoke, refusal, success

AWAY = (
    "Using SuperLink: lab\n\nConnection to the SuperLink is unavailable. Please check your network"
)
FAILED = "ServerApp failed with exception: "
NO_CHECKPOINT = f"{FAILED}/runs/x/checkpoint: expected a checkpoint, found none"
NO_DIRECTORY = f"{FAILED}FileNotFoundError: /runs/x: expected the directory of a run, found none"
KILLED = "No heartbeat received from the task"
NOT = {"success": False}

PROGRAM = """\
#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
script = json.loads((folder / "script.json").read_text())
done = len((folder / "calls.txt").read_text().splitlines())
with (folder / "calls.txt").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
print(json.dumps(script[done]) if script[done] else "the log", file=sys.stdout)
"""


class Flwr:
    """Responds to one call after another, and records the calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script, self.log, program = (
            folder / "script.json",
            folder / "calls.txt",
            folder / "flwr",
        )
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        monkeypatch.setattr(module, "FLWR", str(program))
        monkeypatch.setattr(module, "LOOK", 0)

    def answers(self, *script: Any) -> None:
        self.script.write_text(json.dumps(script))
        self.log.write_text("")

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def configs(self) -> list[dict[str, Any]]:
        """The run configs that were submitted."""
        texts = [call[call.index("--run-config") + 1] for call in self.calls if call[0] == "run"]
        return [tomllib.loads(text.replace(" ", "\n")) for text in texts]


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flwr:
    return Flwr(tmp_path, monkeypatch)


def run(number: int, *endings: str) -> list[Any]:
    """The responses for a run: its submission, its log, and its statuses up to its end."""
    return [{"success": True, "run-id": str(number)}, None, *map(status, endings)]


def status(text: str) -> dict[str, Any]:
    state, _, details = text.partition("|")
    return {"success": True, "runs": [{"status": state, "status-details": details or "N/A"}]}


def test_submit_waits_for_the_end(
    flwr: Flwr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flwr.answers(*run(7, "running", "finished:completed"))
    success(invoke("submit", "lab", "algo=scaffold", "out-dir=mine", "lr=0.1"))
    first, log, look, again = flwr.calls
    assert first[:3] == ["run", str(REPOSITORY), "lab"]
    assert first[-2:] == ["--format", "json"]
    assert "--federation-config" not in first
    assert log == ["log", "7", "lab"]
    assert look == again == ["ls", "lab", "--run-id", "7", "--format", "json"]
    (config,) = flwr.configs()
    assert config.pop("name").startswith("scaffold-digits-seed0-")  # which resumes it by name
    # lr=0.1 is a default, but the packed folder may have another one
    assert config == {"algo": "scaffold", "out-dir": str(tmp_path / "mine"), "lr": 0.1}


def test_a_simulation_has_the_clients_of_the_run_config(flwr: Flwr) -> None:
    flwr.answers(*run(7, "finished:completed"))
    success(invoke("submit", "local", "num-clients=12"))
    words = flwr.calls[0]
    clients = "num-supernodes=12 client-resources-num-cpus=1"
    assert words[words.index("--federation-config") + 1] == clients


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        (f"finished:failed|{FAILED}3 rounds failed", f"run 7 failed: {FAILED}3 rounds failed"),
        ("finished:stopped|", "run 7 stopped: N/A"),
        (f"finished:failed|{NO_CHECKPOINT}", "found none"),  # the user's own resume=true
    ],
)
def test_a_run_that_fails_gives_exit_code_1(flwr: Flwr, ending: str, line: str) -> None:
    flwr.answers(*run(7, ending))
    result = invoke("submit", "lab", "resume=true", "name=x")
    assert result.exit_code == 1
    assert result.stderr.startswith("fedaccord: ")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [KILLED, "Task failed with unknown error.", f"{FAILED}3 rounds: {EARLIER_START}"]
)
def test_a_run_resumes_when_its_server_is_available_again(flwr: Flwr, words: str) -> None:
    away = NOT | {"error-message": AWAY}
    flwr.answers(
        *run(7)[:2],
        *(away, away, status("running"), status(f"finished:failed|{words}")),
        *(away, *run(8, "finished:completed")),
    )
    result = success(invoke("submit", "lab", "algo=scaffold", "name=x"))
    assert flwr.configs() == [
        {"algo": "scaffold", "name": "x"},
        *[{"algo": "scaffold", "name": "x", "resume": True}] * 2,
    ]
    assert "warning: run 7 stopped: " in result.stderr


@pytest.mark.parametrize("nothing", [NO_CHECKPOINT, NO_DIRECTORY])
def test_a_run_without_a_checkpoint_restarts_under_another_name(flwr: Flwr, nothing: str) -> None:
    flwr.answers(
        *run(7, f"finished:failed|{KILLED}"),
        *run(8, f"finished:failed|{nothing}"),
        *run(9, "finished:completed"),
    )
    success(invoke("submit", "lab", "name=x"))
    names = [(config["name"], config.get("resume", False)) for config in flwr.configs()]
    assert names == [("x", False), ("x", True), ("x-2", False)]


def test_the_last_run_is_the_one_that_can_be_resumed(flwr: Flwr) -> None:
    flwr.answers(
        *run(7, f"finished:failed|{KILLED}"),
        *run(8, f"finished:failed|{NO_CHECKPOINT}"),
        *run(9, f"finished:failed|{KILLED}"),
    )
    line = invoke("submit", "lab", "name=x", "--resubmit", 2).stderr.splitlines()[-1]
    assert line.endswith("the run stopped 3 times; resume=true name=x-2 resumes it")


def test_a_last_run_without_a_checkpoint_is_restarted(flwr: Flwr) -> None:
    flwr.answers(*run(7, f"finished:failed|{KILLED}"), *run(8, f"finished:failed|{NO_CHECKPOINT}"))
    line = invoke("submit", "lab", "name=x", "--resubmit", 1).stderr.splitlines()[-1]
    assert line.endswith("the run stopped 2 times; name=x-2 restarts it")


@pytest.mark.parametrize("times", [0, 2])
def test_the_number_of_restarts_is_limited(flwr: Flwr, times: int) -> None:
    flwr.answers(*[*run(7, f"finished:failed|{KILLED}")] * 4)
    result = invoke("submit", "lab", "name=x", "--resubmit", times)
    assert result.exit_code == 1
    assert len(flwr.configs()) == times + 1
    assert f"the run stopped {times + 1} times; resume=true name=x resumes it" in result.stderr


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ([NOT | {"error-message": AWAY}], "flwr run: Connection to the SuperLink is unavailable"),
        ([NOT | {"error-message": "\nSuperLink connection 'lab' not found"}], "'lab' not found"),
        ([NOT | {"error-message": ""}], "flwr run: it ended with exit code 0"),
        ([[3]], "flwr run: [3]"),
        ([None], "flwr run: the log"),
        (
            [*run(7)[:2], {"success": True, "runs": []}],  # the server lost its database
            "fedaccord: the server does not know run 7; start it with its --database\n",
        ),
    ],
)
def test_an_invalid_response_gives_one_line(flwr: Flwr, script: list[Any], line: str) -> None:
    flwr.answers(*script)
    result = invoke("submit", "lab")
    assert line in result.stderr
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lr=-1"], "lr: expected above 0"),
        (["lr"], "expected key=value"),
        (["--app", "/no/such"], "--app: expected a clone of FedAccord, found no /no/such"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_submitted(
    flwr: Flwr, tmp_path: Path, words: list[str], line: str
) -> None:
    flwr.answers()
    assert line in refusal(tmp_path, invoke("submit", "lab", *words))
    assert flwr.calls == []


def test_a_setting_is_no_name_of_a_superlink(flwr: Flwr, tmp_path: Path) -> None:
    flwr.answers()
    line = "SUPERLINK: expected a name of Flower's configuration first, got 'lr=nan'"
    assert line in refusal(tmp_path, invoke("submit", "lr=nan", "algo=fedavg"))
    assert flwr.calls == []

"""A server that is killed and started again, from what its directory, a copy or a backup holds.

Devices keep their states in a folder each. The next start of a server that was killed trains with
them, and if it resumes from its last checkpoint the model is that of a run without a break.
"""

import csv
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedaccord import client_app, engine, recorded_run
from fedaccord.config import RunConfig
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.round import Round
from fedaccord.storage.store import EARLIER_START
from fedaccord.task import load_task
from tests.grid import InProcessGrid

CLIENTS = 4
METHODS = [
    *(("fedavg", {}), ("scaffold", {}), ("afedpd", {})),
    pytest.param(("fedavg", {"compress.method": "topk"}), id="topk"),
]


class Lab:
    """Devices, and runs of a server that can be killed after a round."""

    def __init__(self, folder: Path, method: str, more: dict[str, Any]) -> None:
        self.folder = folder
        self.has_states = method != "fedavg" or bool(more)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
        np.savez(folder / "data.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
        self.settings = {
            **{"algo": method, "dataset": "npz", "data-dir": str(folder / "data.npz")},
            **{"model": "linear", "num-clients": CLIENTS, "partition": "iid", "threads": 1},
            **{"fraction-train": 0.5, "local-epochs": 1, "batch-size": 5, "checkpoint-every": 3},
            **{"out-dir": str(folder / "runs"), **more},
        }
        self.messages: list[Message] = []  # the messages of all starts

    def run(
        self,
        rounds: int,
        killed_after: int = 0,
        name: str = "x",
        devices: str = "devices",
        **more: Any,
    ) -> Path:
        """The directory of a run, as a server leaves it that is killed after a round."""
        values = {"num-server-rounds": rounds, "name": name, **more}
        config = RunConfig.make(self.settings | values)
        path, copy = self.folder / "runs" / name, self.folder / "left"

        def on_round(round: Round) -> None:
            if round.number == killed_after > 0:
                shutil.copytree(path, copy)
                raise KeyboardInterrupt

        with InProcessGrid(client_app.app, CLIENTS, config.flat) as grid, engine.quiet():
            for i, context in enumerate(grid.contexts.values()):
                state_dir = self.folder / devices / str(i)
                context.node_config |= {"state-dir": str(state_dir), "allow-server-data": True}
            push = grid.push_messages

            def pushed(messages: Any) -> Any:
                self.messages += (messages := [*messages])
                return push(messages)

            grid.push_messages = pushed  # type: ignore[method-assign]
            task = load_task(config.task, num_clients=1, whole=True)
            run = partial(recorded_run.run, lambda _: MessageFleet(grid), config, task)
            if not killed_after:
                return run(in_process=False).path
            with pytest.raises(KeyboardInterrupt):
                run(on_round, in_process=False)
        shutil.rmtree(path)
        copy.rename(path)
        return path

    def deliver(self, message: Message) -> str:
        """What the devices reply to an old message."""
        with InProcessGrid(client_app.app, CLIENTS, self.settings) as grid:
            for i, context in enumerate(grid.contexts.values()):
                state_dir = self.folder / "devices" / str(i)
                context.node_config |= {"state-dir": str(state_dir), "allow-server-data": True}
            (reply,) = grid.send_and_receive([message])
        return str(reply.error.reason) if reply.has_error() else "accepted"


@pytest.fixture(params=METHODS, ids=lambda it: it[0])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    return Lab(tmp_path, *request.param)


def statuses(path: Path) -> set[str]:
    with (path / "clients.csv").open() as file:
        return {row["status"] for row in csv.DictReader(file)}


def same_model(a: Path, b: Path) -> bool:
    first, second = (load_file(path / "model.safetensors") for path in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_server_is_killed_and_resumed_twice_from_one_checkpoint(lab: Lab) -> None:
    lab.run(7, killed_after=4)
    lab.run(7, killed_after=5, resume=True)  # both resume from round 3
    directory = lab.run(7, resume=True)
    assert statuses(directory) == {"ok"}
    assert same_model(directory, lab.run(7, name="whole", devices="others"))


def test_a_backup_is_restored(lab: Lab) -> None:
    path = lab.run(7, killed_after=4)
    shutil.copytree(path, lab.folder / "backup")
    lab.run(8, resume=True)
    shutil.rmtree(path)
    shutil.copytree(lab.folder / "backup", path)
    lost = statuses(lab.run(7, resume=True)) - {"ok"}
    assert bool(lost) == lab.has_states  # of rounds after the backup, which the devices replaced
    assert all(status.startswith("lost its state of round ") for status in lost)


def test_a_directory_is_copied_and_both_are_resumed_in_turn(lab: Lab) -> None:
    path = lab.run(7, killed_after=4)
    shutil.copytree(path, path.with_name("copy"))
    for rounds in (5, 6, 7):
        for name in ("x", "copy"):
            directory = lab.run(rounds, name=name, resume=True)
            assert statuses(directory) == {"ok"}  # devices keep the state of the last checkpoint


def test_a_late_message_of_an_earlier_start_changes_nothing(lab: Lab) -> None:
    lab.run(7, killed_after=4)
    late = lab.messages[-1]
    lab.run(7, killed_after=6, resume=True)
    files = {f: f.read_bytes() for f in (lab.folder / "devices").rglob("*") if f.is_file()}
    assert EARLIER_START in lab.deliver(late)
    assert {f: f.read_bytes() for f in (lab.folder / "devices").rglob("*") if f.is_file()} == files

"""Real Flower processes for the tests: started on loopback, stopped with all they have started."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from flwr.supercore.control import ControlHttpClient
from safetensors.torch import load_file

from fedaccord.data import datasets
from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds for one Flower command on a busy machine


class Outcome(NamedTuple):
    """A finished `flwr run`; its exit code says nothing, it is 0 for failed runs too."""

    status: str  # as `flwr ls` shows it: finished:completed, finished:failed
    output: str  # what was streamed


class Flower:
    """A SuperLink with a FLWR_HOME and a port of its own, and its SuperNodes.

    simulation: it runs clients as Ray actors, as the local SuperLink does that a bare `flwr run`
    starts; here the test starts it, and so knows what to stop.
    """

    def __init__(self, home: Path, *, simulation: bool) -> None:
        self.home = home
        self.port = free_port()
        self.connection = "local" if simulation else "lab"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
        # every client process imports PyTorch: three times as slow without its compiled files
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.env = environment | {
            "FLWR_HOME": str(home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(self.port),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # see `engine/cluster.py`
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "NO_PROXY": "127.0.0.1,localhost",
            "COLUMNS": "200",  # no wrapped lines in what the tests read
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the SuperLink and wait until it answers."""
        if self.connection == "lab":
            address = f"127.0.0.1:{self.port}"
            self.configure(f'[superlink.lab]\naddress = "{address}"\ninsecure = true\n')
        self.start_superlink(
            "flower-superlink",
            *(["--simulation"] if self.connection == "local" else []),
            *("--insecure", "--isolation", "subprocess"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.home / "state.db")),
        )

    def configure(self, text: str) -> None:
        """The user's Flower configuration."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(text)

    def start_superlink(self, *command: str) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self._start(*command)
        wait_until(self._healthy, "the SuperLink", self.log)

    def node(self, config: str, *program: str) -> tuple[str, ...]:
        """The command of a SuperNode with a node config; program: in place of Flower's."""
        where = ("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--node-config", config)
        return (*(program or ("flower-supernode",)), *where)

    def start_supernodes(self, *node_configs: str) -> None:
        """A SuperNode per node config; returns when all are online."""
        self.start_nodes(*(self.node(config) for config in node_configs))

    def start_nodes(self, *commands: Sequence[str]) -> None:
        """A SuperNode per command, each on a port of its own; returns when all are online."""
        before = self._nodes_online()
        for command in commands:
            self._start(*command, "--port", str(free_port()))
        wait_until(
            lambda: self._nodes_online() == before + len(commands),
            *("the SuperNodes", self.log),
        )

    def start_more_supernodes(self, *node_configs: str) -> None:
        """As `start_supernodes`, without a look at who is online: Flower takes a while to see that
        a node has gone."""
        for config in node_configs:
            self._start(*self.node(config), "--port", str(free_port()))

    def end_last(self) -> None:
        """End the process that was started last."""
        process = self.processes.pop()
        process.terminate()
        process.wait(PATIENCE)

    def run(self, app: Path, config: Mapping[str, Any], *options: str) -> Outcome:
        """`flwr run` of an app with run-config overrides, to its end."""
        words = ("run", app, self.connection, "--stream", "-c", pairs(config))
        return self.run_words(*words, *options)

    def submit(self, app: Path, config: Mapping[str, Any]) -> str:
        """`flwr run` that does not wait; the run's id."""
        output = self._flwr("run", app, self.connection, "-c", pairs(config))
        match = re.search(r"started run (\d+)", output)
        assert match, output
        return match[1]

    def stop_run(self, run_id: str) -> None:
        """`flwr stop`; the processes of the run learn of it at their next heartbeat."""
        self._flwr("stop", run_id, self.connection)

    def run_words(self, *words: str | Path) -> Outcome:
        """A `flwr run` in the words after `flwr`, to its end."""
        output = self._flwr(*words)
        match = re.search(r"started run (\d+)", output)
        assert match, output
        wait_until(lambda: self._status(match[1]).startswith("finished"), "the run", self.log)
        return Outcome(self._status(match[1]), output)

    def log(self) -> str:
        """What the processes have written."""
        logs = sorted(self.home.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def stop(self) -> None:
        """End every process of this SuperLink, politely first; each by its own id."""
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while pids := self._descendants():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.2)

    def _start(self, *command: str) -> None:
        log = self.home / f"{command[0]}-{len(self.processes)}.log"
        with log.open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command, cwd=self.home, env=self.env, stdout=output, stderr=subprocess.STDOUT
                )
            )

    def _flwr(self, *arguments: str | Path) -> str:
        return subprocess.run(
            ["flwr", *arguments],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            text=True,
            check=False,
        ).stdout

    @contextmanager
    def _control(self) -> Iterator[ControlHttpClient]:
        """Asks the SuperLink as `flwr ls` does, which takes more than a second of a processor."""
        address = f"127.0.0.1:{self.port}"
        with closing(ControlHttpClient.from_server_address(address, True, None, [])) as client:
            yield client

    def _status(self, run_id: str) -> str:
        with self._control() as client:
            status = client.ListRuns(ListRunsRequest()).run_dict[int(run_id)].status
        return ":".join(filter(None, (status.status, status.sub_status)))

    def _nodes_online(self) -> int:
        assert all(process.poll() is None for process in self.processes), self.log()
        with self._control() as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        return sum(node.status == "online" for node in nodes)

    def _healthy(self) -> bool:
        assert self.processes[0].poll() is None, self.log()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def _descendants(self) -> set[int]:
        """Processes that still run with this FLWR_HOME, and their children (where /proc shows it).

        Flower starts some in sessions of their own, so that no process group holds them all.
        """
        mark = f"FLWR_HOME={self.home}".encode()
        parents, pids = {}, set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] == "Z":
                continue
            parents[int(folder.name)] = int(stat[1])
            if mark in environment:
                pids.add(int(folder.name))
        while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
            pids |= more
        return pids


def copy_app(source: Path, folder: Path, package: str) -> Path:
    """A test's own app, whose ``package`` has two components around FedAccord's, with the
    run-config keys of the repository's app; not for the hub, as it has no licence."""
    shutil.copytree(source, folder)
    project = (REPOSITORY / "pyproject.toml").read_text()
    for side in ("server_app", "client_app"):
        assert f"fedaccord.apps:{side}" in project
        project = project.replace(f"fedaccord.apps:{side}", f"{package}.{side}:app")
    project = re.sub(r"^fab-.* = (\[[^]]*]|.*).*\n", "", project, flags=re.MULTILINE)
    (folder / "pyproject.toml").write_text(project.replace('"fedaccord"', f'"{package}"'))
    return folder


def pairs(config: Mapping[str, Any]) -> str:
    """A run config as `flwr run -c` takes it."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def wait_until(
    ready: Callable[[], bool], what: str, log: Callable[[], str], pause: float = 0.5
) -> None:
    """pause: seconds between two looks."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"waited too long for {what}\n{log()}"
        time.sleep(pause)


def digits_files(folder: Path) -> list[int]:
    """The digits as the page's files; the numbers of the sites' training samples."""
    digits = datasets.load("digits")
    x, x_test = (images.movedim(1, -1).numpy() for images in (digits.x_train, digits.x_test))
    y = digits.y_train.numpy()
    cut = 500
    test = {"x_test": x_test, "y_test": digits.y_test.numpy()}
    for name, part in (("site-a", slice(cut)), ("site-b", slice(cut, None)), ("test", slice(50))):
        np.savez(folder / f"{name}.npz", x_train=x[part], y_train=y[part], **test)
    return [cut, len(y) - cut]


def assert_same_run(flower_run: Path, own_run: Path) -> None:
    tensors, expected = (load_file(run / "model.safetensors") for run in (flower_run, own_run))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    # as texts: repr gives a float's exact value
    table, expected = (pd.read_csv(run / "metrics.csv", dtype=str) for run in (flower_run, own_run))
    pd.testing.assert_frame_equal(table.drop(columns="seconds"), expected.drop(columns="seconds"))


@contextmanager
def running(home: Path, *, simulation: bool) -> Iterator[Flower]:
    flower = Flower(home, simulation=simulation)
    try:
        flower.start()
        yield flower
    finally:
        flower.stop()


@pytest.fixture(scope="session")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    """Flower's simulation runtime, started once for all tests."""
    with running(tmp_path_factory.mktemp("simulation") / "home", simulation=True) as flower:
        yield flower


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Flower]:
    """A SuperLink for SuperNodes: a deployment on this machine."""
    with running(tmp_path / "home", simulation=False) as flower:
        yield flower

"""`fedaccord doctor`: settings and machines that pass, give a warning or fail."""

import os
import re
import signal
import socket
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from fedaccord import config
from fedaccord.cli import doctor as diagnosis
from fedaccord.data import datasets
from fedaccord.strategies import METHODS
from tests.cli.shell import invoke
from tests.ports import free_port


def doctor(*words: object, **env: str) -> tuple[int, dict[str, str]]:
    """The exit code, and each line's mark and text by its subject; a free port for the daemon."""
    port = env.pop("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", str(free_port()))
    result = invoke("doctor", *words, FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port, **env)
    lines = {}
    for line in result.stdout.splitlines():
        mark, rest = line.split(maxsplit=1)
        subject, _, text = rest.partition(": ")
        lines[subject] = f"{mark} {text.strip()}"
    return result.exit_code, lines


def test_the_default_settings_pass(tmp_path: Path) -> None:
    code, lines = doctor("model=linear", f"out-dir={tmp_path}", FEDACCORD_CACHE=str(tmp_path))
    assert code == 0, lines
    assert lines["flwr"].startswith("ok 1.")
    assert lines["flower daemon"].startswith("ok none")
    assert lines["data size"] == "ok digits, 1,438 training samples, 129.4 kB, not decoded yet"
    assert lines["model"] == "ok linear, d = 650 parameters, 2.6 kB a vector"
    assert lines["client state"] == "ok 20 x 1 vectors, 52.0 kB"
    assert lines["threads"] == "ok 1 thread: the model is small (32,000 multiplications a batch)"
    assert not list(tmp_path.iterdir())  # nothing was decoded or written


def test_threads_are_those_of_the_run(tmp_path: Path) -> None:
    _, lines = doctor("model=linear", "workers=2", "batch-size=1000000", f"out-dir={tmp_path}")
    assert lines["threads"] == "ok 1 thread: for each of 2 workers"


def test_what_a_run_in_process_refuses_is_said(tmp_path: Path) -> None:
    x, y, file = np.zeros((8, 3), np.float32), np.arange(8) % 2, tmp_path / "train.npz"
    np.savez(file, x_train=x, y_train=y)
    datasets.load("npz", str(file))
    own = ("dataset=npz", f"data-dir={file}", "model=linear", "num-clients=2", "partition=iid")
    code, lines = doctor(*own, f"out-dir={tmp_path}")
    assert code == 1
    assert lines["evaluation"].startswith("fail evaluation=server: expected test samples for the")
    code, lines = doctor(*own, "evaluation=clients", f"out-dir={tmp_path}")
    assert code == 0  # devices may have some
    assert lines["evaluation"].startswith("warn evaluation=clients: expected test samples for the")
    code, lines = doctor(*own, "validation=0.5", "schedule=buffered", f"out-dir={tmp_path}")
    assert (code, "evaluation" in lines) == (0, False)
    assert lines["schedule"].startswith("warn buffered without device-profile: SuperNodes alone")


def test_devices_that_a_run_refuses_fail(tmp_path: Path) -> None:
    devices = tmp_path / "devices.csv"
    devices.write_text(
        "client,ms_per_sample,up_kbps,down_kbps,active\n0,1,1000,1000,0-50\n1,1,1000,1000,0-50\n"
    )
    words = ("model=linear", "num-clients=2", f"device-profile={devices}", f"out-dir={tmp_path}")
    private = ("sampling=bernoulli", "dp.noise-multiplier=1")
    code, lines = doctor(*words, *private)
    assert code == 1
    assert "expected devices that are always available with dp" in lines["settings"]


def test_the_facts_of_digits_are_those_of_the_data() -> None:
    data = datasets.load("digits")
    facts = datasets.DATASETS["digits"].facts
    assert facts is not None
    assert facts.shape == tuple(data.x_train.shape[1:])
    assert facts.samples == len(data.y_train)
    assert facts.size == sum(x.nbytes for x in data[1:5])
    code, lines = doctor("num-clients=2000")
    assert code == 1
    assert lines["data size"].endswith(", decoded")
    assert lines["partition"].startswith("fail num-clients: expected at least one sample")


@pytest.mark.parametrize(
    ("words", "subject", "text"),
    [
        ("algo=scaffold relaxed-init.beta=0.1 precision=float64", "client state", "ok 20 x 2 vect"),
        ("algo=fedavg fedprox.mu=0.1", "settings", "warn fedprox.mu=0.1 has no effect: it needs"),
        ("--preset dfedsam dataset=digits download=false", "graph", "ok random of 100 nodes"),
    ],
)
def test_settings_are_read_as_by_run(words: str, subject: str, text: str) -> None:
    _, lines = doctor(*words.split(), "model=linear")
    assert lines[subject].startswith(text)


@pytest.mark.parametrize("method", METHODS)
def test_the_memory_of_every_method_is_estimated(method: str) -> None:
    settings = config.RunConfig.make({"algo": method, "model": "linear", "fraction-train": 1.0})
    marks = {check.what: check.mark for check in diagnosis.check_settings(settings)}
    assert marks["client state"] == marks["memory"] == "ok"


def test_a_setting_that_is_too_big_fails(tmp_path: Path) -> None:
    words = ("dataset=cifar10", "model=vgg11", "num-clients=1000000", "download=true")
    code, lines = doctor(*words, FEDACCORD_CACHE=str(tmp_path))
    assert code == 1
    assert lines["data"] == "warn to be fetched"
    assert "d = 9,750,922" in lines["model"]
    on_disk = "fail 1,000,000 x 1 vectors, 39.0 TB; on disk: 78.0 TB, two for each that is "
    assert lines["client state"].startswith(on_disk + "visited, ")
    _, lines = doctor(*words, "client-state=memory", FEDACCORD_CACHE=str(tmp_path))
    assert lines["client state"] == "ok 1,000,000 x 1 vectors, 39.0 TB"
    assert lines["memory"].startswith("fail ")
    assert "too big: use fewer clients" in lines["memory"]


OWN = ("dataset=tests.own:arrays", "num-clients=2", "partition=iid")


@pytest.mark.parametrize(
    "words",
    [
        ["dataset=tests.own:one_target", "model=linear"],
        ["dataset=tests.own:tokens", "model=transformer"],
    ],
)
def test_numbers_and_tokens_of_ones_own_fit(tmp_path: Path, words: list[str]) -> None:
    code, lines = doctor(*words, *OWN[1:], FEDACCORD_CACHE=str(tmp_path))
    assert code == 0
    assert lines["model"].startswith("ok ")


@pytest.mark.parametrize(
    "words",
    [
        ["dataset=tests.own:one_target", "model=linear"],
        ["dataset=tests.own:tokens", "model=transformer"],
    ],
)
def test_a_partition_that_fails_leaves_a_model_of_numbers_or_tokens_fit(
    tmp_path: Path, words: list[str]
) -> None:
    own = [*words, "partition=natural", "num-clients=2"]
    code, lines = doctor(*own, FEDACCORD_CACHE=str(tmp_path))
    assert code == 1
    assert lines["partition"].startswith("fail ")
    assert lines["model"].startswith("ok ")


def test_token_ids_below_zero_fail(tmp_path: Path) -> None:
    words = ("dataset=tests.own:tokens_below_zero", "model=transformer", *OWN[1:])
    code, lines = doctor(*words, FEDACCORD_CACHE=str(tmp_path))
    assert code == 1
    assert lines["data"].startswith("fail model: expected token ids from 0 on")


def test_a_server_of_devices_with_their_own_data_passes(tmp_path: Path) -> None:
    own = ("dataset=npz", "num-clients=8", "model=linear", f"out-dir={tmp_path}")
    cache = str(tmp_path / "cache")
    code, lines = doctor(*own, "evaluation=clients", FEDACCORD_CACHE=cache)
    assert (code, lines["data"][:17]) == (0, "warn no data-dir:")
    code, lines = doctor(*own, FEDACCORD_CACHE=cache)  # whose server evaluates
    assert (code, lines["data"][:4]) == (1, "fail")
    x, y, file = np.zeros((4, 3), np.float32), np.arange(4) % 2, tmp_path / "test.npz"
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    words = (*own, f"data-dir={file}", "partition=iid")
    datasets.load("npz", str(file))
    code, lines = doctor(*words)
    assert code == 0
    assert lines["partition"].startswith("warn num-clients: expected at least one sample")
    assert lines["model"].startswith("ok ")


@pytest.mark.parametrize(
    ("words", "subject", "message"),
    [
        (["lr=-1"], "settings", "fail lr: expected above 0"),
        (["lr"], "settings", "fail expected key=value"),
        (["min-replies=50"], "settings", "fail min-replies: expected at most 10, the clients"),
        (["threads=100000"], "settings", "fail threads: expected at most"),
        (["device=cuda:99"], "settings", "fail device: expected one of"),
        (["model=lenet"], "model", "fail model: expected images of at least 16x16"),
        (["dataset=cifar10"], "data", "fail "),
        (["dataset=npz", "data-dir=/no/such.npz"], "data", "fail npz: expected a .npz file"),
        (["num-clients=2000"], "partition", "fail "),
        (["device-profile=/no/such.csv"], "settings", "fail device-profile: /no/such.csv: No such"),
        (["workers=9999"], "settings", "fail workers: expected at most "),
        (["resume=true"], "settings", "fail resume: expected name=..., the run's directory"),
        (["resume=true", "name=none"], "settings", "fail {tmp_path}/none: expected the directory"),
        (["name=../x"], "settings", "fail name: expected a folder below out-dir, got '../x'"),
        (["name=file"], "settings", "fail name: {tmp_path}/file exists already; choose another"),
        (["keep-best=client-loss"], "keep-best", "fail keep-best: expected a metric that this run"),
        (["dataset=tests.own:absent"], "data", "fail dataset: expected a function of tests.own, "),
        (["dataset=tests.own:below_zero"], "data", "fail dataset: "),
        ([*OWN, "model=tests.own:few_outputs"], "model", "fail model: expected "),
        ([*OWN, "model=tests.own:no_module"], "model", "fail model: expected "),
        (["out-dir=/dev/null/runs"], "run folder", "fail "),
        (
            ["algo=dfedavg", "gossip.topology=file", "gossip.file=/no/such.json"],
            "settings",
            "fail gos",
        ),
    ],
)
def test_settings_that_cannot_run_fail(
    tmp_path: Path, words: list[str], subject: str, message: str
) -> None:
    (tmp_path / "file").touch()
    code, lines = doctor(f"out-dir={tmp_path}", *words, FEDACCORD_CACHE=str(tmp_path / "cache"))
    assert code == 1
    assert lines[subject].startswith(message.format(tmp_path=tmp_path))


def test_without_a_home_an_own_folder_and_an_own_cache_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", lambda path: homeless() if "~" in str(path) else path)
    words = "model=linear", f"out-dir={tmp_path}"
    assert doctor(*words, FEDACCORD_CACHE=str(tmp_path))[0] == 0
    without = invoke("doctor", *words, FEDACCORD_CACHE="", XDG_CACHE_HOME="")
    assert without.exit_code == 2
    assert without.stderr.startswith("fedaccord: no home directory ")
    assert "write the whole path (the cache's is FEDACCORD_CACHE), or set HOME" in without.stderr


def test_a_name_that_is_taken_hides_no_other_check(tmp_path: Path) -> None:
    """As with the config.toml of a run, which names it."""
    (tmp_path / "x").touch()
    code, lines = doctor("model=linear", "name=x", f"out-dir={tmp_path}")
    assert code == 1
    assert lines["settings"].startswith("fail name: ")
    assert lines["memory"].startswith("ok ")


def test_functions_of_ones_own_are_called(tmp_path: Path) -> None:
    words = (*OWN, "model=linear")
    code, lines = doctor(*words, FEDACCORD_CACHE=str(tmp_path))
    assert code == 0
    assert lines["data size"].startswith("ok tests.own:arrays, ")
    assert lines["model"].startswith("ok linear, d = ")


def test_data_with_unknown_facts_give_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    np.savez(file, x_train=np.zeros((4, 2)))
    code, lines = doctor("dataset=npz", f"data-dir={file}")
    assert code == 0
    assert lines["data"].startswith("warn npz: unknown until it is decoded")


def test_other_versions_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(package: str) -> str:
        if package == "ray":
            raise PackageNotFoundError
        return "1.4.0"

    monkeypatch.setattr("importlib.metadata.version", other)
    code, lines = doctor()
    assert code == 0
    assert lines["flwr"].startswith("warn 1.4.0, but FedAccord is written for <1.43,>=1.41")
    assert lines["ray"].startswith("warn not installed")


def test_the_line_of_a_running_daemon_has_the_command_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub that has the daemon's name and listens on its port."""
    program = tmp_path / "flower-superlink"
    program.write_text(
        "import socket, sys\n"
        "server = socket.create_server(('127.0.0.1', int(sys.argv[2])))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    server.accept()\n"
    )
    port = str(free_port())
    command = [sys.executable, str(program), "--port", port]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout
            daemon.stdout.readline()
            code, lines = doctor(FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
            assert code == 0
            text = lines["flower daemon"]
            assert text.startswith(f"ok runs since {datetime.now():%Y-}")
            assert f" in {tmp_path} on port {port}; " in text
            monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python")
            _, lines = doctor(FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
            assert lines["flower daemon"].startswith("warn of another Python environment, ")
            (pid,) = re.findall(r"`kill (\d+)` ends it", text)
            os.kill(int(pid), signal.SIGTERM)
            assert daemon.wait(10) == -signal.SIGTERM
        finally:
            daemon.kill()
    _, lines = doctor(FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
    assert lines["flower daemon"].startswith(f"ok none on port {port}")


def test_a_port_of_another_program_gives_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, lines = doctor(FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
    assert code == 0
    assert lines["flower daemon"].startswith(f"warn port {port} is used by another program")
    code, lines = doctor(FLWR_LOCAL_SUPERLINK_HTTP_API_PORT="none")
    assert code == 1
    assert lines["flower daemon"].startswith("fail expected a port, got 'none'")


def test_a_ray_cluster_that_is_gone_gives_a_warning(tmp_path: Path) -> None:
    """Ray's file outlives a cluster that was killed, and Ray would wait for it."""
    file = tmp_path / "ray" / "ray_current_cluster"
    own = {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    assert doctor(**own)[1]["ray cluster"].startswith("ok none")
    file.parent.mkdir()
    ghost = f"127.0.0.1:{free_port()}"
    file.write_text(ghost)
    line = f"warn no cluster answers at {ghost}, and a simulation would wait for it for minutes; "
    code, lines = doctor(**own)
    assert code == 0
    assert lines["ray cluster"] == f"{line}rm {file}"
    assert doctor(**own | {"RAY_ADDRESS": ghost})[1]["ray cluster"] == f"{line}unset RAY_ADDRESS"
    assert doctor(**own | {"RAY_ADDRESS": "ray://there:1"})[1]["ray cluster"] == "ok ray://there:1"
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        file.write_text(address := f"127.0.0.1:{cluster.getsockname()[1]}")
        assert doctor(**own)[1]["ray cluster"] == f"ok at {address}, which simulations join"


def test_the_noise_of_a_private_run_is_computed() -> None:
    words = ("dp.epsilon=8", "sampling=bernoulli", "num-clients=4", "num-server-rounds=3")
    code, lines = doctor(*words, "fraction-train=0.5")
    assert code == 0
    assert re.fullmatch(r"ok noise multiplier 0\.\d+", lines["privacy"])
    code, lines = doctor(*words, "fraction-train=0.01", "dp.delta=0.05")
    assert (code, lines["settings"].startswith("fail dp.delta: expected less than")) == (1, True)


def test_the_graph_of_a_run_without_a_server_is_described() -> None:
    code, lines = doctor("algo=dfedavg", "model=linear", "num-clients=8", "gossip.steps=3")
    assert code == 0
    # of Metropolis weights 1/3: 2/3 (1 - cos(2 pi / 8))
    assert lines["graph"] == "ok ring of 8 nodes, 3 step(s) a round, spectral gap 0.1953"
    assert lines["server state"] == "ok 8 vectors, 20.8 kB"  # the relay keeps every node's model
    assert lines["messages"].startswith("ok at most 8 x 2 vectors")

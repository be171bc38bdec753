"""Ray is started and joined without a wait, in the environment that is there, and ends with us."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

ray = pytest.importorskip("ray")
ray_constants = pytest.importorskip("ray._private.ray_constants")
ray_utils = pytest.importorskip("ray._private.utils")
cluster = pytest.importorskip("fedaccord.engine.cluster")
pytestmark = pytest.mark.flower  # it starts Ray


def test_under_uv_run_workers_have_the_environment_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = []
    monkeypatch.setattr(ray_constants, cluster.UV_RUN, True)
    monkeypatch.delenv(cluster.UV_RUN, raising=False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: flags.append(flag()))

    def flag() -> bool:
        return bool(ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV)

    cluster.begin("local", 1)
    monkeypatch.setattr(ray_constants, cluster.UV_RUN, True)
    monkeypatch.setenv(cluster.UV_RUN, "1")  # as a user wants it
    cluster.begin("local", 1)
    assert flags == [False, True]


def test_a_cluster_that_is_gone_is_named_at_once_and_a_local_one_ignores_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray would wait for it for minutes."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda *args, **_: addresses.extend(args))
    addresses: list[str] = []
    with pytest.raises(ValueError, match=rf"no cluster answers at 127.0.0.1:1, .*; rm {file}"):
        cluster.begin("auto", 1)
    cluster.begin("local", 1)
    assert addresses == ["local"]


@pytest.mark.parametrize(
    ("address", "error", "line"),
    [
        (
            "local",
            Exception("The node\ntimed out"),
            "workers: Ray did not start here .The node t",
        ),
        (
            "10.0.0.9:6379",
            RuntimeError("Version mismatch:\n  Ray: 1"),
            "ray-address: .*Version m",
        ),
    ],
)
def test_why_ray_does_not_start_is_one_line(
    address: str, error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster.ray_cluster, "connect", lambda *_: True)
    with pytest.raises(ValueError, match=f"^{line}") as refusal:
        cluster.begin(address, 1)
    assert "\n" not in str(refusal.value)


def test_in_a_session_of_the_caller_there_must_be_gpus_for_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would wait for them without end."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with (
        pytest.raises(ValueError, match="expected at most 0, the GPUs that Ray has, got 1 for 2 w"),
        cluster.ray_for(2, "local", 1, 0.5),
    ):
        pass


def test_a_task_that_cannot_be_sent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = pytest.importorskip("fedaccord.engine.workers")
    report = TypeError("Could not serialize\nreport")  # as of Ray; others pass through it
    report.__cause__ = TypeError("cannot pickle 'lock' object")
    for error in (report, RuntimeError("a Value is inherited, not pickled")):
        monkeypatch.setattr(workers, "put", Mock(side_effect=error))
        with pytest.raises(ValueError, match=r"^workers: expected .*pickle.*; set workers=0$"):
            workers.sent(None)
    monkeypatch.setattr(workers, "put", Mock(side_effect=OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        workers.sent(None)


def test_a_signal_while_ray_starts_ends_the_block_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler would end the process at once, an exception in its core with a dump."""
    done = []

    def init(*_: object, **__: object) -> None:
        ray_utils.set_sigterm_handler(lambda *_: pytest.fail("Ray's handler was called"))
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shutdown"))
    with pytest.raises(KeyboardInterrupt) as error, cluster.started("local", 1):
        pytest.fail("not reached")
    assert error.value.args == (signal.SIGTERM,)
    assert done == ["started", "shutdown"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_ray_took_ends_the_block_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not see the handlers of Ray's core: that of SIGTERM aborts in three seconds."""
    ignore = ctypes.c_void_p(int(signal.SIG_IGN))
    take = ctypes.CDLL(None).signal
    take.argtypes = [ctypes.c_int, ctypes.c_void_p]
    monkeypatch.setattr(ray, "init", lambda *_, **__: take(signal.SIGTERM, ignore))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(KeyboardInterrupt) as error, cluster.started("local", 1):
        os.kill(os.getpid(), signal.SIGTERM)
    assert error.value.args == (signal.SIGTERM,)


def test_more_local_workers_than_cores_are_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker is a process with PyTorch: a mistyped number fills the memory."""
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    line = rf"^workers: expected at most {os.cpu_count()}, the cores of .* got 9999; 0 trains the"
    with pytest.raises(ValueError, match=line), cluster.ray_for(9999, "local", 1, 0.0):
        pass


def test_a_disk_is_full_when_250_mb_are_left_and_a_small_one_as_for_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not" / "yet"))
    monkeypatch.delenv(cluster.FULL, raising=False)
    usage = shutil.disk_usage(tmp_path)
    for total, free in [(250e9, 0.25e9), (16e12, 0.25e9), (1e9, 0.05e9)]:
        disks = {tmp_path: usage._replace(total=int(total))}
        monkeypatch.setattr(shutil, "disk_usage", disks.__getitem__)
        with cluster.environment():
            left = total * (1 - float(os.environ[cluster.FULL]))
        assert left == pytest.approx(free, rel=0.05)
        assert cluster.FULL not in os.environ
    monkeypatch.setenv(cluster.FULL, "0.9")
    with cluster.environment():
        assert os.environ[cluster.FULL] == "0.9"


def test_a_run_with_workers_in_another_thread_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("share_tensors", "begin", "check_room"):
        monkeypatch.setattr(cluster, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(ray.util, "deregister_serializer", lambda _: calls.append("deregister"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS", raising=False)

    def use() -> str | None:
        with cluster.ray_for(1, "local", 1, 0.0):
            return os.environ.get("RAY_IGNORE_UNHANDLED_ERRORS")

    whole = ["begin", "check_room", "check_room", "share_tensors", "deregister", "shutdown"]
    with ThreadPoolExecutor(1) as pool:
        with cluster.ray_for(1, "local", 1, 0.0):
            with pytest.raises(ValueError, match=r"^workers: expected one run .* for each run$"):
                pool.submit(use).result()
            assert calls == whole[:4]
            assert os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] == "1"
        assert "RAY_IGNORE_UNHANDLED_ERRORS" not in os.environ
        assert pool.submit(use).result() == "1"
    assert calls == whole * 2


def test_no_process_outlives_a_killed_run(tmp_path: Path) -> None:
    """Two of Ray's agents looked for the rest of it for a minute."""
    words = ["run", "workers=1", "num-server-rounds=100000", "threads=1", f"out-dir={tmp_path}"]
    env = os.environ | {"RAY_TMPDIR": tempfile.mkdtemp()}  # the path of a socket is to be short
    command = [sys.executable, "-c", "from fedaccord.cli import app; app()", *words]
    run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not [*tmp_path.glob("*/clients.csv")]:
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        others = psutil.Process(run.pid).children(recursive=True)
        assert len(others) > 3
    finally:
        run.kill()
        run.wait()
    _, alive = psutil.wait_procs(others, timeout=50)
    for process in alive:
        process.kill()
    assert not alive
    shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)

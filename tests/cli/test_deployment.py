"""`fedaccord doctor --deployment` on valid and on broken set-ups, with a stub of a SuperLink: TLS,
its clock, and its responses to a key."""

import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedaccord.cli import deployment
from fedaccord.cli.deployments import certificates, folders
from tests.cli.shell import invoke
from tests.ports import free_port


class SuperLink(HTTPServer):
    ahead = 0.0  # seconds of its clock
    answer = 400  # to an activation: 400 as for a key that it knows, 412 for another


class TrainReply(BaseHTTPRequestHandler):
    server: SuperLink

    def do_GET(self) -> None:
        self._send(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        is_activation = self.path == "/v1/fleet/activate-node" and self.headers["flwr-signature"]
        self._send(self.server.answer if is_activation else 401)

    def _send(self, status: int) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + self.server.ahead, usegmt=True))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path | None, port: int) -> Iterator[SuperLink]:
    """folder: has the certificate; None: without TLS."""
    server = SuperLink(("127.0.0.1", port), TrainReply)
    if folder:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / folders.CERTIFICATE, folder / folders.SERVER_KEY)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A deployment of one device with its key and data."""
    path = tmp_path / "lab"
    invoke("deploy", "init", path, "--supernodes", 1, "--host", "127.0.0.1", "--port", free_port())
    invoke("deploy", "key", path / "device-0")
    (tmp_path / "train.npz").touch()
    config = path / "device-0" / folders.NODE_CONFIG
    config.write_text(config.read_text().replace("/data/train.npz", f"{tmp_path}/train.npz"))
    return path


def doctor(folder: Path) -> tuple[int, dict[str, str]]:
    """The exit code, and each line's mark and text by its subject."""
    result = invoke("doctor", "--deployment", folder)
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None), result.exception
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    return result.exit_code, {what.rstrip(":"): f"{mark} {text}" for mark, what, text in lines}


def port_of(lab: Path) -> int:
    return folders.read_facts(lab / "server").port


def test_a_valid_device_and_a_valid_server(lab: Path) -> None:
    with serving(lab / "server", port_of(lab)):
        code, lines = doctor(lab / "device-0")
        assert code == 0, lines
        assert lines["key"] == "ok registered"
        assert lines["clock"] == "ok as the server's"
        assert lines["certificate"] == "ok of 127.0.0.1, valid for 825 days"
        assert lines["state-dir"].startswith("ok ")
        code, server = doctor(lab / "server")
        assert (code, server["port"]) == (0, f"ok the SuperLink answers on {port_of(lab)}")
    code, server = doctor(lab / "server")
    assert (code, server["port"]) == (0, f"ok {port_of(lab)} is free")


@pytest.mark.parametrize("mode", [None, 0o750])
def test_only_the_devices_user_can_read_a_new_state_dir(lab: Path, mode: int | None) -> None:
    """A folder that is there keeps its mode."""
    state = lab / "device-0" / "state"
    if mode is not None:
        state.mkdir()
        state.chmod(mode)
    assert doctor(lab / "device-0")[1]["state-dir"].startswith("ok ")
    assert state.stat().st_mode & 0o777 == (mode or 0o700)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ('"{}"', "ok {}"),
        ("'{}'", "ok {}"),
        ('"states"', "fail expected an absolute path, got 'states'"),
        ('"/proc/x"', "fail /p"),
    ],
)
def test_a_device_with_a_state_dir_of_its_own(
    lab: Path, tmp_path: Path, own: str, text: str
) -> None:
    place = str(tmp_path / "own")
    with (lab / "device-0" / folders.NODE_CONFIG).open("a", encoding="utf-8") as file:
        file.write(f" state-dir={own.format(place)}")
    assert doctor(lab / "device-0")[1]["state-dir"].startswith(text.format(place))
    assert not (lab / "device-0" / "state").exists()
    assert (tmp_path / "own").exists() == ("{}" in own)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (412, "fail not registered at the server: run flwr supernode register"),
        (401, "fail refused"),
    ],
)
def test_a_key_that_the_server_does_not_know(lab: Path, answer: int, text: str) -> None:
    with serving(lab / "server", port_of(lab)) as server:
        server.answer = answer
        code, lines = doctor(lab / "device-0")
    assert code == 1
    assert lines["key"].startswith(text)


@pytest.mark.parametrize(
    ("ahead", "mark", "text"),
    [
        (0, "ok", "as the server's"),
        (-20, "fail", "s ahead of the server's; signed messages are refused"),
        (60, "warn", "s behind the server's; set both"),
        (400, "fail", "s behind the server's; signed messages are refused"),
    ],
)
def test_clocks_that_differ(lab: Path, ahead: float, mark: str, text: str) -> None:
    """Flower accepts signatures up to five seconds early and five minutes late."""
    with serving(lab / "server", port_of(lab)) as server:
        server.ahead = ahead
        code, lines = doctor(lab / "device-0")
    assert lines["clock"].startswith(mark)
    assert text in lines["clock"]
    assert code == (mark == "fail")


@pytest.mark.parametrize("date", [None, "garbage", "Fri, 27 Nov 2026 03:00:00"])
def test_a_server_whose_response_has_no_date(date: str | None) -> None:
    assert deployment._check_clock(date).mark == "warn"


def a_folder_as_key(device: Path) -> None:
    (device / folders.DEVICE_KEY).unlink()
    (device / folders.DEVICE_KEY).mkdir(mode=0o700)


def test_certificates_that_a_device_rejects(lab: Path, tmp_path: Path) -> None:
    def what() -> str:
        with serving(lab / "server", port_of(lab)):
            code, lines = doctor(lab / "device-0")
        assert code == 1
        assert "key" not in lines  # nothing is sent to such a server
        return lines["certificate"]

    folders.renew(lab, ["127.0.0.1"], days=-1)
    assert "has expired: run `fedaccord deploy renew" in what()
    _, lines = doctor(lab / "server")
    assert "has expired 1 days ago" in lines["certificate"]
    folders.renew(lab, ["192.0.2.10"])
    facts = folders.read_facts(lab / "device-0")._replace(host="127.0.0.2")
    (lab / "server" / folders.FACTS).write_text(tomli_w.dumps(facts._asdict()))
    _, lines = doctor(lab / "server")
    assert "is for 192.0.2.10, localhost, 127.0.0.1, not for 127.0.0.2" in lines["certificate"]
    invoke("deploy", "init", tmp_path / "other", "--supernodes", 1)
    shutil.copy(tmp_path / "other/device-0/ca.crt", lab / "device-0/ca.crt")
    assert "is not signed by this folder's ca.crt" in what()


def test_a_server_without_tls_and_a_port_without_a_server(lab: Path) -> None:
    with serving(None, port_of(lab)):
        code, lines = doctor(lab / "device-0")
        assert code == 1
        assert "the server does not speak TLS" in lines["certificate"]
        code, lines = doctor(lab / "server")
        assert code == 1
        assert lines["port"].endswith("is used by another program; end it")
    code, lines = doctor(lab / "device-0")
    assert code == 1
    assert lines["port"].startswith(f"fail 127.0.0.1:{port_of(lab)}: Connection refused; start the")


@pytest.mark.parametrize("package", folders.COMPARED)
def test_versions_that_differ(lab: Path, package: str) -> None:
    facts = folders.read_facts(lab / "server")
    facts.versions[package] = "0.0.7"
    (lab / "server" / folders.FACTS).write_text(tomli_w.dumps(facts._asdict()))
    code, lines = doctor(lab / "server")
    assert code == 1
    assert lines[package].startswith("fail expected 0.0.7, as on the other machines, got ")
    assert sum(line.startswith("fail") for line in lines.values()) == 1


@pytest.mark.parametrize(
    ("version", "mark"),
    [("{}+cu128", "ok"), ("{}.0a0+872d972e41.nv24.08", "warn"), ("1.13.1", "fail"), ("", "fail")],
)
def test_builds_of_pytorch_may_differ(
    version: str, mark: str, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a GPU, devices without one, and NVIDIA's own builds."""
    own = deployment.versions()
    here = version.format(own["torch"].partition("+")[0])
    monkeypatch.setattr(deployment, "versions", lambda: own | {"torch": here})
    code, lines = doctor(lab / "server")
    assert lines["torch"].startswith(mark)
    assert code == (mark == "fail")


@pytest.mark.parametrize(("free", "mark"), [(5e7, "fail"), (5e8, "warn"), (5e9, "ok")])
def test_little_space(lab: Path, free: float, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(lab)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(free)))
    code, lines = doctor(lab / "server")
    assert lines["space"].startswith(mark)
    assert code == (mark == "fail")


def texts(name: str, text: str) -> Callable[[Path], object]:
    return lambda device: (device / name).write_text(text)


def without(name: str) -> Callable[[Path], None]:
    return lambda device: (device / name).unlink()


@pytest.mark.parametrize(
    ("damage", "what", "text"),
    [
        (without(folders.DEVICE_KEY), "key", "none in"),
        (
            lambda device: (device / "device.key").chmod(0o644),
            "device.key",
            "other users can read it: chmod 600",
        ),
        (texts(folders.DEVICE_KEY, "x"), "key", "expected a key"),
        (a_folder_as_key, "key", "expected a key"),
        (without("ca.crt"), "ca.crt", "expected a certificate"),
        (texts("ca.crt", "x"), "ca.crt", "expected a certificate"),
        (
            texts(folders.NODE_CONFIG, 'partition-id=0 num-partitions=1 dataset="npz"'),
            *("data", "dataset=npz: expected data-dir with it, got none; edit "),
        ),
        (
            texts(folders.NODE_CONFIG, "partition-id=0 num-partitions=1 data-dir=/data/a.npz"),
            *("node-config", 'expected pairs such as key=1 key=true key="text"; edit '),
        ),
        (
            texts(folders.NODE_CONFIG, "partition-id = 0 num-partitions = 1"),
            *("node-config", "without spaces around =, got partition-id=None; edit "),
        ),
        (
            texts(folders.NODE_CONFIG, "data-path='.' max_threads=1"),
            *("node-config", "max_threads: expected max-threads in this node's config: rename"),
        ),
        (
            texts(folders.NODE_CONFIG, 'data-dir="/no/such.npz"'),
            *("data", "data-dir: expected this device's data, found no /no/such.npz"),
        ),
        (
            texts(folders.NODE_CONFIG, "data-path='/no/such.npz'"),
            *("data", "data-path: expected this device's data, found no /no/such.npz"),
        ),
        (without("node-config"), "node-config", "expected a line"),
        (texts("state", ""), "state-dir", "cannot be written"),
    ],
)
def test_a_device_that_lacks_something(
    lab: Path, damage: Callable[[Path], object], what: str, text: str
) -> None:
    damage(lab / "device-0")
    with serving(lab / "server", port_of(lab)):
        code, lines = doctor(lab / "device-0")
    assert code == 1
    assert lines[what].startswith("fail ")
    assert text in lines[what]
    assert sum(line.startswith("fail") for line in lines.values()) == 1


def test_a_device_without_data_of_its_own(lab: Path) -> None:
    (lab / "device-0" / folders.NODE_CONFIG).write_text("partition-id=0 num-partitions=1")
    with serving(lab / "server", port_of(lab)):
        code, lines = doctor(lab / "device-0")
    assert code == 0
    assert lines["data"].startswith("warn no data-dir")


@pytest.mark.parametrize("pair", ["dataset=sites.data:load", "allow-server-data=true"])
def test_a_device_whose_data_are_no_folder(lab: Path, pair: str) -> None:
    file = lab / "device-0" / folders.NODE_CONFIG
    quoted = pair.replace("sites.data:load", '"sites.data:load"')
    file.write_text(f"partition-id=0 num-partitions=1 {quoted}")
    with serving(lab / "server", port_of(lab)):
        assert doctor(lab / "device-0")[1]["data"] == f"ok {pair}"


def test_a_server_that_lacks_something(lab: Path) -> None:
    key = lab / "server" / folders.SERVER_KEY
    key.chmod(0o640)
    code, lines = doctor(lab / "server")
    assert code == 1
    assert "other users can read it" in lines["server.key"]
    other, _ = certificates.make_device_key()
    key.write_bytes(other)
    assert doctor(lab / "server")[1]["certificate"].startswith("fail ")
    key.unlink()
    assert doctor(lab / "server")[1]["server.key"].startswith("fail none in")
    code, lines = doctor(lab)
    assert code == 1
    assert "expected the server's or a device's folder" in lines["folder"]

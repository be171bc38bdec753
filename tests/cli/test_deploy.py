"""`fedaccord deploy`: the folders of a deployment, and the commands of its start scripts."""

import errno
import os
import shutil
import stat
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from fedaccord.cli.deployments import certificates, folders
from tests.cli.shell import invoke, refusal, success


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def server_files(path: Path) -> tuple[Any, Any, Any]:
    """The server's certificate and key, and the authority."""
    return (
        certificates.read_certificate(path / "server/server.crt"),
        certificates.read_key(path / "server/server.key"),
        certificates.read_certificate(path / "device-0/ca.crt"),
    )


def pairs_of(options: list[str]) -> list[tuple[str, str]]:
    return list(zip(options[::2], options[1::2], strict=True))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_writes_a_folder_for_each_machine(tmp_path: Path) -> None:
    path = tmp_path / "lab"
    result = success(invoke("deploy", "init", path, "--supernodes", 2, "--host", "192.0.2.10"))
    assert f"FLWR_HOME={path}/operator" in result.stdout
    shared = {"ca.crt", "deployment.toml", "start.sh"}
    server = shared | {"server.crt", "server.key", "fedaccord-superlink.service"}
    assert files(path / "server") == server
    for i in range(2):
        device = path / f"device-{i}"
        assert files(device) == shared | {"node-config", "fedaccord-supernode.service"}
        config = parse_config_args([(device / "node-config").read_text()])  # as Flower reads it
        assert config["partition-id"] == i
        assert config["num-partitions"] == 2
    assert files(path / "operator") == {"ca.crt", "config.toml"}
    assert [name for name in files(path) if name.endswith(".key") and "server" not in name] == [
        "authority/ca.key"
    ]
    success(invoke("deploy", "key", path / "device-1"))
    assert {p.name: mode(p) for p in path.rglob("*.key")} == dict.fromkeys(
        ("ca.key", "server.key", "device.key"), 0o600
    )
    assert len({(p.read_bytes()) for p in path.rglob("ca.crt")}) == 1
    connection = tomllib.loads((path / "operator/config.toml").read_text())["superlink"]
    assert connection["default"] == "federation"
    assert connection["federation"]["address"] == "192.0.2.10:8000"
    assert Path(connection["federation"]["root-certificates"]).samefile(path / "operator/ca.crt")


@pytest.mark.parametrize(("host", "every"), [("192.0.2.10", "0.0.0.0"), ("2001:db8::1", "::")])
def test_the_server_answers_at_the_addresses_of_its_kind(
    tmp_path: Path, host: str, every: str
) -> None:
    """And its database is not for others to read."""
    invoke("deploy", "init", tmp_path / "x", "--supernodes", 1, "--host", host)
    script = (tmp_path / "x/server/start.sh").read_text()
    assert f"--host {every} --port 8000" in script
    assert script.index("umask 077") < script.index("exec flower-superlink")


def test_a_device_may_have_its_states_elsewhere(tmp_path: Path) -> None:
    device = tmp_path / "x/device-0"
    invoke("deploy", "init", tmp_path / "x", "--supernodes", 1, "--host", "192.0.2.10")
    invoke("deploy", "key", device)
    file = device / "node-config"
    file.write_text(file.read_text().strip() + ' state-dir="/mnt/states"')
    config = dict(pairs_of(folders.supernode(device)))["--node-config"]
    assert parse_config_args([config])["state-dir"] == "/mnt/states"  # Flower refuses two


def test_the_options_of_a_devices_supernode(tmp_path: Path) -> None:
    device = tmp_path / "x/device-0"
    invoke("deploy", "init", tmp_path / "x", "--supernodes", 1, "--host", "2001:db8::1")
    invoke("deploy", "key", device)
    assert dict(pairs_of(folders.supernode(device))) == {
        "--superlink": "[2001:db8::1]:8000",  # an IPv6 address is in brackets
        "--root-certificates": str(device / "ca.crt"),
        "--auth-supernode-private-key": str(device / "device.key"),
        "--node-config": 'partition-id=0 num-partitions=1 dataset="npz" '
        f'data-dir="/data/train.npz" state-dir="{device}/state"',
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "expected a device's folder, or options of flower-supernode, got neither"),
        (("none",), "none: expected the server's or a device's folder of `fedaccord deploy init`,"),
        (("x/server", "--port", "9"), "x/server: expected a device's folder, got "),
        (("x/device-0",), "x/device-0: expected a device.key; `fedaccord deploy key` makes one"),
    ],
)
def test_a_device_without_its_files_is_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("deploy", "init", "x", "--supernodes", 1, "--host", "192.0.2.10")
    assert line in refusal(tmp_path, invoke("device", *words))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("init", "file", "--supernodes", 1), "file: expected a new or an empty folder, got a fil"),
        (("renew", "x/server"), "x/server: expected the folder that `fedaccord deploy init` made,"),
        (("renew", "x"), "x/server/server.crt: expected a certificate, got a damaged file"),
        (("renew", "x", "--host", "b"), "x/authority/ca.key: expected an elliptic-curve key,"),
        (("key", "x/server"), "x/server: expected a device's folder, got "),
        (("key", "x/device-0"), "cannot be read (UnicodeDecodeError: 'utf-8' codec can't decode"),
    ],
)
def test_other_folders_and_damaged_files_are_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("deploy", "init", "x", "--supernodes", 1, "--host", "192.0.2.10")
    for name in ("file", "x/server/server.crt", "x/authority/ca.key", "x/device-0/deployment.toml"):
        Path(name).write_bytes(b"\x98" * 1000)
    before = files(tmp_path)
    text = refusal(tmp_path, invoke("deploy", *words))
    assert line in text
    assert len(text) < 250
    assert files(tmp_path) == before


NO_HOSTS = ["-h", "..", "a" * 300, "a" * 64, "a..b", "a-", "300.1.1.1", "fe80::1%eth0", "my_host"]
NO_HOSTS += ["a b", "http://x", 'x"; rm', "$(reboot)", ""]
HOSTS = ["node-1", "fed.example.org", "9.example", "a" * 63, "::1", ".".join(["a" * 60] * 4)]


@pytest.mark.parametrize("host", [*NO_HOSTS, *HOSTS])
def test_only_names_and_addresses_are_hosts(tmp_path: Path, host: str) -> None:
    result = invoke("deploy", "init", tmp_path / "x", "--supernodes", 1, "--host", host)
    if host in HOSTS:
        assert result.exit_code == 0, result.output
        return
    assert "--host: expected a host name or an IP address" in refusal(tmp_path, result)
    assert len(result.stderr) < 250
    assert not (tmp_path / "x").exists()


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    words = ("deploy", "init", tmp_path / "x", "--supernodes", 1)
    success(invoke(*words))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert "expected a new or an empty folder" in refusal(tmp_path, invoke(*words))
    key = ("deploy", "key", tmp_path / "x/device-0")
    success(invoke(*key))
    private = (tmp_path / "x/device-0/device.key").read_bytes()
    assert "exists, and identifies" in refusal(tmp_path, invoke(*key))
    assert (tmp_path / "x/device-0/device.key").read_bytes() == private
    assert {p: p.read_bytes() for p in before} == before
    assert "deployment.toml cannot be read" in refusal(tmp_path, invoke("deploy", "key", tmp_path))


def test_a_renewed_certificate_is_trusted_like_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    names = ("192.0.2.10", "lab.example.org")
    hosts = [word for name in names for word in ("--host", name)]
    invoke("deploy", "init", path, "--supernodes", 1, *hosts)
    first = (path / "server/server.crt").read_bytes()
    success(invoke("deploy", "renew", path))
    certificate = certificates.read_certificate(path / "server/server.crt")
    assert certificates.as_pem(certificate) != first
    key = certificates.read_key(path / "server/server.key")
    authority = certificates.read_certificate(path / "device-0/ca.crt")
    for name in names:
        certificates.check_server(certificate, key, authority, name)
    invoke("deploy", "renew", path, "--host", "198.51.100.7")
    other = certificates.read_certificate(path / "server/server.crt")
    assert certificates.hosts_of(other) == ["198.51.100.7", "localhost", "127.0.0.1"]
    for machine in ("server", "device-0"):  # which connect to the new name
        assert folders.read_facts(path / machine).host == "198.51.100.7"
    assert "198.51.100.7:8000" in (path / "operator/config.toml").read_text()
    certificates.check_server(*server_files(path), "198.51.100.7")
    shutil.rmtree(path / "authority")
    assert "ca.crt" in refusal(tmp_path, invoke("deploy", "renew", path))


def test_a_renewal_after_an_upgrade_has_the_new_versions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    invoke("deploy", "init", path, "--supernodes", 1, "--host", "192.0.2.10")
    new = folders.read_facts(path / "server")
    assert "deployment.toml" not in success(invoke("deploy", "renew", path)).stdout
    folders.write_facts(path, new._replace(versions=new.versions | {"flwr": "1.0.0"}))
    config = path / "operator" / "config.toml"
    config.write_text(own := config.read_text() + '\n[superlink.lab]\naddress = "lab:9093"\n')
    line = f"192.0.2.10: copy {folders.FACTS} to the server and to each device, and start.sh to"
    assert line in success(invoke("deploy", "renew", path)).stdout
    assert folders.read_facts(path / "server") == folders.read_facts(path / "device-0") == new
    assert config.read_text() == own
    success(invoke("deploy", "renew", path, "--host", "fed.example.org"))
    links = tomllib.loads(config.read_text())["superlink"]
    assert links["lab"] == {"address": "lab:9093"}
    assert links["federation"]["address"].startswith("fed.example.org:")


def test_a_server_without_its_facts_keeps_its_certificate(tmp_path: Path) -> None:
    path = tmp_path / "x"
    invoke("deploy", "init", path, "--supernodes", 1, "--host", "192.0.2.10")
    (path / "server" / folders.FACTS).unlink()
    before = {name: (path / "server" / name).read_bytes() for name in ("server.key", "server.crt")}
    assert f"{folders.FACTS} cannot be read" in refusal(tmp_path, invoke("deploy", "renew", path))
    assert {name: (path / "server" / name).read_bytes() for name in before} == before


def test_a_full_disk_leaves_the_server_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    invoke("deploy", "init", path, "--supernodes", 1, "--host", "192.0.2.10")
    before = {name: (path / "server" / name).read_bytes() for name in ("server.key", "server.crt")}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert invoke("deploy", "renew", path).exit_code == 2
    assert {name: (path / "server" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("machine", ["server", "device-0"])
def test_a_start_script_runs_the_checks_and_then_flower_with_its_files(
    tmp_path: Path, machine: str
) -> None:
    """With stubs that print their arguments."""
    invoke("deploy", "init", tmp_path / "lab", "--supernodes", 1, "--host", "192.0.2.10")
    programs = tmp_path / "bin"
    for name in ("fedaccord", "flower-superlink"):
        text = f'#!/bin/sh\nfor word in {name} "$@"; do echo "$word"; done\nexit "${{RC:-0}}"\n'
        folders.write(programs / name, text, mode=0o755)
    folder = tmp_path / "a folder" / machine  # copied to its machine
    shutil.copytree(tmp_path / "lab" / machine, folder)

    def start(rc: int) -> list[str]:
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "RC": str(rc)}
        command = ["sh", str(folder / "start.sh"), "--more"]
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert result.stderr == ""
        return result.stdout.splitlines()

    checked = ["fedaccord", "doctor", "--deployment", "."]
    assert start(1) == checked
    words = start(0)
    assert words[:4] == checked
    assert words[-1] == "--more"
    options = dict(pairwise(words))
    assert "--insecure" not in words
    if machine == "server":
        assert words[4] == "flower-superlink"
        assert "--enable-supernode-auth" in words
        assert options["--database"] == str(folder / "superlink.db")
        for option in ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"):
            assert (folder / options[option]).is_file()
    else:
        assert words[4:] == ["fedaccord", "device", ".", "--more"]
        invoke("deploy", "key", folder)
        options = dict(pairs_of(folders.supernode(folder)))
        assert options["--superlink"] == "192.0.2.10:8000"
        assert (folder / options["--root-certificates"]).is_file()
        assert options["--auth-supernode-private-key"] == str(folder / folders.DEVICE_KEY)
        config = parse_config_args([options["--node-config"]])
        assert config["state-dir"] == str(folder / "state")
        assert config["data-dir"] == "/data/train.npz"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd's own check")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    invoke("deploy", "init", tmp_path / "x", "--supernodes", 1)
    for unit in tmp_path.rglob("*.service"):
        result = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)], capture_output=True, text=True
        )
        assert unit.name not in result.stderr, result.stderr
        text = unit.read_text()
        # Flower accepts a key again a minute after its SuperNode was killed
        assert ("RestartSec=60" in text) == (unit.name == folders.SUPERNODE_UNIT)
        assert "Restart=always" in text

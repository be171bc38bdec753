"""docs/secure-deployment.md on this machine: its commands, and who is refused."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from fedaccord.cli.deployments import folders
from tests.flower.conftest import PATIENCE, REPOSITORY, Flower, digits_files, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = REPOSITORY / "docs" / "secure-deployment.md"


class Lab:
    """The machines of the page, as folders of this one."""

    def __init__(self, home: Path) -> None:
        self.flower = Flower(home / "flower", simulation=False)
        self.flower.home.mkdir()
        self.home, self.server = home, home / "federation" / "server"
        self.devices = [home / "federation" / f"device-{i}" for i in range(2)]
        operator = {"FLWR_HOME": str(home / "federation" / "operator")}
        self.operator = self.flower.env | operator

    def say(self, command: str, folder: Path) -> tuple[int, str]:
        """A command's exit code and what it says, once it has ended."""
        result = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env=self.operator,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout

    def do(self, command: str, folder: Path) -> str:
        code, output = self.say(command, folder)
        assert code == 0, f"{command}\n{output}\n{self.flower.log()}"
        return output

    def nodes_online(self) -> int:
        return self.do("flwr supernode ls federation", self.home).count("online")


def test_the_page_says_what_works_and_who_is_refused(tmp_path: Path) -> None:
    lab, port = Lab(tmp_path), free_port()
    text = PAGE.read_text().replace("--host 192.0.2.10", f"--host 127.0.0.1 --port {port}")
    text = text.replace("num-server-rounds=50", "num-server-rounds=2 local-epochs=1 threads=1")
    text = text.replace("=/data/", f"={tmp_path}/")
    blocks = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    (init,), (start_server,), (key,), (_, register), (start,), (listed, submit) = blocks
    inline = sorted({*re.findall(r"`((?:fedaccord|flwr) [^`]+)`", text)})
    renew, _device, doctor, stop, unregister = inline  # start scripts run the second
    doctor = doctor.replace("DIR", ".")
    sizes = digits_files(tmp_path)
    flower = lab.flower
    try:
        lab.do(init, tmp_path)
        flower._start("sh", "-c", f"cd {tmp_path}/federation && exec {start_server}")
        wait_until(
            lambda: "the SuperLink answers" in lab.say(doctor, lab.server)[1],
            *("the SuperLink", flower.log),
        )
        for device, site in zip(lab.devices, ("site-a", "site-b"), strict=True):
            lab.do(key, device)
            config = device / folders.NODE_CONFIG
            config.write_text(config.read_text().replace("/data/train", f"{tmp_path}/{site}"))

        code, output = lab.say(start, lab.devices[0])
        assert code == 1
        assert "fail  key:           not registered at the server" in output
        lab.do(register, tmp_path)
        refused(lab, port)
        for device in lab.devices:
            flower._start("sh", "-c", f"cd {device} && exec {start} --port {free_port()}")
        wait_until(lambda: lab.nodes_online() == 2, "the SuperNodes", flower.log)
        assert lab.do(listed, tmp_path).count("online") == 2
        lab.do(submit, tmp_path)
        (folder,) = (tmp_path / "runs").iterdir()
        clients = pd.read_csv(folder / "clients.csv").groupby("client")["num-examples"]
        assert [set(examples) for _, examples in clients] == [{size} for size in sizes]
        assert [*lab.devices[0].glob("state/*/0/*")]  # SCAFFOLD's c_i
        code, output = lab.say(f"{submit} lr=-1", tmp_path)
        assert (code, output) == (2, "fedaccord: lr: expected above 0, got -1.0\n")  # not sent
        code, output = lab.say(f"{submit} name={folder.name}", tmp_path)  # there already
        assert code == 1
        assert f"{folder} exists already" in output.splitlines()[-1]
        stopped(lab, f"{submit} num-server-rounds=1000 name=long", stop)

        text = lab.do("flwr supernode ls federation --format json", tmp_path)
        node = json.loads(text)["nodes"][0]["node-id"]
        lab.do(unregister.replace("NODE_ID", str(node)), tmp_path)
        codes = [lab.say(doctor, device)[0] for device in lab.devices]
        assert sorted(codes) == [0, 1]  # one is shut out
    finally:
        flower.stop()
    before = (lab.server / folders.CERTIFICATE).read_bytes()
    lab.do(renew, tmp_path)
    assert (lab.server / folders.CERTIFICATE).read_bytes() != before
    folders.renew(tmp_path / "federation", ["127.0.0.1"], days=-1)
    code, output = lab.say(start_server, tmp_path / "federation")
    assert code == 1
    assert "has expired 1 days ago" in output


def stopped(lab: Lab, submit: str, stop: str) -> None:
    """A run that `flwr stop` ends: the command that submitted it says so."""
    with subprocess.Popen(
        ["sh", "-c", submit],
        cwd=lab.home,
        env=lab.operator,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = (re.match(r"run (\d+) is called long", line) for line in process.stdout)
        match = next(filter(None, lines))  # after a line on the key that is given twice
        lab.do(stop.replace("RUN_ID", match[1]), lab.home)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, output
        assert f"fedaccord: run {match[1]} stopped" in output


def refused(lab: Lab, port: int) -> None:
    """A SuperNode without a key, one of another authority, and a client without TLS."""
    device, own = lab.devices[0], f"--port {free_port()}"
    node = f"flower-supernode --superlink 127.0.0.1:{port} {own} --root-certificates"
    code, output = lab.say(f"{node} ca.crt", device)
    assert code == 1
    assert "[code: 2001] SuperNode authentication is enabled" in output
    lab.do("fedaccord deploy init other --supernodes 1", lab.home)
    code, output = lab.say(
        f"{node} {lab.home}/other/device-0/ca.crt --auth-supernode-private-key device.key", device
    )
    assert code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in output
    good = (device / "ca.crt").read_bytes()
    shutil.copy(lab.home / "other/device-0/ca.crt", device / "ca.crt")
    code, output = lab.say("sh start.sh", device)
    assert code == 1
    assert "is not signed by this folder's ca.crt" in output
    (device / "ca.crt").write_bytes(good)
    config = Path(lab.operator["FLWR_HOME"]) / "config.toml"
    plain = f'[superlink.plain]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    config.write_text(config.read_text() + plain)
    code, output = lab.say("flwr ls plain", lab.home)
    assert code == 1
    assert "Connection to the SuperLink is unavailable" in output

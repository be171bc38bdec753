"""Two devices behind TLS, one ten times slower, one killed: synchronous and buffered, with a watch.

    python benchmarks/device_walk.py --markdown docs/results/device-walk.md

The commands of docs/secure-deployment.md on loopback: a server, two devices that `fedaccord device`
runs and whose keys are registered, SCAFFOLD on the digits. The second device runs for a tenth of
the time (SIGSTOP and SIGCONT). Once a fifth of the rounds is over, the first one is killed with all
its processes (kill -9) and started again, which Flower admits after a minute. Nothing else is done
by hand, and the run is one `fedaccord submit`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import devices
import numpy as np
import pandas as pd
import psutil
import timing

from fedaccord.data import datasets

SHARE, CYCLE = 0.1, 1.0  # of the time that the slow device runs; seconds
SCHEDULES = {"synchronous": "", "buffered": "schedule=buffered concurrency=2 buffer-size=1"}
SAMPLES = 500  # of the first device; the second has the others


class Machines:
    """The page's machines, as folders of this one."""

    def __init__(self, home: Path) -> None:
        self.home, self.processes = home, list[psutil.Process]()
        others = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
        self.environment = others | {
            "FLWR_HOME": str(home / "federation/operator"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PATH": f"{devices.BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.ports = [devices.free_port() for _ in range(3)]

    def do(self, command: str, folder: Path) -> str:
        process = self.run(["sh", "-c", command], folder)
        if process.returncode:
            sys.exit(f"{command}\n{process.stdout}{process.stderr}")
        return process.stdout

    def run(self, command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def start(self, folder: Path, *more: str) -> psutil.Process:
        log = (folder / "log").open("ab")
        command = ["sh", "start.sh", *more]
        self.processes.append(
            psutil.Popen(command, cwd=folder, env=self.environment, stdout=log, stderr=log)
        )
        return self.processes[-1]

    def device(self, i: int) -> psutil.Process:
        port = str(self.ports[1 + i])
        return self.start(self.home / f"federation/device-{i}", "--port", port)

    def online(self) -> int:
        """Devices; -1: the server does not answer yet."""
        process = self.run(["flwr", "supernode", "ls", "federation"], self.home)
        return -1 if process.returncode else process.stdout.count("online")

    def wait(self, number: int) -> None:
        end = time.monotonic() + devices.PATIENCE
        while self.online() < number:
            if time.monotonic() > end:
                sys.exit(f"{number} devices did not come")
            time.sleep(1.0)

    def stop(self) -> None:
        everything = [p for one in self.processes for p in (one, *devices.descendants(one))]
        for each in everything:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@contextmanager
def deployed(home: Path) -> Iterator[Machines]:
    machines = Machines(home)
    digits = datasets.load("digits")
    x, x_test = (images.movedim(1, -1).numpy() for images in (digits.x_train, digits.x_test))
    y = digits.y_train.numpy()
    test: dict[str, Any] = {"x_test": x_test, "y_test": digits.y_test.numpy()}
    for name, part in (("0", slice(SAMPLES)), ("1", slice(SAMPLES, None)), ("test", slice(50))):
        np.savez(home / f"{name}.npz", x_train=x[part], y_train=y[part], **test)
    hosts = f"--supernodes 2 --host 127.0.0.1 --port {machines.ports[0]}"
    try:
        machines.do(f"fedaccord deploy init federation {hosts}", home)
        machines.start(home / "federation/server")
        machines.wait(0)
        for i in range(2):
            folder = home / f"federation/device-{i}"
            machines.do("fedaccord deploy key", folder)
            file = next(p for p in folder.iterdir() if p.is_file() and "/data/train" in _text(p))
            file.write_text(file.read_text().replace("/data/train", f"{home}/{i}"))
            command = f"flwr supernode register federation/device-{i}/device.pub federation"
            machines.do(command, home)
        yield machines
    finally:
        machines.stop()


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


@contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """A block in which a process and all that it starts run for `SHARE` of the time."""
    over = threading.Event()

    def send(which: Any) -> None:
        for each in (*devices.descendants(process), process):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(which)

    def throttle() -> None:
        while not over.is_set():
            send(SIGSTOP)
            time.sleep(CYCLE * (1 - SHARE))
            send(SIGCONT)
            over.wait(CYCLE * SHARE)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(SIGCONT)


def walk(schedule: str, rounds: int, timeout: float, home: Path) -> dict[str, Any]:
    """One run; what was seen of it."""
    home.mkdir()
    facts: dict[str, Any] = {"schedule": schedule}
    with deployed(home) as machines:
        first, second = machines.device(0), machines.device(1)
        machines.wait(2)
        over = threading.Event()
        run = home / "runs/walk"

        def kill() -> None:
            while number(run) < max(1, rounds // 5):
                if over.wait(0.2):
                    return
            for each in (*devices.descendants(first), first):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(SIGKILL)
            facts["killed after round"] = number(run)
            if over.wait(70.0):
                return
            machines.device(0)
            facts["started again after round"] = number(run)

        killer = threading.Thread(target=kill)
        killer.start()
        settings = f"algo=scaffold num-server-rounds={rounds} fraction-train=1.0 dataset=npz"
        settings += f" data-dir={home}/test.npz out-dir={home}/runs name=walk local-epochs=1"
        settings += f" threads=1 round-timeout={timeout:g} {SCHEDULES[schedule]}"
        with slowed(second):
            began = time.monotonic()
            machines.do(f"fedaccord submit federation {settings}", home)
            facts["seconds"] = time.monotonic() - began
        over.set()
        killer.join()
    return facts | table(run)


def number(run: Path) -> int:
    """Rounds that are in a run's table."""
    with suppress(OSError):
        return max(0, len((run / "metrics.csv").read_text().splitlines()) - 2)
    return 0


def table(run: Path) -> dict[str, Any]:
    metrics, clients = (pd.read_csv(run / f"{name}.csv") for name in ("metrics", "clients"))
    ok = clients[clients["status"] == "ok"]
    lost = clients[clients["status"] != "ok"]["status"].value_counts().to_dict()
    seconds = metrics["seconds"].dropna()
    return {
        "rounds": len(metrics) - 1,
        "median seconds a round": float(seconds.median()),
        "longest round, seconds": float(seconds.max()),
        "rounds that counted": int(metrics["counted"].sum()),
        "replies of the fast device": int((ok["client"] == 0).sum()),
        "replies of the slow device": int((ok["client"] == 1).sum()),
        "largest staleness": float(ok["staleness"].max()) if "staleness" in ok else 0.0,
        "test accuracy": float(metrics["test-accuracy"].iloc[-1]),
        "visits without a reply": "; ".join(f"{n} x {_short(str(w))}" for w, n in lost.items())
        or "0",
    }


def _short(why: str) -> str:
    return re.sub(r"[|\n]", " ", why)[:80]


def page(walks: list[Mapping[str, Any]], options: argparse.Namespace) -> str:
    names = [name for name in walks[0] if name != "schedule"]
    head = ["", *(str(one["schedule"]) for one in walks)]
    cells = [
        [n, *(f"{v:.4g}" if isinstance(v := one.get(n, "-"), float) else str(v) for one in walks)]
        for n in names
    ]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells]]
    settings = f"`{SCHEDULES['buffered']}`"
    return "\n".join(
        [
            "# A walk with two devices",
            "",
            " ".join(__doc__.split("\n\n")[2].split()),
            "",
            f"Buffered: {settings}. A visit may take {options.timeout:g} s. An epoch a visit, CPU, "
            f"{os.cpu_count()} cores, measured with other load: seconds are upper bounds, an order "
            "of magnitude.",
            "",
            *lines,
            "",
            "A step of the synchronous run waits for the slow device, one of the buffered run for "
            "the first reply: the same number of rounds has fewer replies of the slow device, so "
            "the accuracies are not comparable.",
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


def main() -> None:
    options = arguments().parse_args()
    walks = list[Mapping[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            home = Path(folder) / schedule
            walks.append(walk(schedule, options.rounds, options.timeout, home))
            print(walks[-1], flush=True)
    if options.markdown:
        options.markdown.write_text(page(walks, options))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a visit")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    return parser


if __name__ == "__main__":
    main()

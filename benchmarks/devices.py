"""Rounds on SuperNodes: seconds a round, CPU seconds a message, memory of each process.

    python benchmarks/devices.py --markdown docs/results/devices.md
    python benchmarks/devices.py --before COMMIT        # also the app of an earlier commit

A SuperLink and two SuperNodes on loopback, started anew for each row and each repetition: Flower's
own FedAvg (`benchmarks/fedavg_app`), and SCAFFOLD on the digits by this package, an epoch a round.
CPU seconds a message are those of all processes of a SuperNode between the start and the end of a
run, divided by the messages. Memory is sampled every 0.3 s: the resident set of each process,
and for all of a node the proportional set size (PSS), which counts shared pages once.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import psutil
import timing

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NODES, PATIENCE, MB = 2, 600.0, 1e6
DEVICE = ("fedaccord", "device")
ROWS = {  # name: (app, command of a SuperNode)
    "Flower's FedAvg": ("plain", ("flower-supernode",)),
    "Flower's FedAvg, `fedaccord device`": ("plain", DEVICE),
    "before": ("before", ("flower-supernode",)),
    "flower-supernode": ("ours", ("flower-supernode",)),
    "fedaccord device --no-short-pauses": ("ours", (*DEVICE, "--no-short-pauses")),
    "fedaccord device": ("ours", DEVICE),
}


class Measurement(NamedTuple):
    """A run: seconds of its rounds, CPU seconds a message, MB by role, and of an idle node."""

    rounds: list[float]
    cpu: float
    idle_cpu: float  # CPU seconds a second of an idle node
    memory: dict[str, float]  # peaks
    idle: dict[str, float]


def main() -> None:
    options = arguments().parse_args()
    rows = [name for name in options.rows if options.before or ROWS[name][0] != "before"]
    measurements: dict[str, list[Measurement]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        apps = {"plain": REPOSITORY / "benchmarks/fedavg_app", "ours": REPOSITORY}
        if options.before:
            apps["before"] = Path(folder) / "before"
            apps["before"].mkdir()
            command = f"git archive {options.before} | tar -x -C {apps['before']}"
            subprocess.run(["sh", "-c", command], cwd=REPOSITORY, check=True)
        for repetition in range(options.repetitions):
            for name in rows:
                app, node = ROWS[name]
                work = Path(folder) / f"{repetition}-{len(measurements[name])}-{rows.index(name)}"
                measurements[name].append(
                    measure(apps[app], app == "plain", node, options.rounds, work)
                )
                print(name, measurements[name][-1], flush=True)
                if options.out:
                    options.out.write_text(json.dumps(measurements, indent=1))
    table = "\n".join([*lines(measurements), "", *memory_lines(measurements)])
    print(table)
    if options.markdown:
        options.markdown.write_text(page(table, options))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--before", metavar="COMMIT", help="an earlier commit, measured too")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=Path, help="write what was measured to this JSON file")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    return parser


def measure(app: Path, plain: bool, node: Sequence[str], rounds: int, work: Path) -> Measurement:
    configs = [f"partition-id={i} num-partitions={NODES}" for i in range(NODES)]
    with deployment(work, [node] * NODES, configs) as (environment, nodes):
        time.sleep(5.0)  # until all has been imported
        idle = peaks(nodes)
        before, began = cpu_seconds(nodes), time.monotonic()
        time.sleep(10.0)
        idle_cpu = (cpu_seconds(nodes) - before) / (time.monotonic() - began) / NODES
        before = cpu_seconds(nodes)
        with watched(nodes) as memory:
            seconds = run(app, plain, rounds, work, environment)
        messages = NODES * (rounds + (not plain))  # and the handshake
        cpu = (cpu_seconds(nodes) - before) / messages
    return Measurement(seconds, cpu, idle_cpu, memory, idle)


def run(
    app: Path, plain: bool, rounds: int, work: Path, environment: dict[str, str], more: str = ""
) -> list[float]:
    """`flwr run` to its end; the seconds of each round. more: settings."""
    if plain:
        settings = f'num-server-rounds={rounds} out-file="{work}/seconds"'
    else:
        settings = f'algo="scaffold" num-server-rounds={rounds} fraction-train=1.0 threads=1 '
        settings += f'local-epochs=1 out-dir="{work}" name="run" {more}'
    words = ["flwr", "run", str(app), "lab", "--stream", "-c", settings]
    process = subprocess.run(
        words, env=environment, cwd=work, capture_output=True, text=True, timeout=PATIENCE
    )
    try:
        if plain:
            return [float(line) for line in (work / "seconds").read_text().split()]
        return [*pd.read_csv(work / "run/metrics.csv")["seconds"].dropna()]
    except OSError:
        sys.exit(process.stdout + process.stderr)


@contextmanager
def deployment(
    work: Path, commands: Sequence[Sequence[str]], node_configs: Sequence[str]
) -> Iterator[tuple[dict[str, str], list[psutil.Process]]]:
    """A SuperLink and its SuperNodes, which are stopped with all that they have started."""
    work.mkdir(parents=True)
    (work / "tmp").mkdir()
    port = free_port()
    config = f'[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (work / "config.toml").write_text(config)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {
        "FLWR_HOME": str(work),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    processes: list[psutil.Process] = []

    def start(*command: str) -> psutil.Process:
        log = (work / f"{len(processes)}.log").open("wb")
        out = subprocess.STDOUT
        process = psutil.Popen(command, cwd=work, env=environment, stdout=log, stderr=out)
        processes.append(process)
        return processes[-1]

    def online() -> int:
        listed = ["flwr", "supernode", "ls", "lab", "--format", "json"]
        process = subprocess.run(
            listed, env=environment, cwd=work, capture_output=True, text=True, check=False
        )
        return len(re.findall(r'"status": *"online"', process.stdout))

    try:
        address = ("--host", "127.0.0.1", "--port", str(port))
        start("flower-superlink", "--insecure", *address, "--database", str(work / "state.db"))
        time.sleep(5.0)
        nodes = [
            start(
                *command,
                *("--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                *("--node-config", config),
            )
            for command, config in zip(commands, node_configs, strict=True)
        ]
        end = time.monotonic() + PATIENCE
        while online() < len(nodes):
            if time.monotonic() > end:
                sys.exit("".join(log.read_text() for log in work.glob("*.log")))
            time.sleep(1.0)
        yield environment, nodes
    finally:
        everything = [p for process in processes for p in (process, *descendants(process))]
        for process in reversed(processes):
            process.terminate()
        psutil.wait_procs(everything, timeout=20)
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def cpu_seconds(nodes: Sequence[psutil.Process]) -> float:
    """Of the nodes' processes, also of those that have ended."""
    total = 0.0
    for node in nodes:
        for process in (node, *descendants(node)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])  # user, system, and of reaped children
    return total


def peaks(nodes: Sequence[psutil.Process]) -> dict[str, float]:
    """The MB of the first node's processes: RSS by role, and the PSS of all."""
    sizes: dict[str, float] = {}
    pss = 0.0
    for process in (nodes[0], *descendants(nodes[0])):
        with suppress(psutil.Error, ValueError):
            words, memory = " ".join(process.cmdline()), process.memory_full_info()
            pss += memory.pss / MB
            role = role_of(process, nodes[0], words)
            sizes[role] = max(sizes.get(role, 0.0), memory.rss / MB)
    return sizes | {"all, PSS": pss}


def role_of(process: psutil.Process, node: psutil.Process, words: str) -> str:
    if process.pid == node.pid:
        return "SuperNode"
    if "hand_over" in words:
        return "caller"
    if "device" not in words:  # Flower's own commands
        return "SuperExec" if "superexec" in words else "ClientApp"
    if process.ppid() == node.pid:
        return "warm process"
    siblings = sorted(psutil.Process(process.ppid()).children(), key=lambda p: p.create_time())
    return "SuperExec" if process.pid == siblings[0].pid else "ClientApp"


@contextmanager
def watched(nodes: Sequence[psutil.Process]) -> Iterator[dict[str, float]]:
    """The peaks of a block, filled when it ends."""
    sizes: dict[str, float] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for role, value in peaks(nodes).items():
                sizes[role] = max(sizes.get(role, 0.0), value)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def lines(measurements: dict[str, list[Measurement]]) -> Iterator[str]:
    yield "| SuperNode | seconds a round: median (min to max) | CPU seconds a message | idle, % |"
    yield "| --- | --: | --: | --: |"
    for name, runs in measurements.items():
        rounds = [seconds for one in runs for seconds in one.rounds]
        cpu, idle = [one.cpu for one in runs], [100 * one.idle_cpu for one in runs]
        row = (timing.spread(rounds, 1), timing.spread(cpu, 2), f"{statistics.median(idle):.1f}")
        yield f"| {name} | {' | '.join(row)} |"


def memory_lines(measurements: dict[str, list[Measurement]]) -> Iterator[str]:
    roles = ("SuperNode", "SuperExec", "warm process", "ClientApp", "all, PSS")
    yield "| MB: idle / peak of a run | " + " | ".join(roles) + " |"
    yield "| --- |" + " --: |" * len(roles)
    for name, runs in measurements.items():
        cells = []
        for role in roles:
            idle, peak = (
                [memory[role] for memory in memories if role in memory]
                for memories in ([one.idle for one in runs], [one.memory for one in runs])
            )
            cells.append(" / ".join(f"{max(x):.0f}" if x else "-" for x in (idle, peak)))
        yield f"| {name} | {' | '.join(cells)} |"


def page(table: str, options: Any) -> str:
    import torch

    return "\n".join(
        [
            "# Rounds on devices",
            "",
            " ".join(__doc__.split("\n\n")[2].split()),
            "",
            f"CPU, {os.cpu_count()} cores, Python {sys.version.split()[0]}, torch "
            f"{torch.__version__}, an MLP on the digits, {options.repetitions} x "
            f"{options.rounds} rounds a row. With other load on the machine seconds are upper "
            "bounds. `before` is this app when it still polled every three seconds as "
            "Flower does. The goals are 0.5 CPU seconds a message besides training and, with a "
            "warm process, 4 s a round with Flower's own pauses and about 1 s without. Idle is the "
            "CPU time of a SuperNode without messages in percent of a core.",
            "",
            table,
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()

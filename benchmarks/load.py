"""Many SuperNodes' worth of messages against one SuperLink: memory of the server, lost replies.

    python benchmarks/load.py --nodes 30 100 --out load.json --markdown docs/results/load.md

A SuperLink and a run of ResNet-18 (45 MB) on loopback, and one process with the identities of all
nodes, which speaks Flower's Fleet API as SuperNodes do: it registers each, sends its heartbeats,
pulls its messages and pushes its replies, four at a time. A node's reply is the model that it
received with a number of its own added: nothing is trained, and no two replies have an object in
common. Memory is sampled every 0.3 s: the resident set of the SuperLink and of the ServerApp, and
the part of it that is anonymous, which no file backs. The ServerApp is in a memory group of --limit
bytes (as root, with a memory controller of cgroup v1), so that it fails if it needs more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import devices
import pandas as pd
import psutil
import small_devices
import timing
import torch

from fedaccord.federation.polls import READ_AT_ONCE
from fedaccord.storage.mapped import REPLIES

MODEL, SAMPLES_OF_A_NODE, WORKERS, MB = "resnet18", 100, 4, 1e6
ROLES = {"flower-superlink": "SuperLink", "flwr-serverapp": "ServerApp"}


def main() -> None:
    options = arguments().parse_args()
    if options.address:
        serve(options)
        return
    measurements = earlier(options)
    for nodes in options.nodes:
        if nodes in [one["nodes"] for one in measurements]:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measurements.append(measure(nodes, options, Path(folder)))
        print(json.dumps(measurements[-1], indent=1), flush=True)
        content = made_with(options) | {"measurements": measurements}
        options.out.write_text(json.dumps(content, indent=1))
    if options.markdown:
        options.markdown.write_text(page(measurements, options))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--algo", default="fedavg")
    parser.add_argument("--limit", type=float, default=2e9, help="bytes of the ServerApp; 0: none")
    parser.add_argument("--folder", type=Path, help="of the run and of the SuperLink's database")
    parser.add_argument("--out", type=Path, default=Path("load.json"), help="what was measured")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of the process with the nodes
    return parser


def made_with(options: argparse.Namespace) -> dict[str, Any]:
    """The options that all measurements in a file share."""
    return {"algo": options.algo, "rounds": options.rounds, "limit": options.limit}


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What --out contains already; exits if other options made it."""
    if not options.out.exists():
        return []
    content = json.loads(options.out.read_text())
    measurements: list[dict[str, Any]] = (
        content.pop("measurements", []) if isinstance(content, dict) else []
    )
    if content != made_with(options):
        sys.exit(
            f"{options.out} has results of other options: expected --algo {options.algo} "
            f"--rounds {options.rounds} --limit {options.limit:g}; use the same ones or another "
            "--out"
        )
    return measurements


def measure(nodes: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    small_devices.write_images(folder / "data.npz", small_devices.IMAGES[MODEL])
    work = folder / "work"
    settings = f'algo="{options.algo}" model="{MODEL}" dataset="npz" data-dir="{folder}/data.npz" '
    settings += f"num-server-rounds={options.rounds} fraction-train=1.0 local-steps=1 threads=1 "
    settings += "wait-timeout=3000.0 "
    settings += f'eval-every={options.rounds} out-dir="{work}" name="run" round-timeout=6000.0'
    limited = small_devices.limited(options.limit)
    with limited as group, devices.deployment(work, [], []) as (environment, _):
        address = (work / "config.toml").read_text().split('"')[1]
        own = [sys.executable, __file__, "--address", address, "--nodes", str(nodes)]
        own += ["--folder", str(folder)]
        with (work / "nodes.log").open("wb") as log:
            serving = subprocess.Popen(own, stdout=log, stderr=log, env=environment)
        try:
            words = ["flwr", "run", str(devices.REPOSITORY), "lab", "--stream", "-c", settings]
            with watched(group) as peaks:
                began = time.monotonic()
                process = subprocess.run(
                    words, env=environment, cwd=work, capture_output=True, text=True, check=False
                )
                while is_running("flwr-serverapp"):  # a busy server may end the stream of its log
                    time.sleep(1.0)
                seconds = time.monotonic() - began
                if group:
                    peaks |= small_devices.usage(group)
        finally:
            serving.terminate()
            serving.wait(60)
        metrics = work / "run/metrics.csv"
        rows = pd.read_csv(metrics).iloc[1:] if metrics.is_file() else pd.DataFrame()
        if len(rows) < options.rounds:
            sys.exit(f"{process.stdout}{process.stderr}{(work / 'nodes.log').read_text()}{peaks}")
    return {
        "nodes": nodes,
        "algo": options.algo,
        "seconds of a round": rows["seconds"].tolist(),
        "seconds of the run": seconds,
        "replies": rows["replies"].tolist(),
        "dropped": rows["dropped"].tolist(),
        "MB of a reply": float(rows["up-bytes"].iloc[0] / rows["replies"].iloc[0]) / MB,
        "peak MB": peaks,
    }


def is_running(command: str) -> bool:
    """Whether a process that this one started, or one of theirs, has this command."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if command in " ".join(process.cmdline()):
                return True
    return False


@contextmanager
def watched(group: Path | None) -> Iterator[dict[str, float]]:
    """The peaks of a block: resident MB of each role, and the anonymous part. The ServerApp is
    moved into the group."""
    sizes: dict[str, float] = {}
    moved = set[int]()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError, StopIteration):
                    words = " ".join(process.cmdline())
                    role = next(role for name, role in ROLES.items() if name in words)
                    if group and role == "ServerApp" and process.pid not in moved:
                        (group / "tasks").write_text(str(process.pid))
                        moved.add(process.pid)
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    for line in lines:
                        name, _, value = line.partition(":")
                        if name in ("VmRSS", "RssAnon"):
                            key = f"{role}, {'anonymous' if name == 'RssAnon' else 'all'}"
                            size = int(value.split()[0]) * 1024 / MB
                            sizes[key] = max(sizes.get(key, 0.0), size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def page(measurements: list[dict[str, Any]], options: argparse.Namespace) -> str:
    made = argparse.Namespace(**vars(options) | {"nodes": [one["nodes"] for one in measurements]})
    heads = [
        *("SuperNodes", "replies", "lost", "seconds a round", "SuperLink: all", "anonymous"),
        *("ServerApp: all", "anonymous", "most of its group"),
    ]
    lines = [f"| {' | '.join(heads)} |", "| --: " * len(heads) + "|"]
    for one in measurements:
        peaks = one["peak MB"]
        sizes = [f"{role}, {part}" for role in ROLES.values() for part in ("all", "anonymous")]
        cells = [
            *(one["nodes"], f"{sum(one['replies']):.0f}", f"{sum(one['dropped']):.0f}"),
            f"{max(one['seconds of a round']):.0f}",
            *(f"{peaks[name]:.0f}" for name in sizes),
            f"{peaks['most of the group']:.0f}" if "most of the group" in peaks else "-",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    killed = sum(int(one["peak MB"].get("killed", 0)) for one in measurements)
    at_once, in_memory = (number / MB for number in (READ_AT_ONCE, REPLIES))
    return "\n".join(
        [
            "# Load on a server",
            "",
            " ".join(__doc__.split("\n\n")[2].split()),
            "",
            f"CPU, {os.cpu_count()} cores with other load, torch {torch.__version__}, "
            f"{options.algo}, rounds: {options.rounds}, {measurements[0]['MB of a reply']:.0f} MB "
            f"a reply, a limit of {options.limit / MB:,.0f} MB; MB at the peak.",
            "",
            *lines,
            "",
            f"The limit killed {killed} processes; the group's figure includes the files that "
            "Linux caches for it.",
            "",
            f"**The bound.** The ServerApp fetches at most {at_once:.0f} MB of replies together, "
            "one reply at least; the others wait in the SuperLink's database. Of a round's replies "
            f"{in_memory:.0f} MB stay in memory, those that came first, and the others are stored "
            "in files of the run directory, from which the server step reads them one by one in "
            "the order of clients, so that the sum does not depend on the order of arrival. "
            "Neither number depends on how many nodes there are. In addition there are the "
            "server's own models and vectors, and Flower's copies of the replies that are fetched. "
            "In buffered rounds replies are fetched in the same portions, until the step has all "
            "that it needs.",
            "",
            "Runs of 60 and of 100 nodes on the same busy machine ended before their replies had "
            "arrived: the SuperLink answered the nodes' requests with HTTP status 500, as SQLite, "
            "in which it stores them, was locked for longer than Flower waits (`database is "
            "locked`). The maximal number of nodes of such a server is unknown.",
            "",
            f"Made by `{timing.command(arguments(), made)}`.",
            "",
        ]
    )


# --- the process with the nodes -------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Be the nodes until this process is ended."""
    from flwr.supernode.fleet_http_connection import http_request_response

    torch.set_num_threads(1)
    with ExitStack() as stack, ThreadPoolExecutor(WORKERS) as pool:
        number = options.nodes[0]
        nodes = [
            Node(i, options, *stack.enter_context(http_request_response(options.address, True)))
            for i in range(number)
        ]
        print(f"{len(nodes)} nodes", flush=True)
        while True:
            busy = [*pool.map(Node.handle, nodes)]
            if not any(busy):
                time.sleep(1.0)


class Node:
    """A node's identity."""

    def __init__(
        self,
        client: int,
        options: argparse.Namespace,
        node_id: int,
        receive: Callable[..., Any],
        send: Callable[..., Any],
        get_run: Callable[..., Any],
        get_fab: Callable[..., Any],
        pull_object: Callable[..., Any],
        push_object: Callable[..., Any],
        confirm: Callable[..., Any],
    ) -> None:
        from flwr.app import Context, RecordDict

        self.client, self.receive, self.send = client, receive, send
        self.pull_object, self.push_object, self.confirm = pull_object, push_object, confirm
        config = {"partition-id": client, "num-partitions": options.nodes[0], "dataset": "npz"}
        config["data-dir"] = f"{options.folder}/data.npz"
        self.context = Context(0, node_id, config, RecordDict(), {"model": MODEL})

    def handle(self) -> bool:
        """Answer a message; False: there is none."""
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import (
            inflate_object_from_contents,
            pull_objects,
        )

        received = self.receive()
        if received is None:
            return False
        head, tree = received
        run, message_id = head.metadata.run_id, head.metadata.message_id
        names = [it.object_id for it in iterate_object_tree(tree)]
        contents = pull_objects(names, lambda name: self.pull_object(run, name))
        self.confirm(run, message_id)
        message: Any = inflate_object_from_contents(message_id, contents)
        message.metadata.__dict__["_message_id"] = message_id
        del contents
        reply = self.reply(message)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            missing, session = self.send(reply, get_object_tree(reply), 1.0)
            for name in missing:
                self.push_object(run, session, name, objects[name].deflate())
        return True

    def reply(self, message: Any) -> Any:
        from flwr.app import Message

        from fedaccord.client_app import app
        from fedaccord.core.request import TrainReply
        from fedaccord.wire.instruction import is_handshake
        from fedaccord.wire.messages import read_request, write_reply

        if is_handshake(message):
            return app(message, self.context)
        request = read_request(message)
        instruction, w = request.instruction, request.down.w
        own = 1e-6 * (1 + self.client + 1000 * instruction.round)
        sends = instruction.half.sends
        up = sends(*(w + own if name == "w" else w * own for name in sends._fields))
        return Message(write_reply(TrainReply(up, SAMPLES_OF_A_NODE, 1, 2.3)), reply_to=message)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

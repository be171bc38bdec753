"""Many SuperNodes' worth of messages against one SuperLink: memory of the server, lost replies.

    python benchmarks/load.py --nodes 200 --rounds 2 --limit 2e9

A SuperLink and a run of ResNet-18 (45 MB) on loopback, and one process with the identities of all
nodes, which speaks Flower's Fleet API as SuperNodes do: it registers each, sends its heartbeats,
pulls its messages and pushes its replies, four at a time. A node's reply is the model that it
received with a number of its own added: nothing is trained, and no two replies have an object in
common. Memory is sampled every 0.3 s: the resident set of the SuperLink and of the ServerApp, and
the part of it that is anonymous, which no file backs. With --limit the ServerApp is in a memory
group of so many bytes (as root, with a memory controller of cgroup v1).
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
import torch

MODEL, SAMPLES_OF_A_NODE, WORKERS, MB = "resnet18", 100, 4, 1e6
ROLES = {"flower-superlink": "SuperLink", "flwr-serverapp": "ServerApp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--algo", default="fedavg")
    parser.add_argument("--limit", type=float, help="bytes of memory of the ServerApp")
    parser.add_argument("--folder", type=Path, help="of the run and of the SuperLink's database")
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of the process with the nodes
    options = parser.parse_args()
    if options.address:
        serve(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    small_devices.write_images(folder / "data.npz", small_devices.IMAGES[MODEL])
    work = folder / "work"
    settings = f'algo="{options.algo}" model="{MODEL}" dataset="npz" data-dir="{folder}/data.npz" '
    settings += f"num-server-rounds={options.rounds} fraction-train=1.0 local-steps=1 threads=1 "
    settings += f'eval-every={options.rounds} out-dir="{work}" name="run" round-timeout=3000.0'
    limited = small_devices.limited(options.limit)
    with limited as group, devices.deployment(work, [], []) as (environment, _):
        address = (work / "config.toml").read_text().split('"')[1]
        own = [sys.executable, __file__, "--address", address, "--nodes", str(options.nodes)]
        own += ["--folder", str(folder)]
        with (work / "nodes.log").open("wb") as log:
            nodes = subprocess.Popen(own, stdout=log, stderr=log, env=environment)
        try:
            words = ["flwr", "run", str(devices.REPOSITORY), "lab", "--stream", "-c", settings]
            with watched(group) as peaks:
                began = time.monotonic()
                done = subprocess.run(
                    words, env=environment, cwd=work, capture_output=True, text=True, check=False
                )
                seconds = time.monotonic() - began
                if group:
                    peaks |= small_devices.usage(group)
        finally:
            nodes.terminate()
            nodes.wait(60)
        metrics = work / "run/metrics.csv"
        if not metrics.is_file():
            sys.exit(done.stdout + done.stderr + (work / "nodes.log").read_text())
        rows = pd.read_csv(metrics).iloc[1:]
    return {
        "nodes": options.nodes,
        "algo": options.algo,
        "seconds of a round": rows["seconds"].tolist(),
        "seconds of the run": seconds,
        "replies": rows["replies"].tolist(),
        "dropped": rows["dropped"].tolist(),
        "MB of a reply": float(rows["up-bytes"].iloc[0] / rows["replies"].iloc[0]) / MB,
        "peak MB": peaks,
    }


@contextmanager
def watched(group: Path | None) -> Iterator[dict[str, float]]:
    """The peaks of a block: resident MB of each role, and the anonymous part. The ServerApp is
    moved into the group."""
    found: dict[str, float] = {}
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
                            found[key] = max(found.get(key, 0.0), size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


# --- the process with the nodes -------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Be the nodes until this process is ended."""
    from flwr.supernode.fleet_http_connection import http_request_response

    torch.set_num_threads(1)
    with ExitStack() as stack, ThreadPoolExecutor(WORKERS) as pool:
        nodes = [
            Node(i, options, *stack.enter_context(http_request_response(options.address, True)))
            for i in range(options.nodes)
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
        config = {"partition-id": client, "num-partitions": options.nodes, "dataset": "npz"}
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
        message = inflate_object_from_contents(message_id, contents)
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

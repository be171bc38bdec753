"""A device's environment, its idle SuperNode and a visit, within one core and little memory.

    python benchmarks/small_devices.py --environment ~/device-env --models mlp lenet
    python benchmarks/small_devices.py --environment ~/device-env --models resnet18 --limit 2e9

A SuperLink and two SuperNodes on loopback. The first SuperNode runs in the environment of
--environment, which needs this package and no extra (ResNet-18: the extra `data`), bound to one
core (taskset) and, as root with a memory controller of cgroup v1, in a group of --limit bytes; the
second one is unbounded. Three rounds of SCAFFOLD on random images in an `.npz` file, an epoch of
500 samples a round.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import devices
import numpy as np

GROUPS = Path("/sys/fs/cgroup/memory")
IMAGES = {"mlp": (8, 8, 1), "lenet": (32, 32, 3), "resnet18": (32, 32, 3)}
SAMPLES, ROUNDS = 500, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=devices.BIN.parent)
    parser.add_argument("--models", nargs="+", choices=IMAGES, default=["mlp", "lenet"])
    parser.add_argument("--plain", action="store_true", help="flower-supernode, no warm process")
    parser.add_argument("--limit", type=float, default=2**30, help="bytes; 0: none")
    options = parser.parse_args()
    print(f"{options.environment}: {size(options.environment) / devices.MB:.0f} MB")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, limited(options.limit) as group:
            print(model, json.dumps(measure(model, options, Path(folder), group)), flush=True)


def measure(
    model: str, options: argparse.Namespace, folder: Path, group: Path | None
) -> dict[str, object]:
    write_images(folder / "data.npz", IMAGES[model])
    own = options.environment / "bin"
    name = ["flower-supernode"] if options.plain else ["fedaccord", "device"]
    script = f'PATH={own}:$PATH; exec taskset -c 0 {own}/"$0" "$@"'
    if group:
        script = f"echo $$ > {group}/tasks; {script}"
    configs = [
        f'partition-id={i} num-partitions=2 dataset="npz" data-dir="{folder}/data.npz"'
        for i in range(2)
    ]
    commands = [["sh", "-c", script, *name], ["fedaccord", "device"]]
    settings = f'dataset="npz" data-dir="{folder}/data.npz" model="{model}" batch-size=50 '
    with devices.deployment(folder / "work", commands, configs) as (environment, nodes):
        time.sleep(10.0)
        idle = devices.peaks(nodes)
        before = devices.cpu_seconds(nodes[:1])
        with devices.watched(nodes) as peak:
            seconds = devices.run(
                devices.REPOSITORY, False, ROUNDS, folder / "work", environment, settings
            )
        cpu = (devices.cpu_seconds(nodes[:1]) - before) / (ROUNDS + 1)
        measurements = {"idle": idle, "peak": peak, "cpu a message": cpu, "rounds": seconds}
        if group:
            measurements |= usage(group)
    return measurements


def usage(group: Path) -> dict[str, Any]:
    """Of a memory group: its peak in MB, how often it reached its limit, how many were killed."""
    return {
        "most of the group": number(group / "memory.max_usage_in_bytes") / devices.MB,
        "times at the limit": number(group / "memory.failcnt"),
        "killed": (group / "memory.oom_control").read_text().split()[-1],
    }


def write_images(path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        f"{what}_{part}": values
        for part, n in (("train", SAMPLES), ("test", 50))
        for what, values in (
            ("x", rng.integers(0, 256, (n, *shape), dtype=np.uint8)),
            ("y", np.arange(n) % 10),
        )
    }
    np.savez(path, **arrays)


@contextmanager
def limited(limit: float) -> Iterator[Path | None]:
    """A memory group of its own; None: this user or system can make none, or there is no limit.

    limit: in bytes; 0: none.
    """
    if not limit:
        yield None
        return
    group = GROUPS / f"fedaccord-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(int(limit)))
    except OSError as error:
        print(f"no memory group ({error}): one core alone", file=sys.stderr)
        yield None
        return
    try:
        yield group
    finally:
        end = time.monotonic() + 30
        while (group / "tasks").read_text() and time.monotonic() < end:
            time.sleep(0.5)
        group.rmdir()


def number(file: Path) -> int:
    return int(file.read_text())


def size(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if not file.is_symlink())


if __name__ == "__main__":
    main()

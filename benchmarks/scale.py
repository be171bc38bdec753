"""What registered clients cost: seconds to start, seconds a round, memory, from 10^3 to 10^6.

    python benchmarks/scale.py                   # the tables
    python benchmarks/scale.py --check           # exit 1 if a target is missed
    python benchmarks/scale.py --clock cpu       # on a machine that others use too

1,000 clients a round, each with 50 samples of its own draw. They do all that a round asks of them
but the local steps: sampling, data, messages, states, checks, aggregation and metrics stay. Each
row is a process of its own.

    linear fedavg   digits, 650 parameters: what is left is the engine
    lenet fedavg    CIFAR-10, 797,962 parameters, 3.2 MB a vector
    cnn fedavg      CIFAR-10, 1,626,442 parameters, 6.5 MB a vector
    lenet feddyn    with a state on every client, on disk
    lenet afedpd    likewise

With --markdown all tables and the targets are written again; other sections of the page stay.

The last table is A-FedPD's server, which keeps a vector for every round in which some client was
last seen: LeNet, 10 of a million clients a round.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from typing import Any

import data
import psutil
import timing
import torch
from timing import CLOCKS, spread

from fedaccord import recorded_run
from fedaccord.client.data import training_data
from fedaccord.client.train import begun_state
from fedaccord.config import RunConfig
from fedaccord.core.client_half import GradientHook
from fedaccord.core.request import TrainReply, TrainRequest
from fedaccord.core.rounds import Solution, client_round
from fedaccord.core.rule import Direction
from fedaccord.core.vectors import Vector, leaves
from fedaccord.engine import store_choice
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.run import Run
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.storage.mapped import in_file
from fedaccord.task import load_task

CLIENTS = (1000, 10_000, 100_000, 1_000_000)
ACTIVE = 1000
ON_DISK = {"client-state": "disk"}
CASES: dict[str, dict[str, Any]] = {
    "linear fedavg": {"model": "linear", "algo": "fedavg"},
    "lenet fedavg": {"dataset": "cifar10", "model": "lenet", "algo": "fedavg"},
    "cnn fedavg": {"dataset": "cifar10", "model": "cnn", "algo": "fedavg"},
    "lenet feddyn": {"dataset": "cifar10", "model": "lenet", "algo": "feddyn"} | ON_DISK,
    "lenet afedpd": {"dataset": "cifar10", "model": "lenet", "algo": "afedpd"} | ON_DISK,
}
SETTING = {"partition": "dirichlet", "dirichlet-alpha": 0.1, "samples-per-client": 50}
SETTING |= {"local-steps": 1, "precision": "float32", "num-server-rounds": 10**6}
START, ROUND, BYTES = 10.0, 1.1, 100  # targets: seconds, times C = 1,000, bytes a client
PAST = {"dataset": "cifar10", "model": "lenet", "algo": "afedpd"}
PAST_ROUNDS = (50, 100, 200, 300)


def main() -> None:
    options = arguments().parse_args()
    names = options.cases or [*CASES, "afedpd"]
    if unknown := set(names) - {*CASES, "afedpd"}:
        sys.exit(f"unknown case {unknown.pop()!r}; known: {', '.join([*CASES, 'afedpd'])}")
    if options.one:
        print(json.dumps(past() if names == ["afedpd"] else measure(names[0], options)))
        return
    measurements: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for num_clients in options.clients if name in CASES else CLIENTS[-1:]:
            measurements.setdefault(name, []).append(in_a_process(name, num_clients, options))
            print(name, measurements[name][-1], flush=True)
    tables = page(measurements, options)
    print(tables)
    if options.markdown:
        timing.rewrite(options.markdown, tables, own=map(heading, [*CASES, "afedpd"]))
    if options.check and (missed := missed_targets(measurements)):
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("cases", nargs="*", help=f"default: {', '.join(CASES)}, afedpd")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="of the rows, C")
    parser.add_argument("--active", type=int, default=ACTIVE, help="clients a round")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed, after a first one")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    timing.add_page(parser)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # C, of the process of a row
    return parser


def in_a_process(name: str, num_clients: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, name, "--one", str(num_clients)]
    command += ["--active", str(options.active), "--rounds", str(options.rounds)]
    command += ["--clock", options.clock]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{name}, {num_clients} clients: {process.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(process.stdout.splitlines()[-1]))


# --- a row ----------------------------------------------------------------------------------------


class NoSteps(LocalFleet):
    """Clients whose model after the local steps is the one before them."""

    def _round(self, request: TrainRequest, state: Any) -> tuple[TrainReply, Any]:
        instruction = request.instruction
        client_data = training_data(self.task, instruction)
        begun = begun_state(request, client_data.model, state)
        visit = client_round(instruction.half, request.down, begun, instruction.config, no_steps)
        return TrainReply(visit.up, client_data.examples or 0, 1, 0.0), visit.state


def no_steps(w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
    return Solution(w_i0.clone(), 1, torch.zeros(()), None)


def begin(case: dict[str, Any], num_clients: int, active: int) -> Run:
    """A federation before its first round."""
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    values = SETTING | case | {"num-clients": num_clients, "fraction-train": active / num_clients}
    if case.get("dataset") == "cifar10":
        values["data-dir"] = str(data.find())
    config = RunConfig.make(values)
    strategy = config.strategy
    task = load_task(config.task, num_clients=num_clients)
    rounds = config.num_server_rounds
    store = store_choice.make_store(config.client_state, strategy, task, rounds, folder=None)
    initial = recorded_run.initial_arrays(task, strategy.model_settings)
    run = Run(strategy, NoSteps(task, store=store), initial, rounds)
    run.begin()
    return run


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    clock = CLOCKS[options.clock]
    run = begin(CASES[name], options.one, options.active)
    wall = options.clock == "wall"
    start = time.time() - psutil.Process().create_time() if wall else time.process_time()
    at_start, seconds = resident(), []
    for _ in range(1 + options.rounds):  # the first one allocates
        began = clock()
        if run.train_round().metrics["dropped"]:
            raise RuntimeError("a client was dropped")
        seconds.append(clock() - began)
    return {
        "clients": options.one,
        "start": start,
        "seconds": seconds[1:],
        "at-start": at_start,
        "at-end": resident(),
    }


def past() -> dict[str, Any]:
    """Memory and files of A-FedPD's server after some rounds."""
    run, rows = begin(PAST, CLIENTS[-1], 10), []
    for number in range(1, PAST_ROUNDS[-1] + 1):
        run.train_round()
        if number in PAST_ROUNDS:
            vectors = dict(leaves(run.state.server.lam_bar_after))
            in_files = [v for v in vectors.values() if in_file(v)]
            rows.append(
                {
                    "rounds": number,
                    "bytes": sum(v.nbytes for v in vectors.values()),
                    "in-files": sum(v.nbytes for v in in_files),
                    "resident": resident(),
                }
            )
    return {"rows": rows}


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


# --- the tables -----------------------------------------------------------------------------------


def ratio(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Of the medians of a round's seconds, to the fewest clients."""
    return float(statistics.median(row["seconds"]) / statistics.median(rows[0]["seconds"]))


def bytes_a_client(rows: list[dict[str, Any]], key: str) -> float:
    return float((rows[-1][key] - rows[0][key]) / (rows[-1]["clients"] - rows[0]["clients"]))


def missed_targets(measurements: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = []
    for name, rows in measurements.items():
        if name not in CASES:
            continue
        if (start := max(row["start"] for row in rows)) > START:
            lines.append(f"missed: {name} takes {start:.1f} s to start, allowed {START:g}")
        if (times := ratio(rows, rows[-1])) > ROUND:
            lines.append(f"missed: a round of {name} takes {times:.2f} x, allowed {ROUND:g}")
        if (extra := bytes_a_client(rows, "at-end")) > BYTES:
            lines.append(f"missed: {name} takes {extra:.0f} bytes a client, allowed {BYTES}")
    return lines


NOTES = {
    "linear fedavg": "digits, 650 parameters",
    "lenet fedavg": "CIFAR-10, 797,962 parameters: the replies of a round take 3.2 GB",
    "cnn fedavg": "CIFAR-10, 1,626,442 parameters: 6.5 GB",
    "lenet feddyn": "LeNet with a vector on every client, `client-state=disk`",
    "lenet afedpd": "likewise",
}


def heading(case: str) -> str:
    if case == "afedpd":
        return "## What A-FedPD's server keeps of past rounds"
    return f"## {case}: {NOTES[case]}"


def page(measurements: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    clock = "wall-clock" if options.clock == "wall" else "CPU"
    lines = [
        "# Registered clients",
        "",
        f"{options.active:,} of C clients a round, each with 50 samples of its own draw "
        "(Dirichlet, alpha 0.1), in process, without the local steps: what is measured is drawing "
        "the cohort and the clients' data, messages, states, checks, aggregation and metrics. A "
        "process a row; "
        f"seconds are {clock} seconds: to start, from the beginning of the process to the first "
        f"round; a round, the median (min to max) of {options.rounds} after a first one. RSS is "
        f"the process's memory. CPU, {psutil.cpu_count()} cores, 1 thread, torch "
        f"{torch.__version__}" + ("; with other load." if options.clock == "cpu" else "."),
    ]
    for name, rows in measurements.items():
        if name not in CASES:
            continue
        columns = "| C | s to start | s a round | x C = 1,000 | RSS at start | RSS at end |"
        lines += ["", heading(name), "", columns, "| --: " * 6 + "|"]
        for row in rows:
            seconds = spread(row["seconds"], 3)
            memory = " | ".join(f"{row[key] / 1e6:,.0f} MB" for key in ("at-start", "at-end"))
            times = ratio(rows, row)
            lines.append(
                f"| {row['clients']:,} | {row['start']:.1f} | {seconds} | {times:.2f} | {memory} |"
            )
        each = bytes_a_client(rows, "at-start")
        lines += ["", f"{each:.0f} bytes for each registered client before the first round."]
    for row in measurements.get("afedpd", []):
        lines += ["", heading("afedpd"), ""]
        lines += ["LeNet, 10 of 1,000,000 clients a round.", ""]
        lines += ["| rounds | kept | of it in files | RSS |", "| --: " * 4 + "|"]
        for at in row["rows"]:
            sizes = " | ".join(f"{at[k] / 1e6:,.0f} MB" for k in ("bytes", "in-files", "resident"))
            lines.append(f"| {at['rounds']} | {sizes} |")
    missed = missed_targets(measurements)
    lines += [
        "",
        "## Targets",
        "",
        f"At most {START:g} s to start, a round at most {ROUND:g} x that of C = 1,000, at "
        f"most {BYTES} bytes of memory a registered client: {'; '.join(missed) or 'all met'}.",
        "",
        f"Made by `{timing.command(arguments(), options)}`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

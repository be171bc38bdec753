"""What Ray workers gain and cost, beside one process and beside Flower's own simulation.

    python benchmarks/ray_path.py                # three tables
    python benchmarks/ray_path.py --check        # exit 1 if a target is missed
    python benchmarks/ray_path.py --only flower  # steps, visits or flower
    python benchmarks/ray_path.py --compare A1.json B1.json A2.json B2.json    # two versions

    steps   LeNet on CIFAR-10, 10 clients x 20 steps of batch 50: one process with one thread and
            with two, two workers with one thread each. What the second core gains.
    visits  one step of one sample on a linear layer of 45 MB, 10 clients: this process, a worker.
            What a client's way to a worker and back costs.
    flower  the same steps over Flower's simulation (Ray, two actors) at three sizes: Flower's own
            FedAvg with a client as its guide has it, this package's FedAvg with `train_locally`,
            and this package's two workers, in one process by turns.

Rounds take turns, each ratio is taken within a repetition, and a round is the time between two
evaluations of the model (steps, visits: between call and return), without a contestant's first;
under Flower the mean of a few, because they wait for its polls, every 0.1 s. This package's server
polls for replies every 0.01 s.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import data
import flwr
import psutil
import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flowers
from flwr.simulation import run_simulation
from timing import SETTING, engine_round, spread
from torch import Tensor, nn
from torch.nn.utils import skip_init

from fedaccord import recorded_run, train_locally
from fedaccord.config import RunConfig
from fedaccord.engine.cluster import ray_for
from fedaccord.engine.fleet import LocalFleet
from fedaccord.engine.workers import workers_fleet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.federation.session import Book
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.strategies import FedAvg
from fedaccord.task import Clients, Task, load_task

INPUTS = 100
SIZES = {0.25: 625, 3.0: 7_500, 45.0: 112_000}  # MB of float32: outputs of a layer of 100 inputs
ROUNDS = {0.25: 12, 3.0: 8, 45.0: 4}  # by MB; their mean, as many wait for Flower's next look
CLIENTS, LR = 10, 0.01
Seconds = dict[str, list[float]]


def cpu_seconds() -> float:
    """Of this process and of those that it began: Ray's and the actors."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}
TARGETS = (  # of `check`: what, contestant, base, at most; a difference is in seconds a client
    ("steps", "two workers", "one thread", 1 / 1.7),
    ("steps", "two workers", "two threads", 1.0),
    *((f"{size} MB", "this package's FedAvg", "Flower's FedAvg", 1.1) for size in SIZES),
)
ATTEMPTS = count(1)
INIT: dict[str, Any] = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
}
OVERHEAD = 0.020  # seconds a client at 45 MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("steps", "visits", "flower"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall: elapsed time; cpu: CPU seconds of all processes, for a busy machine",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument(
        "--out", type=Path, help="JSON file of results, to which new ones are added"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="measure nothing: compare results of --out, of an earlier version and this by turns",
    )
    parser.add_argument("--earlier", default="An earlier version", help="its name, for --compare")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    if options.compare:
        print(section := comparison(options.compare, options.earlier))
        if options.markdown:
            write(options.markdown, section)
        return
    logging.getLogger("flwr").setLevel(logging.WARNING)
    keep_freed_memory()  # as `fedaccord run` does
    torch.set_num_threads(1)
    clock = CLOCKS[options.clock]
    measurements: dict[str, Seconds] = {}
    if options.out and options.out.exists():
        measurements = json.loads(options.out.read_text())
    if options.only != "flower":
        with ray_for(2, "local", 1, 0.0):
            for name, measure in (("steps", steps), ("visits", requests)):
                if options.only in (None, name):
                    measurements[name] = measure(options.repetitions, clock)
                    print(table(name, measurements[name]), flush=True)
    if options.only in (None, "flower"):
        for name, seconds in flower(options.repetitions, clock).items():
            measurements[name] = seconds
            print(table(name, seconds), flush=True)
    if options.out:
        options.out.write_text(json.dumps(measurements, indent=2) + "\n")
    if options.markdown:
        write(options.markdown, page(measurements, options))
    if options.check and (missed := missed_targets(measurements)):
        sys.exit("\n".join(missed))


# --- this process and workers ---------------------------------------------------------------------


def steps(repetitions: int, clock: Callable[[], float]) -> Seconds:
    settings = SETTING | {"data-dir": str(data.find()), "local-steps": 20}
    settings |= {"fraction-train": 0.1, "algo": "fedavg", "device": "cpu"}
    make = partial(RunConfig.make, settings)
    task = load_task(make().task, num_clients=SETTING["num-clients"])
    load = partial(load_task, make().task, num_clients=SETTING["num-clients"])
    cohorts = [sorted(range(k, 100, 10)) for k in range(10)]
    with ExitStack() as stack:
        two = stack.enter_context(_workers(task, 2, load))
        rounds = {
            "one thread": engine_round(task, make()),
            "two threads": engine_round(task, make()),
            "two workers": engine_round(task, make(), two),
        }

        def one_round(name: str, number: int) -> float:
            torch.set_num_threads(2 if name == "two threads" else 1)
            began = clock()
            rounds[name](cohorts[number % 10])
            return clock() - began

        return by_turns(rounds, one_round, repetitions)


def requests(repetitions: int, clock: Callable[[], float]) -> Seconds:
    """Seconds of a round of ten clients."""
    task = linear_task(SIZES[45.0])
    make = partial(method, CLIENTS)
    with _workers(task, 1) as one:
        fleets = {"this process": LocalFleet(task), "one worker": one}
        rounds = {}
        for name, fleet in fleets.items():
            initial = recorded_run.initial_arrays(task, make().model_settings)
            run = Run(make(), fleet, initial, 10**6)
            run.begin()
            rounds[name] = run.train_round

        def one_round(name: str, number: int) -> float:
            began = clock()
            rounds[name]()
            return clock() - began

        return by_turns(rounds, one_round, 2 * repetitions)


def by_turns(names: Any, one_round: Callable[[str, int], float], repetitions: int) -> Seconds:
    """Each repetition in another order; the first round of each does not count."""
    names = list(names)
    seconds: Seconds = {name: [] for name in names}
    for name in names:
        one_round(name, 0)
    for number in range(repetitions):
        k = number % len(names)
        for name in names[k:] + names[:k]:
            seconds[name].append(one_round(name, number))
    return seconds


@contextmanager
def _workers(task: Task, number: int, load: Callable[[], Task] | None = None) -> Iterator[Any]:
    with workers_fleet(task, load, workers=number, address="local", threads=1, gpus=0.0) as fleet:
        yield fleet


# --- Flower's simulation --------------------------------------------------------------------------


def half_square(predictions: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((predictions - y) ** 2).mean()


def linear(outputs: int) -> nn.Linear:
    """With random parameters, as equal ones travel cheaply."""
    torch.manual_seed(0)
    return nn.Linear(INPUTS, outputs, bias=False)


def empty(outputs: int) -> nn.Linear:
    """For parameters that come with a message."""
    layer = skip_init(nn.Linear, INPUTS, outputs, bias=False)
    assert isinstance(layer, nn.Linear)
    return layer


def sample(outputs: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, INPUTS), torch.zeros(1, outputs)


def linear_task(outputs: int) -> Task:
    xs, ys = zip(*[sample(outputs)] * CLIENTS, strict=True)
    return Task(lambda: linear(outputs), Clients(xs, ys), loss=half_square)


def method(clients: int) -> FedAvg:
    """One step of SGD, and nothing else that costs time."""
    return FedAvg(
        fraction_train=1.0,
        local_steps=1,
        batch_size=0,
        lr=LR,
        lr_decay=1.0,
        weight_decay=0.0,
        clip_norm=0.0,
    )


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One step on one sample: this package's way, or by hand as in Flower's guide."""
    if "arrays" not in message.content:
        import fedaccord.strategies  # noqa: F401  (whose rules messages name)

        outputs = message.content.config_records["config"].get("outputs", 1)
        assert isinstance(outputs, int)
        model, batches = empty(outputs), [sample(outputs)]
        return train_locally(message, context, model=model, batches=batches, loss=half_square)
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    w = arrays.to_torch_state_dict()
    model = empty(len(w["weight"]))
    model.load_state_dict(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = sample(len(w["weight"]))
    loss = half_square(model(x), y)
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"train-loss": float(loss), "num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def flower(repetitions: int, clock: Callable[[], float]) -> dict[str, Seconds]:
    """Seconds of a round by size; the server runs in a thread of this process."""
    measurements: dict[str, Seconds] = {}
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        while not ray.is_initialized():  # by Flower, in another thread: the workers join it
            time.sleep(0.1)
        for size in SIZES:
            measurements[f"{size} MB"] = _one_size(grid, size, repetitions, clock)

    run_simulation(
        server_app=app,
        client_app=client_app,
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": INIT,
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return measurements


def _one_size(grid: Grid, size: float, repetitions: int, clock: Callable[[], float]) -> Seconds:
    outputs = SIZES[size]
    arrays = ArrayRecord(linear(outputs).state_dict())
    config = ConfigRecord({"outputs": outputs})
    with _workers(linear_task(outputs), 2) as two:

        def rounds(name: str, number: int) -> float:
            """The mean of some rounds after a first one."""
            ends: list[float] = []
            last = ROUNDS[size]

            def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
                ends.append(clock())
                return MetricRecord({"test-loss": 0.0})

            def on_round(played: Round) -> None:
                ends.append(clock())

            if name == "Flower's FedAvg":
                strategy = flowers.FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
                result = strategy.start(
                    grid, arrays, last, train_config=config, evaluate_fn=evaluate
                )
            else:
                workers = name == "this package's workers"
                fleet = two if workers else MessageFleet(grid, config)
                book = Book(attempt=next(ATTEMPTS))  # clients remember the rounds of the last one
                run = Run(method(CLIENTS), fleet, arrays, last, book=book, on_round=on_round)
                result = run.play()
            assert len(result.train_metrics_clientapp) == last, f"{name} lost a round"
            return (ends[last] - ends[1]) / (last - 1)

        names = ("Flower's FedAvg", "this package's FedAvg", "this package's workers")
        return by_turns(names, rounds, repetitions)


# --- tables ---------------------------------------------------------------------------------------


def table(name: str, seconds: Seconds) -> str:
    base = next(iter(seconds))
    lines = [
        "",
        f"| {name} | seconds a round: median (min to max) | ratio to {base}, likewise |",
        "| --- | --: | --: |",
    ]
    for contestant, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds[base], strict=True)]
        lines.append(f"| {contestant} | {spread(values, 3)} | {spread(ratios, 3)} |")
    if name == "visits":
        lines += ["", f"Overhead of a client: {1e3 * overhead(seconds):.1f} ms, the median."]
    return "\n".join(lines)


def overhead(seconds: Seconds) -> float:
    """Seconds a client that a worker takes more than this process, the median."""
    pairs = zip(seconds["one worker"], seconds["this process"], strict=True)
    return statistics.median((a - b) / CLIENTS for a, b in pairs)


def missed_targets(measurements: dict[str, Seconds]) -> list[str]:
    lines = []
    for name, contestant, base, allowed in TARGETS:
        if name in measurements:
            pairs = zip(measurements[name][contestant], measurements[name][base], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            if ratio > allowed:
                lines.append(
                    f"missed: {name}: {contestant} takes {ratio:.3f} x {base}, "
                    f"allowed {allowed:.3f}"
                )
    if "visits" in measurements and (cost := overhead(measurements["visits"])) > OVERHEAD:
        lines.append(f"missed: visits: {1e3 * cost:.1f} ms a client, allowed {1e3 * OVERHEAD:.0f}")
    return lines


COMPARED = """## Beside an earlier version

{earlier}
and this version by turns, the first one alternately; in each turn new processes. CPU seconds of a
round, of all processes together, and the ratio of the medians of each turn. Flower's FedAvg has
no code of either: its ratios show what other load does.

| | contestant | turns | before | now | now / before |
| --- | --- | --: | --: | --: | --: |
"""


def comparison(files: list[Path], earlier: str) -> str:
    """A row for each contestant; files: before, now, before, now, ..."""
    results = [json.loads(file.read_text()) for file in files]
    rows = []
    for name, contestants in results[0].items():
        for contestant in contestants:
            values = [result[name][contestant] for result in results if name in result]
            medians = [*map(statistics.median, values)]
            ratios = [now / before for before, now in zip(medians[::2], medians[1::2], strict=True)]
            cells = [spread([*chain(*values[k::2])], 3) for k in (0, 1)] + [spread(ratios, 2)]
            rows.append(f"| {name} | {contestant} | {len(ratios)} | {' | '.join(cells)} |\n")
    return COMPARED.format(earlier=earlier) + "".join(rows)


def write(file: Path, text: str) -> None:
    """Replace the page's tables or its comparison, whichever ``text`` is."""
    old = file.read_text() if file.exists() else ""
    head = COMPARED.partition("\n")[0]
    tables, _, compared = old.partition(head)
    if text.startswith(head):
        compared = text.removeprefix(head)
    else:
        tables = text
    file.write_text(tables.rstrip() + "\n" + (f"\n{head}{compared}" if compared else ""))


def page(measurements: dict[str, Seconds], options: argparse.Namespace) -> str:
    versions = f"torch {torch.__version__}, ray {ray.__version__}, flwr {flwr.__version__}"
    kind = "Wall-clock" if options.clock == "wall" else "CPU (of all processes together)"
    missed = missed_targets(measurements)
    verdict = "All targets met." if not missed else "\n".join(f"- {line}" for line in missed)
    what = " ".join(__doc__.split("\n\n")[-1].split())
    return f"""# Ray workers

{os.cpu_count()} cores; {versions}; {options.repetitions} repetitions. {kind} seconds.

- steps: LeNet on CIFAR-10, 10 clients x 20 steps of batch 50.
- visits: one step of one sample on a linear layer of 45 MB, 10 clients, one thread.
- MB: the same step over Flower's simulation with two Ray actors, 10 clients: Flower's own FedAvg
  with a client by hand, this package's FedAvg with `train_locally`, and this package's two workers.

{what}
{"".join(table(name, seconds) + chr(10) for name, seconds in measurements.items())}
Targets (medians): two workers at most 1/1.7 of one thread and at most two threads; overhead of a
client at most {1e3 * OVERHEAD:.0f} ms; over Flower's simulation at most 1.1 x Flower's FedAvg.

{verdict}

Made by `python benchmarks/ray_path.py --markdown docs/results/ray_path.md`.
"""


if __name__ == "__main__":
    main()

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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import data
import psutil
import ray
import timing
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flowers
from flwr.simulation import run_simulation
from ray_path_page import CLIENTS, SIZES, Seconds, comparison, missed_targets, page, table
from timing import SETTING, engine_round
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
ROUNDS = {0.25: 12, 3.0: 8, 45.0: 4}  # by MB; their mean, as many wait for Flower's next look
LR = 0.01


def cpu_seconds() -> float:
    """Of this process and of those that it began: Ray's and the actors."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}
ATTEMPTS = count(1)
INIT: dict[str, Any] = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
}


def main() -> None:
    options = arguments().parse_args()
    if options.compare:
        print(section := comparison(options.compare, options.earlier))
        if options.markdown:
            timing.rewrite(options.markdown, section)
        return
    logging.getLogger("flwr").setLevel(logging.WARNING)
    keep_freed_memory()  # as `fedaccord run` does
    torch.set_num_threads(1)
    clock = CLOCKS[options.clock]
    measurements = earlier(options)
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
        content = made_with(options) | {"seconds": measurements}
        options.out.write_text(json.dumps(content, indent=2) + "\n")
    if options.markdown:
        what = " ".join(__doc__.split("\n\n")[-1].split())
        several = len({name if name in ("steps", "visits") else "MB" for name in measurements}) > 1
        every = vars(options) | ({"only": None} if several else {})  # with those of --out
        made = timing.command(arguments(), argparse.Namespace(**every))
        timing.rewrite(options.markdown, page(measurements, options, what, made))
    if options.check and (missed := missed_targets(measurements)):
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
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
    return parser


def made_with(options: argparse.Namespace) -> dict[str, Any]:
    """The options that all results in a file share."""
    return {"clock": options.clock, "repetitions": options.repetitions}


def earlier(options: argparse.Namespace) -> dict[str, Seconds]:
    """What --out contains already; exits if other options made it."""
    if not options.out or not options.out.exists():
        return {}
    content = json.loads(options.out.read_text())
    measurements: dict[str, Seconds] = content.pop("seconds", {})
    if content != made_with(options):
        sys.exit(
            f"{options.out} has results of other options: expected --clock {options.clock} "
            f"--repetitions {options.repetitions}; use the same ones or another --out"
        )
    return measurements


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


if __name__ == "__main__":
    main()

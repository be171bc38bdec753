"""Runs in this process: `run` for a configuration, `simulate` for tensors and notebooks."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import logbook, server_app, threads
from fedaccord.config import RunConfig, check_resumed
from fedaccord.engine import states
from fedaccord.engine import vectorize as vectorized
from fedaccord.engine.faults import Faults, FaultyFleet
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.runs import RunDirectory
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.task import Clients, Samples, Task, find_device, load_task, models, partition
from fedaccord.task.solver import Loss
from fedaccord.wire.tensor_array import to_tensor

if TYPE_CHECKING:
    import pandas as pd

    from fedaccord.engine.workers import WorkersFleet

log = logging.getLogger("flwr")


def run(
    config: RunConfig,
    *,
    on_round: Callable[[Round], None] | None = None,
    on_client: Callable[[int], None] | None = None,
    at: int | None = None,
) -> RunDirectory:
    """Run a configuration in this process; see `server_app.run`."""
    threads.check(config.threads)
    # what does not fit shows before a file is written
    config.strategy.topology.facts(config.num_clients)
    task = load_task(config.task, num_clients=config.num_clients)
    report = partition_report(task)
    counts = {"duplicated": report.duplicated, "unused": report.unused}
    facts = {name: count for name, count in counts.items() if count is not None}
    chosen = threads.of_task(config.threads, task, config.strategy, config.workers)
    with chosen.in_use():
        asked = logbook.as_begun(config, at)
        clients = config.strategy.cohort_size(config.num_clients)
        choice = vectorized.choose(asked, task, config.strategy, clients)
        if asked == "auto":
            log.info("%s", choice)
        config = config.having("vectorize", choice.as_set)
        load = partial(load_task, config.task, num_clients=config.num_clients)
        with _fleet(config, config.strategy, task, load, choice.vectorize, on_client) as fleet:
            return server_app.run(fleet, config, task, on_round, at, partition=facts)


def _fleet(
    config: RunConfig,
    strategy: FederatedStrategy,
    task: Task,
    load: Callable[[], Task] | None,
    vectorize: bool,
    on_client: Callable[[int], None] | None = None,
) -> AbstractContextManager["LocalFleet | WorkersFleet"]:
    """The clients in this process, or in workers; load: gives a worker its task, None: this one."""
    if not config.workers:
        asked, rounds = config.client_state, config.num_server_rounds
        memories = states.memories(asked, strategy, task, rounds)
        return nullcontext(LocalFleet(task, on_client, vectorize, memories, task.device))
    try:
        from fedaccord.engine.workers import workers_fleet  # with Ray, which takes a second
    except ImportError as error:
        raise ValueError(
            f"workers: expected Ray, found none ({error}); pip install 'flwr[simulation]'"
        ) from None
    return workers_fleet(
        task,
        load,
        workers=config.workers,
        address=config.ray_address,
        threads=torch.get_num_threads(),
        gpus=config.gpus_per_worker,
        vectorize=vectorize,
        on_client=on_client,
    )


def partition_report(task: Task) -> partition.Report:
    clients = task.clients
    assert clients.parts is not None
    assert isinstance(clients.y, Tensor)
    return partition.report(clients.parts, clients.y.numpy())


@contextmanager
def quiet() -> Iterator[None]:
    """Let only warnings through Flower's logger."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


class History(NamedTuple):
    """What `simulate` returns; T rounds, C clients, d parameters."""

    metrics: "pd.DataFrame"  # a row a round, number 0 before the first
    model: dict[str, Tensor]  # the headline model under its parameter names
    clients: list[Any]  # every client's last ClientState; None: never active
    weights: Tensor | None  # (T+1, d) w^t that round t broadcasts; with record="weights";
    # under gossip (T+1, C, d), a row per node
    averages: Tensor | None  # (T+1, d) mean of the uploaded models, or of the nodes; row 0: w^0
    states: list[list[Any]] | None  # every client's state after every round; row 0: all None


def simulate(
    algo: str | FederatedStrategy,
    *,
    clients: Sequence[Samples] | None = None,
    test: Samples | None = None,
    model: str | nn.Module = "mlp",
    loss: Loss = F.cross_entropy,
    rounds: int = 30,
    participation: float | Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float32,
    record: str = "metrics",
    faults: Faults | None = None,
    resume: str | Path | None = None,
    vectorize: str = "off",
    **keys: Any,
) -> History:
    """Run a federation in this process through the same ServerApp path as `fedaccord run`.

    algo: a name from METHODS, or a strategy (whose own settings then stand).
    clients: (inputs, targets) per client; by default dealt from ``dataset`` as the run config says.
    test: (inputs, targets) to evaluate on, with ``clients``.
    model: a module, whose parameters are the initial ones, or a name with ``dataset``.
    loss: ``loss(predictions, targets)``.
    participation: the share of clients a round, or the clients of every round.
    dtype: float32 or float64, of data, model and every vector.
    record: "weights" keeps w^t, the averages and the client states of every round.
    faults: (round from 0, client) -> None, or what happens there: "lost-message", "lost-reply",
        "duplicate", "late" or "crash" (the client's memory is gone).
    resume: a run directory; go on from its last checkpoint, to ``rounds`` in all. What is returned
        begins there.
    vectorize: many clients in one call, which is faster for small models and may differ in the last
        bits: "off", "on", or "auto", by a rule that knows only sizes.
    keys: any run-config key, as ``local_steps=10`` or ``**{"scaffold.server-lr": 1.0}``; missing
        ones take the run config's defaults; ``clip_norm=None`` is off.

    Nothing is written to disk, but client states that memory does not hold (``client_state``), in
    files that go with the process. Raises ValueError on settings, samples and models that do not
    fit, FederationError where no round counted and where the model diverged.
    """
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    if values.get("clip-norm", 0) is None:
        values["clip-norm"] = 0.0
    cohorts = None
    if isinstance(participation, (int, float)):
        values["fraction-train"] = float(participation)
    elif participation is not None:
        cohorts = participation
    if record not in ("metrics", "weights"):
        raise ValueError(f"record: expected 'metrics' or 'weights', got {record!r}")
    values |= {"num-server-rounds": rounds, "precision": _precision(dtype), "vectorize": vectorize}
    if isinstance(algo, str):
        values["algo"] = algo
    if isinstance(model, str):
        values["model"] = model
    if clients is not None:
        values["num-clients"] = len(clients)
    config = RunConfig.make(values)
    if isinstance(algo, str):
        for line in config.unread(given=values):
            log.warning(line)
    strategy = config.strategy if isinstance(algo, str) else algo
    if cohorts is not None:
        strategy.participation = cohorts
    elif participation is not None:
        strategy.fraction_train = config.strategy.fraction_train

    threads.check(config.threads)
    task = _task(config, clients, test, model, loss, pooled=strategy.pools)
    server_app.pool(strategy, task, config)
    chosen = threads.of_task(config.threads, task, strategy, config.workers)
    found = None if resume is None else Checkpoints(Path(resume) / logbook.FOLDER).load()
    if found is not None and vectorize == "auto":
        vectorize = logbook.vectorize_of(found.facts)
    sizes = map(len, cohorts) if cohorts else [strategy.cohort_size(len(task.clients))]
    choice = vectorized.choose(vectorize, task, strategy, round(fmean(sizes)))
    config = config.having("vectorize", choice.as_set)
    with chosen.in_use(), quiet(), _fleet(config, strategy, task, None, choice.vectorize) as own:
        fleet = own if faults is None else FaultyFleet(own, faults)
        home = server_app.home_of(own)
        initial = server_app.initial_arrays(task, strategy.precision, home)
        recorder = Recorder(strategy, own.state, weights=record == "weights")
        strategy.on_round = recorder
        state = None
        if found is not None:
            if isinstance(algo, str):
                check_resumed(config, found.facts["settings"])
            state = logbook.restore(strategy, fleet, found)
        server_app.start(strategy, fleet, initial, task, rounds, config.eval_train, state)
        return recorder.history()


def _precision(dtype: torch.dtype) -> str:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    return str(dtype).removeprefix("torch.")


def _task(
    config: RunConfig,
    clients: Sequence[Samples] | None,
    test: Samples | None,
    model: str | nn.Module,
    loss: Loss,
    pooled: bool = False,
) -> Task:
    if clients is None:
        if isinstance(model, nn.Module):
            raise ValueError("model: expected a name with dataset=, or a module with clients=")
        return load_task(config.task, num_clients=config.num_clients)
    _check_samples(clients, test)
    xs, ys = zip(*clients, strict=True)
    if pooled:
        xs, ys = (torch.cat(xs),), (torch.cat(ys),)
    if isinstance(model, str):
        shape = tuple(xs[0].shape[1:])
        classes = int(max(int(y.max()) for y in ys)) + 1
        seed, stem, name = config.strategy.seed, config.task.stem, model

        def module() -> nn.Module:
            return models.build(name, shape, classes, stem=stem, seed=seed)
    else:
        template = model

        def module() -> nn.Module:
            return copy.deepcopy(template)

    task = Task(module, Clients(xs, ys), test, loss, find_device(config.task.device))
    _check_fit(task, config.strategy.precision)
    return task


def _check_samples(clients: Sequence[Samples], test: Samples | None) -> None:
    """Raise ValueError, in one line, on what are no samples."""
    for i, samples in enumerate([*clients, *([] if test is None else [test])]):
        what = f"clients: client {i}" if i < len(clients) else "test"
        for part in samples:
            if not isinstance(part, Tensor):
                kind = type(part).__name__
                raise ValueError(f"{what}: expected tensors, got {kind}; use torch.as_tensor")
        x, y = samples
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{what}: expected equally many inputs and targets, at least one each")
        first = clients[0][0]
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise ValueError(
                f"{what}: expected inputs (n, ...) as client 0 has, {tuple(first.shape[1:])} "
                f"{first.dtype}, got {tuple(x.shape[1:])} {x.dtype}"
            )


def _check_fit(task: Task, precision: str) -> None:
    """Raise ValueError, in one line, where the model does not take the samples."""
    model = task.model(precision)
    x, y = (part[:2] for part in task.clients.samples(0))
    try:
        with torch.no_grad():
            for inputs, targets in task.batches((x, y), model.w.dtype):
                value = task.loss(model.module.eval()(inputs), targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model: expected one that takes inputs (n, ...) of {tuple(x.shape[1:])} and gives "
            f"what the loss compares with targets of {tuple(y.shape[1:])} {y.dtype}: {reason}"
        ) from error
    if value.numel() != 1:
        raise ValueError(f"loss: expected one number for a batch, got {tuple(value.shape)}")


class Recorder:
    """Keeps what `simulate` returns; state_of: (client, round) -> its state after that round."""

    def __init__(
        self,
        strategy: FederatedStrategy,
        state_of: Callable[[int, int], Any],
        weights: bool,
    ) -> None:
        self.strategy, self.state_of, self.keep = strategy, state_of, weights
        self.rows: list[dict[str, float]] = []
        self.client_rows: list[dict[str, Any]] = []
        self.weights: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.states: list[list[Any]] = []

    def __call__(self, round: Round) -> None:
        self.rows.append({"round": round.number, **round.metrics})
        self.client_rows += round.clients
        if self.keep:
            self.weights.append(round.w.to("cpu", copy=True))
            self.averages.append(round.w_bar.to("cpu", copy=True))
            self.states.append(self.client_states())

    def client_states(self) -> list[Any]:
        """Every client's state as the server knows of it."""
        assert self.strategy.state is not None
        return [self.state_of(*pair) for pair in enumerate(self.strategy.state.accepted.tolist())]

    def history(self) -> History:
        import pandas as pd

        model = self.strategy.current()
        assert model is not None
        return History(
            metrics=pd.DataFrame(self.rows),
            model={name: to_tensor(array) for name, array in model.items()},
            clients=self.client_states(),
            weights=torch.stack(self.weights) if self.keep else None,
            averages=torch.stack(self.averages) if self.keep else None,
            states=self.states if self.keep else None,
        )

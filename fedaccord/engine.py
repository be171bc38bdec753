"""The in-process engine: a Grid that calls the ClientApp directly, and `simulate`.

The one file that touches Flower's private parts: `TaskIdentity` (who writes a message), `Run` (the
type of ``Grid.run``) and ``metadata._message_id`` (which the SuperLink would set).
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import pandas as pd
import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import records, server_app
from fedaccord.client_app import make_app
from fedaccord.config import RunConfig
from fedaccord.runs import RunDirectory
from fedaccord.strategies.base import FederatedStrategy, Round
from fedaccord.task import Clients, Samples, Task, find_device, load_task, models, partition
from fedaccord.task.training import Loss

RUN_ID, SERVER_NODE, TASK_ID = 1, 1, 1
FIRST_NODE = 1000  # node ids are not partition-ids, here as elsewhere


class InProcessGrid(Grid):
    """C clients in this process; each has a Context that lasts as long as the grid.

    Messages pass by reference. A ClientApp that raises gives an error reply and leaves its
    client's state as it was, as in Flower's simulation.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        on_client: Callable[[int], None] | None = None,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id = RUN_ID, SERVER_NODE
        TaskIdentity.task_id = TASK_ID
        self._run = Run.create_empty(RUN_ID)
        self._app = client_app
        self._on_client = on_client  # called after each training reply with the client's number
        self._replies: dict[str, Message] = {}
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + i,
                node_config={records.PARTITION_ID: i, records.NUM_PARTITIONS: num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_clients)
        }

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            _stamp(message)
            self._replies[message.metadata.message_id] = self._call(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _call(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        before = context.state.copy()
        try:
            reply = self._app(message, context)
        except Exception as error:  # whatever a client raises is the server's to judge
            context.state = before
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(code=2, reason=reason), reply_to=message)
        _stamp(reply)
        training = message.metadata.message_type == MessageType.TRAIN
        if self._on_client and training and not records.is_hello(message):
            self._on_client(context.node_id - FIRST_NODE)
        return reply


def _stamp(message: Message) -> None:
    message.metadata.__dict__["_message_id"] = str(uuid4())


def run(
    config: RunConfig,
    *,
    on_round: Callable[[Round], None] | None = None,
    on_client: Callable[[int], None] | None = None,
) -> RunDirectory:
    """Run a configuration in this process; see `server_app.run`."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if gossip := config.build_strategy().gossip:  # what does not fit shows before a file is written
        gossip.begin(config.num_clients, config.strategy["seed"])
    task = load_task(**config.task(), num_clients=config.num_clients)
    grid = InProcessGrid(make_app(lambda _: task), config.num_clients, on_client=on_client)
    assert task.clients.parts is not None
    held = partition.report(list(task.clients.parts), task.clients.y.numpy())  # type: ignore[union-attr]
    facts = {"duplicated": held.duplicated, "unused": held.unused}
    return server_app.run(grid, config, task, on_round, partition=facts)


@contextmanager
def quiet() -> Iterator[None]:
    """Let only warnings through Flower's logger."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


class History(NamedTuple):
    """What `simulate` returns; T rounds, C clients, d parameters."""

    metrics: pd.DataFrame  # a row a round, number 0 before the first
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
    keys: any run-config key, as ``local_steps=10`` or ``**{"scaffold.server-lr": 1.0}``; missing
        ones take the run config's defaults; ``clip_norm=None`` is off.

    Nothing is written to disk. Raises ValueError on settings that do not fit.
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
    values |= {"num-server-rounds": rounds, "precision": _precision(dtype)}
    if isinstance(algo, str):
        values["algo"] = algo
    if isinstance(model, str):
        values["model"] = model
    if clients is not None:
        values["num-clients"] = len(clients)
    config = RunConfig.make(values)
    strategy = config.build_strategy() if isinstance(algo, str) else algo
    if cohorts is not None:
        strategy.participation = cohorts
    elif participation is not None:
        strategy.fraction_train = config.strategy["fraction_train"]

    task = _task(config, clients, test, model, loss)
    grid = InProcessGrid(make_app(lambda _: task), len(task.clients))
    recorder = Recorder(strategy, grid, weights=record == "weights")
    strategy.on_round = recorder
    initial = server_app.initial_arrays(task, strategy.precision)
    with quiet():
        server_app.start(strategy, grid, initial, task, rounds, config.eval_train)
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
) -> Task:
    if clients is None:
        if isinstance(model, nn.Module):
            raise ValueError("model: expected a name with dataset=, or a module with clients=")
        return load_task(**config.task(), num_clients=config.num_clients)
    xs, ys = zip(*clients, strict=True)
    if any(len(x) != len(y) or not len(x) for x, y in clients):
        raise ValueError("clients: expected equally many inputs and targets, at least one each")
    if test is not None and len(test[0]) != len(test[1]):
        raise ValueError("test: expected equally many inputs and targets")
    if isinstance(model, str):
        shape = tuple(xs[0].shape[1:])
        classes = int(max(int(y.max()) for y in ys)) + 1
        seed, stem, name = config.strategy["seed"], config.stem, model

        def module() -> nn.Module:
            return models.build(name, shape, classes, stem=stem, seed=seed)
    else:
        given = model

        def module() -> nn.Module:
            return copy.deepcopy(given)

    return Task(module, Clients(xs, ys), test, loss, find_device(config.device))


class Recorder:
    """Keeps what `simulate` returns."""

    def __init__(self, strategy: FederatedStrategy, grid: InProcessGrid, weights: bool) -> None:
        self.strategy, self.grid, self.keep = strategy, grid, weights
        self.rows: list[dict[str, float]] = []
        self.client_rows: list[dict[str, Any]] = []
        self.weights: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.states: list[list[Any]] = []

    def __call__(self, round: Round) -> None:
        self.rows.append({"round": round.number, **round.metrics})
        self.client_rows += round.clients
        if self.keep:
            self.weights.append(round.w.clone())
            self.averages.append(round.w_bar.clone())
            self.states.append(self.client_states())

    def client_states(self) -> list[Any]:
        like = self.strategy.client_state_like()
        saved = [records.load_state(context, like) for context in self.grid.contexts.values()]
        return [None if found is None else found[0] for found in saved]

    def history(self) -> History:
        model = self.strategy.current()
        assert model is not None
        return History(
            metrics=pd.DataFrame(self.rows),
            model={name: records.to_tensor(array) for name, array in model.items()},
            clients=self.client_states(),
            weights=torch.stack(self.weights) if self.keep else None,
            averages=torch.stack(self.averages) if self.keep else None,
            states=self.states if self.keep else None,
        )

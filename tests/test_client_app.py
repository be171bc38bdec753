"""The app's ClientApp: the node's configuration, its data, its model."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedaccord import client_app, simulate, train_locally
from fedaccord.client_app import app, configured_task, memory_of
from fedaccord.config import RunConfig
from fedaccord.core.rule import Registered
from fedaccord.engine import quiet
from fedaccord.engine.keywords import keys_of
from fedaccord.federation.errors import FederationError
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.storage.store import ContextStore
from fedaccord.strategies import FedAvg
from fedaccord.task import load_task, multiplications
from fedaccord.wire import codec, instruction
from fedaccord.wire import handshake as module
from tests.grid import InProcessGrid
from tests.own import save


@pytest.fixture(autouse=True)
def sender() -> Iterator[None]:
    """Give the messages of a test a sender."""
    with InProcessGrid(ClientApp(), 1):
        yield


def context(**node: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})


def handshake() -> Message:
    return Message(module.handshake(), 1, MessageType.TRAIN)


@pytest.mark.parametrize("ready_made", [False, True])
@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({}, "expected an integer 'partition-id' in this node's config, got None"),
        ({"partition-id": "one"}, "expected an integer 'partition-id' in this node's config, got"),
        ({"partition-id": 0}, "expected an integer 'num-partitions' in this node's config, got"),
        ({"partition-id": 0, "num-partitions": "all"}, "expected an integer 'num-partitions'"),
    ],
)
def test_a_node_without_a_partition_id_is_refused(
    node: dict[str, Any], line: str, ready_made: bool
) -> None:
    own = context(**node)
    with pytest.raises(ValueError, match=r"--node-config") as error:
        app(handshake(), own) if ready_made else train_locally(
            handshake(), own, model=nn.Linear(2, 1), batches=[]
        )
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


# --- what Flower's simulation does with every message ---------------------------------------------


def test_the_app_is_sent_by_name() -> None:
    """Nested functions would be sent as code."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    content = cloudpickle.dumps(app)
    assert len(content) < 1000
    assert app._registered_funcs.keys() == cloudpickle.loads(content)._registered_funcs.keys()


def test_a_node_counts_its_threads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, count = [], multiplications.multiplications
    monkeypatch.setattr(
        multiplications, "multiplications", lambda *of: calls.append(of) or count(*of)
    )
    before = torch.get_num_threads()
    try:
        for client in range(3):
            node: dict[str, Any] = {"partition-id": client, "num-partitions": 3}
            first = context(**node)
            first.run_config = {"seed": 12345}
            configured_task(first)
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 1


# --- the run's optimiser --------------------------------------------------------------------------

STEPS = """
from fedaccord.core import SGD, Optimizer

class Halved(Optimizer):
    def step(self, w, d, own, lr, decay, config):
        SGD().step(w, d, own, lr / 2, decay, config)
"""


@pytest.mark.parametrize("allowed", ["halved", ""])
def test_a_node_imports_the_optimizer_before_it_reads_a_message(
    allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message, also one to evaluate, may be the first of a process."""
    (tmp_path / "halved.py").write_text(STEPS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    plain = {"model": "linear", "local_steps": 2, "num_clients": 3, "fraction_train": 1.0}
    more = {"algo": "fedavg", "optimizer": "halved:Halved", "evaluation": "clients"}
    config = RunConfig.make(keys_of(plain | more))

    def forget(message: Message, context: Context, call_next: Any) -> Message:
        context.node_config["allowed-imports"] = allowed
        sys.modules.pop("halved", None)
        Registered.registry.pop("halved", None)
        for cached in (client_app._prepared, instruction._read_common, codec.loads):
            cached.cache_clear()
        return call_next(message, context)

    initial = ArrayRecord(load_task(config.task, num_clients=3).module().state_dict())
    each = ClientApp(mods=[forget])
    each.train()(app._registered_funcs["train.default"])
    each.evaluate()(app._registered_funcs["evaluate.default"])
    with InProcessGrid(each, 3, config.flat) as grid, quiet():
        run = Run(config.strategy, MessageFleet(grid), initial, 2)
        if not allowed:
            with pytest.raises(FederationError, match="optimizer: this node imports nothing from"):
                run.play()
            return
        result = run.play()
    history = simulate("fedavg", **plain, lr=config.strategy.lr / 2, rounds=2)
    for name, value in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(value, history.model[name])
    for metrics in result.evaluate_metrics_clientapp.values():
        assert metrics["client-loss"] > 0


# --- a node's own data ----------------------------------------------------------------------------


def test_a_node_with_its_own_data_has_all_of_it(tmp_path: Path) -> None:
    run = {"dataset": "npz", "model": "linear", "data-dir": str(save(tmp_path / "30.npz", 30))}
    node: dict[str, Any] = {"partition-id": 1, "num-partitions": 3}
    own = {**node, "data-dir": str(save(tmp_path / "14.npz", 14))}
    node["allow-server-data"] = True
    for config, sizes in ((node, [10, 10, 10]), (own, [14, 14, 14])):
        task = configured_task(
            Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run)
        )
        assert [task.num_examples(i) for i in range(3)] == sizes
    x, y = task.clients.samples(1)
    with np.load(own["data-dir"]) as file:
        assert np.array_equal(x.numpy(), file["x_train"])
        assert np.array_equal(y.numpy(), file["y_train"])


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_has_become_another_client_is_refused(number: int, tmp_path: Path) -> None:
    """It was started again within the run, with another partition-id; no handshake follows."""
    config = RunConfig.make({"model": "linear", "local-steps": 1, "num-server-rounds": 2})
    rounds = list[Any]()

    def change(grid: InProcessGrid) -> None:
        for context in grid.contexts.values():
            if context.node_config["partition-id"] == 2:
                context.node_config["partition-id"] = 2 - number

    with InProcessGrid(app, 3, config.flat) as grid, quiet():
        strategy = FedAvg(fraction_train=1.0, local_steps=1, min_replies=2)
        initial = ArrayRecord(load_task(config.task, num_clients=3).module().state_dict())
        run = Run(strategy, MessageFleet(grid), initial, 2)
        run.begin()
        rounds.append(run.train_round())
        change(grid)
        rounds.append(run.train_round())
    statuses = [{row["client"]: row["status"] for row in round.clients} for round in rounds]
    assert {*statuses[0].values()} == {"ok"}
    assert statuses[1][0] == statuses[1][1] == "ok"
    if number:
        assert "partition-id=1: expected 2, as this node reported" in statuses[1][2]
    else:
        assert statuses[1][2] == "ok"


@pytest.mark.parametrize("dataset", ["npz", "digits"])
def test_a_data_path_is_enough_for_a_nodes_data(tmp_path: Path, dataset: str) -> None:
    """The run defines how to read it, and the server assigns the partition-id."""
    run = {"dataset": dataset, "model": "linear", "num-clients": 2}
    node: dict[str, Any] = {"data-path": str(save(tmp_path / "14.npz", 14))}
    own = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run)
    if dataset == "digits":  # which would be trained on in the place of the node's own
        with pytest.raises(ValueError, match=r"^data-path=.*: dataset=digits: expected a data set"):
            app(handshake(), own)
        return
    assert configured_task(own).num_examples(0) == 14
    client, num_clients, *_ = module.read_handshake(app(handshake(), own))
    assert (client, num_clients) == (None, None)


def test_a_handshake_checks_the_nodes_settings_and_names_the_node() -> None:
    own = context(**{"partition-id": 0, "num-partitions": 2, "device": "warp"})
    with pytest.raises(ValueError, match=r"^partition-id=0: device: expected"):
        app(handshake(), own)
    own = context(**{"partition-id": 4, "num-partitions": 6, "dataset": "npz", "data-dir": "/no"})
    with pytest.raises(ValueError, match=r"^partition-id=4: npz: .*/no"):
        app(handshake(), own)
    own = context(**{"dataset": "npz", "data-path": "/no"})
    with pytest.raises(ValueError, match=r"^data-path=/no: npz: .*/no"):
        app(handshake(), own)


def test_the_folder_of_client_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device names its own folder; the run names that of simulated clients."""

    def of(node: dict[str, Any], run: dict[str, Any]) -> Any:
        own = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run)
        return memory_of(own, "first")

    own, servers = {"state-dir": str(tmp_path / "own")}, {"state-dir": str(tmp_path / "servers")}
    assert isinstance(of({}, {}), ContextStore)
    assert isinstance(of({}, servers), ContextStore)
    assert of(own, servers).folder == tmp_path / "own" / "first"
    monkeypatch.setattr("fedaccord.client.node_limits.is_simulated", lambda: True)
    assert of({}, servers).folder == tmp_path / "servers" / "first"
    assert isinstance(of({}, {"state-dir": ""}), ContextStore)

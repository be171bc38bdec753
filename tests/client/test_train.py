"""A local round: what it counts, what it refuses, and that its state is written last."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedaccord import evaluate_locally, train_locally
from fedaccord.client.train import begun_state
from fedaccord.core.client_half import ClientHalf, WithLocal
from fedaccord.core.optimizer import Schedule
from fedaccord.core.request import StateLost, TrainInstruction
from fedaccord.core.rule import LocalConfig, LocalResult, LocalRule, Model
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.storage import store
from fedaccord.strategies import Scaffold
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.feddyn import ClientState, FedDynClient
from fedaccord.task.solver import Batch
from fedaccord.wire.handshake import handshake, read_handshake
from fedaccord.wire.instruction import write_instruction
from fedaccord.wire.messages import read_reply
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_tensor
from tests.grid import InProcessGrid

W = torch.tensor([1.0, -2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def sender() -> Iterator[None]:
    """Messages that a test makes have a sender."""
    with InProcessGrid(ClientApp(), 1):
        yield


def linear() -> nn.Linear:
    return nn.Linear(2, 1, bias=False)


def half_square(predictions: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((predictions - targets) ** 2).sum()


def batches(*sizes: int) -> list[Batch]:
    torch.manual_seed(0)
    return [(torch.randn(n, 2).double(), torch.randn(n, 1).double()) for n in sizes]


def context(**node: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})


def message(rule: LocalRule | None = None, *plugins: Any, **values: Any) -> Message:
    """A training message as a strategy writes it."""
    instruction = TrainInstruction(
        round=0,
        rounds=3,
        half=ClientHalf(rule or FedAvgClient(), plugins),
        shapes=((1, 2),),
        lr=0.01,
        weight_decay=0.0,
        clip_norm=0.0,
        local_epochs=1,
        local_steps=0,
        batch_size=0,
        seed=0,
        precision="float64",
        client=0,
        accepted=-1,
    )._replace(**values)
    config = write_instruction(instruction)
    content = RecordDict({"down": pack(Model(W)), "config": config})
    return Message(content, 1, MessageType.TRAIN)


def train(
    request: Message,
    data: Any,
    own: Context | None = None,
    model: nn.Module | None = None,
    **more: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """w_K and the metrics of one local round."""
    own = own or context()
    more = {"loss": half_square, **more}
    reply = train_locally(request, own, model=model or linear(), batches=data, **more)
    metrics = dict(reply.content.metric_records["metrics"])
    return to_tensor(reply.content.array_records["up"]["w"]), metrics


def walk(data: list[Batch], lr: float = 0.01, weight_decay: float = 0.0, clip: float = 0.0) -> Any:
    """Plain gradient descent, a step per batch: w_K and the losses before each step."""
    w, losses = W.clone(), []
    for x, y in data:
        residual = x @ w[:, None] - y
        losses.append(float(0.5 * (residual**2).sum()))
        g = (x.T @ residual)[:, 0]
        if clip and g.norm() > clip:
            g = g * clip / g.norm()
        w = w - lr * (g + weight_decay * w)
    return w, losses


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "steps", "indices", "examples"),
    [
        (1, 0, [0, 1, 2], 9),
        (3, 0, [0, 1, 2] * 3, 9),
        (3, 2, [0, 1], 9),  # steps count if both are set
        (1, 3, [0, 1, 2], 9),
        (1, 8, [0, 1, 2, 0, 1, 2, 0, 1], 9),  # steps continue beyond one pass
    ],
)
def test_epochs_or_steps_over_a_list_of_batches(
    epochs: int, steps: int, indices: list[int], examples: int
) -> None:
    data = batches(4, 4, 1)
    w_K, metrics = train(message(local_epochs=epochs, local_steps=steps), data)
    expected, losses = walk([data[k] for k in indices])
    close(w_K, expected)
    assert metrics["steps"] == len(indices)
    assert metrics["num-examples"] == examples  # of one pass, also of one that is cut short
    assert metrics["train-loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@pytest.mark.parametrize(("epochs", "steps", "number"), [(2, 0, 6), (1, 4, 4), (1, 2, 2)])
def test_epochs_or_steps_over_a_data_loader(epochs: int, steps: int, number: int) -> None:
    x, y = torch.cat([b[0] for b in batches(9)]), torch.cat([b[1] for b in batches(9)])
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    w_K, metrics = train(message(local_epochs=epochs, local_steps=steps), loader)
    pieces = list(zip(x.split(4), y.split(4), strict=True))
    close(w_K, walk((pieces * 2)[:number])[0])
    assert metrics["steps"] == number
    assert metrics["num-examples"] == 9
    even = DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True)
    assert train(message(local_steps=1), even)[1]["num-examples"] == 8
    assert train(message(local_steps=1), iter(loader))[1]["num-examples"] == 4  # all it can know


def test_no_step_is_prepared_that_is_not_taken() -> None:
    calls: list[int] = []

    class Watched:
        def __iter__(self) -> Iterator[Batch]:
            for k, batch in enumerate(batches(4, 4, 1)):
                calls.append(k)
                yield batch

    train(message(local_steps=4), Watched())
    assert calls == [0, 1, 2, 0]


def test_the_number_of_examples_may_be_given() -> None:
    assert train(message(), batches(4, 4), examples=123)[1]["num-examples"] == 123


def test_a_client_tells_the_seconds_of_its_steps() -> None:
    class Slow:
        def __iter__(self) -> Iterator[Batch]:
            time.sleep(0.05)
            yield from batches(4)

    began = time.perf_counter()
    seconds = train(message(local_epochs=2), Slow())[1]["seconds"]
    assert 0.1 <= seconds <= time.perf_counter() - began


def test_rates_come_with_the_message() -> None:
    data = batches(4, 4, 4)
    plain = walk(data)[0]
    for settings, expected in (
        ({"lr": 0.02}, walk(data, lr=0.02)[0]),
        ({"weight_decay": 0.5}, walk(data, weight_decay=0.5)[0]),
        ({"clip_norm": 1.0}, walk(data, clip=1.0)[0]),
    ):
        assert not torch.allclose(expected, plain)
        close(train(message(**settings), data)[0], expected)


def test_precision_comes_with_the_message() -> None:
    assert train(message(), batches(4))[0].dtype == torch.float64
    request = message(precision="float32")
    request.content["down"] = pack(Model(W.float()))
    single = [(x.float(), y.float()) for x, y in batches(4)]
    w_K, _ = train(request, single)
    assert w_K.dtype == torch.float32
    torch.testing.assert_close(w_K.double(), walk(batches(4))[0], rtol=1e-5, atol=1e-6)


def test_the_vectors_of_a_message_are_not_changed() -> None:
    request = message(local_epochs=5, weight_decay=0.1)
    train(request, batches(4, 4))
    assert torch.equal(to_tensor(request.content["down"]["w"]), W)
    assert W.tolist() == [1, -2]


# --- what is refused ------------------------------------------------------------------------------


def refused(line: str, request: Message, data: Any, **more: Any) -> None:
    """The round raises ValueError with one line that begins like this, and keeps no state."""
    own = context()
    with pytest.raises(ValueError, match=r".") as error:
        train(request, data, own, **more)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    assert not own.state


def test_another_model_is_refused() -> None:
    line = "expected the server's model with parameter shapes 1x2, got 1x3"
    refused(line, message(), batches(4), model=nn.Linear(3, 1, bias=False))
    refused(line[:-1] + "2 1", message(), batches(4), model=nn.Linear(2, 1))
    refused(line[:-3] + "2x1", message(), batches(4), model=nn.Linear(1, 2, bias=False))


def test_a_model_with_running_statistics_is_refused() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(1))
    refused("model: expected one without buffers", message(), [], model=model)


def test_a_client_without_data_is_refused() -> None:
    line = "expected at least one batch of training data, got none"
    refused(line, message(local_epochs=3), [])
    refused(line, message(local_steps=3), [])


@pytest.mark.parametrize("counts", [{"local_epochs": 2}, {"local_steps": 3}])
def test_batches_that_are_used_up_after_a_pass_are_refused(counts: dict[str, int]) -> None:
    line = "expected batches that can be iterated more than once (a list, a DataLoader), got a "
    refused(line + "list_iterator", message(**counts), iter(batches(4, 4)))
    _, metrics = train(message(), iter(batches(4, 4)))  # enough for one pass
    assert metrics["steps"] == 2


def test_rates_that_fall_within_the_round_need_the_number_of_steps() -> None:
    half = ClientHalf(FedAvgClient(), schedule=Schedule("linear"))
    line = "lr-schedule=linear: expected batches with a length (a list, a DataLoader), or local-"
    refused(line, message(half=half), iter(batches(4, 4)))
    (up, _), (same, _) = (
        train(message(half=half), batches(4, 4)),
        train(message(half=half, local_steps=2), iter(batches(4, 4))),
    )
    assert torch.equal(up, same)
    line = "lr-schedule=linear: expected as many batches as the data said, got 2 of 3"

    class Longer(list[Any]):
        def __len__(self) -> int:
            return 3

    refused(line, message(half=half), Longer(batches(4, 4)))


def test_a_message_of_another_strategy_is_refused() -> None:
    line = "expected a training message from a FedAccord strategy, got one without 'instruction'"
    refused(line, Message(RecordDict(), 1, MessageType.TRAIN), batches(4))


def test_a_rule_that_this_client_does_not_know_is_refused() -> None:
    request = message()
    config = request.content.config_records["config"]
    fields = json.loads(str(config["instruction"]))
    half = json.loads(fields["half"]) | {"rule": {"class": "antigravity:Rule"}}
    fields["half"] = json.dumps(half)
    config["instruction"] = json.dumps(fields)
    refused("expected a message with a LocalRule that this client knows", request, batches(4))


def test_divergence_is_told_with_its_step_size() -> None:
    line = "the local model diverged, got NaN or Inf after 2 steps at lr 1e+200"
    refused(line, message(lr=1e200), batches(4, 4))


# --- state ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FedDynClient):
    """Fails after all the work is done, from round 1 on."""

    def remember(self, read: Model, down: Model, state: ClientState, result: LocalResult) -> Any:
        next_state = super().remember(read, down, state, result)
        if state.lam.any():
            raise RuntimeError("the disk is full")
        return next_state


def test_state_is_written_last() -> None:
    own = context()
    train(message(Failing(0.5)), batches(4), own)
    before = own.state.copy()
    lam = to_tensor(own.state.array_records[store.STATE]["lam"]).clone()
    assert lam.any()
    for data, error in ((batches(4), RuntimeError), ([], ValueError)):
        with pytest.raises(error):
            train(message(Failing(0.5), round=1, accepted=0), data, own)
        assert dict(own.state) == dict(before)
        assert torch.equal(to_tensor(own.state[store.STATE]["lam"]), lam)


def test_state_of_one_round_is_where_the_next_begins() -> None:
    """FedDyn: lam = alpha (w_K - w) after a round, and the next step walks along it."""
    own = context()
    w_K, _ = train(message(FedDynClient(0.5)), batches(4), own)
    lam = to_tensor(own.state.array_records[store.STATE]["lam"])
    close(lam, 0.5 * (w_K - W))
    close(w_K, walk(batches(4))[0])
    w_K, _ = train(message(FedDynClient(0.5), round=1, accepted=0), batches(4), own)
    close(w_K, walk(batches(4))[0] - 0.01 * lam)


def test_the_state_of_another_method_is_refused() -> None:
    own = context()
    train(message(FedDynClient(0.5)), batches(4), own)
    before = dict(own.state)
    line = r"^expected a state of the vectors \[\], got \['lam'\]"
    with pytest.raises(ValueError, match=line):
        train(message(FedAvgClient(), round=1, accepted=0), batches(4), own)
    assert dict(own.state) == before


def test_a_client_that_lost_its_state_says_so_and_does_not_train() -> None:
    """A restarted device: its server then sends it a first message."""
    own = context()
    relaxed = message(FedAvgClient(), RelaxedInit(beta=0.1), client=7, round=3, accepted=1)
    reply = train_locally(relaxed, own, model=linear(), batches=batches(4), loss=half_square)
    assert read_reply(reply.content, ClientHalf(FedAvgClient())) == StateLost(1)
    assert list(reply.content) == ["metrics"]
    assert not own.state


def test_a_client_whose_step_was_not_accepted_goes_back() -> None:
    """As if it had not been asked; and what it answers once more is the same."""
    one, other = context(), context()
    rule, data = FedDynClient(0.5), batches(4, 4)
    for own in (one, other):
        train(message(rule), data, own)
    train(message(rule, round=1, accepted=0), data, one)  # its reply is lost
    again = message(rule, round=2, accepted=0)
    models = [train(again, data, own)[0] for own in (one, other, one)]
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])
    memories = [store.ContextStore(own).load(0) for own in (one, other)]
    for memory in memories:
        assert (memory.latest.round, memory.before.round) == (2, 0)


# --- the handshake --------------------------------------------------------------------------------


def test_the_handshake_is_answered_without_data() -> None:
    own = context(**{"partition-id": 3, "num-partitions": 4})
    question = Message(handshake(), 1, MessageType.TRAIN)
    reply = train_locally(question, own, model=nn.Linear(2, 1), batches=[])
    assert read_handshake(reply)[:2] == (3, 4)
    assert not own.state


def test_random_numbers_of_batches_are_those_of_seed_round_and_client() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            return self.tensors[0][i] * (np.random.rand() + random.random()), self.tensors[1][i]

    (x, _), y = *batches(8), torch.arange(8) % 2
    data = DataLoader(Noisy(x, y), batch_size=4, shuffle=True)
    usual = {"model": nn.Linear(2, 2), "loss": functional.cross_entropy}  # needs no autograd
    models = []
    for round in (0, 0, 1):
        request = message(round=round, shapes=((2, 2), (2,)))
        request.content["down"] = pack(Model(torch.zeros(6, dtype=torch.float64)))
        models.append(train(request, data, **usual)[0])
        np.random.seed(round)
        random.seed(round)
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_batches_in_dicts_train_as_pairs_do() -> None:
    def trained(some: Any, **more: Any) -> Tensor:
        reply = train_locally(
            message(), context(), model=linear(), batches=some, loss=half_square, **more
        )
        content: Any = read_reply(reply.content, ClientHalf(FedAvgClient()))
        w: Tensor = content.up.w
        return w

    pairs = batches(4, 3)
    images = [{"img": x, "label": y} for x, y in pairs]
    rows = [{"a": x[:, :1], "b": x[:, 1:], "y": y, "name": ["row"] * len(y)} for x, y in pairs]

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(torch.cat([batch["a"], batch["b"]], 1))
        return output

    want = trained(pairs)
    assert not torch.equal(want, W)
    assert torch.equal(trained(images), want)
    assert torch.equal(trained(rows, forward=forward, targets="y"), want)
    with pytest.raises(ValueError, match="give forward="):
        trained(rows, targets="y")


def test_a_loss_with_parameters_of_its_own_is_refused_before_round_1() -> None:
    loss, hello = nn.BCEWithLogitsLoss(), message()
    loss.scale = nn.Parameter(torch.ones(()))
    for function in (train_locally, evaluate_locally):
        with pytest.raises(ValueError, match=r"^loss: .* 'scale', which no step"):
            function(hello, context(), model=linear(), batches=batches(4), loss=loss)


@pytest.mark.parametrize(("accepted", "counts"), [(3, True), (-5, False)])
def test_after_a_reset_only_a_clients_own_parts_count(accepted: int, counts: bool) -> None:
    half = Scaffold(buffers="local").client_half()
    w, c_i, local = torch.zeros(2), torch.ones(2), torch.full((3,), 7.0)
    config = LocalConfig(0, 1, 0.1, 0.0, 0.0, 0, 0, ((2,),))
    stored = WithLocal(half.init(w, w, config)._replace(c_i=c_i), local)
    instruction = SimpleNamespace(half=half, accepted=accepted, config=config)
    request: Any = SimpleNamespace(instruction=instruction, w_init=None, down=SimpleNamespace(w=w))
    model: Any = SimpleNamespace(w=w, initial_local=torch.zeros(3))
    begun = begun_state(request, model, stored)
    assert torch.equal(begun.base.c_i, c_i if counts else w)
    assert torch.equal(begun.local, local)

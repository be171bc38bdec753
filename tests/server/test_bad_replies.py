"""Whatever one client sends, the federation is the one in which that client was absent.

Client 2 answers badly in the first two rounds and well in the third; each kind is one line a round
in the log. Four methods in turn: without memory, with control variates, with duals, with a last
model.
"""

import io
import math
import pickle
from collections.abc import Callable, Iterable
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedaccord.engine import quiet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.roster import Roster
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import AFedPD, FedAvg, FedInit, Scaffold
from fedaccord.wire.handshake import answer_handshake
from fedaccord.wire.instruction import PROTOCOL, is_handshake, read_instruction
from fedaccord.wire.tensor_array import to_tensor
from tests.grid import FIRST_NODE, InProcessGrid
from tests.server.net import Clock, Net, through
from tests.server.runs import C, Spoil, client_app, run_over, strategy
from tests.server.test_replies import (
    boasting,
    raising,
    replied,
    with_metrics,
    with_records,
    with_vectors,
    with_w,
    wordless,
)

METHODS: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "scaffold": Scaffold,
    "afedpd": AFedPD,
    "fedinit": FedInit,
}
BAD_ROUNDS, ROUNDS, CLIENT = 2, 3, 2
OTHERS = [i for i in range(C) if i != CLIENT]
ABSENT = [OTHERS] * BAD_ROUNDS + [range(C)] * (ROUNDS - BAD_ROUNDS)
GOOD = np.zeros(5)


# --- what is wrong with a vector ------------------------------------------------------------------


def with_array(array: Array) -> Spoil:
    """In the place of "w"; the other vectors stay."""
    return with_vectors(lambda up: arrays(up | {"w": array}))


def arrays(up: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord(
        {name: x if isinstance(x, Array) else Array(x.numpy()) for name, x in up.items()}
    )


def saying(**claims: Any) -> Spoil:
    """The bytes of a good vector, and false words about them."""
    good = Array(GOOD)
    fields = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data}
    return with_array(Array(**{**fields, **claims}))


def npy(shape: Any, dtype: str = "'<f8'", version: bytes = b"\x01\x00", data: bytes = b"") -> Array:
    """An .npy file whose header says whatever it likes."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    size = len(header).to_bytes(2, "little")
    claim = shape if isinstance(shape, tuple) else (5,)
    return Array("float64", claim, "numpy.ndarray", b"\x93NUMPY" + version + size + header + data)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, w=GOOD)
    return file.getvalue()


def objects() -> Array:
    file = io.BytesIO()
    np.save(file, np.array([print] * 5, dtype=object), allow_pickle=True)
    return Array("object", (5,), "numpy.ndarray", file.getvalue())


def with_value(index: int, value: float) -> Spoil:
    def change(w: torch.Tensor) -> torch.Tensor:
        w[index] = value
        return w

    return with_w(change)


UNREAD, SHAPE = "expected an array of numbers, got ", "expected 'w' of shape"
SEVERAL = np.array([(1, 2.0)] * 5, dtype=[("a", "i4"), ("b", "f8")])
VECTORS: dict[str, tuple[Spoil, str]] = {
    "words": (with_array(Array(np.array(["a"] * 5))), UNREAD),
    "structured": (with_array(Array(SEVERAL)), UNREAD),
    "pickled objects": (with_array(objects()), UNREAD),
    "a bare pickle": (saying(data=pickle.dumps(GOOD)), UNREAD),
    "dates": (with_array(Array(np.zeros(5, "datetime64[s]"))), UNREAD),
    "the other byte order": (with_array(Array(GOOD.astype(">f8"))), UNREAD),
    "a dtype that nobody knows": (saying(dtype="float1024"), UNREAD),
    "another dtype than the bytes'": (saying(dtype="float32"), UNREAD),
    "a dtype of a megabyte": (saying(dtype="\x1b[31m" * 200_000), UNREAD),
    "another stype": (saying(stype="torch.Tensor"), UNREAD),
    "no bytes": (saying(data=b""), UNREAD),
    "bytes that are no array": (saying(data=b"?" * 1000), UNREAD),
    "npz for npy": (saying(data=npz()), UNREAD),
    "bytes that were cut": (saying(data=Array(GOOD).data[:-1]), UNREAD),
    "bytes too many": (saying(data=Array(GOOD).data + b"more"), UNREAD),
    "a header of 10^15 elements": (with_array(npy((10**15,))), UNREAD),
    "a header of 10^30 elements": (with_array(npy((10**15, 10**15))), UNREAD),
    "a negative header": (with_array(npy((-5,), data=bytes(40))), UNREAD),
    "a header without end": (with_array(npy("(" * 20_000)), UNREAD),
    "a header of code": (with_array(npy("__import__('os').getpid()")), UNREAD),
    "a version to come": (with_array(npy((5,), version=b"\x09\x00", data=bytes(40))), UNREAD),
    "a declared shape of 10^12": (saying(shape=(10**12,)), UNREAD),
    "another shape than the bytes'": (saying(shape=(1, 5)), UNREAD),
    "10^18 times nothing": (with_array(npy((0, 10**18))), SHAPE),
    "a scalar": (with_w(lambda w: w[0]), SHAPE),
    "nothing": (with_w(lambda w: w[:0]), SHAPE),
    "one element": (with_w(lambda w: w[:1]), SHAPE),
    "one element more": (with_w(lambda w: torch.cat([w, w[:1]])), SHAPE),
    "a column": (with_w(lambda w: w[:, None]), SHAPE),
    "a matrix": (with_w(lambda w: w.expand(5, 5)), SHAPE),
    "float32": (with_w(lambda w: w.float()), SHAPE),
    "float16": (with_w(lambda w: w.half()), SHAPE),
    "integers": (with_w(lambda w: w.long()), SHAPE),
    "bytes": (with_w(lambda w: w.byte()), SHAPE),
    "truth values": (with_w(lambda w: w > 0), SHAPE),
    "complex numbers": (with_w(lambda w: w + 0j), SHAPE),
    "NaN first": (with_value(0, math.nan), "got NaN or Inf in 'w'"),
    "NaN last": (with_value(-1, math.nan), "got NaN or Inf in 'w'"),
    "Inf": (with_value(2, math.inf), "got NaN or Inf in 'w'"),
    "-Inf": (with_value(2, -math.inf), "got NaN or Inf in 'w'"),
    "a vector missing": (with_vectors(lambda up: {}), "expected the vectors ["),
    "a vector more": (with_vectors(lambda up: up | {"v": up["w"]}), "expected the vectors ["),
    "another name": (with_vectors(lambda up: {"v": up["w"]}), "expected the vectors ["),
    "a name of a megabyte": (
        with_vectors(lambda up: up | {"\x1b[31m" + "x" * 10**6: up["w"]}),
        "expected the vectors [",
    ),
}


# --- with a number, with the records, with the answer as such -------------------------------------


def number(name: str, value: Any) -> Spoil:
    return with_metrics(**{name: value})


def lost(value: Any) -> Spoil:
    return lambda message, reply: replied(message, metrics=MetricRecord({"lost-round": value}))


def leaving(message: Message, reply: Message) -> Message:
    raise SystemExit(3)


def returning(value: Any) -> Spoil:
    return lambda message, reply: value


def bare(message: Message, reply: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def strange_error(message: Message, reply: Message) -> Message:
    return Message(Error(code=-(10**9), reason="Traceback:\n  deep\n"), reply_to=message)


EXAMPLES, STEPS = "expected num-examples to be an integer from 1", "expected steps to be an integer"
LOSS = "expected train-loss to be a number from -1e+15 to 1e+15"
REST: dict[str, tuple[Spoil, str]] = {
    **{f"{x} examples": (number("num-examples", x), EXAMPLES) for x in (0, -3, 0.5, 2**62)},
    "NaN examples": (number("num-examples", math.nan), EXAMPLES),
    "a list of examples": (number("num-examples", [12]), EXAMPLES),
    "examples that nobody can hold": (
        number("num-examples", 10**7 + 1),
        "an integer from 1 to 10000000 (max-examples), got",
    ),
    "no examples": (with_metrics("num-examples"), "with num-examples, steps, train-loss"),
    **{f"{x:g} steps": (number("steps", x), STEPS) for x in (0, -3, 1e300, math.nan, 10**20)},
    "a list of steps": (number("steps", [2] * 10**5), STEPS),
    "a billion steps": (number("steps", 10**9), "at most local-epochs times num-examples, got 1"),
    "more steps than samples": (
        number("steps", 25),
        "at most local-epochs times num-examples, got 25 beside 24",
    ),
    "no steps": (with_metrics("steps"), "with num-examples, steps, train-loss"),
    **{
        f"a loss of {x}": (number("train-loss", x), LOSS)
        for x in (math.nan, math.inf, -1e300, 1e29)
    },
    "a list of losses": (number("train-loss", [1.0]), LOSS),
    "seconds below 0": (number("seconds", -1.0), "expected seconds to be a number from 0 to"),
    "endless seconds": (number("seconds", math.inf), "expected seconds to be a number from 0 to"),
    "no loss": (with_metrics("train-loss"), "with num-examples, steps, train-loss"),
    "no vectors": (with_records(up=None), "expected the records 'up' and 'metrics'"),
    "no metrics": (with_records(metrics=None), "expected the records 'up' and 'metrics'"),
    "no records": (bare, "expected the records 'up' and 'metrics'"),
    "metrics for vectors": (with_records(up=MetricRecord()), "expected the records 'up'"),
    "config for vectors": (with_records(up=ConfigRecord()), "expected the records 'up'"),
    "vectors for metrics": (with_records(metrics=ArrayRecord()), "expected the records 'up'"),
    "empty vectors": (with_records(up=ArrayRecord()), "expected the vectors ["),
    "two records of vectors": (with_records(more=ArrayRecord()), "expected the records 'up'"),
    "the loss of a state it never had": (lost(0), "the loss of the state of round 0, got that"),
    "the loss of a state to come": (lost(10**18), "expected a reply, or the loss of the state"),
    "the loss of round NaN": (lost(math.nan), "expected a reply, or the loss of the state"),
    "the loss of many rounds": (lost([0] * 10**5), "expected a reply, or the loss of the state"),
    "an error": (raising, "the disk is full"),
    "an error without a reason": (wordless, "error 4: no reason given"),
    "an error of a megabyte": (boasting, f"error 4: =HYPERLINK(1) red {'x' * 100}"),
    "an error of another code": (strange_error, "error -1000000000: deep"),
    "the end of its process": (leaving, "error 2: SystemExit: 3"),
    "None": (returning(None), "expected a Message from the ClientApp, got None"),
    "a text": (returning("\x1b[31m" * 10**5), "expected a Message from the ClientApp, got '"),
}
BAD = VECTORS | REST


def early(spoil: Spoil) -> Spoil:
    """Badly in the first rounds alone."""

    def change(message: Message, reply: Message) -> Message:
        return spoil(message, reply) if read_instruction(message).round < BAD_ROUNDS else reply

    return change


def federation(method: str, app: ClientApp, grid: type[InProcessGrid], **more: Any) -> list[Round]:
    reports: list[Round] = []
    with grid(app, C) as nodes, quiet():
        own = strategy(METHODS[method], round_timeout=0.1)  # replies are there at the first poll
        run_over(nodes, own, ROUNDS, on_round=reports.append, **more).play()
    return reports


@cache
def expected(method: str, *, absent: bool) -> tuple[torch.Tensor, ...]:
    """The models of a federation with good clients alone."""
    more = {"cohorts": ABSENT} if absent else {}
    return tuple(r.w for r in federation(method, client_app(), InProcessGrid, **more))


def same(rounds: list[Round], weights: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(r.w, w) for r, w in zip(rounds, weights, strict=True))


@pytest.mark.parametrize(("bad", "method"), [*zip(BAD, cycle(METHODS))])
def test_a_bad_reply_is_the_absence_of_its_client(
    bad: str, method: str, warnings: list[str]
) -> None:
    spoil, reason = BAD[bad]
    rounds = federation(method, client_app(early(spoil), CLIENT), InProcessGrid)
    assert same(rounds, expected(method, absent=True))
    assert [r.metrics["dropped"] for r in rounds[1:]] == [1, 1, 0]
    assert len(warnings) == BAD_ROUNDS
    for t, line in enumerate(warnings):
        assert line.startswith(f"round {t + 1}: dropped client {CLIENT}: ")
        assert reason in line
        assert line.isprintable()
        assert len(line) < 500
        (row,) = [row for row in rounds[t + 1].clients if row["client"] == CLIENT]
        assert row.keys() == {"round", "client", "status"}
        assert reason in row["status"]


# --- what does no harm ----------------------------------------------------------------------------


HARMLESS: dict[str, Spoil] = {
    "1,000 metrics": with_metrics(**{f"m{k}": 1.0 for k in range(1000)}),
    "metrics of our names": with_metrics(**{"round": 7, "client": 0, "status": 1, "up-bytes": -1}),
    "metrics of lists": with_metrics(**{"many": [1.0] * 10**5}),
    "metrics of strange names": with_metrics(**{"=1+1": 1, "\x1b[31m": 2, "": 3, "x" * 10**6: 4}),
    "records of its own": with_records(more=MetricRecord({"a": 1}), config=ConfigRecord({"b": 2})),
    "a loss of its own kind": number("train-loss", -5),
}


@pytest.mark.parametrize(("kind", "method"), [*zip(HARMLESS, cycle(METHODS))])
def test_what_is_not_asked_for_changes_nothing(kind: str, method: str, warnings: list[str]) -> None:
    rounds = federation(method, client_app(early(HARMLESS[kind]), CLIENT), InProcessGrid)
    assert same(rounds, expected(method, absent=False))
    assert not warnings
    (row,) = [row for row in rounds[1].clients if row["client"] == CLIENT]
    assert len(row) <= 9 + 32
    assert (row["round"], row["client"], row["status"]) == (1, CLIENT, "ok")
    assert row["up-bytes"] > 0
    assert all(name.isprintable() and len(name) < 65 and "=" not in name for name in row)


# --- what a network makes of good replies ---------------------------------------------------------


def forged(reply: Message, sender: int) -> Message:
    up = {
        name: Array(-to_tensor(a).numpy()) for name, a in reply.content.array_records["up"].items()
    }
    content = RecordDict({"up": ArrayRecord(up), "metrics": reply.content["metrics"]})
    copy = pickle.loads(pickle.dumps(reply))
    copy.content = content
    copy.metadata.__dict__["_src_node_id"] = sender
    return copy


def sender(reply: Message) -> int:
    return reply.metadata.src_node_id


REPEATED: dict[str, type[InProcessGrid]] = {
    "every reply comes twice": through(lambda _, replies: [*reversed(replies), *replies]),
    "another node makes up a reply for client 2": through(
        lambda _, replies: [forged(replies[CLIENT], sender(replies[0])), *replies]
    ),
    "a reply of client 2 in the server's name, without an error": through(
        lambda messages, replies: [forged(replies[CLIENT], sender(messages[0])), *replies]
    ),
    "every node replies twice, the second time otherwise": through(
        lambda _, replies: [*replies, *(forged(reply, sender(reply)) for reply in replies)]
    ),
}


class Delaying(InProcessGrid):
    """Client 2's first replies come a round too late."""

    late: tuple[Message, ...] = ()
    rounds = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [*super().pull_messages(message_ids)]
        if len(replies) < C or "up" not in replies[0].content:  # a handshake, or a second poll
            return replies
        replies = [*self.late, *replies]
        self.rounds += 1
        if self.rounds > BAD_ROUNDS:
            return replies
        *others, reply = sorted(replies, key=lambda r: sender(r) == FIRST_NODE + CLIENT)
        self.late = (reply,)
        return others


@pytest.mark.parametrize("method", METHODS)
def test_second_and_forged_replies_are_ignored(method: str) -> None:
    for kind, grid in REPEATED.items():
        rounds = federation(method, client_app(), grid)
        assert same(rounds, expected(method, absent=False)), kind


def test_an_error_that_flower_reports_is_the_reply_of_its_node() -> None:
    def unavailable(messages: list[Message], replies: list[Message]) -> list[Message]:
        error = Message(Error(3, "node unavailable"), reply_to=messages[CLIENT])
        error.metadata.__dict__["_src_node_id"] = sender(messages[CLIENT])
        return [*replies[:CLIENT], error, *replies[CLIENT + 1 :]]

    last = federation("fedavg", client_app(), through(unavailable))[-1]
    assert last.clients[CLIENT]["status"] == "error 3: node unavailable"


@pytest.mark.parametrize("method", METHODS)
def test_a_late_reply_is_the_absence_of_its_client(method: str) -> None:
    rounds = federation(method, client_app(), Delaying)
    assert same(rounds, expected(method, absent=True))
    status = [row["status"] for r in rounds[1:] for row in r.clients if row["client"] == CLIENT]
    assert status == ["no reply in time", "no reply in time", "ok"]


# --- answers to the hello, and to an evaluation ---------------------------------------------------


def answering(answer: Callable[[Message], Any]) -> ClientApp:
    """Nodes with a config introduce themselves, one without answers in its own way."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Any:
        assert is_handshake(message)
        return answer_handshake(message, context) if context.node_config else answer(message)

    return app


def claiming(client: Any, num_clients: Any, protocol: int = PROTOCOL) -> Callable[..., Message]:
    claims = {"partition-id": client, "num-partitions": num_clients, "protocol": protocol}
    return lambda message: replied(message, metrics=MetricRecord(claims))


def with_model(text: str) -> Callable[..., Message]:
    numbers = MetricRecord({"partition-id": 2, "num-partitions": 3, "protocol": PROTOCOL})
    model = ConfigRecord({"model-layout": text})
    return lambda message: replied(message, metrics=numbers, config=model)


def exits(message: Message) -> Message:
    raise SystemExit


def raises(message: Message) -> Message:
    raise FileNotFoundError("no folder /data\nbeside the camera")


NUMBERS = "expected an answer with 'partition-id' and 'num-partitions', got "
ANSWERS: dict[str, tuple[Callable[[Message], Any], str]] = {
    "no record": (lambda message: replied(message), NUMBERS),
    "vectors": (lambda message: replied(message, metrics=ArrayRecord()), NUMBERS),
    "no numbers": (lambda message: replied(message, metrics=MetricRecord()), NUMBERS),
    "the question": (
        lambda message: replied(message, **message.content),
        "[]: answer the strategy's messages with fedaccord.train_locally",
    ),
    "lists": (claiming([3], [4]), NUMBERS),
    "floats": (claiming(3.0, 4.0), NUMBERS),
    "NaN": (claiming(math.nan, 4), NUMBERS),
    "a negative number": (claiming(-1, 4), "expected partition-id below num-partitions, got "),
    "too high a number": (claiming(4, 4), "expected partition-id below num-partitions, got "),
    "2^62 clients": (claiming(3, 2**62), "expected num-partitions of at most 1000000, got"),
    "another protocol": (
        claiming(0, 3, 7),
        f"expected a client with protocol {PROTOCOL}, as here, got protocol 7: install the same",
    ),
    "a model that is no JSON": (
        with_model("{"),
        "expected the tensors of a model by role, got '{'",
    ),
    "a model without roles": (
        with_model("[]"),
        "expected the tensors of a model by role, got '[]'",
    ),
    "a model of 100,000 lists": (with_model("[" * 10**5), "expected an answer that can be read"),
    "None": (lambda message: None, "expected a Message from the ClientApp, got None"),
    "the end of its process": (exits, "SystemExit"),
    "an error": (raises, ": beside the camera"),
    "an error of a megabyte": (lambda message: boasting(message, message), "=HYPERLINK(1) red xx"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_bad_answer_to_the_hello_concerns_its_node_alone(
    kind: str, clock: Clock, warnings: list[str]
) -> None:
    answer, reason = ANSWERS[kind]
    with Net(answering(answer)) as net:
        for i in range(3):
            net.join(100 + i, i, 3)
        net.join(99)
        roster = Roster(clock)
        roster.wait_for_all(net, 60.0)
        roster.update(net)
    assert roster.nodes == {0: 100, 1: 101, 2: 102}
    assert list(roster.refused) == [99]
    (line,) = warnings
    assert line.startswith("node 99 is left out: ")
    assert reason in line
    assert line.isprintable()
    assert len(line) < 500


# --- a worker of Flower's simulation that died ----------------------------------------------------


@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_worker_ends_the_run_and_one_clients_word_for_it_does_not(dead: int) -> None:
    """Flower gives the dead worker client after client: what one client says may be made up."""
    reason = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly'>"

    dying = through(
        lambda messages, replies: [
            *(Message(Error(0, reason), reply_to=m) for m in messages[:dead]),
            *replies[dead:],
        ]
    )
    if dead == 1:
        assert federation("fedavg", client_app(), dying)[-1].metrics["replies"] == C - 1
    else:
        with pytest.raises(FederationError, match=r"^a worker process of Flower's simulation died"):
            federation("fedavg", client_app(), dying)

"""What a training message says beside its vectors, and the introduction before it."""

import json
import re
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.request import TrainInstruction
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.feddyn import FedDynClient
from fedaccord.wire.handshake import answer_handshake, handshake, read_handshake
from fedaccord.wire.instruction import (
    PROTOCOL,
    check_own_config,
    is_handshake,
    read_instruction,
    shapes_text,
    with_config,
    write_instruction,
)
from tests.grid import InProcessGrid
from tests.wire.wires import WIRES, through_protobuf

HALF = ClientHalf(FedDynClient(alpha=0.3), (SAM(rho=0.2),))
INSTRUCTION = TrainInstruction(
    *(3, 20, HALF, ((2, 3), (3,)), 0.1, 0.001, 10.0, 5, 0, 50, 7, "float32", "fed", 2, 4, 1, 0)
)


@pytest.fixture(autouse=True)
def sender() -> Any:
    """Messages that a test makes have a sender."""
    with InProcessGrid(ClientApp(), 1) as grid:
        yield grid


def message(content: RecordDict) -> Message:
    return Message(content, 1, "train")


def content(**extra: Any) -> RecordDict:
    return with_config(RecordDict({"config": write_instruction(INSTRUCTION)}), extra, "config", 1)


def test_an_instruction_survives_the_wire() -> None:
    sent = content(note="x")
    for received in (sent, *(wire(sent) for wire in WIRES)):
        copy = read_instruction(message(received))
        assert copy == INSTRUCTION
        assert type(copy.half.rule) is FedDynClient
        assert received.config_records["config"]["note"] == "x"


def test_what_the_local_round_needs_of_it() -> None:
    config = INSTRUCTION.config
    assert (config.round, config.rounds, config.client, config.seed) == (3, 20, 4, 7)
    assert (config.lr, config.weight_decay, config.clip_norm) == (0.1, 0.001, 10.0)
    assert config.shapes == ((2, 3), (3,))


@pytest.mark.parametrize("missing", ["instruction", "client", "accepted-round", "durable-round"])
def test_a_message_of_another_strategy_is_one_line(missing: str) -> None:
    incomplete = content()
    del incomplete.config_records["config"][missing]
    with pytest.raises(ValueError, match=f"from a FedAccord strategy, .* without '{missing}'"):
        read_instruction(message(incomplete))
    for foreign in (RecordDict(), RecordDict({"config": ConfigRecord({"server-round": 1})})):
        with pytest.raises(ValueError, match=r"without 'instruction' in its config$"):
            read_instruction(message(foreign))


@pytest.mark.parametrize("change", ["", "[]", "7", "field more", "field less", "half", "shapes"])
def test_an_instruction_of_another_version_is_one_line(change: str) -> None:
    record = content()
    fields = json.loads(str(record.config_records["config"]["instruction"]))
    if change == "field more":
        fields["newer"] = 1
    elif change == "field less":
        del fields["clip_norm"]
    elif change in fields:
        fields[change] = 5
    text = change if change in ("", "[]", "7") else json.dumps(fields)
    record.config_records["config"]["instruction"] = text
    with pytest.raises(ValueError, match="expected an instruction of this version") as error:
        read_instruction(message(record))
    assert "install the same version" in str(error.value)
    assert "\n" not in str(error.value)


OTHERS = [None, 0, PROTOCOL + 1, "1", True, [PROTOCOL]]  # None: before there were numbers


@pytest.mark.parametrize("number", OTHERS)
def test_an_instruction_of_another_protocol_is_refused_in_a_line_that_names_both(
    number: Any,
) -> None:
    record = content()
    fields = json.loads(str(record.config_records["config"]["instruction"]))
    assert fields["protocol"] == PROTOCOL
    fields["newer"] = 1  # whatever else it may hold
    fields["protocol"] = number
    if number is None:
        del fields["protocol"]
    record.config_records["config"]["instruction"] = json.dumps(fields)
    with pytest.raises(ValueError, match=refusal("server", number)):
        read_instruction(message(record))


def refusal(other: str, number: Any) -> str:
    words = "one without a number" if number is None else f"protocol {number!r}"
    line = f"expected a {other} with protocol {PROTOCOL}, as here, got {words}: install the same "
    return f"^{re.escape(line)}version of FedAccord on server and clients$"


@pytest.mark.parametrize("key", ["instruction", "client", "accepted-round", "hello"])
def test_a_callers_own_keys_may_not_take_ours(key: str) -> None:
    with pytest.raises(
        ValueError, match=f"^train_config, evaluate_config: .* of your own, got '{key}'"
    ) as error:
        check_own_config({"mine": 1, key: 1}, "config")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["config", "mine"])
def test_a_callers_own_config_is_in_a_record_of_its_name(key: str) -> None:
    check_own_config({"note": "x"}, key)
    record = RecordDict({"config": write_instruction(INSTRUCTION)})
    config = with_config(record, {"note": "x", "server-round": 9}, key, 3)[key]
    assert (config["note"], config["server-round"]) == ("x", 3)
    assert read_instruction(message(record)) == INSTRUCTION
    for own in ("down", "secure-sum"):
        with pytest.raises(ValueError, match=r"^configrecord_key: expected another name than"):
            check_own_config({}, own)


def test_shapes_as_text() -> None:
    assert shapes_text([(2, 3), (4,), ()]) == "2x3 4 scalar"


# --- hello ----------------------------------------------------------------------------------------


def test_hello_is_no_training_message() -> None:
    assert is_handshake(message(handshake()))
    assert is_handshake(message(through_protobuf(handshake())))
    assert not is_handshake(message(content()))
    assert not is_handshake(message(RecordDict()))


def answer(node_config: dict[str, Any]) -> Message:
    own = Context(1, 2, node_config, RecordDict(), {})
    return answer_handshake(message(handshake()), own)


def test_a_client_introduces_itself() -> None:
    assert read_handshake(answer({"partition-id": 4, "num-partitions": 9}))[:2] == (4, 9)


@pytest.mark.parametrize("config", [(3, 3), (-1, 3), (0, 0), (0, -1)])
def test_a_partition_id_that_cannot_be_is_one_line(config: tuple[int, int]) -> None:
    below = config[1] < 1  # the node itself says so, before it divides its data
    line = "num-partitions from 1 in" if below else "partition-id below num-partitions, got "
    with pytest.raises(ValueError, match=f"^expected {line}"):
        read_handshake(answer(dict(zip(("partition-id", "num-partitions"), config, strict=True))))


@pytest.mark.parametrize("number", OTHERS)
def test_a_server_of_another_protocol_is_refused_at_the_hello(number: Any) -> None:
    question = handshake()
    assert question.config_records["config"].pop("protocol") == PROTOCOL
    if number is not None:
        question.config_records["config"]["protocol"] = number
    own = Context(1, 2, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
    with pytest.raises(ValueError, match=refusal("server", number)):
        answer_handshake(message(question), own)


@pytest.mark.parametrize("config", [{"partition-id": 0, "num-partitions": 2}, {"data-path": "/"}])
@pytest.mark.parametrize("number", [None, 0, PROTOCOL + 1, 1.0, [PROTOCOL]])
def test_a_client_of_another_protocol_is_refused_at_the_hello(
    number: Any, config: dict[str, Any]
) -> None:
    reply = answer(config)
    assert reply.content.metric_records["metrics"].pop("protocol") == PROTOCOL
    if number is not None:
        reply.content.metric_records["metrics"]["protocol"] = number
    with pytest.raises(ValueError, match=refusal("client", number)):
        read_handshake(reply)


def test_an_answer_that_is_none_is_one_line() -> None:
    with pytest.raises(ValueError, match="answer the strategy's messages with"):
        read_handshake(Message(RecordDict(), reply_to=message(handshake())))

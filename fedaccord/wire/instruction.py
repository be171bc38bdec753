"""The content of a training message besides its vectors."""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedaccord.core.options import listed
from fedaccord.core.request import TrainInstruction
from fedaccord.wire.codec import dumps, loads
from fedaccord.wire.records import ARRAYS, CONFIG, SECURE, config_of

PROTOCOL = 4  # the version of all messages; another one is refused
INSTRUCTION, CLIENT, ACCEPTED = "instruction", "client", "accepted-round"
HANDSHAKE = "hello"  # the key of earlier versions, which thus detect that the protocols differ
VERSION = "protocol"
DURABLE = "durable-round"
OWN = ("client", "accepted", "durable")  # fields of a single client, written separately


def write_instruction(instruction: TrainInstruction) -> ConfigRecord:
    """A message's config."""
    own: dict[str, Any] = {
        INSTRUCTION: _write_common(instruction._replace(client=-1, accepted=-1, durable=-1)),
        CLIENT: instruction.client,
        ACCEPTED: instruction.accepted,
        DURABLE: instruction.durable,
    }
    return ConfigRecord(own)


def check_own_config(config: Iterable[str], key: str) -> None:
    """Raise ValueError, in one line, if a caller's config, or its record, has a reserved name."""
    clashes = [own for own in config if own in (INSTRUCTION, CLIENT, ACCEPTED, DURABLE, HANDSHAKE)]
    if clashes:
        raise ValueError(
            f"train_config, evaluate_config: expected keys of your own, got {clashes[0]!r}, which "
            "the strategy sets: make it an option of the strategy or use another name"
        )
    if key in (*ARRAYS, SECURE):
        raise ValueError(
            f"configrecord_key: expected another name than {listed((*ARRAYS, SECURE))}, which are "
            "the strategy's own"
        )


def with_config(
    content: RecordDict, config: Mapping[str, Any], key: str, server_round: int
) -> RecordDict:
    """A message's content with a caller's own config under ``key``, as Flower's strategies send."""
    record = config_of(content, key)
    content[key] = ConfigRecord({**config, "server-round": server_round, **record})
    return content


@lru_cache(maxsize=1)
def _write_common(instruction: TrainInstruction) -> str:
    """The part that all clients of a round receive, encoded once."""
    fields = {k: v for k, v in instruction._asdict().items() if k not in OWN}
    return json.dumps({VERSION: PROTOCOL, **fields, "half": dumps(instruction.half)})


def is_ours(message: Message) -> bool:
    """Whether it has an instruction."""
    return INSTRUCTION in config_of(message.content, CONFIG)


def read_instruction(message: Message) -> TrainInstruction:
    """Raises ValueError, in one line, for a message that is not from a FedAccord strategy."""
    config = config_of(message.content, CONFIG)
    missing = [key for key in (INSTRUCTION, CLIENT, ACCEPTED, DURABLE) if key not in config]
    if missing:
        raise ValueError(
            "expected a training message from a FedAccord strategy, "
            f"got one without {missing[0]!r} in its config"
        )
    text = config[INSTRUCTION]
    if not isinstance(text, str):
        raise _not_ours(str(text))
    common = _read_common(text)
    return common._replace(
        client=config[CLIENT], accepted=config[ACCEPTED], durable=config[DURABLE]
    )


@lru_cache(maxsize=8)
def _read_common(text: str) -> TrainInstruction:
    try:
        fields = json.loads(text)
        version = fields.pop(VERSION, None)
    except (AttributeError, TypeError, json.JSONDecodeError):
        raise _not_ours(text) from None
    check_protocol("server", version)
    try:
        half, shapes = fields.pop("half"), tuple(map(tuple, fields.pop("shapes")))
        return TrainInstruction(half=loads(half), shapes=shapes, **fields)
    except (KeyError, AttributeError, TypeError):
        raise _not_ours(text) from None


def _not_ours(text: str) -> ValueError:
    return ValueError(
        f"expected an instruction of this version of FedAccord, got {text[:80]!r}: install the "
        "same version on server and clients"
    )


def check_protocol(other: str, version: Any) -> None:
    """Raise ValueError, in one line, if a message from the ``other`` side has another protocol."""
    if type(version) is not int or version != PROTOCOL:
        theirs = "one without a number" if version is None else f"protocol {version!r:.40}"
        raise ValueError(
            f"expected a {other} with protocol {PROTOCOL}, as here, got {theirs}: install the same "
            "version of FedAccord on server and clients"
        )


def is_handshake(message: Message) -> bool:
    return HANDSHAKE in config_of(message.content, CONFIG)


def shapes_text(shapes: Iterable[Iterable[int]]) -> str:
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)

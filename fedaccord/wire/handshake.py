"""The handshake: before a node trains, it reports its client id and its model's tensors."""

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedaccord.core.node_config import NUM_PARTITIONS, PARTITION_ID, is_unnumbered
from fedaccord.core.options import listed
from fedaccord.core.request import DEFAULT, ModelLayout, ModelSettings
from fedaccord.wire.instruction import HANDSHAKE, PROTOCOL, VERSION, check_protocol
from fedaccord.wire.records import CONFIG, METRICS, config_of, metrics_of

UNNUMBERED = "without-number"  # in the reply of a node to which the server assigns an id
MAX_CLIENTS = 10**6  # limit of num-partitions
SETTINGS, LAYOUT, CARD = "model-settings", "model-layout", "model-card"
MAX_SIZE, MAX_VOCABULARY = 10**9, 10**7  # model card limits
MAX_NAME = 200  # characters of a class's name


class HandshakeReply(NamedTuple):
    """A node's report about itself."""

    client: int | None  # None: the server assigns it
    num_clients: int | None  # None: the server's
    layout: ModelLayout | None = None  # None: not reported
    card: Mapping[str, Any] | None = None  # how to build and feed the model; None: not reported


def handshake(settings: ModelSettings = DEFAULT) -> RecordDict:
    """A request for the node's client id and model, which needs no training."""
    question = ConfigRecord({HANDSHAKE: True, VERSION: PROTOCOL})
    question[SETTINGS] = json.dumps(settings._asdict())
    return RecordDict({CONFIG: question})


def answer_handshake(
    message: Message,
    context: Context,
    layout_of: Callable[[ModelSettings], ModelLayout] | None = None,
    card_of: Callable[[], Mapping[str, Any]] = dict,
) -> Message:
    """The reply to `handshake`: the node's client id, or that the server is to assign it; the
    tensors of its model, from ``layout_of``; and how a server without data builds the model, from
    ``card_of``, as `Task.card`.

    Raises ValueError if the node's config has neither, or the server has another protocol.
    """
    question = config_of(message.content, CONFIG)
    check_protocol("server", question.get(VERSION))
    config = context.node_config
    values: dict[str, int] = {VERSION: PROTOCOL}
    wanted: tuple[str, ...] = (PARTITION_ID, NUM_PARTITIONS)
    if is_unnumbered(config):
        values[UNNUMBERED] = 1
        wanted = (NUM_PARTITIONS,) if NUM_PARTITIONS in config else ()
    for key in wanted:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"expected an integer {key!r} in this node's config, got {value!r}: "
                'start the SuperNode with --node-config "partition-id=0 num-partitions=3", or with '
                "its own data by data-dir"
            )
        if key == NUM_PARTITIONS and value < 1:
            raise ValueError(f"expected {key} from 1 in this node's config, got {value}")
        values[key] = value
    metrics = MetricRecord(dict[str, int | float | list[int] | list[float]](values))
    content = RecordDict({METRICS: metrics})
    if layout_of:
        layout = layout_of(ModelSettings(**json.loads(str(question[SETTINGS]))))
        described = ConfigRecord({LAYOUT: json.dumps(layout._asdict())})
        if card := card_of():
            described[CARD] = json.dumps(card)
        content[CONFIG] = described
    return Message(content, reply_to=message)


def read_handshake(reply: Message) -> HandshakeReply:
    """The content of a reply to `handshake`.

    Raises ValueError, in one line, for anything else.
    """
    metrics, layout = metrics_of(reply.content, METRICS), _layout(reply.content)
    card = _card(reply.content)
    if UNNUMBERED in metrics or PARTITION_ID in metrics:
        check_protocol("client", metrics.get(VERSION))
    if UNNUMBERED in metrics:
        most = metrics.get(NUM_PARTITIONS)
        if most is not None and not (isinstance(most, int) and 0 < most <= MAX_CLIENTS):
            raise ValueError(f"expected {NUM_PARTITIONS} from 1 to {MAX_CLIENTS}, got {most!r:.40}")
        return HandshakeReply(None, most, layout, card)
    values = [metrics.get(key) for key in (PARTITION_ID, NUM_PARTITIONS)]
    if not all(isinstance(value, int) for value in values):
        raise ValueError(
            f"expected an answer with {PARTITION_ID!r} and {NUM_PARTITIONS!r}, got "
            f"{listed(metrics)}: answer the strategy's messages with fedaccord.train_locally"
        )
    client, num_clients = (cast(int, value) for value in values)
    if not 0 <= client < num_clients:
        raise ValueError(
            f"expected partition-id below num-partitions, got partition-id={client} "
            f"num-partitions={num_clients}"
        )
    if num_clients > MAX_CLIENTS:
        raise ValueError(f"expected num-partitions of at most {MAX_CLIENTS}, got {num_clients}")
    return HandshakeReply(client, num_clients, layout, card)


def _layout(content: RecordDict) -> ModelLayout | None:
    text = config_of(content, CONFIG).get(LAYOUT)
    if text is None:
        return None
    try:
        roles = json.loads(str(text))
        shapes = {
            role: {str(name): tuple(map(int, shape)) for name, shape in roles[role].items()}
            for role in ("shared", "buffers", "local")
        }
        return ModelLayout(**shapes, frozen={str(k): str(v) for k, v in roles["frozen"].items()})
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"expected the tensors of a model by role, got {text!r:.80}") from None


def class_names(card: Mapping[str, Any]) -> list[str]:
    """The names of the classes of a `Task.card`, or their number if they have no names."""
    return [name or str(k) for k, name in enumerate(card["class-names"])]


def _card(content: RecordDict) -> Mapping[str, Any] | None:
    """Raises ValueError, in one line, for a card that no model can have."""
    text = config_of(content, CONFIG).get(CARD)
    if text is None:
        return None
    try:
        card = json.loads(str(text))
        arguments, names = card["arguments"], card["class-names"]
        sizes = [*arguments["shape"], arguments["classes"]]
        fits = all(type(n) is int and n > 0 for n in sizes)
        fits = fits and max(prod(arguments["shape"]), arguments["classes"]) <= MAX_SIZE
        fits = fits and all(isinstance(v, str | int | list) for v in arguments.values())
        fits = fits and 0 < arguments.get("vocabulary", 1) <= MAX_VOCABULARY
        fits = fits and len(names) <= arguments["classes"]
        fits = fits and all(isinstance(n, str) and len(n) <= MAX_NAME for n in names)
        fits = fits and all(isinstance(x, float) for x in (*card["mean"], *card["std"]))
    except (KeyError, TypeError, AttributeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"expected how to build a model, got {text!r:.80}")
    return {k: card[k] for k in ("arguments", "class-names", "mean", "std")}

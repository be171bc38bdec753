"""NamedTuples of vectors <-> Flower records. The only place that knows record keys.

A training message carries ``DOWN`` (what the method broadcasts) and ``CONFIG`` (a `Order`: the
round, the client, the rule and the local settings); its reply carries ``UP`` and ``METRICS``. A
client keeps its state in ``context.state`` under ``STATE``.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

DOWN, CONFIG, INITIAL = "down", "config", "initial"
UP, METRICS = "up", "metrics"
STATE, STATE_INFO = "fedaccord-state", "fedaccord-state-info"
PARTITION_ID, NUM_PARTITIONS = "partition-id", "num-partitions"

Vectors = TypeVar("Vectors", bound=tuple[Any, ...])


class TensorArray(Array):
    """An Array that holds a tensor and writes its bytes when a runtime first asks for them.

    In process nobody asks, so vectors pass by reference: do not change one after packing it.
    """

    __qualname__ = "Array"  # Flower names the type of an object on the wire by its class

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self.stype = "numpy.ndarray"

    @property
    def data(self) -> bytes:  # type: ignore[override]
        if "bytes" not in self.__dict__:
            self.__dict__["bytes"] = Array(self.tensor.cpu().numpy()).data
        return cast(bytes, self.__dict__["bytes"])

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def to_tensor(array: Array) -> Tensor:
    """The tensor of an Array: the very one it holds in process, else a copy of its bytes."""
    if isinstance(array, TensorArray):
        return array.tensor
    return torch.from_numpy(array.numpy())


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


# --- NamedTuples of vectors -------------------------------------------------------------------


def pack(vectors: tuple[Any, ...]) -> ArrayRecord:
    """A NamedTuple of vectors under its field names; a nested one under dotted names.

    A field that is None is left out: it costs no traffic.
    """
    return to_record(dict(_leaves(vectors)))


def _leaves(vectors: tuple[Any, ...], prefix: str = "") -> Iterable[tuple[str, Tensor]]:
    for name, value in zip(vectors._fields, vectors, strict=True):  # type: ignore[attr-defined]
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif value is not None:
            yield from _leaves(value, f"{prefix}{name}.")


def unpack(kind: type[Vectors], record: ArrayRecord, *, like: Tensor | None = None) -> Vectors:
    """A NamedTuple of type ``kind``, without nesting, from the record that `pack` made of it.

    With ``like`` the fields must have its shape and dtype. Raises ValueError, naming the field, on
    missing or extra names, and on a wrong shape or dtype.
    """
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    optional = {name for name in fields if "None" in str(kind.__annotations__[name])}
    missing = [name for name in fields if name not in record and name not in optional]
    extra = [name for name in record if name not in fields]
    if missing or extra:
        raise ValueError(f"expected the vectors {list(fields)}, got {list(record)}")
    values = {name: to_tensor(record[name]) if name in record else None for name in fields}
    for name, value in values.items():
        if like is not None and value is not None:
            _check_like(name, value, like)
    return kind(**values)


def _check_like(name: str, value: Tensor, like: Tensor) -> None:
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"expected {name!r} of shape {tuple(like.shape)} and {like.dtype}, "
            f"got {tuple(value.shape)} and {value.dtype}"
        )


def size(record: ArrayRecord) -> tuple[int, int]:
    """Elements and bytes of the vectors of a record, headers not counted."""
    elements = [(torch.Size(a.shape).numel(), _itemsize(a.dtype)) for a in record.values()]
    return sum(n for n, _ in elements), sum(n * b for n, b in elements)


def _itemsize(dtype: str) -> int:
    return cast(int, getattr(torch, dtype).itemsize)


# --- the rule that travels with a message ---------------------------------------------------------


def encode(rule: Any) -> dict[str, Any]:
    """A rule (a dataclass of plain values and other rules) as JSON-able values."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    kind = type(rule)
    return {"class": f"{kind.__module__}:{kind.__qualname__}"} | {
        name: encode(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def decode(encoded: dict[str, Any], base: type) -> Any:
    """The rule that `encode` wrote. Raises ValueError where it names no subclass of ``base``."""
    module, _, name = encoded["class"].partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        kind = None
    unknown = ValueError(
        f"expected a message with a {base.__name__} that this client can import, got "
        f"{encoded['class']!r}: install the same version of its package on server and clients"
    )
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise unknown
    values = {
        name: decode(value, base) if isinstance(value, dict) and "class" in value else value
        for name, value in encoded.items()
        if name != "class"
    }
    try:
        return kind(**values)
    except TypeError:  # fields of another version
        raise unknown from None


# --- messages -------------------------------------------------------------------------------------


class Order(NamedTuple):
    """What a training message says beside its vectors."""

    round: int  # t, from 0
    client: int
    last_round: int  # the last round the server accepted from this client; -1: none
    rule: str  # JSON of `encode`
    shapes: str  # shapes of the parameters in vector order
    lr: float  # eta_t
    weight_decay: float
    clip_norm: float  # 0: off
    local_epochs: int
    local_steps: int  # 0: count epochs
    batch_size: int  # 0: the whole client as one batch, in order
    seed: int
    precision: str


def write_order(order: Order, extra: Mapping[str, Any]) -> ConfigRecord:
    """The message's config and a caller's own entries. Raises ValueError where they clash."""
    taken = [key for key in extra if key == HELLO or key in map(_key, Order._fields)]
    if taken:
        raise ValueError(
            f"train_config: expected keys of your own, got {taken[0]!r}, which the strategy sets: "
            "make it an option of the strategy or take another name"
        )
    return ConfigRecord(dict(extra) | {_key(name): v for name, v in order._asdict().items()})


def read_order(message: Message) -> Order:
    """Raises ValueError on a message that no FedAccord strategy wrote."""
    config: Mapping[str, Any] = message.content.config_records.get(CONFIG, {})
    missing = [name for name in Order._fields if _key(name) not in config]
    if missing:
        raise ValueError(
            "expected a training message from a FedAccord strategy, "
            f"got one without {_key(missing[0])!r} in its config"
        )
    return Order(**{name: config[_key(name)] for name in Order._fields})


def _key(name: str) -> str:
    return name.replace("_", "-")


def unpack_down(message: Message, kind: type[Vectors], *, like: Tensor) -> Vectors:
    """What a training message broadcasts, on the host; vectors of the model's shape and dtype."""
    if DOWN not in message.content.array_records:
        raise ValueError(
            f"expected a training message with {DOWN!r}, got {sorted(message.content)}"
        )
    return unpack(kind, message.content.array_records[DOWN], like=like)


def shapes_text(shapes: Iterable[Iterable[int]]) -> str:
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


# --- the introduction: before round 1 every node says which client it is --------------------------

HELLO = "hello"


def hello() -> RecordDict:
    """A question that a ClientApp answers without training: which client are you?"""
    return RecordDict({CONFIG: ConfigRecord({HELLO: True})})


def is_hello(message: Message) -> bool:
    return HELLO in message.content.config_records.get(CONFIG, {})


def introduce(message: Message, context: Context) -> Message:
    """Raises ValueError where the node's config has no partition-id or num-partitions."""
    config = context.node_config
    values = {}
    for key in (PARTITION_ID, NUM_PARTITIONS):
        if not isinstance(config.get(key), int):
            raise ValueError(
                f"expected an integer {key!r} in this node's config, got {config.get(key)!r}: "
                'start the SuperNode with --node-config "partition-id=0 num-partitions=3"'
            )
        values[key] = cast(int, config[key])
    return Message(RecordDict({METRICS: MetricRecord(values)}), reply_to=message)  # type: ignore[arg-type]


def introduction(reply: Message) -> tuple[int, int]:
    """(client, number of clients) of an answer to `hello`."""
    metrics = reply.content.metric_records[METRICS]
    return cast(int, metrics[PARTITION_ID]), cast(int, metrics[NUM_PARTITIONS])


# --- client state ---------------------------------------------------------------------------------


def save_state(context: Context, state: tuple[Any, ...], round: int) -> None:
    context.state[STATE] = pack(state)
    context.state[STATE_INFO] = ConfigRecord({"round": round})


def load_state(context: Context, like: Vectors) -> tuple[Vectors, int] | None:
    """The saved state, with the structure of ``like``, and its round; None before the first."""
    if STATE not in context.state:
        return None
    record = context.state.array_records[STATE]
    return _fill(like, record), cast(int, context.state.config_records[STATE_INFO]["round"])


def _fill(like: Vectors, record: ArrayRecord, prefix: str = "") -> Vectors:
    values: list[Any] = []
    for name, value in zip(like._fields, like, strict=True):  # type: ignore[attr-defined]
        if isinstance(value, tuple):
            values.append(_fill(value, record, f"{prefix}{name}."))
        elif value is None and prefix + name not in record:
            values.append(None)
        else:
            values.append(to_tensor(record[prefix + name]))
    return type(like)(*values)


def dumps(rule: Any) -> str:
    return json.dumps(encode(rule))


def loads(text: str, base: type) -> Any:
    return decode(json.loads(text), base)

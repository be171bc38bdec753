"""NamedTuples of vectors as Flower records: in process, as protobuf, as objects and as pickles."""

import pickle
from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedaccord.compat.flower import TensorArray
from fedaccord.core.rule import Stateless
from fedaccord.wire.records import pack, unpack, unpack_state
from fedaccord.wire.tensor_array import to_record, to_tensor
from tests.wire.wires import WIRES, through_protobuf

DTYPES = [torch.float32, torch.float64]


class Down(NamedTuple):
    w: Tensor
    missed: Tensor | None


class OlderDown(NamedTuple):
    """The same, its optional field spelled as before Python 3.10."""

    w: Tensor
    missed: Optional[Tensor]  # noqa: UP045


class Inner(NamedTuple):
    c_i: Tensor


class State(NamedTuple):
    last: Tensor
    base: Inner
    none: Stateless
    later: Tensor | None = None


def vector(dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    return torch.arange(start, start + 6, dtype=dtype) / 7


# --- in process -----------------------------------------------------------------------------------


def test_what_is_packed_is_unpacked_without_a_copy() -> None:
    w, missed = vector(), vector(start=3)
    record = pack(Down(w, missed))
    assert isinstance(record, ArrayRecord)
    assert list(record) == ["w", "missed"]
    down = unpack(Down, record)
    assert type(down) is Down
    assert down.w.data_ptr() == w.data_ptr()
    assert down.missed is not None
    assert down.missed.data_ptr() == missed.data_ptr()


def test_a_vector_in_process_is_the_very_tensor() -> None:
    array = TensorArray(vector())
    assert to_tensor(array) is array.__dict__["tensor"]
    assert "bytes" not in array.__dict__  # they were not requested
    array.data  # noqa: B018
    assert "bytes" in array.__dict__


@pytest.mark.parametrize("kind", [Down, OlderDown])
def test_a_field_that_is_none_is_left_out(kind: type[Down]) -> None:
    record = pack(kind(vector(), None))
    assert list(record) == ["w"]
    assert unpack(kind, record).missed is None
    with pytest.raises(ValueError, match=r"^expected the vectors \['w', 'missed'\], got \[\]$"):
        unpack(kind, ArrayRecord())


def test_nested_fields_have_dotted_names() -> None:
    state = State(vector(), Inner(vector(start=1)), Stateless())
    assert list(pack(state)) == ["last", "base.c_i"]
    assert list(pack(Stateless())) == []


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": ({"missed": vector()}, "expected the vectors ['w', 'missed'], got ['missed']"),
    "extra": (
        {"w": vector(), "v": vector()},
        "expected the vectors ['w', 'missed'], got ['w', 'v']",
    ),
    "shape": (
        {"w": vector()[:1]},
        "expected 'w' of shape (6,) and torch.float32, got (1,) and torch.float32",
    ),
    "dtype": (
        {"w": vector(), "missed": vector(torch.float64)},
        "expected 'missed' of shape (6,) and torch.float32, got (6,) and torch.float64",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_unpacking_says_in_one_line_what_does_not_fit(bad: str) -> None:
    tensors, line = BAD[bad]
    for record in (to_record(tensors), ArrayRecord(dict(tensors))):
        with pytest.raises(ValueError, match=r"^expected") as error:
            unpack(Down, record, like=vector())
        assert str(error.value) == line


# --- on the wire ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_survive_the_wire_bit_for_bit(
    wire: Callable[[RecordDict], RecordDict], dtype: torch.dtype
) -> None:
    w, missed = vector(dtype), vector(dtype, start=5) * torch.pi
    received = wire(RecordDict({"down": pack(Down(w, missed))})).array_records["down"]
    assert list(received) == ["w", "missed"]
    for name, sent in (("w", w), ("missed", missed)):
        assert isinstance(received[name], Array)
        assert (received[name].dtype, received[name].shape) == (str(dtype)[6:], (6,))
        assert torch.equal(to_tensor(received[name]), sent)
    down = unpack(Down, received, like=w)
    assert down.w.dtype == dtype
    down.w.add_(1)  # it may be written to


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(1.5), torch.zeros(0), torch.arange(6.0).view(2, 3).T, torch.arange(6.0)[::2]],
    ids=["scalar", "empty", "transposed", "strided"],
)
def test_any_shape_and_layout_survives_the_wire(
    wire: Callable[[RecordDict], RecordDict], tensor: Tensor
) -> None:
    array = wire(RecordDict({"r": to_record({"x": tensor})})).array_records["r"]["x"]
    assert torch.equal(to_tensor(array), tensor)


def test_objects_name_their_type_as_flowers_own_arrays_do() -> None:
    ours, theirs = TensorArray(vector()), Array(vector())
    assert ours.deflate().split(b" ")[0] == theirs.deflate().split(b" ")[0] == b"Array"
    assert ours.object_id == theirs.object_id


def test_a_gradient_does_not_travel() -> None:
    w = torch.ones(3, requires_grad=True) * 2
    assert not TensorArray(w).__dict__["tensor"].requires_grad
    assert torch.equal(to_tensor(pickle.loads(pickle.dumps(TensorArray(w)))), w.detach())


UNREADABLE = {
    "serialised by somebody else": Array("float32", (6,), "pickle", b"x"),
    "no NumPy bytes": Array("float32", (6,), "numpy.ndarray", b"x"),
    "no bytes at all": Array("float32", (6,), "numpy.ndarray", b""),
}


@pytest.mark.parametrize("array", UNREADABLE.values(), ids=UNREADABLE)
def test_bytes_that_are_no_array_of_numbers_are_one_line(array: Array) -> None:
    with pytest.raises(
        ValueError, match=r"^expected an array of numbers, got float32 as "
    ) as error:
        unpack(Down, ArrayRecord({"w": array}))
    assert "\n" not in str(error.value)


def test_a_dtype_that_pytorch_lacks_is_one_line() -> None:
    words = Array(np.array(["a", "b"]))
    with pytest.raises(ValueError, match=r"^expected an array of numbers, got "):
        to_tensor(words)


# --- states ---------------------------------------------------------------------------------------


class Seen(NamedTuple):
    lam_bar: Tensor
    seen: dict[int, Tensor]


def test_a_dict_of_vectors_by_round_survives() -> None:
    state = Seen(vector(), {0: vector(start=1), 12: vector(start=2)})
    record = pack(state)
    assert list(record) == ["lam_bar", "seen.0", "seen.12"]
    wire = through_protobuf(RecordDict({"state": record}))["state"]
    assert isinstance(wire, ArrayRecord)
    nothing = torch.empty(0)
    for source in (record, wire):
        copy = unpack_state(Seen(nothing, {}), source)
        assert type(copy) is Seen
        assert list(copy.seen) == [0, 12]
        assert all(torch.equal(copy.seen[t], v) for t, v in state.seen.items())


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            pack(Inner(vector())),
            "expected a state of the vectors ['base.c_i', 'last'], got ['c_i']",
        ),
        (
            to_record({"last": vector(), "base.c_i": vector(), "base.v": vector()}),
            "expected a state of the vectors ['base.c_i', 'last'], got ['base.c_i', 'base.v', 'la",
        ),
    ],
    ids=["missing", "extra"],
)
def test_a_state_of_another_method_is_one_line(record: ArrayRecord, line: str) -> None:
    nothing = torch.empty(0)
    with pytest.raises(ValueError, match=r"^expected a state") as error:
        unpack_state(State(nothing, Inner(nothing), Stateless()), record)
    assert str(error.value).startswith(line)

"""Tensors in the memory of what carries them: pickles with buffers beside them, as Ray's are."""

import pickle
from typing import cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from torch import Tensor

from fedaccord.compat.flower import KeptArray, TensorArray
from fedaccord.core.rule import Model
from fedaccord.storage.store import ContextStore, Memory, Version
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_record, to_tensor

W = torch.randn(1000)


def travelled(record: ArrayRecord) -> tuple[ArrayRecord, bytes, list[memoryview]]:
    """The record as it arrives, its pickle, and the memory, not to be written to, beside it."""
    buffers: list[pickle.PickleBuffer] = []
    words = pickle.dumps(record, protocol=5, buffer_callback=buffers.append)
    memory = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    return cast(ArrayRecord, pickle.loads(words, buffers=memory)), words, memory


def lies_in(tensor: Tensor, memory: memoryview) -> bool:
    return tensor.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


def test_a_message_is_read_where_it_lies() -> None:
    twice = travelled(to_record({"w": W}))[0]  # as a client that hands it on
    for record in (to_record({"w": W}), twice):
        copy, words, memory = travelled(record)
        assert len(words) < 1000  # the vector is not among them
        assert type(copy["w"]) is TensorArray
        w = to_tensor(copy["w"])
        assert lies_in(w, memory[0])
        assert torch.equal(w, W)
        assert torch.equal(torch.from_numpy(copy["w"].numpy()), W)


def test_its_memory_is_the_tensors_until_it_is_carried() -> None:
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(to_record({"w": W}), protocol=5, buffer_callback=buffers.append)
    assert lies_in(W, buffers[0].raw())


def test_what_a_client_remembers_is_taken_out_of_it() -> None:
    context = Context(run_id=1, node_id=2, node_config={}, run_config={}, state=RecordDict())
    own = ContextStore(context)
    own.save(0, Memory(Version(0, own.pack(0, 0, Model(W)))))
    record = context.state.array_records["fedaccord-state"]
    for _ in range(2):  # to the client's process and back
        record, words, memory = travelled(record)
        assert len(words) < 1000
        assert type(record["w"]) is KeptArray
        w = to_tensor(record["w"])
        assert not lies_in(w, memory[0])
        assert torch.equal(w, W)


def test_a_pickle_without_buffers_beside_it_gives_a_vector_of_its_own() -> None:
    copy = pickle.loads(pickle.dumps(pack(Model(W))))
    to_tensor(copy["w"]).add_(1)
    assert not torch.equal(to_tensor(copy["w"]), W)


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(6, dtype=np.float32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3)),
        np.float64(3.0),
    ],
)
def test_a_received_array_is_read_over_its_bytes(numbers: np.ndarray) -> None:
    array = Array(np.asarray(numbers))
    tensor = to_tensor(array)
    assert torch.equal(tensor, torch.from_numpy(np.array(numbers)))
    data = np.frombuffer(array.data, np.uint8)
    if tensor.numel():
        assert 0 < tensor.data_ptr() - data.ctypes.data < len(data)


def test_bytes_at_an_odd_place_are_copied() -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    assert len(data) % 8
    array = Array(np.zeros(1))
    array.data = data + np.float64(2.5).tobytes()
    tensor = to_tensor(array)
    assert tensor.tolist() == [2.5]
    assert tensor.data_ptr() % tensor.itemsize == 0


def test_bytes_that_are_no_numpy_file_are_refused() -> None:
    array = Array(dtype="float64", shape=(1,), stype="else", data=Array(np.zeros(1)).data)
    with pytest.raises(ValueError, match="expected an array of numbers, got float64 as else"):
        to_tensor(array)

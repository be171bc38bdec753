"""Tensors in the memory of what carries them: pickles with buffers beside them, as Ray's are."""

import pickle
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from torch import Tensor

from fedaccord.compat.flower_1_41 import KeptArray, TensorArray
from fedaccord.core.rule import Model
from fedaccord.storage.store import ContextStore, Memory, Version
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_record, to_tensor

W = torch.randn(1000)


def travelled(record: ArrayRecord) -> tuple[ArrayRecord, bytes, list[memoryview]]:
    """The record as it arrives, its pickle, and the memory, not to be written to, beside it."""
    sent: list[pickle.PickleBuffer] = []
    words = pickle.dumps(record, protocol=5, buffer_callback=sent.append)
    memory = [memoryview(bytes(buffer.raw())) for buffer in sent]
    return cast(ArrayRecord, pickle.loads(words, buffers=memory)), words, memory


def lies_in(tensor: Tensor, memory: memoryview) -> bool:
    return tensor.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


def test_a_message_is_read_where_it_lies() -> None:
    twice = travelled(to_record({"w": W}))[0]  # as a client that hands it on
    for record in (to_record({"w": W}), twice):
        received, words, memory = travelled(record)
        assert len(words) < 1000  # the vector is not among them
        assert type(received["w"]) is TensorArray
        w = to_tensor(received["w"])
        assert lies_in(w, memory[0])
        assert torch.equal(w, W)
        assert torch.equal(torch.from_numpy(received["w"].numpy()), W)


def test_its_memory_is_the_tensors_until_it_is_carried() -> None:
    sent: list[pickle.PickleBuffer] = []
    pickle.dumps(to_record({"w": W}), protocol=5, buffer_callback=sent.append)
    assert lies_in(W, sent[0].raw())


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
    received = pickle.loads(pickle.dumps(pack(Model(W))))
    to_tensor(received["w"]).add_(1)
    assert not torch.equal(to_tensor(received["w"]), W)

"""Large vectors of states in memory have pages of their own, and no tensor is kept of them."""

import gc
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from fedaccord.storage.memories import PagedMemories
from fedaccord.storage.store import Memory, Version


class State(NamedTuple):
    large: Tensor
    small: Tensor | None = None


def test_large_vectors_have_pages_of_their_own() -> None:
    given = State(torch.randn(2**18 + 1), torch.randn(3, dtype=torch.float64))
    own = PagedMemories()
    kept = own.pack(7, 0, given)
    own.save(7, Memory(Version(0, kept), None, 5))
    first = own.state(7, 0)
    assert torch.equal(first.large, given.large)
    assert first.large.data_ptr() % mmap.PAGESIZE == 0
    assert first.large.data_ptr() != given.large.data_ptr()
    assert first.small is given.small
    later = own.pack(7, 1, State(given.large + 1, given.small))
    own.save(7, Memory(Version(1, later), Version(0, kept)))
    assert own.state(7, 0).large.data_ptr() == first.large.data_ptr()  # not copied again
    assert torch.equal(own.state(7, 1).large, given.large + 1)
    own.remove(7)
    assert own.clients() == []
    assert torch.equal(first.large, given.large)  # it stays as long as it is used


def test_no_tensor_of_a_large_vector_is_kept() -> None:
    """A tensor itself takes a place in the heap that a freed vector had."""
    own, before = PagedMemories(), tensors_alive()
    for i in range(20):
        own.save(i, Memory(Version(0, own.pack(i, 0, State(torch.zeros(2**18))))))
    assert tensors_alive() <= before + 2  # the form that all share, a view, and what it shows
    assert own.state(3, 0).large.shape == (2**18,)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(found) is Tensor for found in gc.get_objects())


def test_small_states_are_kept_as_they_are() -> None:
    state = State(torch.zeros(5))
    assert PagedMemories().pack(0, 3, state) is state

"""States in files or in pages of their own are those by reference; files do not grow."""

import gc
import mmap
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedaccord.core.vectors import leaves
from fedaccord.storage import in_process
from fedaccord.storage.in_process import FileStore, InProcessStore, PageStore
from fedaccord.storage.store import Memory, Version, version


class State(NamedTuple):
    lam: torch.Tensor | None
    more: Any = None


def state(number: float) -> State:
    """Of vectors of several types, and of two forms."""
    more = State(torch.full((5,), number, dtype=torch.float64)) if number % 2 else None
    return State(torch.full((33,), number), (more, torch.tensor([True, False])) and more)


def put(store: InProcessStore, client: int, t: int, new: Any, **others: Any) -> None:
    """A new latest version; others: fields of `Memory`."""
    content = store.pack(client, t, new)
    store.save(client, Memory(Version(t, content), **others))


def values(store: InProcessStore, client: int) -> Any:
    """A memory with lists instead of tensors."""

    def lists(content: Any) -> Any:
        return [(name, x.tolist()) for name, x in leaves(store.unpack(content))]

    memory = store.load(client)
    if memory is None:
        return None
    versions = (memory.latest, memory.before, memory.durable)
    return [*(v and (v.round, lists(v.state)) for v in versions), memory.attempt]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "SHARD", 1000)  # a few slots a file
    monkeypatch.setattr(in_process, "OWN_PAGES_BYTES", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [FileStore, PageStore])
def test_they_store_what_memory_does(kind: type[PageStore]) -> None:
    """Visits in any order: some replies are lost, some clients are asked twice, some forget."""
    generator, plain, packed = random.Random(0), InProcessStore(), kind()
    accepted: dict[int, int] = {}
    durable: dict[int, int] = {}  # as of a checkpoint every 15 rounds
    for t in range(60):
        for i in generator.sample(range(12), 4):
            last, new = accepted.get(i, -1), state(100.0 * t + i)
            for store in (plain, packed):
                memory = store.load(i)
                number = durable.get(i, -1)
                third = None if number == last else version(memory, number)
                before = version(memory, last)
                put(store, i, t, new, before=before, attempt=t // 20, durable=third)
            if generator.random() < 0.7:
                accepted[i] = t
        if t % 15 == 14:
            durable = dict(accepted)
        if t % 10 == 9:
            client = generator.choice(plain.clients())
            plain.remove(client)
            packed.remove(client)
            accepted.pop(client, None)
        assert packed.clients() == plain.clients()
        assert all(values(packed, i) == values(plain, i) for i in plain.clients())
    assert packed.load(99) is None


@pytest.mark.parametrize("kind", [InProcessStore, FileStore, PageStore])
def test_a_checkpoint_has_the_state_of_the_last_accepted_reply(kind: type[InProcessStore]) -> None:
    store = kind()
    put(store, 0, 1, state(1.0))
    put(store, 0, 3, state(3.0), before=version(store.load(0), 1))  # whose reply was lost
    ((round, stored),) = store.states([1]).values()
    assert (round, stored.lam.unique().tolist()) == (1, [1.0])


@pytest.mark.usefixtures("small")
def test_slots_are_used_again() -> None:
    """Two versions of each client are stored, so five slots serve two clients for ever."""
    store = FileStore()
    for t in range(50):
        for i in (0, 1):
            new = State(torch.full((64,), float(t)))
            put(store, i, t, new, before=version(store.load(i), t - 1))
    assert len(store._files) == 2  # 3 slots of 256 bytes each
    assert values(store, 1)[0][0] == 49
    assert values(store, 1)[1][0] == 48


@pytest.mark.usefixtures("small")
def test_the_slots_of_clients_that_are_removed_or_restored_are_used_again() -> None:
    store, own = FileStore(), State(torch.ones(64))
    for _ in range(20):
        store.restore((i, (0, own)) for i in range(3))  # 3 slots of 256 bytes, a file
        store.remove(1)
        put(store, 1, 5, own)
    assert len(store._files) == 1
    assert store.clients() == [0, 1, 2]


def test_a_file_has_no_more_slots_than_memory_has_room_for_their_table() -> None:
    store = FileStore()
    put(store, 0, 0, State(torch.ones(3)))
    assert len(store._files[0]) == in_process.SLOTS * in_process.ALIGNED


def test_a_client_without_vectors_takes_no_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "not there")
    for t in range(3):
        put(store, 0, t, State(None), before=version(store.load(0), t - 1))
    assert store.states([2]) == {0: (2, State(None))}
    assert store._files == []


def test_the_memory_stays_if_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    store, plain = FileStore(), InProcessStore()
    put(store, 0, 0, state(2.0))
    put(plain, 0, 0, state(2.0))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(in_process, "mapped", full)
    store._free.clear()
    with pytest.raises(OSError, match="/x"):
        put(store, 0, 1, state(4.0))
    assert values(store, 0) == values(plain, 0)


def test_states_do_not_stay_in_memory() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc here")

    def resident() -> int:
        line = next(x for x in path.read_text().splitlines() if x.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    store, n = FileStore(), 2**20
    v = torch.ones(n)
    put(store, 0, 0, State(v))
    before = resident()
    for t in range(1, 4):
        for i in range(30):
            memory = store.load(i)
            total = float(store.unpack(memory.latest.state).lam.sum()) if memory else 0.0
            assert total in (0.0, n)
            put(store, i, t, State(v), before=memory and memory.latest)
    assert len(store.clients()) == 30
    assert resident() - before < 0.1 * 2 * 30 * v.nbytes
    assert store.state(7, 3).lam.sum() == n


def test_a_state_that_was_asked_for_stays_as_it_is() -> None:
    store = FileStore()
    put(store, 0, 0, State(torch.zeros(3)))
    first = store.state(0, 0).lam
    for t in range(1, 4):
        put(store, 0, t, State(torch.ones(3)))
    assert not first.any()
    assert store.state(0, 0) is None


def test_large_states_have_pages_of_their_own() -> None:
    own = State(torch.randn(2**18 + 1), State(torch.randn(3, dtype=torch.float64)))
    paged = PageStore()
    put(paged, 7, 0, own, attempt=5)
    first = paged.state(7, 0)
    assert torch.equal(first.lam, own.lam)
    assert torch.equal(first.more.lam, own.more.lam)
    assert first.lam.data_ptr() % mmap.PAGESIZE == 0
    assert first.lam.data_ptr() != own.lam.data_ptr()
    put(paged, 7, 1, State(own.lam + 1, own.more), before=version(paged.load(7), 0))
    assert paged.state(7, 0).lam.data_ptr() == first.lam.data_ptr()  # not copied again
    assert torch.equal(paged.state(7, 1).lam, own.lam + 1)
    paged.remove(7)
    assert paged.clients() == []
    assert torch.equal(first.lam, own.lam)  # it stays as long as it is used


def test_small_states_are_stored_by_reference() -> None:
    small = State(torch.zeros(5))
    assert PageStore().pack(0, 3, small) is small


def test_no_tensor_of_a_large_state_is_kept() -> None:
    """A tensor itself takes a place in the heap that a freed vector had."""
    own, before = PageStore(), tensors_alive()
    for i in range(20):
        put(own, i, 0, State(torch.zeros(2**18)))
    assert tensors_alive() <= before + 2  # the form that all share, a view, and what it shows
    assert own.state(3, 0).lam.shape == (2**18,)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(each) is torch.Tensor for each in gc.get_objects())

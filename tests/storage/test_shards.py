"""Memories in mapped files are those in memory, for any order of visits, and files do not grow."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedaccord.core.vectors import leaves
from fedaccord.storage import shards
from fedaccord.storage.memories import Memories
from fedaccord.storage.shards import Shards
from fedaccord.storage.store import Memory, Version, version


class State(NamedTuple):
    lam: torch.Tensor | None
    more: Any = None


def state(number: float) -> State:
    """Of vectors of several types, and of two forms."""
    more = State(torch.full((5,), number, dtype=torch.float64)) if number % 2 else None
    return State(torch.full((33,), number), (more, torch.tensor([True, False])) and more)


def put(memories: Memories, client: int, t: int, new: Any, **others: Any) -> None:
    """A new latest version; others: fields of `Memory`."""
    kept = memories.pack(client, t, new)
    memories.save(client, Memory(Version(t, kept), **others))


def values(memories: Memories, client: int) -> Any:
    """A memory with lists instead of tensors."""

    def lists(kept: Any) -> Any:
        return [(name, x.tolist()) for name, x in leaves(memories.unpack(kept))]

    memory = memories.load(client)
    if memory is None:
        return None
    kept = (memory.latest, memory.before, memory.durable)
    return [*(v and (v.round, lists(v.state)) for v in kept), memory.attempt]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD", 1000)  # a few places a file


@pytest.mark.usefixtures("small")
def test_they_store_what_memory_does(tmp_path: Path) -> None:
    """Visits in any order: some replies are lost, some clients are asked twice, some forget."""
    generator, plain, filed = random.Random(0), Memories(), Shards(tmp_path)
    accepted: dict[int, int] = {}
    durable: dict[int, int] = {}  # as of a checkpoint every 15 rounds
    for t in range(60):
        for i in generator.sample(range(12), 4):
            last, new = accepted.get(i, -1), state(100.0 * t + i)
            for memories in (plain, filed):
                memory = memories.load(i)
                held = durable.get(i, -1)
                third = None if held == last else version(memory, held)
                before = version(memory, last)
                put(memories, i, t, new, before=before, attempt=t // 20, durable=third)
            if generator.random() < 0.7:
                accepted[i] = t
        if t % 15 == 14:
            durable = dict(accepted)
        if t % 10 == 9:
            gone = generator.choice(plain.clients())
            plain.remove(gone)
            filed.remove(gone)
            accepted.pop(gone, None)
        assert filed.clients() == plain.clients()
        assert all(values(filed, i) == values(plain, i) for i in plain.clients())
    assert filed.load(99) is None


@pytest.mark.usefixtures("small")
def test_places_are_used_again() -> None:
    """Two versions of each client are stored, so five places serve two clients for ever."""
    filed = Shards()
    for t in range(50):
        for i in (0, 1):
            new = State(torch.full((64,), float(t)))
            put(filed, i, t, new, before=version(filed.load(i), t - 1))
    assert len(filed._shards) == 2  # 3 places of 256 bytes each
    assert values(filed, 1)[0][0] == 49
    assert values(filed, 1)[1][0] == 48


@pytest.mark.usefixtures("small")
def test_the_places_of_clients_that_are_removed_or_restored_are_used_again() -> None:
    filed, own = Shards(), State(torch.ones(64))
    for _ in range(20):
        filed.restore((i, (0, own)) for i in range(3))  # 3 places of 256 bytes, a file
        filed.remove(1)
        put(filed, 1, 5, own)
    assert len(filed._shards) == 1
    assert filed.clients() == [0, 1, 2]


def test_a_client_without_vectors_takes_no_file(tmp_path: Path) -> None:
    filed = Shards(tmp_path / "not there")
    for t in range(3):
        put(filed, 0, t, State(None), before=version(filed.load(0), t - 1))
    assert filed.states([2]) == {0: (2, State(None))}
    assert filed._shards == []


def test_the_memory_stays_if_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    filed, plain = Shards(), Memories()
    put(filed, 0, 0, state(2.0))
    put(plain, 0, 0, state(2.0))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(shards, "mapped", full)
    filed._free.clear()
    with pytest.raises(OSError, match="/x"):
        put(filed, 0, 1, state(4.0))
    assert values(filed, 0) == values(plain, 0)


def test_states_do_not_stay_in_memory() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc here")

    def resident() -> int:
        line = next(x for x in path.read_text().splitlines() if x.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    filed, n = Shards(), 2**20
    v = torch.ones(n)
    put(filed, 0, 0, State(v))
    before = resident()
    for t in range(1, 4):
        for i in range(30):
            used = filed.load(i)
            total = float(filed.unpack(used.latest.state).lam.sum()) if used else 0.0
            assert total in (0.0, n)
            put(filed, i, t, State(v), before=used and used.latest)
    assert len(filed.clients()) == 30
    assert resident() - before < 0.1 * 2 * 30 * v.nbytes
    assert filed.state(7, 3).lam.sum() == n


def test_a_state_that_was_asked_for_stays_as_it_is() -> None:
    filed = Shards()
    put(filed, 0, 0, State(torch.zeros(3)))
    first = filed.state(0, 0).lam
    for t in range(1, 4):
        put(filed, 0, t, State(torch.ones(3)))
    assert not first.any()
    assert filed.state(0, 0) is None

"""Memories in mapped files are those in memory, for any order of visits, and files do not grow."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.storage import shards, store
from fedaccord.storage.shards import Shards
from fedaccord.storage.store import Memory, Version


class State(NamedTuple):
    lam: torch.Tensor | None
    more: Any = None


def state(number: float) -> State:
    """Of vectors of several types, and of two forms."""
    more = State(torch.full((5,), number, dtype=torch.float64)) if number % 2 else None
    return State(torch.full((33,), number), (more, torch.tensor([True, False])) and more)


def values(memory: Memory | None) -> Any:
    """A memory with lists in the place of tensors."""
    if memory is None:
        return None
    kept = (memory.latest, memory.before, memory.durable)
    versions = [v and (v.round, [(n, x.tolist()) for n, x in leaves(v.state)]) for v in kept]
    return [*versions, memory.attempt]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD", 1000)  # a few places a file


@pytest.mark.usefixtures("small")
def test_they_remember_what_a_dictionary_does(tmp_path: Path) -> None:
    """Visits in any order, some of whose replies were lost, some asked twice, some forgotten."""
    generator, plain, filed = random.Random(0), dict[int, Memory](), Shards(tmp_path)
    accepted: dict[int, int] = {}
    durable: dict[int, int] = {}  # as of a checkpoint every 15 rounds
    for t in range(60):
        for i in generator.sample(range(12), 4):
            last, new = accepted.get(i, -1), state(100.0 * t + i)
            for memories in (plain, filed):
                memory = memories.get(i)
                before = store.version(memory, last)
                latest = Version(t, new)
                held = durable.get(i, -1)
                third = None if held == last else store.version(memory, held)
                memories[i] = Memory(latest, before, t // 20, third)
            if generator.random() < 0.7:
                accepted[i] = t
        if t % 15 == 14:
            durable = dict(accepted)
        if t % 10 == 9:
            gone = generator.choice(sorted(plain))
            assert values(plain.pop(gone)) == values(filed.pop(gone))
            accepted.pop(gone, None)
        assert {i: values(m) for i, m in filed.items()} == {i: values(m) for i, m in plain.items()}
        assert len(filed) == len(plain)
    assert filed.get(99) is None
    with pytest.raises(KeyError):
        filed[99]


@pytest.mark.usefixtures("small")
def test_places_are_used_again() -> None:
    """Two versions of each client are kept, so that five places serve two of them for ever."""
    filed = Shards()
    for t in range(50):
        for i in (0, 1):
            new = State(torch.full((64,), float(t)))
            filed[i] = store.Memory(Version(t, new), store.version(filed.get(i), t - 1))
    assert len(filed._shards) == 2  # 3 places of 256 bytes each
    assert values(filed[1])[0][0] == 49
    assert values(filed[1])[1][0] == 48


def test_a_client_without_vectors_takes_no_file(tmp_path: Path) -> None:
    filed = Shards(tmp_path / "not there")
    for t in range(3):
        filed[0] = Memory(Version(t, State(None)), store.version(filed.get(0), t - 1))
    assert filed[0].latest == (2, State(None))
    assert filed._shards == []


def test_where_the_disk_is_full_the_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    filed = Shards()
    filed[0] = Memory(Version(0, state(2.0)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(shards, "mapped", full)
    filed._free.clear()
    with pytest.raises(OSError, match="/x"):
        filed[0] = Memory(Version(1, state(4.0)), filed[0].latest)
    assert values(filed[0]) == values(Memory(Version(0, state(2.0))))


def test_states_do_not_stay_in_memory() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc here")

    def resident() -> int:
        line = next(x for x in path.read_text().splitlines() if x.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    filed, n = Shards(), 2**20
    v = torch.ones(n)
    filed[0] = Memory(Version(0, State(v)))
    before = resident()
    for t in range(1, 4):
        for i in range(30):
            used = filed.get(i)
            total = 0.0 if used is None else float(used.latest.state.lam.sum())
            assert total in (0.0, n)
            filed[i] = Memory(Version(t, State(v)), used and used.latest)
    assert len(filed) == 30
    assert resident() - before < 0.1 * 2 * 30 * v.nbytes
    assert map_vectors(torch.clone, filed[7].latest.state).lam.sum() == n

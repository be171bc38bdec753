"""A client's memory on disk: what is kept, what is lost, and what is reported."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedaccord.core.client_half import state_like
from fedaccord.core.rule import LocalRule
from fedaccord.storage.disk import DiskStore, prepare
from fedaccord.storage.store import Memory, MissingStateError, Version
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.scaffold import ScaffoldClient
from tests.storage.test_store import instruction


class Inner(NamedTuple):
    c_i: Tensor


class State(NamedTuple):
    last: Tensor
    base: Inner


LIKE = State(torch.empty(0), Inner(torch.empty(0)))


def state(start: float) -> State:
    return State(torch.arange(4.0) + start, Inner(torch.arange(3, dtype=torch.float64) - start))


def memory(store: DiskStore, *rounds: int, attempt: int = 0) -> Memory:
    """Of the latest version, the one before and that of a checkpoint."""
    versions = [Version(t, store.pack(2, t, state(t))) for t in rounds]
    latest, before, durable = [*versions, None, None][:3]
    assert latest is not None
    return Memory(latest, before, attempt, durable)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, "first")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of client 2 in `store`."""
    return tmp_path / "first" / "2"


def same(a: State, b: State) -> bool:
    return torch.equal(a.last, b.last) and torch.equal(a.base.c_i, b.base.c_i)


def test_it_is_there_in_another_process(store: DiskStore, tmp_path: Path) -> None:
    assert store.load(2) is None
    store.save(2, memory(store, 7, 3, 1, attempt=2))
    again = DiskStore(tmp_path, "first")
    entry = again.load(2)
    assert entry is not None
    assert entry.before is not None
    assert entry.durable is not None
    assert (entry.latest.round, entry.before.round, entry.durable.round) == (7, 3, 1)
    assert entry.attempt == 2
    assert same(again.unpack(entry.durable.state, LIKE), state(1))
    assert same(again.unpack(entry.latest.state, LIKE), state(7))
    assert same(again.unpack(entry.before.state, LIKE), state(3))


def test_clients_and_federations_are_kept_apart(tmp_path: Path) -> None:
    mine = DiskStore(tmp_path, "first")
    mine.save(2, memory(mine, 1))
    assert mine.load(3) is None
    for other in ("second", "../first/2"):
        assert DiskStore(tmp_path, other).load(2) is None
        assert DiskStore(tmp_path, other).folder.is_relative_to(tmp_path)
    assert DiskStore(tmp_path, "..").folder.parent == tmp_path


def test_the_versions_of_the_memory_are_kept_and_no_more(store: DiskStore, folder: Path) -> None:
    store.save(2, memory(store, 4, 3, 2))
    assert len(list(folder.iterdir())) == 4
    for latest, before in ((1, 0), (4, 1), (9, 4)):
        store.save(2, memory(store, latest, before))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["4.safetensors", "9.safetensors", "memory.json"]


def test_a_step_that_was_not_remembered_leaves_the_memory_as_it_was(
    store: DiskStore, folder: Path, tmp_path: Path
) -> None:
    """The process died after it had written the state and before it wrote the index."""
    store.save(2, memory(store, 1))
    store.pack(2, 5, state(5))
    (folder / ".memory.json.77").write_text("{")
    entry = DiskStore(tmp_path, "first").load(2)
    assert entry is not None
    assert entry.latest.round == 1
    store.save(2, memory(store, 6, 1))
    assert len(list(folder.iterdir())) == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_state_is_lost_with_one_line(
    damage: Any, store: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(2, memory(store, 1))
    damage(folder / "1.safetensors")
    entry = store.load(2)
    assert entry is not None
    with pytest.raises(MissingStateError):
        store.unpack(entry.latest.state, LIKE)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder / '1.safetensors'} is damaged (")
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("rule", "is_lost"), [(FedAvgClient(), False), (ScaffoldClient(), True)], ids=["bare", "c_i"]
)
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_client_that_keeps_nothing_loses_nothing(
    damage: Any, rule: LocalRule, is_lost: bool, store: DiskStore, folder: Path
) -> None:
    first = instruction(1, -1, rule=rule)._replace(client=2)
    store.remember(first, state_like(first.half, first.shapes))
    damage(folder / "1.safetensors")
    with pytest.raises(MissingStateError) if is_lost else nullcontext():
        assert store.recall(first._replace(round=2, accepted=1)) is None
    assert store.recall(first._replace(round=2, accepted=-1)) is None


@pytest.mark.parametrize("gone", ["1.safetensors", "memory.json"])
def test_what_still_counts_after_a_reset_is_lost_with_any_file(
    gone: str, store: DiskStore, folder: Path
) -> None:
    first = instruction(1, -1, rule=ScaffoldClient())._replace(client=2)
    store.remember(first, state_like(first.half, first.shapes))
    kept = first._replace(round=3, accepted=-2 - 1)
    assert store.recall(kept) is not None
    (folder / gone).unlink()
    with pytest.raises(MissingStateError):
        store.recall(kept)


class Other(NamedTuple):
    last: Tensor


class More(NamedTuple):
    last: Tensor
    base: Inner
    v: Tensor


NOTHING = torch.empty(0)


@pytest.mark.parametrize(
    "like", [Other(NOTHING), More(NOTHING, Inner(NOTHING), NOTHING)], ids=["extra", "missing"]
)
def test_a_state_of_other_vectors_is_lost_with_one_line(
    like: Any, store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MissingStateError):
        store.unpack(store.pack(2, 1, state(1)), like)
    (record,) = caplog.records
    assert "expected a state of the vectors ['" in record.getMessage()
    assert "got ['base.c_i', 'last']" in record.getMessage()


def test_a_damaged_index_is_a_lost_memory(
    store: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(2, memory(store, 1))
    for text in (
        "",
        "{",
        "[]",
        '{"versions": []}',
        '{"versions": [{"round": 1}], "attempt": 0}',
        "[" * 10**5,
    ):
        (folder / "memory.json").write_text(text)
        assert store.load(2) is None
        assert "memory.json is damaged" in caplog.records[-1].getMessage()


def test_the_state_of_another_method_is_lost(store: DiskStore) -> None:
    content = store.pack(2, 1, Inner(torch.zeros(3)))
    with pytest.raises(MissingStateError):
        store.unpack(content, LIKE)


def test_only_its_own_files_are_removed(store: DiskStore, folder: Path) -> None:
    store.save(2, memory(store, 1))
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "9.safetensors").mkdir()
    (folder / "notes.txt").write_text("mine")
    store.save(2, memory(store, 5))
    names = {path.name for path in folder.iterdir()}
    own = {"5.safetensors", "memory.json"}
    assert names == {".ipynb_checkpoints", "9.safetensors", "notes.txt", *own}


@pytest.mark.parametrize("name", ["memory.json", "1.safetensors"])
def test_a_pipe_is_a_lost_state(
    store: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    store.save(2, memory(store, 1))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if (entry := store.load(2)) is not None:
        with pytest.raises(MissingStateError):
            store.unpack(entry.latest.state, LIKE)
    assert f"{name} is damaged ({name}: expected a file" in caplog.text


def test_folders_are_private(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "states", "first")
    store.save(2, memory(store, 1))
    for folder in (store.folder, *store.folder.parents[:2]):
        assert folder.stat().st_mode & 0o777 == 0o700
    prepare(tmp_path / "others")
    assert (tmp_path / "others").stat().st_mode & 0o777 == 0o700


def test_old_federations_are_removed_when_a_new_one_begins(tmp_path: Path) -> None:
    for name, days in (("old", 91), ("recent", 89), ("mine", 200)):
        store = DiskStore(tmp_path, name)
        store.save(2, memory(store, 1))
        then = time.time() - 86400 * days
        os.utime(store.folder / "2" / "memory.json", (then, then))
    (tmp_path / "foreign").mkdir()
    os.utime(tmp_path / "foreign", (0, 0))
    for name in ("foreign/work", "other/2"):  # with an old file of the same name, and another
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "memory.json").write_text("{}")
        (tmp_path / name / "thesis.tex").write_text("of years")
        os.utime(tmp_path / name / "memory.json", (0, 0))
    (tmp_path / "client.json").write_text("{}")
    mine = DiskStore(tmp_path, "mine", 90)  # known: nothing is removed
    mine.save(2, memory(mine, 2))
    assert len(list(tmp_path.iterdir())) == 6
    new = DiskStore(tmp_path, "new", 90)
    new.save(2, memory(new, 0))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"recent", "mine", "new", "foreign", "other", "client.json"}
    assert mine.load(2) is not None


# --- a device's own folder ------------------------------------------------------------------------

OWNER = {"partition-id": 1, "data": "/a.npz"}


def test_a_folder_belongs_to_one_client(tmp_path: Path) -> None:
    for _ in range(2):
        prepare(tmp_path, OWNER)
    for other in (OWNER | {"partition-id": 2}, OWNER | {"data": "/b.npz"}):
        with pytest.raises(ValueError, match=r"^state-dir: expected the folder of .* remove ") as e:
            prepare(tmp_path, other)
        assert "\n" not in str(e.value)
    (tmp_path / "client.json").write_text("{")
    with pytest.raises(ValueError, match="a damaged file"):
        prepare(tmp_path, OWNER)


def test_a_folder_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", Path("relative")):
        with pytest.raises(ValueError, match=r"^state-dir: expected"):
            prepare(wrong, OWNER)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=r"^state-dir: expected .*Permission denied"):
        prepare(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(store: DiskStore) -> None:
    store.folder.write_text("")
    with pytest.raises(OSError, match=str(store.folder / "2")):
        store.pack(2, 1, state(1))


def test_a_full_disk_is_named_and_the_memory_stays(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(2, memory(store, 1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*5\.safetensors"):
        store.pack(2, 5, state(5))
    monkeypatch.undo()
    later = memory(store, 6, 5)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*memory\.json"):
        store.save(2, later)
    monkeypatch.undo()
    entry = store.load(2)
    assert entry is not None
    assert same(store.unpack(entry.latest.state, LIKE), state(1))
    store.save(2, entry)
    assert sorted(p.name for p in folder.iterdir()) == ["1.safetensors", "memory.json"]

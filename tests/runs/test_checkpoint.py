"""Checkpoints on disk: their files, which of them are kept, and damaged ones."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedaccord.runs.checkpoint import MANY, Checkpoints, DamagedError
from fedaccord.storage.files import replace


def save(folder: Path, number: int) -> Checkpoints:
    """A checkpoint of two clients: the first trained in every round, the second only in round 0."""
    checkpoints = Checkpoints(folder)
    states = {0: (number - 1, {"c": torch.full((2,), float(number))}), 1: (0, {"c": torch.ones(2)})}
    checkpoints.save(number, {"t": number}, {"w": torch.full((3,), float(number))}, states)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_two_checkpoints_are_kept_with_all_files_that_they_name(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        checkpoints = save(tmp_path, number)
    assert checkpoints.numbers() == [3, 4]
    states = [f"clients/{name}.safetensors" for name in ("0-2", "0-3", "1-0")]
    assert names(tmp_path) == ["3.json", "3.safetensors", "4.json", "4.safetensors", *states]
    for number in (3, 4):
        checkpoint = checkpoints.load(number)
        assert checkpoint.facts == {"t": number}
        assert torch.equal(checkpoint.server["w"], torch.full((3,), float(number)))
        assert {i: round for i, (round, _) in checkpoint.clients.items()} == {0: number - 1, 1: 0}
        assert torch.equal(checkpoint.clients[0][1]["c"], torch.full((2,), float(number)))


def test_many_new_files_are_synced_together_before_the_checkpoint_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("fedaccord.storage.files.syncfs", sync)
    for clients in (MANY, MANY + 1):
        synced.clear()
        folder = tmp_path / str(clients)
        states = {i: (0, {"c": torch.ones(2)}) for i in range(clients)}
        Checkpoints(folder).save(1, {}, {"w": torch.ones(3)}, states)
        suffixes = [Path(path).name.split(".")[-2] for path in synced if "." in path]
        apart = ["safetensors"] * clients if clients == MANY else []
        assert suffixes == [*apart, "safetensors", "json"]
        together = str(folder / "clients")
        assert synced.index(together) == 0 if clients > MANY else together not in synced


def test_the_file_of_a_past_round_is_written_once(tmp_path: Path) -> None:
    """A checkpoint names the rounds that it needs; other files are deleted."""
    checkpoints = Checkpoints(tmp_path)
    rounds = [{0, 1}, {0, 1, 2}, {2, 3}, {2, 3, 4}]
    inodes: dict[str, int] = {}
    for number, numbers in enumerate(rounds, 1):
        past = {f"server.x.{t}": torch.full((3,), float(t)) for t in numbers}
        checkpoints.save(number, {}, {"w": torch.ones(2) * number, **past}, {})
        for path in (tmp_path / "rounds").iterdir():
            inode = path.stat().st_ino
            assert inodes.setdefault(path.name, inode) == inode
        checkpoint = Checkpoints(tmp_path).load()
        assert checkpoint.server.keys() == {"w", *past}
        assert all(torch.equal(checkpoint.server[name], v) for name, v in past.items())
        assert torch.equal(checkpoint.server["w"], torch.ones(2) * number)
    names_left = {path.name for path in (tmp_path / "rounds").iterdir()}
    assert names_left == {f"server.x.{t}.safetensors" for t in (2, 3, 4)}
    assert Checkpoints(tmp_path).load(3).server.keys() == {"w", "server.x.2", "server.x.3"}
    (tmp_path / "rounds" / "server.x.2.safetensors").write_bytes(b"other bytes")
    with pytest.raises(DamagedError, match=r"expected server\.x\.2\.safetensors with the checksum"):
        Checkpoints(tmp_path).load()


def other_numbers(path: Path) -> None:
    save_file({name: v + 1 for name, v in load_file(path).items()}, path)


def other_facts(path: Path) -> None:
    path.write_text(path.read_text().replace('"t": 2', '"t": 3'))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("2.safetensors", other_numbers),
        ("clients/0-1.safetensors", other_numbers),
        ("2.json", other_facts),
    ],
)
def test_a_readable_file_with_other_content_is_damaged(
    file: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = (tmp_path / file).read_bytes()
    change(tmp_path / file)
    assert (tmp_path / file).read_bytes() != before
    with pytest.raises(
        DamagedError, match=r"the checksum that was written, got another.*\); the previous one"
    ):
        Checkpoints(tmp_path).load()
    assert Checkpoints(tmp_path).load(1).number == 1


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its checksum had another name."""
    save(tmp_path, 1)
    file = tmp_path / "1.json"
    file.write_text(file.read_text().replace('"crc32"', '"sum"', 1))
    assert Checkpoints(tmp_path).load().number == 1


@pytest.mark.parametrize("writes", range(4))
def test_an_unfinished_checkpoint_does_not_count(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after some of its files: two of clients, the server's, and the JSON."""
    save(tmp_path, 1)
    budget = iter(range(writes))

    def full(path: Path, content: bytes, **more: Any) -> None:
        if next(budget, None) is None:
            raise OSError(28, "No space left on device")
        replace(path, content, **more)

    for module in ("runs.checkpoint", "storage.tensors"):
        monkeypatch.setattr(f"fedaccord.{module}.replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, 2)
    assert Checkpoints(tmp_path).numbers() == [1]
    assert Checkpoints(tmp_path).load().facts == {"t": 1}


def test_later_files_are_deleted_when_a_run_resumes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2).resume_from(1)
    states = [f"clients/{name}.safetensors" for name in ("0-0", "1-0")]
    assert names(tmp_path) == ["1.json", "1.safetensors", *states]
    assert json.loads((tmp_path / "1.json").read_text())["content"]["facts"] == {"t": 1}

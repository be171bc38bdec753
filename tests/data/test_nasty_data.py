"""Invalid data is used correctly, or refused in one line before any work is done."""

import logging
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

from fedaccord.config import RunConfig
from fedaccord.data import datasets
from fedaccord.data.kind import ReadOptions
from fedaccord.task import Task, load_task
from tests.data.nasty import Case
from tests.data.nasty.files import CACHES, OTHERS, PARTITIONS
from tests.data.nasty.images import COLOUR, IMAGES, folder_of, of_image, pets
from tests.data.nasty.npz import NPZ, file_in, sound_npz

KINDS = (NPZ, IMAGES, PARTITIONS, CACHES, OTHERS)
CASES = {name: Case(*case) for kind in KINDS for name, case in kind.items()}
SMALL = {"algo": "fedavg", "num-clients": 2, "partition": "iid", "model": "linear"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "cache"))


def load(settings: dict[str, object]) -> Task:
    config = RunConfig.make(SMALL | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python's, of several lines
        return load_task(config.task, num_clients=config.num_clients)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_nasty_data_is_usable_or_one_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    settings = case.make(tmp_path / "data")
    caplog.set_level(logging.WARNING, "flwr")
    if not case.holds:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            load(settings)
        lines = [str(error.value)]
    else:
        task = load(settings)
        assert holds(task) == case.holds
        (x, y), *_ = task.train_batches(0, 0, 4, 0, task.model().w.dtype)
        assert task.loss(task.model().module(x), y).isfinite()
        lines = caplog.messages
    assert [case.says in line for line in lines] == ([True] if case.says else [])
    assert not any("\n" in line for line in lines)


def holds(task: Task) -> str:
    x, tests = task.clients.x, len(task.test[0]) if task.test else 0
    classes = task.card["arguments"]["classes"]
    return f"{len(x)} + {tests} of {(*x[0].shape,)} in {classes}"


def test_the_kinds_are_many_and_each_has_its_name() -> None:
    assert len(CASES) == sum(map(len, KINDS)) > 120


@pytest.mark.parametrize("name", [name for name in CACHES if CASES[name].holds])
def test_a_nasty_cache_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded data equal those of a new cache."""
    path = CASES[name].make(tmp_path / "data")["data-dir"]
    data = datasets.load("npz", path)
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "fresh"))
    fresh = datasets.load("npz", path)
    assert data[5:] == fresh[5:]
    for a, b in zip(data[1:5], fresh[1:5], strict=True):
        assert a.equal(b)
    assert not [*(tmp_path / "cache").glob(".*")]  # parts of killed decodes


@pytest.mark.parametrize("kind", ["npz", "png", "jpg", "tiff", "bmp", "webp", "ppm"])
def test_random_damage_is_at_worst_one_line(kind: str, tmp_path: Path) -> None:
    """Some bytes of a file are changed, or it is truncated."""
    rng, folder = random.Random(kind), tmp_path / "data"
    sound = sound_npz() if kind == "npz" else of_image(COLOUR, kind)
    settings = file_in(folder) if kind == "npz" else folder_of(folder)
    path = folder / "data.npz" if kind == "npz" else pets(folder) / f"train/dog/9.{kind}"
    path.write_bytes(sound)
    source, _ = datasets._locate(settings["dataset"], settings["data-dir"], ReadOptions())
    for _ in range(100):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        says = ""
        try:
            source.decode()
        except ValueError as error:
            says = str(error)
        assert not says or str(path) in says
        assert "\n" not in says


def test_more_than_the_memory_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would let a process reserve it, and kill the process when it is filled."""
    np.savez(tmp_path / "data.npz", x_train=np.zeros((9, 10_000)))
    pets(tmp_path)
    monkeypatch.setattr("fedaccord.data.kind.os.sysconf", lambda name: 500)  # 250 kB
    with pytest.raises(ValueError, match=r"at most the 0.0 GB of memory .*rewrite it"):
        datasets.load("npz", str(tmp_path / "data.npz"))
    with pytest.raises(ValueError, match=r"5 images: expected at most .*smaller images"):
        datasets.load("image-folder", str(tmp_path / "pets"), ReadOptions(image_size=200))

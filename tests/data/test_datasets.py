"""Data sets: their content, their cache, and invalid files."""

import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.data import cache, datasets, digits, image_folder
from fedaccord.data.datasets import DATASETS, cached, load
from fedaccord.data.kind import Arrays, Dataset, ReadOptions
from fedaccord.data.seeding import ALONE
from tests.data.nasty.npz import Y, arrays


@pytest.fixture(autouse=True)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, except for real data."""
    if "real_data" not in request.fixturenames:
        monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(a: Dataset, b: Dataset) -> bool:
    tensors = zip(a[1:5], b[1:5], strict=True)
    return all(torch.equal(s, t) for s, t in tensors) and (a.name, *a[5:]) == (b.name, *b[5:])


def cannot_decode() -> Arrays:
    raise AssertionError("decoded although cached")


@pytest.mark.parametrize("name", ["npz", "text", "image-folder"])
def test_data_of_the_users_own_has_a_path(name: str) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"^data-dir: expected the path .*{name}, got none"
    ):
        load(name)


# The embedded default


def test_digits_are_all_of_scikit_learns_images_rescaled() -> None:
    from sklearn.datasets import load_digits

    data = load("digits")
    assert (data.x_train.shape, data.x_test.shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert data.x_train.dtype == data.x_test.dtype == torch.uint8
    assert data.y_train.dtype == data.y_test.dtype == torch.int64
    assert (data.name, data.classes) == ("digits", 10)

    def rows(x: Any, y: Any) -> list[tuple[int, ...]]:
        pixels = np.asarray(x).reshape(len(x), -1).astype(int)
        return [(int(label), *row) for label, row in zip(y, pixels.tolist(), strict=True)]

    loaded = rows(data.x_train, data.y_train) + rows(data.x_test, data.y_test)
    source = load_digits()
    assert sorted(loaded) == sorted(rows(np.rint(source.images * 255 / 16), source.target))


def test_digits_split_is_stratified_and_the_same_each_time(folder: Path) -> None:
    first = load("digits")
    folder.rename(folder.with_name("first"))
    assert same(first, load("digits"))
    test, train = first.y_test.bincount(), first.y_train.bincount()
    assert (test / (test + train) - 0.2).abs().max() < 0.01


# The cache


def test_second_load_does_not_decode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("digits")
    monkeypatch.setattr(digits, "decode", cannot_decode)
    assert same(first, load("digits"))
    folder.rename(folder.with_name("first"))
    with pytest.raises(AssertionError, match="although cached"):
        load("digits")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_tensors_lie_in_the_mapped_file_and_writes_stay_in_the_process(folder: Path) -> None:
    data = load("digits")
    (file,) = folder.iterdir()
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if line.endswith(str(file))]
    for tensor in data[1:5]:
        assert any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in spans)
    before = file.read_bytes()
    data.x_train.fill_(7)
    assert file.read_bytes() == before


def test_cached_neither_decodes_nor_fetches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached("digits") is None
    assert not folder.exists()
    first = load("digits")
    monkeypatch.setattr(digits, "decode", cannot_decode)
    second = cached("digits")
    assert same(first, second)
    (file,) = folder.iterdir()
    os.truncate(file, 100)
    assert cached("digits") is None
    with pytest.raises(FileNotFoundError, match="has no"):
        cached("cifar10")


def test_two_processes_may_write_the_cache_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer, as in another process, starts and ends during the first one's write."""
    x = np.random.default_rng(0).random((2000, 500), dtype=np.float32)
    y = np.arange(2000) % 10
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = ("npz", str(tmp_path / "data.npz"))
    save, loaded = cache.save_file, []

    def slowly(tensors: Any, file: Path, metadata: Any) -> None:
        save(tensors, file, metadata)
        os.truncate(file, file.stat().st_size // 2)
        if not loaded:
            loaded.append(None)
            loaded[0] = load(*arguments)
            assert len(list(folder.iterdir())) == 2  # the second's, and half of the first's
        save(tensors, file, metadata)

    monkeypatch.setattr(cache, "save_file", slowly)
    loaded.append(load(*arguments))
    for data in loaded:
        assert np.array_equal(data.x_train, x)
        assert data.y_test.tolist() == y.tolist()
    assert len(list(folder.iterdir())) == 1, "temporary files are left"


def test_a_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(cache, "save_file", full_disk)
    with pytest.raises(ValueError, match=r"No space left.*FEDACCORD_CACHE"):
        load("digits")
    assert list(folder.iterdir()) == []


def test_parts_of_killed_writers_are_removed(folder: Path) -> None:
    """By a later load of any data; files that are still being written stay."""
    load("digits")
    (file,) = folder.iterdir()
    old, new = (folder / f".digits-0.safetensors.{name}" for name in ("old", "new"))
    earlier, foreign = folder / ".digits-0.safetensors.file", folder / ".notes"
    for path in (old, new):
        path.mkdir()
    halves = [old / ".tmpA", new / ".tmpB"]  # safetensors' own
    for path in (*halves, earlier, foreign):
        path.write_bytes(b"half of it")
    for path in (*halves[:1], old, new, earlier, foreign, file):
        os.utime(path, (0, 0))
    load("digits")
    assert set(folder.iterdir()) == {file, new, foreign}


def test_a_cache_file_may_be_read_by_whom_the_umask_says(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        load("digits")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_users_own_data_has_one_copy_which_its_owner_alone_may_read(
    folder: Path, tmp_path: Path
) -> None:
    x, y = np.random.default_rng(0).random((8, 3), dtype=np.float32), np.arange(8) % 2
    load("digits")
    (public,) = folder.iterdir()
    files = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    for n in (8, 6):  # samples are removed on request
        for file in files:
            np.savez(file, x_train=x[:n], y_train=y[:n], x_test=x[:2], y_test=y[:2])
            assert len(load("npz", file).x_train) == n
    copies = {*folder.iterdir()} - {public}
    assert len(copies) == 2
    assert {copy.stat().st_mode & 0o777 for copy in copies} == {0o600}
    assert cached("npz", files[0]) is not None


def test_its_copy_is_private_whatever_mode_safetensors_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions than 0.8 let everyone read a file."""
    save = cache.save_file

    def saved(tensors: Any, file: Path, **more: Any) -> None:
        save(tensors, file, **more)
        file.chmod(0o644)
        assert file.parent.stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr(cache, "save_file", saved)
    x, y = np.ones((4, 3), np.float32), np.arange(4) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    load("npz", str(tmp_path / "a.npz"))
    (copy,) = folder.iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600


def copied_records(folder: Path) -> dict[str, set[bytes]]:
    """The texts in bytes of each cache file."""
    copies = {file.name: load_file(file) for file in folder.iterdir()}
    return {
        name: {
            bytes(id - 1 for id in ids.tolist() if id)
            for ids in (*tensors["x_train"], *tensors["x_test"])
        }
        for name, tensors in copies.items()
    }


def test_a_changed_text_is_in_no_copy_of_any_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "tokenizer.py"
    code.write_text("")
    monkeypatch.setattr("fedaccord.core.named.files", lambda key, path: [code])
    site, other = tmp_path / "site.csv", tmp_path / "other.csv"

    def write(file: Path, who: str) -> None:
        rows = [f"{who} {k},{k % 2}" for k in range(10)]
        file.write_text("\n".join(["text,label", *rows, ""]))

    write(site, "Alice")
    write(other, "Mallory")
    tokenizers = ("bytes", "tests.own:letters")
    readings = [ReadOptions(max_length=n, tokenizer=name) for n in (64, 16) for name in tokenizers]
    load("text", str(other), readings[0])
    for reading in readings:
        load("text", str(site), reading)
        assert cached("text", str(site), readings[0]) is not None  # copies of one state coexist
    assert len(copied_records(folder)) == 5
    write(site, "Robert")
    load("text", str(site), readings[0])
    records = [*copied_records(folder).values()]
    assert sorted(sorted(texts)[0] for texts in records) == [b"Mallory 0", b"Robert 0"]
    load("text", str(site), readings[1])
    before = {*folder.iterdir()}
    os.utime(code, (1, 1))
    load("text", str(site), readings[1])  # which replaces its own copy alone
    after = {*folder.iterdir()}
    assert (len(before), len(after), len(before & after)) == (3, 3, 2)


def test_texts_in_another_format_leave_no_copy_of_the_earlier_ones(
    folder: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for split in ("train", "test"):
        (site / f"{split}.csv").write_text("text,label\nAlice,0\nAlice,1\n")
    load("text", str(site))
    for split in ("train", "test"):
        (site / f"{split}.csv").unlink()
        rows = [json.dumps({"text": "Robert", "label": k}) for k in range(2)]
        (site / f"{split}.jsonl").write_text("\n".join(rows))
    load("text", str(site))
    assert [*copied_records(folder).values()] == [{b"Robert"}]


def test_a_folder_without_permission_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Mock(side_effect=PermissionError(13, "Permission denied", "/data/train"))
    monkeypatch.setattr(datasets, "_locate", closed)
    with pytest.raises(
        ValueError, match=r"^data-dir: .* got /data/train \(Permission denied\): ch"
    ):
        load("npz", "/data")


def test_a_disk_that_returns_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "read", lambda path, name: None)
    with pytest.raises(ValueError, match="differs from what was just written: check the disk"):
        load("digits")


def test_cache_folder_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load("digits")
    assert (tmp_path / "own").is_dir()
    monkeypatch.delenv("FEDACCORD_CACHE")
    assert cache.cache_folder() == tmp_path / "xdg" / "fedaccord"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == tmp_path / "home" / ".cache" / "fedaccord"


# Real data


@pytest.mark.data
def test_fashion_mnist(real_data: Path) -> None:
    data = load("fashion-mnist", str(real_data))
    assert (data.x_train.shape, data.x_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert data.y_train.bincount().tolist() == [6000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    assert data.mean == pytest.approx([0.2860], abs=5e-5)  # as published by others
    assert data.std == pytest.approx([0.3530], abs=5e-5)


@pytest.mark.data
def test_cifar10_from_image_files(real_data: Path) -> None:
    data = load("cifar10", str(real_data))
    assert (data.x_train.shape, data.x_test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert data.y_train.bincount().tolist() == [5000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    assert (data.mean, data.std) == DATASETS["cifar10"].scale
    pixels = data.x_train[::5].float().div_(255)  # the channels are in this order
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(data.mean, abs=2e-3)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(data.std, abs=2e-3)
    last = sorted((real_data / "cifar10" / "test" / "truck").iterdir())[-1]
    assert np.array_equal(data.x_test[-1].permute(1, 2, 0), np.asarray(Image.open(last)))


@pytest.mark.data
def test_cifar10_in_the_folder_itself_is_found_too(some_of_cifar10: Path) -> None:
    data = load("cifar10", str(some_of_cifar10))
    assert data.y_train.tolist() == [label for label in range(10) for _ in range(200)]
    assert data.y_test.tolist() == [label for label in range(10) for _ in range(20)]
    assert (data.mean, data.std) == DATASETS["cifar10"].scale


# torchvision's own formats


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    """Writes one of torchvision's CIFAR files and returns its images; their md5 is not checked."""
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).is_file()
    )
    rng = np.random.default_rng(0)

    def write(file: str, key: str, labels: list[int]) -> np.ndarray:
        pixels = rng.integers(256, size=(len(labels), 3, 32, 32), dtype=np.uint8)
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps({"data": pixels.reshape(-1, 3 * 32 * 32), key: labels}))
        return pixels

    return write


def test_cifar100_from_torchvisions_files(tmp_path: Path, cifar: Callable[..., np.ndarray]) -> None:
    train = cifar("cifar-100-python/train", "fine_labels", [5, 99, 0, 42])
    test = cifar("cifar-100-python/test", "fine_labels", [7, 7])
    cifar("cifar-100-python/meta", "fine_label_names", [])
    data = load("cifar100", str(tmp_path))
    assert np.array_equal(data.x_train, train)
    assert np.array_equal(data.x_test, test)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([5, 99, 0, 42], [7, 7])
    assert data.classes == 100
    assert data.mean == (0.5071, 0.4867, 0.4408)  # as published
    assert data.std == (0.2675, 0.2565, 0.2761)


def test_cifar10_prefers_torchvisions_files(
    tmp_path: Path, cifar: Callable[..., np.ndarray]
) -> None:
    batches = [
        cifar(f"cifar-10-batches-py/data_batch_{i}", "labels", [i, 9 - i]) for i in range(1, 6)
    ]
    cifar("cifar-10-batches-py/test_batch", "labels", [3])
    cifar("cifar-10-batches-py/batches.meta", "label_names", [])
    (tmp_path / "train").mkdir()
    data = load("cifar10", str(tmp_path))
    assert np.array_equal(data.x_train, np.concatenate(batches))
    assert data.y_train.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    assert data.classes == 10
    assert data.mean == (0.491, 0.482, 0.447)  # as published
    assert data.std == (0.247, 0.243, 0.262)


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "cifar100"])
def test_the_message_for_missing_data_says_how_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no .*download=true.*data-dir"):
        load(name, str(tmp_path))


def test_download_fetches_into_the_downloads_folder_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cifar: Callable[..., np.ndarray],
    caplog: pytest.LogCaptureFixture,
) -> None:
    roots = []

    def fetch(self: Any) -> None:
        if not self._check_integrity():
            roots.append(self.root)
            cifar("cache/downloads/cifar-100-python/train", "fine_labels", [1])
            cifar("cache/downloads/cifar-100-python/test", "fine_labels", [2])
            cifar("cache/downloads/cifar-100-python/meta", "fine_label_names", [])

    (folder / "downloads").mkdir(parents=True)
    monkeypatch.setattr("torchvision.datasets.CIFAR100.download", fetch)
    for _ in range(2):
        data = load("cifar100", "", ReadOptions(download=True))
        assert data.y_test.tolist() == [2]
    assert [Path(folder) for folder in roots] == [folder / "downloads"]
    assert caplog.messages == [f"downloading CIFAR100 to {folder / 'downloads'}"]  # may be mistyped


def test_the_message_for_a_folder_of_images_names_image_folder(pets: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train/<class>/\* .* are dataset=image-folder"):
        load("cifar100", str(pets))


# image-folder


Draw = Callable[..., Path]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Saves a PNG of one colour as tmp_path/data/<split>/<class>/<file>."""

    def save(
        where: str, colour: int | tuple[int, int, int], size: tuple[int, int] = (6, 4)
    ) -> Path:
        path = tmp_path / "data" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)
        return path

    return save


@pytest.fixture
def pets(draw: Draw) -> Path:
    draw("train/cat/2.png", (20, 0, 0))
    draw("train/cat/1.png", (10, 1, 2))
    draw("train/dog/1.PNG", (30, 0, 0))
    draw("test/dog/1.png", (40, 0, 0))
    root = draw("test/cat/1.png", (50, 0, 0)).parents[2]
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    return root


def load_folder(root: Path, reading: ReadOptions = datasets.USUAL) -> Dataset:
    return load("image-folder", str(root), reading)


def test_image_folder(pets: Path) -> None:
    data = load_folder(pets)
    assert (data.x_train.shape, data.x_train.dtype) == ((3, 3, 4, 6), torch.uint8)
    assert data.x_train[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.x_train[0, :, 3, 5].tolist() == [10, 1, 2]
    assert data.x_test[:, 0, 0, 0].tolist() == [50, 40]
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 0, 1], [0, 1])
    assert data.classes == 2
    assert data.mean == pytest.approx([20 / 255, 1 / 3 / 255, 2 / 3 / 255])
    assert data.std[0] == pytest.approx((200 / 3) ** 0.5 / 255)


def test_decoding_in_two_threads_leaves_the_filters_of_warnings(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the second begins before the first has ended, and ends after it."""
    usual, filters = image_folder._decode_images, [*warnings.filters]
    first, second, futures = Event(), Event(), list[Future[Arrays]]()

    def decode_images(files: list[Path], image_size: int) -> Any:
        if first.is_set():
            second.set()
            futures[0].result(60)
        else:
            first.set()
            second.wait(0.3)  # in vain if the second waits for the first
        return usual(files, image_size)

    monkeypatch.setattr(image_folder, "_decode_images", decode_images)
    with ThreadPoolExecutor(2) as pool:
        futures.append(pool.submit(image_folder.decode, pets, datasets.USUAL))
        assert first.wait(60)
        pool.submit(image_folder.decode, pets, datasets.USUAL).result()
        with ALONE:  # held for other settings of the process
            third = pool.submit(image_folder.decode, pets, datasets.USUAL)
            with pytest.raises(TimeoutError):
                third.result(0.3)
        third.result()
    assert warnings.filters == filters


def test_changed_images_are_decoded_again(pets: Path, draw: Draw) -> None:
    load_folder(pets)
    draw("train/dog/2.png", (99, 0, 0))
    assert load_folder(pets).x_train[:, 0, 0, 0].tolist() == [10, 20, 30, 99]
    draw("train/dog/2.png", (77, 0, 0))  # the folder's own time stays
    assert load_folder(pets).x_train[-1, 0, 0, 0] == 77
    (pets / "train" / "dog" / "2.png").rename(pets / "train" / "cat" / "3.png")
    assert load_folder(pets).y_train.tolist() == [0, 0, 0, 1]


def test_only_all_grey_images_have_one_channel(draw: Draw) -> None:
    for where in ("train/a/1.png", "train/b/1.png", "test/a/1.png"):
        root = draw(where, 9).parents[2]
    (root / "test" / "b").mkdir()
    assert load_folder(root).x_train.shape == (2, 1, 4, 6)
    draw("test/b/1.png", (1, 2, 3))
    data = load_folder(root)
    assert data.x_train.shape == (2, 3, 4, 6)
    assert data.x_train[0, :, 0, 0].tolist() == [9, 9, 9]
    assert data.x_test[1, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [(60, 20), (20, 60)])
def test_image_size_resizes_the_shorter_side_and_crops_the_centre(
    draw: Draw, pets: Path, size: tuple[int, int]
) -> None:
    from torchvision.transforms.functional import center_crop, resize

    noise = np.random.default_rng(0).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(draw("test/dog/1.png", (0, 0, 0)))
    data = load_folder(pets, ReadOptions(image_size=10))
    assert data.x_test.shape == (2, 3, 10, 10)
    expected = center_crop(resize(image, 10), [10, 10])
    assert np.array_equal(data.x_test[1].permute(1, 2, 0), np.asarray(expected))
    assert load_folder(pets, ReadOptions(image_size=5)).x_test.shape == (2, 3, 5, 5)


def test_grey_images_of_16_bits_keep_their_grey_levels(tmp_path: Path) -> None:
    """Pillow's own conversion clips them: every pixel above 1/256 would be white."""
    levels = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    for where in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "data" / where).mkdir(parents=True)
        Image.fromarray(levels).save(tmp_path / "data" / where / "1.png")
        Image.fromarray(levels).save(tmp_path / "data" / where / "2.tif")
    data = load_folder(tmp_path / "data")
    assert data.x_train.shape == (4, 1, 1, 4)
    assert data.x_train[:, 0, 0].tolist() == [[0, 1, 128, 255]] * 4


def test_named_classes_keep_their_labels_if_a_site_lacks_some(pets: Path) -> None:
    for split in ("train", "test"):
        (pets / split / "cow").mkdir()
    assert load_folder(pets).y_train.tolist() == [0, 0, 2]  # an empty class keeps its label
    data = load_folder(pets, ReadOptions(labels="bird, cat, cow, dog"))
    assert data.class_names == ("bird", "cat", "cow", "dog")
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 1, 3], [1, 3])
    (pets / "train" / "dog" / "1.PNG").unlink()
    (pets / "train" / "dog").rmdir()  # in the test samples alone
    assert load_folder(pets, ReadOptions(labels="cat,cow,dog")).y_test.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        ("cat,bird", "every class folder of .* among cat, bird, got dog: add it"),
        ("cat,dog,cat", "two or more different names, separated by commas, got 'cat,dog,cat'"),
        ("cat", "two or more different names"),
    ],
)
def test_image_folder_refuses_wrong_labels(pets: Path, labels: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        load_folder(pets, ReadOptions(labels=labels))


# npz


def load_npz(folder: Path, **arrays: Any) -> Dataset:
    np.savez(folder / "data.npz", **arrays)
    return load("npz", str(folder / "data.npz"))


def test_npz_colour_images_are_stored_channel_first(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(256, size=(7, 5, 6, 3), dtype=np.uint8)
    labels = np.array([0, 1, 1, 0, 2, 0, 1], dtype=np.int32)
    data = load_npz(
        tmp_path, x_train=images[:5], y_train=labels[:5], x_test=images[5:], y_test=labels[5:]
    )
    assert np.array_equal(data.x_train, images[:5].transpose(0, 3, 1, 2))
    assert np.array_equal(data.x_test, images[5:].transpose(0, 3, 1, 2))
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 1, 0, 2], [0, 1])
    assert (data.y_train.dtype, data.classes) == (torch.int64, 3)
    assert data.mean == pytest.approx(images[:5].mean((0, 1, 2)) / 255)
    assert data.std == pytest.approx(images[:5].std((0, 1, 2)) / 255)


def test_npz_grey_images_gain_a_channel(tmp_path: Path) -> None:
    grey = np.full((6, 8, 9), 255, dtype=np.uint8)
    data = load_npz(tmp_path, **arrays(x_train=grey, x_test=grey[:2]))
    assert (data.x_train.shape, data.x_test.shape) == ((6, 1, 8, 9), (2, 1, 8, 9))
    assert (data.mean, data.std) == ((1.0,), (1.0,))  # a constant channel is not divided by zero


def test_npz_features_stay_as_they_are(tmp_path: Path) -> None:
    sound = arrays()
    data = load_npz(tmp_path, **sound)
    assert data.x_train.dtype == data.x_test.dtype == torch.float32
    assert np.array_equal(data.x_train, sound["x_train"].astype(np.float32))
    assert (data.classes, data.mean, data.std) == (3, (), ())


def test_npz_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    np.savez(tmp_path / "x.npz", **arrays())
    with monkeypatch.context() as patch:
        for name in ("builtins.open", "io.open"):
            patch.setattr(name, deny)
        with pytest.raises(ValueError, match="Permission denied"):
            load("npz", str(tmp_path / "x.npz"))


def test_npz_may_say_how_many_classes_there_are(tmp_path: Path) -> None:
    assert load_npz(tmp_path, **arrays(classes=5)).classes == 5


@pytest.mark.parametrize("kind", ["U", "S"])
def test_npz_labels_may_be_the_names_of_the_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    y_train = np.array(["dog", "cat", "dog", "ant", "cat", "dog"]).astype(kind)
    data = load_npz(tmp_path, **arrays(y_train=y_train, y_test=np.array(["cat", "dog"], kind)))
    assert data.class_names == ("ant", "cat", "dog")
    assert "'ant' is 0; devices with data of their own need the array `classes`" in caplog.text
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([2, 1, 2, 0, 1, 2], [1, 2])
    assert data.classes == 3


@pytest.mark.parametrize("kind", ["U", "S"])
def test_npz_names_are_numbered_alike_on_devices_that_lack_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    y = np.array(["dog", "cat", "dog"] * 2).astype(kind)
    classes = np.array(["emu", "dog", "ant", "cat"]).astype(kind)
    data = load_npz(tmp_path, **arrays(y_train=y, y_test=y[:2], classes=classes))
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 3, 1, 1, 3, 1], [1, 3])
    assert (data.classes, data.class_names) == (4, ("emu", "dog", "ant", "cat"))
    assert caplog.text == ""
    numbered = load_npz(tmp_path, **arrays(classes=classes))
    assert (numbered.classes, numbered.class_names) == (4, ("emu", "dog", "ant", "cat"))


def test_known_names_of_classes_are_kept(tmp_path: Path, pets: Path) -> None:
    assert load_folder(pets).class_names == ("cat", "dog")
    assert load("digits").class_names == tuple("0123456789")
    assert load_npz(tmp_path, **arrays()).class_names == ()


@pytest.mark.parametrize("y_train", [Y, np.array(["a", "b"] * 3), Y + 0.5])
def test_npz_without_test_samples(tmp_path: Path, y_train: Any) -> None:
    data = load_npz(tmp_path, **arrays(y_train=y_train, x_test=None, y_test=None))
    assert (len(data.x_train), data.x_test.shape, len(data.y_test)) == (6, (0, 3), 0)
    assert data.y_test.dtype == data.y_train.dtype


# Names and options


def test_only_natural_images_are_augmented() -> None:
    """A mirrored digit is another sign, and arrays may be anything."""
    names = {name for name, kind in DATASETS.items() if kind.augment}
    assert names == {"cifar10", "cifar100", "image-folder"}


def test_augmentation_can_be_turned_off(tmp_path: Path) -> None:
    """A folder of images then trains as an array of them."""
    rng, parts = np.random.default_rng(0), {}
    for split, n in (("train", 16), ("test", 4)):
        x, y = rng.integers(256, size=(n, 8, 8), dtype=np.uint8), np.arange(n) // (n // 2)
        parts |= {f"x_{split}": x, f"y_{split}": y}
        for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
            file = tmp_path / "images" / split / f"{label}" / f"{i:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    np.savez(tmp_path / "images.npz", **parts)
    keys: dict[str, Any] = {"model": "linear", "num_clients": 2, "partition": "iid", "rounds": 1}
    keys |= {"local_steps": 3, "batch_size": 4}

    def weights(dataset: str, data_dir: str, **more: Any) -> torch.Tensor:
        own = {"dataset": dataset, "data_dir": str(tmp_path / data_dir), **more}
        return torch.cat([t.flatten() for t in simulate("fedavg", **keys, **own).model.values()])

    array = weights("npz", "images.npz")
    assert torch.equal(weights("image-folder", "images", augment=False), array)
    usual = weights("image-folder", "images")
    assert not torch.allclose(usual, array)
    assert torch.equal(weights("image-folder", "images", augment=True), usual)
    (line,) = RunConfig.make({"augment": False}).unread()
    assert line == "augment=false has no effect: it needs dataset=cifar10|cifar100|image-folder"


def test_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"digits, .*npz, text, or package.*, got 'cifar-10' \(did you mean 'cifar10'\?\)",
    ):
        load("cifar-10")


@pytest.mark.parametrize("name", ["digits", "tests.own:arrays"])
def test_image_size_is_only_for_image_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"image-size: .* with image-folder; got 16 with {name}"):
        load(name, "", ReadOptions(image_size=16))


def test_nothing_is_downloaded_below_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", lambda _: pytest.fail("download"))
    with pytest.raises(FileNotFoundError, match=r"^data-dir: expected a folder to download .* got"):
        datasets.load("cifar10", str(tmp_path / "dta" / "cifar10"), ReadOptions(download=True))
    assert not [*tmp_path.iterdir()]


def test_a_failed_download_does_not_name_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", offline)
    with pytest.raises(ValueError, match=r"\(no network\): try download=true again, or point"):
        datasets.load("cifar10", str(tmp_path), ReadOptions(download=True))
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match=r"delete .*cifar-10-batches-py and set download=true"):
        datasets.load("cifar10", str(tmp_path))

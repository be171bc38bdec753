"""Data sets that a function of the user's own returns."""

import random
import re
from collections import UserDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedaccord import run, simulate
from fedaccord.data.datasets import cached, load
from fedaccord.data.fingerprint import of_tensors
from fedaccord.data.kind import Dataset, ReadOptions
from fedaccord.data.samples import split_of
from fedaccord.data.seeding import seeded
from fedaccord.data.transforms import normalise
from fedaccord.federation.errors import FederationError
from fedaccord.task import Task, TaskConfig, load_task
from tests import own


def of(function: str, data_dir: str = "", **reading: Any) -> Dataset:
    return load(f"tests.own:{function}", data_dir, ReadOptions(**reading))


@pytest.mark.parametrize(
    "function", ["no_test", "test_of_nothing", "empty_test", "texts_without_test"]
)
def test_a_client_may_have_no_test_samples(function: str) -> None:
    data = of(function)
    assert len(data.x_test) == len(data.y_test) == 0
    assert data.classes == 2


@pytest.mark.parametrize("outputs", [(), (1,), (2, 3)])
def test_numbers_to_predict_may_have_no_test_samples(
    monkeypatch: pytest.MonkeyPatch, outputs: tuple[int, ...]
) -> None:
    data = made(monkeypatch, {"train": (X, np.full((4, *outputs), 0.5, np.float32))})
    assert data.y_train.shape == (4, data.outputs)
    assert data.y_test.shape == (0, data.outputs)


def test_a_run_without_test_samples() -> None:
    """Clients cannot evaluate either; without evaluation they train."""
    keys: dict[str, Any] = {"dataset": "tests.own:no_test", "num_clients": 2}
    keys |= {"model": "linear", "partition": "iid"}
    with pytest.raises(ValueError, match=r"^evaluation=server: expected test samples"):
        run("fedavg", num_server_rounds=1, **keys)
    with pytest.raises(ValueError, match=r"^evaluation=clients: expected test samples for the cli"):
        run("fedavg", evaluation="clients", num_server_rounds=1, **keys)
    with pytest.raises(FederationError, match=r"^evaluation: expected held-out samples"):
        simulate("fedavg", evaluation="clients", rounds=1, **keys)
    history = simulate("fedavg", evaluation="clients", fraction_evaluate=0, rounds=1, **keys)
    assert history.metrics["counted"].iloc[-1] == 1


def test_tokens_without_a_vocabulary_have_as_many_ids_as_the_largest_says() -> None:
    keys: dict[str, Any] = {"dataset": "tests.own:tokens", "partition": "iid", "num_clients": 2}
    tensors = simulate("fedavg", model="transformer", rounds=1, local_steps=1, **keys).model
    assert 9 in {len(tensor) for tensor in tensors.values()}
    own_model = {"model": "tests.own:bag_of_tokens"}
    weights = simulate("fedavg", rounds=1, local_steps=1, **keys, **own_model).model["weight"]
    assert weights.shape == (9, 3)


TWO: dict[str, Any] = {"partition": "iid", "num_clients": 2, "rounds": 1, "local_steps": 1}


@pytest.mark.parametrize("model", ["transformer", "tests.own:bag_of_tokens"])
@pytest.mark.parametrize("form", ["tokens_of_16_bits", "tokens_of_unsigned_16_bits"])
def test_tokens_may_have_16_bits(model: str, form: str) -> None:
    first, second = (
        simulate("fedavg", model=model, dataset=f"tests.own:{name}", **TWO).model
        for name in ("tokens", form)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert of(form).x_train.dtype == torch.int64


def test_token_ids_below_zero_are_refused_before_the_first_round() -> None:
    keys = {"dataset": "tests.own:tokens_below_zero", **TWO}
    for model in ("transformer", "tests.own:bag_of_tokens"):
        line = rf"^model: expected token ids from 0 on as inputs of {model}, got -1$"
        with pytest.raises(ValueError, match=line):
            simulate("fedavg", model=model, **keys)
    simulate("fedavg", model="tests.own:bag_of_shifted_integers", **keys)  # which may read them


def test_settings_that_a_function_does_not_read_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of("arrays", "/data", tokenizer="mine:ids", max_length=8)
    assert [record.getMessage() for record in caplog.records] == [
        "data-dir=/data has no effect: tests.own:arrays has no parameter data_dir",
        "tokenizer=mine:ids has no effect: tests.own:arrays returns no texts",
        "max-length=8 has no effect: tests.own:arrays returns no texts",
    ]
    caplog.clear()
    of("texts_without_test", max_length=8)
    assert not caplog.records


@pytest.mark.parametrize(
    "function", ["arrays", "torch_datasets", "mapping", "partitioned", "tables"]
)
def test_arrays_tensors_and_data_sets_of_libraries(function: str) -> None:
    data = of(function)
    for split, part in (("train", own.numbers(40, 0)), ("test", own.numbers(10, 1))):
        x, y = (getattr(data, f"{name}_{split}") for name in "xy")
        assert np.array_equal(x.numpy(), part[0])
        assert x.dtype == torch.float32
        assert y.tolist() == part[1].tolist()
        assert y.dtype == torch.int64
    assert data.classes == (3 if function == "mapping" else 2)
    names = {"mapping": ("below", "above", "neither"), "partitioned": ("below", "above")}
    assert data.class_names == names.get(function, ())
    assert cached(f"tests.own:{function}") is None


def test_float_targets_are_numbers_to_predict() -> None:
    data = of("targets")
    assert (data.classes, data.outputs) == (0, 2)
    assert data.y_train.shape == (40, 2)
    assert data.y_train.dtype == torch.float32


def test_the_function_reads_where_the_setting_says() -> None:
    assert len(of("from_folder", "/a/b").y_train) == 12


def test_images_become_channel_first_and_tensors_stay() -> None:
    data = of("images")
    assert data.x_train.shape == (2, 3, 4, 5)
    assert data.x_train[1, 2, 3, 4] == 119
    assert len(data.mean) == 3
    assert of("grey_tensors").x_train.shape == (2, 1, 4, 5)
    prepared = normalise(data.x_train, data, torch.float64)
    assert prepared.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-12)


def test_a_partitioner_gives_the_client_of_each_sample() -> None:
    owners = of("partitioned").owners
    assert owners.bincount().tolist() == [5, 10, 25]


def test_a_column_gives_the_client_of_each_sample() -> None:
    assert of("clients_of_a_table").owners.tolist() == [1, 0, 1, 2]
    config = TaskConfig(dataset="tests.own:clients_of_a_table", partition="natural")
    task = load_task(config, num_clients=3)
    assert [task.num_examples(i) for i in range(3)] == [1, 2, 1]


def test_clients_of_the_data_that_a_partition_ignores_are_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def lines(clients: int = 2, whole: bool = False, **settings: Any) -> list[str]:
        caplog.clear()
        for _ in range(2):
            config = TaskConfig(dataset="tests.own:clients_of_a_table", **settings)
            load_task(config, num_clients=clients, whole=whole)
        return [record.getMessage() for record in caplog.records]

    for scheme in ("dirichlet", "iid"):
        (line,) = lines(partition=scheme)
        assert line.startswith(f"partition={scheme} divides the samples anew: the data name client")
        assert line.endswith("; partition=natural keeps them")
    (tmp_path / "parts.json").write_text("[[0], [1, 2, 3]]")
    assert lines(3, partition="natural") == []
    assert lines(partition="file", partition_file=str(tmp_path / "parts.json")) == []
    assert lines(whole=True, partition="pathological") == []


def test_a_class_without_training_samples_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert of("unseen_class").classes == 4
    assert "no training sample has the label 2 of 0 to 3: the model has 4 outputs" in caplog.text
    assert of("from_one").classes == 3
    assert "no training sample has the label 0 of 0 to 2: the model has 3 outputs" in caplog.text
    caplog.clear()
    assert of("identities").classes == 2**31 + 2
    assert "no training sample has the label 2 of 0 to 2147483649: " in caplog.text


def test_texts_are_tokenized() -> None:
    data = of("columns", max_length=4)
    assert data.x_train.tolist() == [[99, 98, 101, 0], [104, 112, 112, 101], [116, 112, 33, 116]]
    assert data.vocabulary == 257
    assert data.class_names == ("negative", "positive")
    data = of("columns", max_length=4, tokenizer="tests.own:letters")
    assert data.x_train[0].tolist() == [2, 1, 4, 0]


def test_bfloat16_has_a_checksum() -> None:
    data = of("half_precision")
    assert of_tensors({"x": data.x_train}) != of_tensors({"x": data.x_train + 1})


def test_random_numbers_of_a_function_are_the_same_in_every_process() -> None:
    first = of("drawn")
    random.seed(1)
    before = random.getstate()
    assert torch.equal(of("drawn").x_train, first.x_train)
    assert random.getstate() == before
    assert len(first.x_train.unique()) == 24


def test_the_checksum_is_of_the_samples_alone() -> None:
    one, again, other = of("half_precision"), of("half_precision"), of("columns")
    assert one.checksum == again.checksum != other.checksum
    assert len(one.checksum) == 8


def test_random_transforms_that_would_be_read_once_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of("torch_datasets")
    assert not caplog.records
    data = of("noisy")
    with seeded(0):  # the samples are those of a first reading
        assert torch.equal(data.x_train, split_of(own.noisy()[0]).x)
    (record,) = caplog.records
    assert "tests.own:noisy: its training samples change" in record.getMessage()


def test_an_augmentation_changes_the_inputs_of_local_steps_alone() -> None:
    """By random numbers of the client's round, also the default ones, in a cohort too."""

    def task(name: str) -> Task:
        config = TaskConfig(dataset=f"tests.own:{name}", partition="iid", model="linear")
        return load_task(config, num_clients=2)

    seeds = count()

    def inputs(name: str, round: int = 0) -> torch.Tensor:
        torch.manual_seed(next(seeds))
        return torch.cat([x for x, _ in task(name).train_batches(0, round, 8, 0, torch.float32)])

    sizes: list[int] = []

    def count_samples(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        sizes.append(len(x))
        return x

    one = replace(task("augmented"), augment=count_samples)
    assert len([*one.train_batches(0, 0, 8, 0, torch.float32)]) == len(sizes)  # batch by batch
    noise = inputs("augmented") - inputs("arrays") - 10
    assert 0 <= noise.min() < noise.max() <= 3
    random.seed(5)
    assert torch.equal(inputs("augmented"), inputs("augmented"))
    assert not torch.equal(inputs("augmented") - noise, inputs("augmented", 1) - noise)
    w = torch.ones(8)
    assert task("augmented").evaluate(w) == task("arrays").evaluate(w)
    keys: dict[str, Any] = {"dataset": "tests.own:augmented", "partition": "iid", "num_clients": 2}
    keys |= {"model": "linear", "local_steps": 5, "batch_size": 8, "rounds": 2}
    one, many = (simulate("fedavg", **keys, vectorize=word).model for word in ("off", "on"))
    assert all(torch.allclose(one[name], many[name], rtol=1e-5) for name in one)


def made(monkeypatch: pytest.MonkeyPatch, content: Any) -> Dataset:
    monkeypatch.setattr(own, "made", lambda: content, raising=False)
    return of("made")


X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 0])


def test_an_augmentation_in_place_changes_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.from_numpy(X.copy())
    content = {"train": (x, Y), "augment": lambda x, generator: x.add_(1)}
    data = made(monkeypatch, content)
    assert torch.equal(data.x_train, torch.from_numpy(X))
    assert data.checksum == made(monkeypatch, content).checksum


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.copy()
    x.setflags(write=False)
    data = made(monkeypatch, {"train": (x, Y)})
    data.x_train.add_(1)
    assert (x == X).all()


def test_values_of_numpy_are_as_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"classes": Y.max() + 2, "client": [np.int64(i) for i in (3, 3, 5, 5)]}
    data = made(monkeypatch, {"train": (X, Y)} | numbers)
    assert data.classes == 4
    assert data.owners is not None
    assert data.owners.tolist() == [0, 0, 1, 1]
    names = np.array(["a", "b", "c"])
    assert made(monkeypatch, {"train": (X, Y), "classes": names}).class_names == ("a", "b", "c")
    texts = np.array(["one", "two", "three", "four"])
    assert made(monkeypatch, {"train": (texts, Y)}).vocabulary == 257


class Palette:
    """An image as PIL has it: an array of indices."""

    mode = "P"

    def convert(self, mode: str) -> Any:
        return {"RGB": np.full((2, 2, 3), 200, np.uint8)}[mode]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros((2, 2), np.uint8)


def test_an_image_of_a_palette_has_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(monkeypatch, {"train": ([Palette()] * 4, Y)})
    assert data.x_train.shape == (4, 3, 2, 2)
    assert (data.x_train == 200).all()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"train": (X.astype(float) * 1e39, Y)}, "finite inputs of train, got .* float32"),
        (
            {"train": (X, np.array([0.0, 1.0, 2.0, 1e39]))},
            "finite targets of train, .* float32",
        ),
        ({"train": (np.zeros((4, 3, 8, 8), np.uint8), Y)}, r"images as uint8 .* transpose them$"),
        (
            {"train": (torch.zeros(4, 8, 8, 3).byte(), Y)},
            r"as uint8 tensors .n, chan.* permute it$",
        ),
        ({"train": ([*torch.zeros(4, 8, 8, 3).byte()], Y)}, r"got a tensor \(4, 8, 8, 3\)"),
        ({"train": (np.zeros((4, 8, 8, 3)), Y)}, "or as floats .n, channels, h, w., got float64"),
        ({"train": (np.ma.masked_equal(X, 3), Y)}, "got a masked array: fill it"),
        ({"train": (X, np.full((4, 2), -100))}, "labels from 0 on, got -100 alone"),
        (
            {"train": (X, np.array([[0, 1], [1, 255]] * 2)), "classes": 2},
            "labels below classes=2, .*, got 255; mark labels that do not count by -100$",
        ),
        (
            {"train": (X, torch.from_numpy(Y).cfloat())},
            "classes or real numbers as targets, got torch.complex64$",
        ),
        ((pd.DataFrame(X), pd.DataFrame(X)), r"one table: return \(table\[features\], table\["),
    ],
)
def test_what_would_train_on_other_values_is_refused(
    content: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=rf"^dataset: .*expected .*{line}") as error:
        made(monkeypatch, content)
    assert "\n" not in str(error.value)


TEXTS = ["one", "two", "three", "four"]


@pytest.mark.parametrize("missing", [None, float("nan"), 3, b"two"])
@pytest.mark.parametrize("row", [0, 2])
def test_texts_without_a_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, missing: Any, row: int
) -> None:
    texts = [*TEXTS[:row], missing, *TEXTS[row + 1 :]]
    line = rf"expected texts, got {re.escape(repr(missing))} among them: fill or drop such rows$"
    for column in (texts, np.array(texts, object), pd.Series(texts, dtype=object)):
        with pytest.raises(ValueError, match=line):
            made(monkeypatch, {"train": (column, Y)})
    with pytest.raises(ValueError, match=line):
        made(monkeypatch, {"train": [*zip(texts, Y, strict=True)]})


def test_a_missing_text_of_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("str", "string"):
        column = pd.Series(["one", None, "three", "four"], dtype=dtype)
        with pytest.raises(ValueError, match=r"expected texts, got (nan|<NA>) among them: fill or"):
            made(monkeypatch, {"train": (column, Y)})


def test_texts_of_numpy_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(monkeypatch, {"train": (TEXTS, Y)}).x_train
    every = [np.array(TEXTS), [np.str_(text) for text in TEXTS], np.array(TEXTS, object)]
    if hasattr(np.dtypes, "StringDType"):  # of NumPy 2
        every.append(np.array(TEXTS, np.dtypes.StringDType()))
    for texts in every:
        assert torch.equal(made(monkeypatch, {"train": (texts, Y)}).x_train, plain)


def test_inputs_that_are_a_mapping_are_no_list_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = UserDict({"input_ids": X, "attention_mask": X})
    with pytest.raises(ValueError, match="one array or tensor, got input_ids, attention_mask"):
        made(monkeypatch, {"train": (tokens, Y)})


def test_a_lazy_column_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Column(Sequence[Any]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, i: Any) -> Any:
            if i >= len(X):
                raise IndexError
            read.append(i)
            return X[i]

    made(monkeypatch, {"train": (Column(), Y)})
    assert read == [*range(len(X))]


def test_names_that_do_not_fit_the_labels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Columns(list[Any]):
        column_names = ("x", "label")

        def __init__(self, names: str) -> None:
            super().__init__(range(4))
            self.features = {"x": None, "label": SimpleNamespace(names=[*names])}

        def __getitem__(self, name: Any) -> Any:
            return {"x": X, "label": Y}[name]

    assert made(monkeypatch, {"train": Columns("abc"), "test": Columns("abc")}).classes == 3
    with pytest.raises(ValueError, match="classes of test as those of train, a, b, c, got b, a, c"):
        made(monkeypatch, {"train": Columns("abc"), "test": Columns("bac")})
    with pytest.raises(ValueError, match="classes=3, the number of names, got 5"):
        made(monkeypatch, {"train": Columns("abc"), "test": Columns("abc"), "classes": 5})
    with pytest.raises(ValueError, match=r"names of classes in UTF-8, got '\\udcff': rename it"):
        made(monkeypatch, {"train": (X, Y), "classes": ["a", "b", "\udcff"]})


def test_a_function_may_have_a_data_dir_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def make(data_dir: str = "/mine") -> Any:
        given.append(data_dir)
        return {"train": (X, Y)}

    monkeypatch.setattr(own, "made", make, raising=False)
    of("made")
    of("made", "/else")
    assert given == ["/mine", "/else"]


def test_integers_stay_integers() -> None:
    data = of("sequences")
    assert normalise(data.x_train, data, torch.float32).dtype == torch.int64
    assert data.y_train.shape == (12, 5)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("nothing", r"expected \(train, test\), or a mapping of train, .*, got a NoneType$"),
        ("uneven", "a target for each of one or more inputs of train, got 4 inputs and 3 targets"),
        ("other_inputs", r"inputs of train and test alike, got \(\(3,\), .* and \(\(2,\), torch"),
        ("broken_inputs", "finite inputs of train, got nan, inf or beyond float32"),
        ("raw_table", r"uint8 images \(n, h, w.*, or float features, .* got uint8 of \(4, 6\)"),
        ("names_of_classes", "expected numbers, of labels integers from 0 on, got <U1"),
        ("below_zero", "expected labels from 0 on, got -1"),
        ("steps_below_zero", "expected labels from 0 on, or -100 for ignored ones, got -1"),
        ("one_class", "labels below classes=1, two or more, got 0"),
        ("misspelt", r"mapping of train, .*, got 'clases' \(did you mean 'classes'\?\)"),
        ("many_columns", r"one column beside the label \(label, .*\), got a, b, label; choose two"),
        ("ragged", "samples of one shape, got several"),
        ("absent", "it has no 'absent'"),
        ("negative_token", "token ids of train from 0 on, got -1"),
        ("unknown_token", "token ids of test below vocabulary=4, got 8"),
        ("unreadable", "OSError: file 0 is damaged at .*own.py:"),
        (
            "halved",
            r"augment to return inputs as given, \(2, 3\) torch.float32, got \(2, 2\) torch",
        ),
        ("clients_of_some", "expected the client of each of 4 training samples, got 3"),
        ("clients_by_floats", "expected client as integers or names, got 0.5"),
        ("clients_twice", "expected client or a partitioner as train, got both"),
        ("augmented_by_name", "augment as a function, got a str"),
        ("letters", "function of no parameters, or of data_dir, in any order; .* has 'text'"),
    ],
)
def test_an_invalid_data_set_is_refused(function: str, line: str) -> None:
    with pytest.raises(ValueError, match=rf"^dataset: .*{line}") as error:
        of(function)
    assert "\n" not in str(error.value)

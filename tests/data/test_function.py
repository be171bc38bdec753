"""Data sets that a function of the user's own returns."""

from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.data.datasets import cached, load
from fedaccord.data.kind import Dataset, Reading
from fedaccord.data.transforms import normalise
from tests import own


def of(function: str, data_dir: str = "", **reading: Any) -> Dataset:
    return load(f"tests.own:{function}", data_dir, Reading(**reading))


@pytest.mark.parametrize("function", ["arrays", "torch_datasets", "mapping", "partitioned"])
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


def test_a_partitioner_says_who_holds_what() -> None:
    owners = of("partitioned").owners
    assert owners is not None
    assert owners.bincount().tolist() == [5, 10, 25]


def test_texts_are_tokenized() -> None:
    data = of("columns", max_length=4)
    assert data.x_train.tolist() == [[99, 98, 101, 0], [104, 112, 112, 101], [116, 112, 33, 116]]
    assert data.vocabulary == 257
    assert data.class_names == ("negative", "positive")
    data = of("columns", max_length=4, tokenizer="tests.own:letters")
    assert data.x_train[0].tolist() == [2, 1, 4, 0]


def test_integers_stay_integers() -> None:
    data = of("sequences")
    assert normalise(data.x_train, data, torch.float32).dtype == torch.int64
    assert data.y_train.shape == (12, 5)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("nothing", r"expected \(train, test\), or a mapping of train, .*, got a NoneType$"),
        ("no_test", r"expected \(train, test\), or .*, got a dict with train$"),
        ("uneven", "a target for each of one or more inputs of train, got 4 inputs and 3 targets"),
        ("other_inputs", r"inputs of train and test alike, got \(\(3,\), .* and \(\(2,\), torch"),
        ("broken_inputs", "finite inputs of train, got nan or inf"),
        ("names_of_classes", "expected numbers, of labels integers from 0 on, got <U1"),
        ("below_zero", "expected labels from 0 on, got -1"),
        ("one_class", "labels below classes=1, two or more, got 0"),
        ("many_columns", r"one column beside the label \(label, .*\), got a, b, label; choose two"),
        ("ragged", "samples of one shape, got several"),
        ("absent", "it has no 'absent'"),
        ("letters", "function of no parameters, or of data_dir, in any order; .* has 'text'"),
    ],
)
def test_what_is_no_data_set_is_one_line(function: str, line: str) -> None:
    with pytest.raises(ValueError, match=rf"^dataset: .*{line}") as refused:
        of(function)
    assert "\n" not in str(refused.value)

"""Labelled texts of CSV files and JSON lines."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaccord.data.datasets import load
from fedaccord.data.kind import Dataset, ReadOptions

TRAIN = 'text,label\n"good, warm",pos\nbad,neg\n"é\n\n",pos\n'
TEST = "label,text\nneg,cold\n"


def read(path: Path, **reading: Any) -> Dataset:
    return load("text", str(path), ReadOptions(**({"max_length": 5} | reading)))


def folder(root: Path, train: str = TRAIN, test: str = TEST) -> Path:
    (root / "train.csv").write_text(train, encoding="utf-8")
    (root / "test.csv").write_text(test, encoding="utf-8")
    return root


def test_bytes_are_truncated_and_padded(tmp_path: Path) -> None:
    data = read(folder(tmp_path))
    assert data.x_train.tolist() == [
        [byte + 1 for byte in b"good,"],
        [ord("b") + 1, ord("a") + 1, ord("d") + 1, 0, 0],
        [0xC3 + 1, 0xA9 + 1, 11, 11, 0],
    ]
    assert data.x_train.dtype == torch.int32
    assert data.x_test.tolist() == [[*(byte + 1 for byte in b"cold"), 0]]
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 0, 1], [0])
    assert (data.classes, data.class_names, data.vocabulary) == (2, ("neg", "pos"), 257)
    assert data.owners is None


def test_json_lines_are_the_same(tmp_path: Path) -> None:
    expected = read(folder(tmp_path))
    rows = [("good, warm", "pos"), ("bad", "neg"), ("é\n\n", "pos")]
    lines = [json.dumps({"label": label, "text": text, "more": [1]}) for text, label in rows]
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n\n")
    data = read(tmp_path)
    assert data.x_train.equal(expected.x_train)
    assert data.y_train.equal(expected.y_train)


def test_nested_json_is_one_line(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.jsonl").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"^text: cannot read .* as UTF-8 jsonl"):
        read(tmp_path)


def test_one_file_is_split_into_training_and_test_rows(tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text("text,label\n" + "".join(f"{k},{k % 2}\n" for k in range(10)))
    data = read(path)
    assert data.x_test[:, 0].tolist() == [ord("4") + 1, ord("9") + 1]
    assert data.x_train[:, 0].tolist() == [ord(c) + 1 for c in "01235678"]
    path.write_text("text,label,split\na,0,train\nb,1,train\nc,1,test\n")
    data = read(path)
    assert data.x_train[:, 0].tolist() == [ord("a") + 1, ord("b") + 1]
    assert data.x_test[:, 0].tolist() == [ord("c") + 1]


def test_a_column_gives_the_client_of_a_row(tmp_path: Path) -> None:
    train = "text,label,client\na,0,b\nb,1,a\nc,0,10\nd,1,9\n"
    owners = read(folder(tmp_path, train, "text,label\ne,0\n")).owners
    assert owners.tolist() == [1, 0, 3, 2]


def test_numbers_of_clients_that_differ_in_zeros_have_one_order(tmp_path: Path) -> None:
    """Else it would depend on the hashes of texts, which are other ones in each process."""
    train = "text,label,client\n" + "".join(f"{i},{i % 2},{'0' * i}1\n" for i in range(9))
    owners = read(folder(tmp_path, train, "text,label\ne,0\n")).owners
    assert owners.tolist() == [*range(8, -1, -1)]


def test_labels_have_the_numbers_of_the_setting(tmp_path: Path) -> None:
    data = read(folder(tmp_path), labels="neutral, pos,neg")
    assert data.class_names == ("neutral", "pos", "neg")
    assert data.y_train.tolist() == [1, 2, 1]


def test_a_tokenizer_of_the_users_own(tmp_path: Path) -> None:
    data = read(folder(tmp_path), tokenizer="tests.own:letters")
    assert data.x_train[1].tolist() == [2, 1, 4, 0, 0]
    assert data.vocabulary == 27
    data = read(tmp_path, tokenizer="tests.own:words")
    assert data.x_train[0].tolist() == [5, 4, 0, 0, 0]
    assert data.vocabulary == 100


def test_what_is_decoded_depends_on_settings_and_files(tmp_path: Path) -> None:
    shapes = [read(folder(tmp_path), max_length=n).x_train.shape for n in (5, 3, 5)]
    assert shapes == [(3, 5), (3, 3), (3, 5)]
    folder(tmp_path, TRAIN + "more,neg\n")
    os.utime(tmp_path / "train.csv", (1, 1))
    assert len(read(tmp_path).y_train) == 4


@pytest.mark.parametrize(
    ("train", "reading", "line"),
    [
        ("sentence,label\na,0\n", {}, r"columns `text` and `label` in row 1 .*'sentence', 'label'"),
        ("text,label\na,0\nb\n", {}, r"columns .* in row 2 of .*'text', 'label' with label None"),
        ("text,label\n", {}, "expected rows for train"),
        ("text,label\na,neg\n", {"labels": "neg"}, "labels: expected two or more different names"),
        ("text,label\na,pos\n", {"labels": "pos,bad"}, "among pos, bad, got 'neg'"),
        (TRAIN, {"tokenizer": "tests.own:no_size"}, "^tokenizer: .*the attribute vocab_size"),
        (TRAIN, {"tokenizer": "tests.own:zeros"}, "ids from 1 to 2 .* of tests.own:zeros, got"),
        (TRAIN, {"tokenizer": "tests.own:tiny"}, "^tokenizer: .*the attribute vocab_size"),
        (TRAIN, {"tokenizer": "tests.none:f"}, "^tokenizer: expected a module"),
        ("text,label,client\na,0,\nb,1,x\n", {}, "a client for every training sample, got one w"),
        ("text,label\na,0\nit costs 0,0,5,1\n", {}, "row 2 of .* got more: quote texts with"),
        ("text,label\nb,0\n" + "a" * 200_000 + ",1\n", {}, "UTF-8 csv .*: use .jsonl, which has"),
    ],
)
def test_an_invalid_file_is_refused(
    train: str, reading: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        read(folder(tmp_path, train), **reading)
    assert "\n" not in str(error.value)


def test_numbers_as_labels_start_from_zero_without_gaps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"labels 0\.\.k-1 in .*, got 0, 1, 3: renumber"):
        read(folder(tmp_path, "text,label\na,0\nb,3\n", "text,label\nc,1\n"))


@pytest.mark.parametrize("names", [[], ["train.csv"], ["train.csv", "train.jsonl"], ["a.csv"]])
def test_files_that_are_missing(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text(TRAIN)
    with pytest.raises(
        FileNotFoundError, match=r"expected a file, or a folder with train and test"
    ):
        read(tmp_path)


def test_a_file_of_another_kind_or_code(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TRAIN)
    with pytest.raises(ValueError, match=r"called \*\.csv or \*\.jsonl, got .*a\.txt"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,0\n")
    with pytest.raises(ValueError, match=r"as UTF-8 csv .*: rewrite it"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"as UTF-8 jsonl .*: rewrite it"):
        read(tmp_path / "a.jsonl")

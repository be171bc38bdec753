"""Data sets of labelled texts: CSV files or JSON lines with the columns `text` and `label`."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedaccord.core import named
from fedaccord.data.kind import Arrays, Kind, ReadOptions, Source, check_fits, number_owners

log = logging.getLogger("flwr")  # what a run prints

BYTE_TOKENIZER = "bytes"  # the tokenizer that needs no vocabulary of its own
PADDING = 0  # the id that pads a text
SUFFIXES = (".csv", ".jsonl")
TEST_EVERY = 5  # rows of one file without a column `split`


class Row(NamedTuple):
    text: str
    label: str
    split: str  # train, test; empty: the file has no such column
    client: str  # the client; empty: likewise


class Tokenizer(NamedTuple):
    encode: Callable[[str], Sequence[int]]  # ids from 1 on
    size: int  # ids, with 0 for the padding


def find(root: Path, reading: ReadOptions) -> Source:
    """One file, or train.csv and test.csv (or .jsonl) in a folder."""
    candidates: tuple[Path, ...] = (root,)
    files = candidates
    if not root.is_file():
        each = [[root / f"{split}{end}" for end in SUFFIXES] for split in ("train", "test")]
        candidates = tuple(path for paths in each for path in paths)  # each may replace another
        files = tuple(path for path in candidates if path.is_file())
        if len(files) != 2 or files[0].stem == files[1].stem:
            raise FileNotFoundError(
                f"text: expected a file, or a folder with train and test as one of "
                f"{', '.join(SUFFIXES)} each, found {[f.name for f in files] or 'neither'} in "
                f"{root}: point data-dir to one"
            )
    if wrong := [path for path in files if path.suffix.lower() not in SUFFIXES]:
        raise ValueError(
            f"text: expected a file called *.csv or *.jsonl, got {wrong[0]}: rename it"
        )
    code: list[Path] = []
    if reading.tokenizer != BYTE_TOKENIZER:  # a change of its code changes the data
        code = named.files("tokenizer", reading.tokenizer)
    return Source(candidates, partial(decode, files, reading), tuple(code))


def decode(files: Sequence[Path], reading: ReadOptions) -> Arrays:
    """Token ids (n, max_length) int32, truncated or padded by 0, and the numbers of the labels.

    In one file the column `split` selects the training rows; without it every fifth row is for
    testing. A column `client` has the client of a row, for ``partition=natural``.
    """
    train, *others = ([*_rows(file)] for file in files)
    train, test = (train, *others) if others else _split(files[0], train)
    for split, rows in (("train", train), ("test", test)):
        if not rows:
            raise ValueError(f"text: expected rows for {split} in {files[-1]}, got none: add some")
    names = _labels(files[0], reading.class_names, [row.label for row in (*train, *test)])
    check_fits("text: token ids", 4 * reading.max_length * (len(train) + len(test)))
    tokenizer = tokenizer_of(reading.tokenizer)
    x_train, x_test = (
        encode([row.text for row in rows], tokenizer, reading) for rows in (train, test)
    )
    number = {name: k for k, name in enumerate(names)}
    y_train, y_test = (np.array([number[row.label] for row in rows]) for rows in (train, test))
    named_owners = [row.client for row in train]
    owners = number_owners("text", named_owners) if any(named_owners) else None
    return Arrays(
        x_train,
        y_train,
        x_test,
        y_test,
        classes=len(names),
        class_names=names,
        vocabulary=tokenizer.size,
        owners=owners,
    )


def tokenizer_of(name: str) -> Tokenizer:
    """``bytes``, or the object of `package.module:name`: a function of a text that returns ids, or
    an object with such a method ``encode``; ``vocab_size`` is the number of ids.

    Raises ValueError, in one line, for anything else.
    """
    if name == BYTE_TOKENIZER:
        return Tokenizer(lambda text: [byte + 1 for byte in text.encode()], 257)
    target = named.load("tokenizer", name)
    function, size = getattr(target, "encode", target), getattr(target, "vocab_size", None)
    if not callable(function) or not isinstance(size, int) or size < 2:
        raise ValueError(
            f"tokenizer: expected {name} as a function of a text, or an object with `encode`, and "
            f"with the attribute vocab_size, an integer; got a {type(target).__name__} with "
            f"vocab_size {size!r}"
        )
    return Tokenizer(function, size)


def encode(texts: Sequence[str], tokenizer: Tokenizer, reading: ReadOptions) -> NDArray[np.int32]:
    """(n, max_length) token ids; longer texts are truncated, shorter ones are padded by 0.

    Raises ValueError, in one line, if the tokenizer fails or returns an invalid id.
    """
    ids = np.full((len(texts), reading.max_length), PADDING, np.int32)
    for row, text in zip(ids, texts, strict=True):
        try:
            tokens = np.asarray(tokenizer.encode(text))[: len(row)]
        except Exception as error:  # of the user's own code
            line = named.one_line(error)
            raise ValueError(f"tokenizer: {reading.tokenizer} failed: {line}") from error
        wrong = tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu")
        if wrong or (tokens.size and not 0 < tokens.min() <= tokens.max() < tokenizer.size):
            raise ValueError(
                f"tokenizer: expected ids from 1 to {tokenizer.size - 1} (0 is the padding) of "
                f"{reading.tokenizer}, got {tokens.tolist()!r:.60} for {text!r:.40}"
            )
        row[: len(tokens)] = tokens
    return ids


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file; raises ValueError, in one line, for an invalid one."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, values in enumerate(_records(path, file), 1):
                yield _row(path, number, values)
    except (OSError, UnicodeError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        too_long = isinstance(error, csv.Error) and "field limit" in str(error)
        advice = "use .jsonl, which has no such limit" if too_long else "rewrite it"
        raise ValueError(
            f"text: cannot read {path} as UTF-8 {path.suffix[1:]} ({error}): {advice}"
        ) from error


def _records(path: Path, file: Any) -> Iterator[Any]:
    if path.suffix.lower() == ".csv":
        yield from csv.DictReader(file)
    else:
        yield from (json.loads(line) for line in file if line.strip())


def _row(path: Path, number: int, values: Any) -> Row:
    fields = values if isinstance(values, dict) else {}
    text, label = fields.get("text"), fields.get("label")
    if None in fields:
        raise ValueError(
            f"text: expected as many fields in row {number} of {path} as columns, got more: quote "
            "texts with commas"
        )
    if not isinstance(text, str) or not isinstance(label, str | int) or label == "":
        columns = ", ".join(map(repr, [name for name in fields if name is not None][:8]))
        raise ValueError(
            f"text: expected the columns `text` and `label` in row {number} of {path}, a text and "
            f"a name or number; got {columns or 'none'}"
            + (f" with label {label!r}" if "label" in fields else "")
            + ": rename or complete them"
        )
    split, client = (fields.get(name) for name in ("split", "client"))
    return Row(text, str(label), str(split or ""), "" if client is None else str(client))


def _split(path: Path, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The training rows and the test rows of one file."""
    if not any(row.split for row in rows):
        test = rows[TEST_EVERY - 1 :: TEST_EVERY]
        return [row for i, row in enumerate(rows, 1) if i % TEST_EVERY], test
    if wrong := [row.split for row in rows if row.split not in ("train", "test")]:
        raise ValueError(
            f"text: expected `train` or `test` in the column `split` of {path}, got {wrong[0]!r}"
        )
    return [row for row in rows if row.split == "train"], [r for r in rows if r.split == "test"]


def _labels(path: Path, names: tuple[str, ...], labels: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes in the order of their numbers: ``names``, or those in the file."""
    present = {*labels}
    if names:
        if unknown := sorted(present - {*names}):
            raise ValueError(
                f"labels: expected the label of every row among {', '.join(names)}, got "
                f"{unknown[0]!r} in {path}: add it"
            )
    elif all(label.isdecimal() for label in present):
        names = tuple(map(str, range(len(present))))
        if {*names} != present:
            raise ValueError(
                f"text: expected labels 0..k-1 in {path}, got {', '.join(sorted(present)[:5])}: "
                "renumber them, or name all in labels="
            )
    else:
        names = tuple(sorted(present))
        log.warning(
            f"text: the {len(names)} classes of {path} are numbered by their names, {names[0]!r} "
            "is 0; devices with data of their own need labels= with all names"
        )
    if len({*names}) < max(len(names), 2):
        raise ValueError(
            f"text: expected two or more different labels in {path}, got {', '.join(names)}: add "
            "rows, or name all in labels="
        )
    return names


TEXT = Kind(find=find, origin="user", reads=("tokenizer", "max_length", "labels"))

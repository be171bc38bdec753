"""`fedaccord fedscale-traces`: FedScale's traces, and pickles that would execute code."""

import os
import pickle
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedaccord.federation.device_profiles import Device, read
from tests.cli.shell import invoke, refusal, success

CAPACITY = {
    7: {"computation": 20.0, "communication": 800.0},
    3: {"computation": 10, "communication": 8},
}
BEHAVIOUR = {
    5: {"duration": 9, "active": [0, 50], "inactive": [20, 60], "finish_time": 100, "model": "x"}
}


convert = partial(invoke, "fedscale-traces")


def dumped(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def test_traces_become_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their numbers; training takes three times as long as an inference; both links
    have the same speed; a trace that is too short repeats."""
    capacity = dumped(tmp_path / "capacity", CAPACITY)
    behaviour = dumped(tmp_path / "behaviour", BEHAVIOUR)
    out = tmp_path / "devices.csv"
    words = (capacity, "--behaviour", behaviour, "--clients", 3, "--out", out)
    assert "3 devices" in success(convert(*words)).stdout
    trace: dict[str, Any] = {"active": ((0, 20), (50, 60)), "period": 100}
    slow, fast = Device(0.03, 1000, 1000, **trace), Device(0.06, 100_000, 100_000, **trace)
    assert read(out, 3) == [slow, fast, slow]
    monkeypatch.setenv("HOME", str(tmp_path))
    success(convert(capacity, "--out=~/devices.csv"))
    assert read(out, 2) == [Device(0.03, 1000, 1000), Device(0.06, 100_000, 100_000)]


def test_intervals_are_in_order_and_end_with_the_trace(tmp_path: Path) -> None:
    capacity = dumped(tmp_path / "capacity", CAPACITY)
    late = {1: {"active": [50, 0, 120], "inactive": [160, 20, 130], "finish_time": 100}}
    out = tmp_path / "devices.csv"
    success(convert(capacity, "--behaviour", dumped(tmp_path / "late", late), "--out", out))
    assert read(out, 2)[0].active == ((0, 20), (50, 100))


@pytest.mark.parametrize(
    ("active", "inactive", "expected"),
    [
        ([0, 10], [20, 30], ((0, 30),)),
        ([0, 5, 60], [50, 10, 70], ((0, 50), (60, 70))),
        ([0.00001], [20], ((0.00001, 20),)),
    ],
)
def test_intervals_may_overlap_and_begin_soon(
    active: list[float], inactive: list[float], expected: Any, tmp_path: Path
) -> None:
    capacity, out = dumped(tmp_path / "capacity", CAPACITY), tmp_path / "devices.csv"
    trace = {1: {"active": active, "inactive": inactive, "finish_time": 100}}
    success(convert(capacity, "--behaviour", dumped(tmp_path / "trace", trace), "--out", out))
    assert read(out, 2)[0].active == expected


@pytest.mark.parametrize(
    ("capacity", "line"),
    [
        ({"computation": 1, "communication": 1e-9}, "expected up_kbps of client 0 of at least"),
        ({"computation": 1e18, "communication": 1}, "expected ms_per_sample of client 0 from"),
    ],
)
def test_a_device_that_no_run_could_read_is_not_written(
    capacity: dict[str, float], line: str, tmp_path: Path
) -> None:
    out = tmp_path / "devices.csv"
    assert line in refusal(tmp_path, convert(dumped(tmp_path / "c", {1: capacity}), "--out", out))
    assert not out.exists()


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_malicious_trace_is_refused_and_nothing_is_executed(tmp_path: Path) -> None:
    bomb = tmp_path / "executed"
    trace = dumped(tmp_path / "trace", CAPACITY | {1: Malicious(bomb)})
    for words in ((trace,), (dumped(tmp_path / "good", CAPACITY), "--behaviour", trace)):
        result = convert(*words, "--out", tmp_path / "out.csv")
        assert "which a trace does not need" in refusal(tmp_path, result)
        assert not bomb.exists()
        assert not (tmp_path / "out.csv").exists()
    pickle.loads(trace.read_bytes())  # as it would without the restriction
    assert bomb.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (OrderedDict(CAPACITY), "it names collections.OrderedDict"),
        ([1, 2], "devices by number, got another object"),
        ({}, "devices by number, got another object"),
        ({1: {"computation": 3.0}}, "expected computation, communication of device 1"),
        ({1: {"computation": -3.0, "communication": 1}}, "a number of at least 0, got '-3.0'"),
        ({1: {"computation": 3.0, "communication": 0}}, "a communication above 0"),
        ({1: {"computation": True, "communication": 1}}, "a number of at least 0, got 'True'"),
    ],
)
def test_a_wrong_trace_is_one_line(value: Any, message: str, tmp_path: Path) -> None:
    trace = dumped(tmp_path / "trace", value)
    result = convert(trace, "--out", tmp_path / "out.csv")
    assert message in refusal(tmp_path, result)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", b"\x80\x05}", b"\x80\x04X\xff\xff\xff\x7fa."]
)
def test_a_damaged_trace_is_one_line(content: bytes, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    assert "expected a FedScale trace" in refusal(tmp_path, convert(trace))
    line = f"cannot read {tmp_path / 'none'} (No such file or directory); check the path"
    assert line in refusal(tmp_path, convert(tmp_path / "none"))


def test_a_device_that_is_never_active(tmp_path: Path) -> None:
    never = {1: {"active": [5], "inactive": [5], "finish_time": 9}}
    good, bad = dumped(tmp_path / "good", CAPACITY), dumped(tmp_path / "bad", never)
    assert "active for a while" in refusal(tmp_path, convert(good, "--behaviour", bad))

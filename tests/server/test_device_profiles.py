"""Simulated devices: drawn ones, and those of a file."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedaccord.federation.device_profiles import MEDIANS, Device, devices, lognormal, read

HEAD = "client,ms_per_sample,up_kbps,down_kbps"
ROW = "2,800,1600"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "devices.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_units_of_a_file(tmp_path: Path) -> None:
    """kbps are 1,000 bits a second; rows come in any order, and more than there are clients."""
    path = written(
        tmp_path,
        f"{HEAD},latency_ms,active,period_s",
        "1,4,8,8,,,",
        "0,2,800,1600,30,0-10 20.5-30,100",
        "7,1,1,1,,,",
    )
    assert read(path, 2) == [
        Device(0.002, 100_000, 200_000, 0.03, ((0, 10), (20.5, 30)), 100),
        Device(0.004, 1000, 1000),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEAD, f"0,{ROW}"], "got none of client 1"),
        ([HEAD, f"0,{ROW}", f"0,{ROW}"], "one row of client 0"),
        (["client,ms_per_sample,up_kbps", "0,1,1"], "the column down_kbps"),
        ([f"{HEAD},speed", f"0,{ROW},1"], "got 'speed'"),
        ([HEAD, f"x,{ROW}"], "number of a client from 0 on, got 'x'"),
        ([HEAD, f"-1,{ROW}"], "number of a client from 0 on, got '-1'"),
        ([HEAD, "0,-2,800,1600"], "ms_per_sample of client 0 from 0 to 1e+15, got '-2'"),
        ([HEAD, "0,2,nan,1600"], "up_kbps of client 0 from 0 to 1e+15, got 'nan'"),
        ([HEAD, "0,1e200,800,1600"], "ms_per_sample of client 0 from 0 to 1e+15, got '1e200'"),
        ([HEAD, "0,2,800,0"], "down_kbps of client 0 of at least 0.001, got 0"),
        ([HEAD, "0,2,1e-310,1600"], "up_kbps of client 0 of at least 0.001, got 1e-310"),
        ([HEAD, f"0,{ROW},7"], "no cell of client 0 without a column, got ['7']"),
        ([f"{HEAD},up_kbps", f"0,{ROW},7"], "each column once, got 'client, ms_per_sample, up_"),
        ([f"{HEAD},active,period_s", f"0,{ROW},,8"], "active beside period_s of client 0"),
        ([f"{HEAD},active", f"0,{ROW},-5-10"], "as 0-3600 7200-9000, got '-5-10'"),
        ([HEAD, "0,2,800"], "expected down_kbps of client 0, got none"),
        ([f"{HEAD},active", f"0,{ROW},5"], "as 0-3600 7200-9000, got '5'"),
        ([f"{HEAD},active", f"0,{ROW},5-5"], "an active interval of client 0"),
        ([f"{HEAD},active", f"0,{ROW},5-9 8-10"], "in order, got '5-9 8-10'"),
        ([f"{HEAD},active,period_s", f"0,{ROW},5-9,8"], "within its period of 8 s"),
        ([], "the column client"),
    ],
)
def test_a_wrong_file_is_one_line(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device-profile: ") as error:
        read(written(tmp_path, *lines), 2)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_a_spreadsheet(tmp_path: Path) -> None:
    """It begins with a byte order mark."""
    path = tmp_path / "devices.csv"
    path.write_text(f"{HEAD}\n0,{ROW}\n", encoding="utf-8-sig")
    assert read(path, 1) == [Device(0.002, 100_000, 200_000)]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device-profile: .*none.csv: No such file"):
        devices(str(tmp_path / "none.csv"), 0, 2)


def test_drawn_devices() -> None:
    """A device is a function of (seed, client) alone; the medians are as documented."""
    sample = devices("lognormal", 3, 2000)
    assert sample[:5] == devices("lognormal", 3, 5) == [lognormal(3, i) for i in range(5)]
    assert len({*sample, *devices("lognormal", 4, 5)}) == 2005
    assert 1000 * median(d.seconds_per_sample for d in sample) == pytest.approx(
        MEDIANS["ms_per_sample"], rel=0.05
    )
    assert 8e-3 * median(d.up for d in sample) == pytest.approx(MEDIANS["up_kbps"], rel=0.1)
    assert all(device.until(1e9) == math.inf for device in sample[:5])


@pytest.mark.parametrize(
    ("active", "period", "now", "until", "next_active"),
    [
        ((), 0, 5, math.inf, 5),
        (((2, 4), (8, 9)), 0, 1, 1, 2),
        (((2, 4), (8, 9)), 0, 3, 4, 3),
        (((2, 4), (8, 9)), 0, 4, 4, 8),  # an interval is open at its end
        (((2, 4), (8, 9)), 0, 9, 9, math.inf),
        (((2, 4), (8, 9)), 10, 9.5, 9.5, 12),
        (((2, 4), (8, 9)), 10, 33, 34, 33),
        (((0, 4), (8, 10)), 10, 8, 14, 8),  # across the end of a period
        (((0, 4), (4, 6)), 10, 1, 6, 1),
        (((0, 10),), 10, 7, math.inf, 7),
    ],
)
def test_when_a_device_is_there(
    active: tuple[tuple[float, float], ...],
    period: float,
    now: float,
    until: float,
    next_active: float,
) -> None:
    device = Device(1, 1, 1, 0, active, period)
    assert (device.until(now), device.next_active(now)) == (until, next_active)


def test_a_day_that_does_not_divide_evenly() -> None:
    device = Device(1, 1, 1, 0, ((0.0, 100.3),), 86400.0)
    assert all(device.until(86400.0 * k) == 86400.0 * k + 100.3 for k in range(50))


HUNDREDTHS = st.integers(0, 300)


@given(
    bounds=st.lists(HUNDREDTHS, min_size=2, max_size=6, unique=True),
    rest=st.integers(0, 100),
    is_periodic=st.booleans(),
    now=st.integers(0, 40_000),
    touching=st.booleans(),
)
def test_the_times_are_those_of_exact_numbers(
    bounds: list[int], rest: int, is_periodic: bool, now: int, touching: bool
) -> None:
    """Intervals of hundredths of seconds, which floats round, against a walk through them."""
    ends = sorted(bounds)[: len(bounds) // 2 * 2]
    pairs = [*zip(ends[::2], ends[1::2], strict=True)]
    if touching:
        pairs = [*pairwise(ends)]
    period = ends[-1] + rest if is_periodic else 0
    moments = {k for b, e in pairs for k in range(b, e)}

    def is_there(k: int) -> bool:
        return (k % period if period else k) in moments

    last = now + 2 * period + 301
    until = next((k for k in range(now, last) if not is_there(k)), math.inf)
    following = next((k for k in range(now, last) if is_there(k)), math.inf)
    device = Device(1, 1, 1, 0, tuple((b / 100, e / 100) for b, e in pairs), period / 100)
    at = now / 100 + 0.005  # no end of an interval: those are rounded
    exact = [at if k == now else k / 100 for k in (until, following)]
    assert [device.until(at), device.next_active(at)] == pytest.approx(exact, rel=1e-12)
    for moment in (at, now / 100):
        begin = device.next_active(moment)
        if begin < math.inf:
            assert device.until(begin) > begin
            assert (device.until(begin) == math.inf) == (len(moments) == period)

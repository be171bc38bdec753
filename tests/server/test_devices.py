"""Simulated devices: drawn ones, and those of a file."""

import math
from pathlib import Path
from statistics import median

import pytest

from fedaccord.federation.devices import MEDIANS, Device, devices, lognormal, read

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
        ([HEAD, "0,-2,800,1600"], "ms_per_sample of client 0 of at least 0, got '-2'"),
        ([HEAD, "0,2,nan,1600"], "up_kbps of client 0 of at least 0, got 'nan'"),
        ([HEAD, "0,2,800,0"], "down_kbps of client 0 above 0"),
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


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device-profile: .*none.csv: No such file"):
        devices(str(tmp_path / "none.csv"), 0, 2)


def test_drawn_devices() -> None:
    """A device is a function of (seed, client) alone; the medians are as documented."""
    drawn = devices("lognormal", 3, 2000)
    assert drawn[:5] == devices("lognormal", 3, 5) == [lognormal(3, i) for i in range(5)]
    assert len({*drawn, *devices("lognormal", 4, 5)}) == 2005
    assert 1000 * median(d.seconds_per_sample for d in drawn) == pytest.approx(
        MEDIANS["ms_per_sample"], rel=0.05
    )
    assert 8e-3 * median(d.up for d in drawn) == pytest.approx(MEDIANS["up_kbps"], rel=0.1)
    assert all(device.until(1e9) == math.inf for device in drawn[:5])


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

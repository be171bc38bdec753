"""Simulated devices: speed and links of a client, and the times when it is available.

`lognormal` draws them from (seed, client); a CSV file has a row for each client:

    client, ms_per_sample, up_kbps, down_kbps, latency_ms, active, period_s

``ms_per_sample``: milliseconds of a gradient of one sample; kbps: 1,000 bits a second. The last
three may be missing or empty: no latency, and always available. ``active``: the seconds in which
the device is available, as "0-3600 7200-9000"; ``period_s``: the seconds after which they repeat;
empty: never.
"""

import csv
import io
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedaccord.storage.files import replace

NONE, LOGNORMAL = "none", "lognormal"  # values of device-profile besides a file
MEDIANS = {"ms_per_sample": 10.0, "up_kbps": 5_000.0, "down_kbps": 20_000.0, "latency_ms": 50.0}
SIGMAS = {"ms_per_sample": 0.6, "up_kbps": 1.0, "down_kbps": 1.0, "latency_ms": 0.5}
REQUIRED = ("client", "ms_per_sample", "up_kbps", "down_kbps")
OPTIONAL = ("latency_ms", "active", "period_s")
BITS = 8
MIN_KBPS, MAX_NUMBER = 1e-3, 1e15  # smallest link, in kbps; largest number in a file


class Profiles:
    """Values of device-profile besides its choices."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and value.endswith(".csv")

    def __str__(self) -> str:
        return "the path of a .csv file"


PROFILES = Profiles()


class Device(NamedTuple):
    """A simulated device; times in seconds."""

    seconds_per_sample: float
    up: float  # bytes a second
    down: float
    latency: float = 0.0  # of a visit
    active: tuple[tuple[float, float], ...] = ()  # (begin, end) in order; empty: always available
    period: float = 0.0  # after which they repeat; 0: never

    def until(self, now: float) -> float:
        """When the device disconnects; ``now``: it is unavailable; inf: never."""
        if not self.active:
            return math.inf
        end = now
        for begin, stop in self._intervals(now):  # may be adjacent, also across two periods
            if begin > end:
                break
            if end < stop:
                end = stop
        return math.inf if 0 < self.period < end - now else end

    def next_active(self, now: float) -> float:
        """The next time when it is available, not before ``now``; inf: never again."""
        if self.until(now) > now:
            return now
        later = (begin for begin, stop in self._intervals(now) if now < begin < stop)
        return next(later, math.inf)

    def _intervals(self, now: float) -> Iterator[tuple[float, float]]:
        """The intervals from the last one that began by ``now``, or one before, in order: of this
        period and the next two."""
        active, length = self.active, self.period
        if not length:
            yield from active[max(0, bisect_right(active, (now, math.inf)) - 1) :]
            return

        def at(period: float, seconds: float) -> float:
            """The end of a period equals the beginning of the next one, despite rounding."""
            return (period + 1) * length if seconds == length else period * length + seconds

        this = now // length
        since = max(0, bisect_right(active, (now - this * length, math.inf)) - 2)
        parts = (this - 1, active[-1:]), (this, active[since:]), (this + 1, active)
        for period, some in (*parts, (this + 2, active)):
            for b, e in some:
                yield at(period, b), at(period, e)


def devices(profile: str, seed: int, num_clients: int) -> list[Device]:
    """The devices of all clients. Raises ValueError, in one line, on a file that does not fit."""
    if profile == LOGNORMAL:
        return [lognormal(seed, i) for i in range(num_clients)]
    return read(Path(profile), num_clients)


def lognormal(seed: int, client: int) -> Device:
    """A device of lognormal speed, links and latency, of `MEDIANS` and `SIGMAS`."""
    generator = random.Random(f"device {seed} {client}")
    return _device({k: m * math.exp(generator.gauss(0, SIGMAS[k])) for k, m in MEDIANS.items()})


def read(path: Path, num_clients: int) -> list[Device]:
    """The devices of clients 0 to ``num_clients`` - 1; further rows are ignored.

    Raises ValueError, in one line, if one is missing or a value is wrong.
    """
    by_client: dict[int, Device] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            names = table.fieldnames or []
            if missing := [name for name in REQUIRED if name not in names]:
                raise ValueError(f"expected the column {missing[0]}, got {', '.join(names)!r:.80}")
            if other := [name for name in names if name not in (*REQUIRED, *OPTIONAL)]:
                columns = ", ".join((*REQUIRED, *OPTIONAL))
                raise ValueError(f"expected the columns {columns}, got {other[0]!r:.40}")
            if len({*names}) < len(names):
                raise ValueError(f"expected each column once, got {', '.join(names)!r:.80}")
            for row in table:
                client = _client(row["client"])
                if client in by_client:
                    raise ValueError(f"expected one row of client {client}, got two")
                by_client[client] = _of_row(client, row)
    except (OSError, ValueError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"device-profile: {path}: {why}") from None
    for client in range(num_clients):
        if client not in by_client:
            raise ValueError(
                f"device-profile: {path}: expected a row of each of {num_clients} clients, "
                f"got none of client {client}"
            )
    return [by_client[client] for client in range(num_clients)]


def write(path: Path, rows: Mapping[int, Mapping[str, object]]) -> None:
    """A file for `read`; rows: of each client, with the columns' names. Raises ValueError, in one
    line, for a row that `read` would refuse."""
    for client, row in rows.items():
        _of_row(client, {name: str(value) for name, value in row.items()})
    text = io.StringIO()
    table = csv.DictWriter(text, (*REQUIRED, *OPTIONAL), lineterminator="\n")
    table.writeheader()
    table.writerows({"client": client, **row} for client, row in rows.items())
    replace(path, text.getvalue().encode())


def _client(text: str | None) -> int:
    if not (text or "").strip().isdecimal():
        raise ValueError(f"expected the number of a client from 0 on, got {text!r:.40}")
    return int(text or "")


def _of_row(client: int, row: Mapping[str | None, Any]) -> Device:
    if None in row:
        raise ValueError(f"expected no cell of client {client} without a column, got {row[None]}")
    values = {name: _number(client, name, row.get(name)) for name in MEDIANS if row.get(name)}
    for name in REQUIRED[1:]:
        if name not in values:
            raise ValueError(f"expected {name} of client {client}, got none")
        if name != "ms_per_sample" and values[name] < MIN_KBPS:
            raise ValueError(
                f"expected {name} of client {client} of at least {MIN_KBPS:g}, got {row[name]}"
            )
    period = _number(client, "period_s", row["period_s"]) if row.get("period_s") else 0.0
    active = tuple(_interval(client, text) for text in (row.get("active") or "").split())
    if period and not active:
        raise ValueError(f"expected active beside period_s of client {client}, got none")
    times = [time for interval in active for time in interval]
    if times != sorted(times) or (period and times and times[-1] > period):
        raise ValueError(
            f"expected active intervals of client {client} in order"
            + (f" and within its period of {period:g} s" if period else "")
            + f", got {row['active']!r:.60}"
        )
    return _device(values)._replace(active=active, period=period)


def _interval(client: int, text: str) -> tuple[float, float]:
    begin, *ends = text.split("-")
    if len(ends) != 1:
        raise ValueError(
            f"expected active of client {client} as 0-3600 7200-9000, got {text!r:.40}"
        )
    first, last = (_number(client, "active", part) for part in (begin, ends[0]))
    if first == last:
        raise ValueError(f"expected an active interval of client {client}, got {text!r:.40}")
    return first, last


def _number(client: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError(
            f"expected {name} of client {client} from 0 to {MAX_NUMBER:g}, got {text!r:.40}"
        )
    return value


def _device(values: Mapping[str, float]) -> Device:
    return Device(
        seconds_per_sample=values["ms_per_sample"] / 1000,
        up=values["up_kbps"] * 1000 / BITS,
        down=values["down_kbps"] * 1000 / BITS,
        latency=values.get("latency_ms", 0.0) / 1000,
    )

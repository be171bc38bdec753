"""`fedaccord fedscale-traces`: FedScale's traces of phones as a file for device-profile."""

import pickle
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from fedaccord.cli.console import check_output, make_console, refusing

TRAINING = 3.0  # FedScale's factor on the milliseconds of an inference


def fedscale_traces(
    capacity: Annotated[
        Path, typer.Argument(help="FedScale's client_device_capacity: speed and bandwidth.")
    ],
    behaviour: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="FedScale's client_behave_trace: when devices are available."
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients; by default all of the trace.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("devices.csv"),
) -> None:
    """Convert FedScale's traces of phones into a file for device-profile.

    A trace is a pickle. Only dictionaries, lists, numbers and texts are read: a pickle that names a
    function or a class is refused without executing it. Client i becomes the device with the i-th
    smallest number; a trace with fewer devices than clients repeats. An example:

    fedaccord fedscale-traces client_device_capacity --behaviour client_behave_trace --clients 100
    """
    from fedaccord.federation.device_profiles import write

    check_output("--out", out)
    with refusing(ValueError, OSError):
        speeds = _read(capacity, "computation", "communication")
        times = _read(behaviour, "active", "inactive", "finish_time") if behaviour else []
        rows = {}
        for client in range(clients or len(speeds)):
            rows[client] = _capacity(capacity, speeds[client % len(speeds)])
            if behaviour:
                rows[client] |= _activity(behaviour, times[client % len(times)])
        write(out.expanduser(), rows)
    make_console().print(f"{len(rows)} devices: {out}", soft_wrap=True)


class _Plain(pickle.Unpickler):
    """Reads only built-in values."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a trace does not need")


def _read(path: Path, *keys: str) -> list[Mapping[str, Any]]:
    """The devices of a trace in the order of their numbers. Raises ValueError, in one line."""
    try:
        with path.open("rb") as file:
            content = _Plain(file).load()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); check the path") from None
    except Exception as error:  # an invalid pickle raises one of a dozen kinds
        raise ValueError(f"{path}: expected a FedScale trace, got {error}") from None
    is_trace = isinstance(content, dict) and content and all(isinstance(k, int) for k in content)
    if not is_trace:
        raise ValueError(
            f"{path}: expected a FedScale trace, devices by number, got another object"
        )
    for number, device in content.items():
        if not isinstance(device, dict) or any(key not in device for key in keys):
            raise ValueError(f"{path}: expected {', '.join(keys)} of device {number}")
    return [content[number] for number in sorted(content)]


def _capacity(path: Path, device: Mapping[str, Any]) -> dict[str, object]:
    speed, bandwidth = _number(path, device["computation"]), _number(path, device["communication"])
    if not bandwidth:
        raise ValueError(f"{path}: expected a communication above 0, got 0")
    return {"ms_per_sample": TRAINING * speed, "up_kbps": bandwidth, "down_kbps": bandwidth}


def _activity(path: Path, device: Mapping[str, Any]) -> dict[str, object]:
    begins, ends = device["active"], device["inactive"]
    if not isinstance(begins, list) or not isinstance(ends, list):
        raise ValueError(f"{path}: expected active and inactive to be lists of seconds")
    period = _number(path, device["finish_time"])  # which the times repeat after
    pairs = sorted((_number(path, b), _number(path, e)) for b, e in zip(begins, ends, strict=False))
    within = [(begin, min(end, period)) for begin, end in pairs]
    merged: list[tuple[float, float]] = []  # intervals of a trace may overlap
    for begin, end in ((begin, end) for begin, end in within if begin < end):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    active = " ".join(f"{_digits(begin)}-{_digits(end)}" for begin, end in merged)
    if not active:
        raise ValueError(f"{path}: expected a device that is active for a while, got none")
    return {"active": active, "period_s": period}


def _digits(seconds: float) -> str:
    """Without an exponent, whose sign would look like the end of an interval."""
    return f"{Decimal(repr(seconds)):f}"


def _number(path: Path, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{path}: expected a number of at least 0, got {str(value)!r:.40}")
    return float(value)

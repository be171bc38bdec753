"""The simulated clock: how long a visit takes, and whom a round waits for."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.core import Model
from fedaccord.core.cost import upload_bytes
from fedaccord.core.request import TrainInstruction, TrainRequest
from fedaccord.federation.clock import Clock
from fedaccord.federation.device_profiles import Device
from fedaccord.federation.errors import FederationError
from fedaccord.strategies import FedAvg, FedPD
from fedaccord.strategies.fedpd import is_silent
from fedaccord.task import Clients, Task
from fedaccord.task.batches import PAIRS
from fedaccord.task.sources import FunctionSource, SourceClients

ONE = Device(seconds_per_sample=1.0, up=math.inf, down=math.inf)


def request(client: int, **more: Any) -> TrainRequest:
    settings = {"local_epochs": 1, "local_steps": 0, "batch_size": 4} | more
    instruction = TrainInstruction(
        *(0, 1, FedAvg().client_half(), ((10,),), 0.1, 0.0, 0.0),
        *(settings["local_epochs"], settings["local_steps"], settings["batch_size"]),
        *(0, "float32"),
        client=client,
    )
    return TrainRequest(instruction, Model(torch.zeros(10)))


def clock_of(seconds: list[float], **device: Any) -> Clock:
    """Client i needs so many seconds for a visit."""
    each = [ONE._replace(seconds_per_sample=s, **device) for s in seconds]
    return Clock(each, lambda _: 1, lambda *_: 1, 0, 1)


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"local_epochs": 3}, 18),
        ({"local_steps": 5}, 20),
        ({"local_steps": 5, "batch_size": 0}, 30),  # whole clients
        ({"local_steps": 5, "batch_size": 50}, 30),
    ],
)
def test_the_time_of_a_visit(settings: dict[str, int], samples: int) -> None:
    """latency + 40 bytes down + 2 gradients of the samples + 80 bytes up; w^0 and buffers travel
    too."""
    device = Device(seconds_per_sample=0.5, up=16.0, down=20.0, latency=3.0)
    clock = Clock(
        [device], lambda _: 6, lambda _, size: min(size or 6, 6), up_bytes=80, gradients=2
    )
    assert clock.end(request(0, **settings), 100.0).seconds == 100 + 3 + 2 + 5 + samples
    more = request(0, **settings)._replace(w_init=torch.zeros(10), buffers=torch.zeros(4))
    assert clock.end(more, 100.0).seconds == 100 + 3 + 2 + 5 + samples + 2 + 16 / 20 + 16 / 16


@pytest.mark.parametrize("size", [4, 20, 100])
def test_the_batches_of_a_function_have_sizes_of_their_own(size: int) -> None:
    """Three steps of 100 samples at one second each."""
    x, y = torch.randn(100, 4), torch.arange(100) % 3
    batches = [*zip(x.split(size), y.split(size), strict=True)]
    clients = SourceClients([FunctionSource(lambda g: batches, PAIRS).counted()])
    own = Task(lambda: torch.nn.Linear(4, 3), clients, None)
    clock = Clock(
        [Device(1.0, math.inf, math.inf, 0.0)], own.num_examples, own.samples_of_step, 0, 1
    )
    assert clock.end(request(0, local_steps=3, batch_size=50), 0.0).seconds == 3 * size


def test_a_full_batch_has_at_most_the_samples_of_a_client() -> None:
    clients = Clients([torch.randn(6, 4)], [torch.arange(6) % 3])
    own = Task(lambda: torch.nn.Linear(4, 3), clients)
    assert [own.samples_of_step(0, size) for size in (0, 4, 50)] == [6, 4, 6]


def test_a_silent_round_uploads_nothing() -> None:
    """FedPD's coin: some seeds are silent in the round in which the cost is measured."""
    device, cases = Device(seconds_per_sample=0.0, up=1.0, down=math.inf), set()
    for seed in range(8):
        method = FedPD(p=0.5, seed=seed, fraction_train=1.0)
        assert (method.cost.down, method.cost.up) == (1, 1)
        like, half = torch.zeros(10), method.client_half()
        clock = Clock(
            [device],
            lambda _: 6,
            lambda _, size: min(size or 6, 6),
            upload_bytes(method.cost, half, like),
            gradients=1,
        )
        visit = request(0)
        visit = visit._replace(instruction=visit.instruction._replace(half=half))
        silent = is_silent(0.5, seed, 0)
        assert clock.end(visit, 0.0).seconds == (0 if silent else 40)
        with_buffers = visit._replace(buffers=torch.zeros(4))
        assert clock.end(with_buffers, 0.0).seconds == (16 if silent else 56)
        cases.add(silent)
    assert len(cases) == 2


@pytest.mark.parametrize(
    ("seconds", "number", "deadline", "end", "cohort"),
    [
        ([3, 1, 2], 3, 0, 3, [0, 1, 2]),
        ([3, 1, 2], 2, 0, 2, [1, 2]),
        ([2, 1, 2], 2, 0, 2, [0, 1]),  # of equal times the smaller number
        ([3, 1, 2], 3, 2, 2, [1, 2]),
        ([3, 1, 2], 3, 9, 3, [0, 1, 2]),
        ([3, 1, 2], 2, 1.5, 1.5, [1]),
        ([3, 1, 2], 1, 0.5, 0.5, []),
    ],
)
def test_whom_a_round_waits_for(
    seconds: list[float], number: int, deadline: float, end: float, cohort: list[int]
) -> None:
    clock, start = clock_of(seconds), 50.0
    timing = clock.round([request(i) for i in range(3)], start, number, deadline)
    assert timing.seconds == start + end
    assert [i for i in range(3) if i not in timing.late] == cohort
    assert timing.ends == {i: start + s for i, s in enumerate(seconds)}
    assert all("late: " in line for line in timing.late.values())


@pytest.mark.parametrize("seconds", [3, 5])
def test_a_device_that_goes_away(seconds: float) -> None:
    """Its reply is lost, and the round does not wait for longer than it is there; a reply of its
    last moment is not."""
    clock = clock_of([seconds, 9], active=((0, 20.0),), period=100.0)
    timing = clock.round([request(0), request(1)], 15.0, 2, 0)
    assert timing.seconds == 20
    assert {i: str(why) for i, why in timing.late.items()} == {
        1: "its device disconnected after 5 simulated seconds"
    }


def test_a_round_begins_when_a_device_is_there() -> None:
    devices = [ONE._replace(active=((b, b + 5.0),), period=50.0) for b in (10.0, 12.0, 40.0)]
    clock = Clock(devices, lambda _: 1, lambda *_: 1, 0, 1)
    assert clock.available(range(3), 0.0) == ([0], 10.0)
    assert clock.available(range(3), 13.0) == ([0, 1], 13.0)
    assert clock.available(range(3), 46.0) == ([0], 60.0)
    once = Clock(
        [device._replace(period=0.0) for device in devices], lambda _: 1, lambda *_: 1, 0, 1
    )
    with pytest.raises(FederationError, match=r"none of 3 clients .* after 46 simulated seconds"):
        once.available(range(3), 46.0)


class Asked(Device):
    """Counts how often it is asked."""

    asked = 0

    def until(self, now: float) -> float:
        Asked.asked += 1
        return super().until(now)


def test_only_devices_that_connect_or_disconnect_are_asked() -> None:
    """And the result is that of asking all, also when the time goes back, as in another run."""
    random, windows = np.random.default_rng(0), []
    for _ in range(300):
        begin, end = sorted(int(it) for it in random.choice(101, 2, replace=False))
        period = float(random.choice([0, 100, 150]))
        windows.append({"active": ((float(begin), float(end)),), "period": period})
    windows += [{}, {"active": ((0.0, 100.0),), "period": 100.0}]  # always available
    devices = [Asked(1.0, 1.0, 1.0, **it) for it in windows]
    clock = Clock(devices, lambda _: 1, lambda *_: 1, 0, 1)
    times = [*np.linspace(0, 600, 121).tolist(), *np.linspace(30, 90, 13).tolist()]
    some = list(range(300, -1, -2))  # in an order of their own
    for now in times:
        expected = [i for i in some if Device.until(devices[i], now) > now]
        assert clock.active(some, now) == expected
    asked = Asked.asked
    clock.active(some, times[-1])
    assert asked < len(times) * len(devices) / 5
    assert Asked.asked == asked


def test_without_profiles_of_presence_no_list_is_made() -> None:
    assert clock_of([1, 2]).available(range(10**9), 7.0) == (range(10**9), 7.0)

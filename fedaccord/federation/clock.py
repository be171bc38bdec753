"""The simulated clock of a run in process: ends of visits, and the visits that a round awaits.

    a visit = latency + bytes down / link down + bytes up / link up
              + gradients per step x samples x seconds per sample

Events are in the order of (time, client), so a clock is a function of the settings. It measures
only training: evaluation needs no time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedaccord.core.cohort import PendingRequest
from fedaccord.core.request import TrainInstruction, TrainRequest
from fedaccord.core.vectors import nbytes
from fedaccord.federation.device_profiles import Device, devices
from fedaccord.federation.errors import FederationError
from fedaccord.federation.method import Method

Clients = Sequence[int] | NDArray[np.int64]


class End(NamedTuple):
    """The end of a visit; ordered by time."""

    seconds: float  # since the start of the run
    client: int
    is_lost: bool = False  # the device disconnected before


class Late(str):
    """Why a round lacks a reply, in one line; not the client's fault."""


def simulated_devices(method: Method, num_clients: int) -> Sequence[Device]:
    """The devices of a device profile.

    Raises ValueError, in one line, if its file, or differential privacy, does not fit.
    """
    simulated = devices(method.device_profile, method.seed, num_clients)
    if method.has_noisy_sums and any(device.active for device in simulated):
        raise ValueError(
            "device-profile: expected devices that are always available with dp, got active "
            "times: a client that takes part decides when the next round begins, and with whom"
        )
    return simulated


class Timing(NamedTuple):
    """The visits that a round awaits."""

    seconds: float  # the end of the round
    ends: Mapping[int, float]  # of each client with a request
    late: Mapping[int, Late]


class Presence:
    """Which devices are available; asks those alone that connect or disconnect since the last
    time."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices, self._now = devices, math.inf
        self._available = np.zeros(len(devices), dtype=bool)
        self._changes = np.zeros(len(devices))  # when each connects or disconnects

    def among(self, clients: Clients, now: float) -> list[int]:
        """The available clients, in their order."""
        due = self._changes <= now if now >= self._now else np.ones_like(self._available)
        for i in np.flatnonzero(due).tolist():
            device = self._devices[i]
            until = device.until(now)
            self._available[i] = until > now
            self._changes[i] = until if until > now else device.next_active(now)
        self._now, of = now, np.asarray(clients, dtype=int)
        present: list[int] = of[self._available[of]].tolist()
        return present

    def change(self, clients: Clients) -> float:
        """When the first of these clients connects or disconnects; inf: never again."""
        return float(self._changes[np.asarray(clients, dtype=int)].min(initial=math.inf))


class Clock:
    """The simulated clock of a federation; devices: of each client, in order."""

    def __init__(
        self,
        devices: Sequence[Device],
        examples: Callable[[int], int],
        of_step: Callable[[int, int], float],
        up_bytes: float,
        gradients: float,
    ) -> None:
        """examples: samples of a client; of_step: those of a full batch of a client, by the batch
        size of the settings; up_bytes: bytes of a reply that is not silent, without
        buffers of the model; gradients: those of a local step, as in `Cost`."""
        self.devices, self._examples, self._of_step = devices, examples, of_step
        self._up_bytes, self._gradients = up_bytes, gradients
        self._presence = Presence(devices) if any(d.active for d in devices) else None

    def available(
        self, clients: Sequence[int], now: float, least: int = 1
    ) -> tuple[Sequence[int], float]:
        """The available clients, and the time: later than ``now`` if it has to wait until there
        are ``least`` of them; if there are not in two periods, those that are there first.

        Raises FederationError if none ever connects."""
        if self._presence is None or not clients:
            return clients, now
        every = np.asarray(clients, dtype=int)  # once: there may be thousands of changes
        first, last = None, math.inf
        while len(active := self._presence.among(every, now)) < min(least, len(every)):
            if active and first is None:
                first, last = (active, now), self._two_periods(clients, now)
            change = self._presence.change(every)
            if change == math.inf or change > last:
                break
            now = change
        else:
            return active, now
        if first is None:
            raise FederationError(
                f"device-profile: none of {len(clients)} clients is available after {now:.0f} "
                "simulated seconds: set period_s, or fewer rounds"
            )
        return first

    def _two_periods(self, clients: Sequence[int], now: float) -> float:
        """When each of these clients has connected as it does in every period."""
        devices = [self.devices[i] for i in clients if self.devices[i].active]
        ends = [device.active[-1][1] for device in devices if not device.period]
        return max([now + 2 * max(device.period for device in devices), *ends])

    def active(self, clients: Sequence[int], now: float) -> Sequence[int]:
        """The available clients among these."""
        return clients if self._presence is None else self._presence.among(clients, now)

    def lost(self, request: PendingRequest) -> Late:
        """Why a request to a disconnected device has no reply."""
        return Late(f"its device disconnected at {request.end:.4g} simulated seconds")

    def end(self, request: TrainRequest, now: float) -> End:
        """The end of a visit that begins now."""
        instruction = request.instruction
        device, extra = self.devices[instruction.client], nbytes(request.buffers)
        silent = instruction.half.rule.is_silent(instruction.round)
        up = extra + (0 if silent else self._up_bytes)
        seconds = device.latency + request.nbytes / device.down + up / device.up
        samples = self._gradients * self._samples(instruction)
        end = now + seconds + samples * device.seconds_per_sample
        departure = device.until(now)
        return (
            End(departure, instruction.client, is_lost=True)
            if departure < end
            else End(end, instruction.client)
        )

    def _samples(self, instruction: TrainInstruction) -> float:
        """The number of samples that a visit's steps read, counting batches as full."""
        client = instruction.client
        if not instruction.local_steps:
            return instruction.local_epochs * self._examples(client)
        return instruction.local_steps * self._of_step(client, instruction.batch_size)

    def round(
        self, requests: Sequence[TrainRequest], now: float, wanted: int, deadline: float
    ) -> Timing:
        """A round that begins now and accepts the first ``wanted`` replies, until its deadline.

        It ends with the last of them, or with fewer at the deadline or at the end of all visits.
        deadline: in seconds from now; 0: none.
        """
        ends = sorted(self.end(request, now) for request in requests)
        last = now + deadline if deadline else math.inf
        in_time = [end for end in ends if not end.is_lost and end.seconds <= last][:wanted]
        if len(in_time) == wanted:
            last = in_time[-1].seconds if in_time else now
        else:
            last = min(last, ends[-1].seconds if ends else now)
        first = {end.client for end in in_time}
        late = {end.client: _why(end, now, last) for end in ends if end.client not in first}
        return Timing(last, {end.client: end.seconds for end in ends}, late)


def _why(end: End, now: float, last: float) -> Late:
    seconds = f"{end.seconds - now:.4g} simulated seconds"
    if end.is_lost:
        return Late(f"its device disconnected after {seconds}")
    return Late(f"late: {seconds}, the round took {last - now:.4g}")

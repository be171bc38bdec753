"""Runs on simulated devices: the clock is a function of the settings."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord

from fedaccord import simulate
from fedaccord.engine import run_with
from fedaccord.federation.device_profiles import lognormal, write
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import DEVICES
from fedaccord.federation.run import Run
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.strategies import FedAvg, FedPD, Scaffold

SMALL: dict[str, Any] = {
    **{"num_clients": 6, "rounds": 4, "model": "linear", "local_steps": 2, "fraction_train": 0.5},
    **{"device_profile": "lognormal", "threads": 1},
}


def history(**more: Any) -> Any:
    return simulate("fedavg", **SMALL | more)


@pytest.mark.parametrize(("name", "gradients"), [("fedavg", 1), ("fedsam", 2)])
def test_the_clock_is_the_sum_of_the_longest_visits(name: str, gradients: int) -> None:
    rows: list[Any] = []
    result = simulate(name, **SMALL, seed=3, on_round=lambda round: rows.extend(round.clients))
    longest = {row["round"]: 0.0 for row in rows}
    for row in rows:
        device = lognormal(3, row["client"])
        seconds = device.latency + gradients * 2 * 50 * device.seconds_per_sample
        seconds += 650 * 4 * (1 / device.up + 1 / device.down)
        longest[row["round"]] = max(longest[row["round"]], seconds)
    assert [*result.metrics["clock"]] == pytest.approx(
        [sum(s for r, s in longest.items() if r <= t) for t in range(5)]
    )


@pytest.mark.parametrize("method", ["topk", "randk", "sign", "qsgd", "bf16", "int8"])
def test_the_clock_counts_the_bytes_that_are_sent(method: str) -> None:
    """Of a compressed upload and a rounded broadcast."""
    plugins = (Broadcast(dtype="int8"), Compress(method=method, share=0.05))
    rows: list[Any] = []
    result = simulate(
        Scaffold(local_steps=2, fraction_train=0.5, device_profile="lognormal", plugins=plugins),
        **{k: SMALL[k] for k in ("num_clients", "rounds", "model", "threads")},
        on_round=lambda round: rows.extend(round.clients),
    )
    down = result.metrics["down-bytes"].iloc[1] / 3
    assert down == 650 + 2 + 4 * 650  # w in int8 with a scale for 512, c in float32
    (up,) = {row["up-bytes"] for row in rows}
    assert up < {"int8": 700, "bf16": 1301}.get(method, 400)
    longest = {row["round"]: 0.0 for row in rows}
    for row in rows:
        device = lognormal(0, row["client"])
        seconds = device.latency + 2 * 50 * device.seconds_per_sample
        seconds += up / device.up + down / device.down
        longest[row["round"]] = max(longest[row["round"]], seconds)
    assert result.metrics["clock"].iloc[-1] == pytest.approx(sum(longest.values()))


def test_the_clock_changes_no_weight_and_vectorised_it_is_the_same() -> None:
    one, stacked = history(), history(vectorize="on")
    assert [*one.metrics["clock"]] == [*stacked.metrics["clock"]]
    bare = history(device_profile="none")
    assert "clock" not in bare.metrics
    assert all(map(torch.equal, bare.model.values(), one.model.values()))


@pytest.mark.parametrize(("share", "size"), [(0.1, 110), (0.12, 112), (0.125, 113)])
def test_over_selection_asks_as_many_more(share: float, size: int) -> None:
    """110 is 100 x 1.1, whose product has a last bit."""
    method = FedAvg(over_selection=share, fraction_train=0.5, device_profile="lognormal")
    assert len(method.draw(0, range(200), 200)) == size
    unclocked = replace(method, device_profile="none")  # no reply is the earliest
    assert len(unclocked.draw(0, range(200), 200)) == 100


def test_over_selection_and_a_deadline() -> None:
    """Five are asked, the three fastest are taken, and the round is shorter."""
    rows: list[Any] = []
    over = history(over_selection=0.5, on_round=lambda round: rows.extend(round.clients))
    plain = history()
    assert {*over.metrics["replies"][1:]} == {3}
    assert {*over.metrics["dropped"][1:]} == {2}
    assert over.metrics["clock"].iloc[-1] < plain.metrics["clock"].iloc[-1]
    for _, cohort in pd.DataFrame(rows).groupby("round"):
        in_time = cohort["status"] == "ok"
        assert cohort[in_time]["clock"].max() < cohort[~in_time]["clock"].min()
    ends = plain.metrics["clock"].diff()[1:]
    limited = history(deadline=float(ends.min()) * 1.01)
    assert limited.metrics["dropped"][1:].sum() > 0
    assert limited.metrics["clock"].iloc[-1] < plain.metrics["clock"].iloc[-1]


def test_a_resumed_run_has_the_same_clock(tmp_path: Path) -> None:
    keys = SMALL | {"over_selection": 0.4, "out_dir": str(tmp_path), "checkpoint_every": 1}
    del keys["rounds"]
    whole = run_with("fedavg", **keys, name="whole", num_server_rounds=4)
    run_with("fedavg", **keys, name="half", num_server_rounds=2)
    path = run_with("fedavg", **keys, name="half", num_server_rounds=4, resume=True)
    for name in ("metrics.csv", "clients.csv"):
        tables = [pd.read_csv(run / name).drop(columns="seconds") for run in (whole, path)]
        pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(device_profile="phones"), "expected one of none, lognormal, or the path"),
        (lambda: FedAvg(over_selection=0.1, sampling="bernoulli"), "cohorts vary in size"),
        (lambda: FedPD(over_selection=0.1, fraction_train=1.0), "its rounds have all clients"),
        (
            lambda: FedPD(fraction_train=1.0, p=0.5, optimizer="adamw", optimizer_state="average"),
            "expected reset or keep with fedpd.p above 0, got 'average': its silent rounds send",
        ),
        (lambda: simulate("dpsgd", **SMALL), "under gossip there is none"),
        (lambda: simulate("fedavg", **SMALL | {"device_profile": "/no.csv"}), "No such file"),
        (
            lambda: simulate(
                FedAvg(device_profile="lognormal", over_selection=0.5),
                **{"participation": [[0]] * 4, "rounds": 4, "num_clients": 6},
            ),
            "expected 0 with given cohorts",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["server", "client"])
def test_private_sums_are_of_devices_that_are_always_available(where: str, tmp_path: Path) -> None:
    """A slow client would decide who else takes part in the next round."""
    path = tmp_path / "windows.csv"
    devices = {i: {"ms_per_sample": 1, "up_kbps": 1e9, "down_kbps": 1e9} for i in range(6)}
    write(path, {**devices, 5: {**devices[5], "active": "0-50", "period_s": 100}})
    more: dict[str, Any] = {"rounds": 1, "device_profile": str(path), "sampling": "bernoulli"}
    more |= {"dp.noise_multiplier": 1.0, "dp.where": where}
    if where == "client":
        assert len(history(**more).metrics) == 2
        return
    with pytest.raises(ValueError, match=r"^device-profile: .* always available with dp, got act"):
        history(**more)


def of_windows(path: Path, *windows: str) -> dict[str, Any]:
    """Devices that are available in these windows, which repeat after 100 seconds."""
    device = {"ms_per_sample": 1, "up_kbps": 1e6, "down_kbps": 1e6, "latency_ms": 500}
    write(path, {i: device | {"active": it, "period_s": 100} for i, it in enumerate(windows)})
    return {"num_clients": len(windows), "device_profile": str(path)}


@pytest.mark.parametrize(
    ("algo", "more"),
    [("fedavg", {"fraction_train": 1.0, "min_replies": 3}), ("fedpd", {"fraction_train": 1.0})],
)
def test_a_round_waits_for_as_many_devices_as_it_needs(
    algo: str, more: dict[str, Any], tmp_path: Path
) -> None:
    devices = of_windows(tmp_path / "d.csv", "0-60", "50-100", "0-100")
    keys = {k: SMALL[k] for k in ("model", "local_steps", "threads")}
    table = simulate(algo, rounds=2, **keys, **devices, **more).metrics
    assert table["replies"].tolist()[1:] == [3, 3]
    assert 50.5 < table["clock"].iloc[1] < 51


@pytest.mark.parametrize("period", ["100", ""])
def test_devices_that_never_meet_fail_their_rounds(period: str, tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    devices = of_windows(path, "0-40", "50-100")
    path.write_text(path.read_text().replace(",100\n", f",{period}\n"))
    more = SMALL | devices | {"fraction_train": 1.0, "min_replies": 2}
    with pytest.raises(FederationError, match="expected at least 2 good replies, got 1"):
        simulate("fedavg", **more)


@pytest.mark.parametrize("schedule", ["synchronous", "buffered"])
def test_a_given_cohort_may_be_empty_beside_windows(schedule: str, tmp_path: Path) -> None:
    devices = of_windows(tmp_path / "d.csv", "0-50", "0-50")
    keys = {k: SMALL[k] for k in ("model", "local_steps", "threads")} | devices
    keys |= {"schedule": schedule, "rounds": 3, "participation": [[0], [], [1]]}
    if schedule == "buffered":
        keys |= {"concurrency": 1, "buffer_size": 1}
    assert simulate("fedavg", **keys).metrics["replies"].tolist()[1:] == [1, 0, 1]


def test_a_file_that_does_not_fit_leaves_no_run(tmp_path: Path) -> None:
    devices = of_windows(tmp_path / "d.csv", "0-50", "0-50")
    keys = {k: SMALL[k] for k in ("model", "local_steps", "threads")} | devices
    dp = {"sampling": "bernoulli", "dp.noise-multiplier": 1.0}
    for wrong in ({"device_profile": "/no/such.csv"}, {"num_clients": 3}, dp):
        with pytest.raises(ValueError, match=r"^device-profile: "):
            run_with("fedavg", **keys | wrong, out_dir=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_late_replies_advise_a_later_deadline() -> None:
    with pytest.raises(
        FederationError, match=r"took 0\.01; raise deadline or raise max-failed-rounds$"
    ):
        history(deadline=0.01)


def test_a_deployment_has_a_real_clock() -> None:
    fleet: Any = SimpleNamespace(place=DEVICES)
    method, initial = FedAvg(device_profile="lognormal"), ArrayRecord([np.zeros(2)])
    with pytest.raises(ValueError, match="expected none under Flower, whose clock is real"):
        Run(method, fleet, initial, 1)

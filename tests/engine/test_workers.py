"""Clients in Ray actors: the bits of one process, whatever becomes of a worker."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.engine import History, fleet_choice
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import LATE
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.process.threads import cores
from fedaccord.storage.store import Memory, MissingStateError, Version
from fedaccord.task import Clients, Task
from fedaccord.task.batches import PAIRS
from fedaccord.task.evaluation import evaluate
from fedaccord.task.sources import PerClient, source_of
from tests.engine.test_resume import ROLES, written
from tests.engine.test_resume import run as run_config
from tests.engine.test_resume import settings as settings  # a fixture
from tests.engine.test_vectorize import COHORTS, EVERYONE, SIZES, SOME, clients, module, small

ray = pytest.importorskip("ray")
ray_constants = pytest.importorskip("ray._private.ray_constants")
pytestmark = pytest.mark.flower  # it starts Ray
TRAP = "FEDACCORD_TEST_TRAP"  # names the file with what a loss is to do, once
HERE = fleet_choice.choose  # of a run without workers


class Kept(NamedTuple):
    c: Tensor


def loss(predictions: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy; what a trap says befalls the first who finds it, "always" whoever does."""
    trap = Path(os.environ[TRAP])
    try:
        kind = trap.read_text()
    except FileNotFoundError:  # none is set, or another process has just sprung it
        kind = ""
    if kind and not kind.startswith("always"):
        try:
            trap.rename(trap.with_suffix(".sprung"))
        except FileNotFoundError:  # another one was first
            kind = ""
    if "dies" in kind:
        os.kill(os.getpid(), signal.SIGKILL)
    if "sleeps" in kind:
        time.sleep(600)
    if "raises" in kind:
        raise ValueError("the trap")
    return F.cross_entropy(predictions, y)


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    os.environ[TRAP] = str(tmp_path_factory.mktemp("trap") / "trap")
    yield Path(os.environ[TRAP])
    del os.environ[TRAP]


@pytest.fixture(scope="module")
def own_ray(trap: Path) -> Iterator[None]:
    from fedaccord.engine.cluster import environment

    with pytest.MonkeyPatch.context() as patch, environment():
        patch.setattr(
            ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False
        )  # see `engine/cluster.py`
        ray.init("local", num_cpus=2, object_store_memory=10**8, include_dashboard=False)
    yield
    ray.shutdown()


def task(test: PerClient | None = None) -> Task:
    xs, ys = zip(*clients(), strict=True)
    return Task(module, Clients(xs, ys), test, loss=loss)


def no_data() -> Task:
    raise FileNotFoundError("no data here")


@contextmanager
def workers(task: Task, **more: Any) -> Iterator[Any]:
    from fedaccord.engine.workers import workers_fleet

    of = {"load": None, "workers": 2, "address": "local", "threads": 1, "gpus": 0.0} | more
    with workers_fleet(task, **of) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def one_fleet(own_ray: None) -> Iterator[Any]:
    with workers(task()) as fleet:
        yield fleet


@pytest.fixture
def fleet(one_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two workers of which every call of `simulate` in a test has the use."""
    one_fleet.restore([])
    monkeypatch.setattr(fleet_choice, "choose", lambda *_, **__: nullcontext(lambda _: one_fleet))
    return one_fleet


def assert_same(one: History, other: History) -> None:
    """Bit by bit: models, states of clients, and every number but seconds."""
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.averages, other.averages)
    for mine, theirs in zip(one.clients, other.clients, strict=True):
        assert type(mine) is type(theirs)
        for (name, v), (_, w) in zip(leaves(mine), leaves(theirs), strict=True):
            assert torch.equal(v, w), name
    pd.testing.assert_frame_equal(
        one.metrics.drop(columns="seconds"), other.metrics.drop(columns="seconds")
    )


def run(method: FederatedStrategy, cohorts: Any = COHORTS, **more: Any) -> History:
    return simulate(
        method,
        clients=clients(),
        model=module(),
        rounds=len(cohorts),
        participation=cohorts,
        record="weights",
        **more,
    )


def run_here(method: FederatedStrategy, **more: Any) -> History:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_choice, "choose", HERE)
        return run(method, **more)


FEDERATED = dict(SOME)


@pytest.mark.parametrize(  # once, with those it takes, and with error memories
    ("name", "plugins"), [*FEDERATED.items(), ("fedavg", "topk"), ("scaffold", "rounded+topk")]
)
def test_every_method(name: str, plugins: str, fleet: Any) -> None:
    method = small(name, plugins)
    everyone = method.topology.is_decentralised or method.all_clients
    cohorts = EVERYONE if everyone else COHORTS
    expected = run_here(small(name, plugins), cohorts=cohorts)
    assert_same(run(small(name, plugins), cohorts), expected)
    assert fleet.store.clients() == [*range(len(SIZES))]


def test_secure_sums(fleet: Any) -> None:
    """Masks are drawn anew, and cancel: the bits of one process."""
    method = replace(small("scaffold"), plugins=(SecureSum(),))
    cohorts = [cohort for cohort in COHORTS if len(cohort) > 2]
    assert_same(run(method, cohorts), run_here(method, cohorts=cohorts))


def test_the_simulated_clock_does_not_depend_on_workers(fleet: Any) -> None:
    method = small("fedavg", device_profile="lognormal", deadline=0.3)
    expected, history = run_here(method), run(method)
    assert_same(history, expected)
    assert expected.metrics["dropped"].sum() > 0


def test_visits_of_several_rounds_in_one_call(fleet: Any) -> None:
    own: dict[str, Any] = {"schedule": "buffered", "concurrency": 4, "buffer_size": 2}
    method = small("scaffold", device_profile="lognormal", **own)
    expected, history = run_here(method), run(method)
    assert_same(history, expected)
    assert expected.metrics["staleness"].max() > 0


@pytest.fixture(scope="module")
def alone() -> History:
    return run_here(small("scaffold"))


def test_a_worker_that_dies_changes_no_bit(
    alone: History,
    fleet: Any,
    trap: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the second round, when clients have states."""
    visits: list[int] = []

    def on_client(client: int) -> None:
        visits.append(client)
        if len(visits) == len(COHORTS[0]):
            trap.write_text("dies")

    monkeypatch.setattr(fleet, "_on_client", on_client)
    before = {slot.actor for slot in fleet._slots}
    assert_same(run(small("scaffold")), alone)
    assert len(before & {slot.actor for slot in fleet._slots}) == 1
    assert sorted(visits) == sorted(i for cohort in COHORTS for i in cohort)
    assert "a worker process died: another starts, 1 clients" in caplog.text


def test_workers_that_die_together_drop_no_client(
    alone: History, fleet: Any, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one machine: the one at work and the one that had just finished."""
    visits: list[int] = []

    def on_client(client: int) -> None:
        visits.append(client)
        if len(visits) == len(COHORTS[0]) - 1:
            for slot in fleet._slots:
                ray.kill(slot.actor)

    trap.write_text("sleeps")  # so that one client waits until all others have replied
    monkeypatch.setattr(fleet, "_on_client", on_client)
    assert_same(run(small("scaffold")), alone)


def test_bfloat16_passes_through_ray(fleet: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3).bfloat16()
    for sent in (x, x[0, 1], x[:0]):
        got = ray.get(ray.put(sent))
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got, sent)


def wait_for_workers(fleet: Any) -> None:
    """Until no worker is starting, as one does if another test killed its predecessor."""
    if starting := [ref for slot in fleet._slots for ref in slot.waits]:
        ray.wait(starting, num_returns=len(starting))


def test_a_run_goes_on_without_a_worker_that_does_not_start_again(
    alone: History,
    own_ray: None,
    trap: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from fedaccord.engine.workers import Worker

    start = partial(ray.remote(Worker).options(num_cpus=0).remote, no_data, 1, False)
    with workers(task()) as own:
        monkeypatch.setattr(fleet_choice, "choose", lambda *_, **__: nullcontext(lambda _: own))
        for slot in own._slots:
            slot._start = start
        trap.write_text("dies")
        assert_same(run(small("scaffold")), alone)
        wait_for_workers(own)  # until the start has failed
        own.restore([])
        assert_same(run(small("scaffold")), alone)
        (line,) = [r.message for r in caplog.records if "did not start again" in r.message]
        assert "no data here" in line
        assert line.endswith("; 1 left")
        own.restore([])
        trap.write_text("dies")
        with pytest.raises(FederationError, match=r"^no worker process is left: .*no data here"):
            run(small("scaffold"))


def test_the_largest_clients_go_first_and_shares_are_even(fleet: Any) -> None:
    """Sizes of clients are 7, 3, 5, 9, 2; two workers take up to four shares each."""

    def deal(clients: Any, most: int = 100) -> list[list[int]]:
        pairs: Any = [(SimpleNamespace(client=i), None) for i in clients]
        return [[i.client for i in share.instructions] for share in fleet._deal(pairs, most)]

    assert deal(range(5)) == [[3], [0], [2], [1], [4]]
    assert list(map(len, deal([*range(5)] * 4))) == [3] * 4 + [2] * 4
    assert deal([*range(5)] * 4)[0] == [3, 2, 4]
    assert max(map(len, deal([*range(5)] * 4, most=2))) == 2
    assert deal([]) == []


def test_answers_are_looked_at_while_workers_work(fleet: Any) -> None:
    """The first answer is there while others are not, and no worker waits for who looks at it."""
    busy: list[int] = []
    usual = fleet.train

    def train(requests: Any, timeout: float) -> Iterator[Any]:
        for reply in usual(requests, timeout):
            busy.append(sum(slot.share is not None for slot in fleet._slots))
            yield reply

    wait_for_workers(fleet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "train", train)
        run(small("fedavg"), EVERYONE[:1])
    assert busy[0] == 2
    assert busy[-1] == 0


@pytest.mark.parametrize(("kills", "starts"), [(10.0, 3.0), (0.1, 3.0)])
def test_a_client_that_kills_its_workers_late_is_dropped_too(
    kills: float, starts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many seconds; without Ray. The other worker has started again meanwhile."""
    from fedaccord.engine import workers as module

    class Ref(NamedTuple):
        at: float
        value: Any

    now, visits = 0.0, []

    def wait(refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        nonlocal now
        first = min(refs, key=lambda ref: ref.at)
        now = min(max(now, first.at), now + timeout)
        return ([first] if first.at <= now else []), []

    def get(ref: Ref) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def begin() -> Any:
        return SimpleNamespace(device=SimpleNamespace(remote=lambda: Ref(now + starts, "cpu")))

    def send(_: Any, share: Any) -> list[Ref]:
        visits.append(now)
        return [Ref(now + kills, ray.exceptions.RayError("died"))]

    own = module.WorkersFleet.__new__(module.WorkersFleet)
    own._slots, own.vectorize = [module.Slot(begin) for _ in range(2)], False
    own.task = SimpleNamespace(num_examples=lambda _: 1)
    own.store = SimpleNamespace(load=Mock(side_effect=MissingStateError))
    for slot in own._slots:
        slot.free()
    for name, stand_in in {"wait": wait, "get": get, "kill": lambda _: None}.items():
        monkeypatch.setattr(ray, name, stand_in)
    monkeypatch.setattr(module, "_now", lambda: now)
    instruction: Any = SimpleNamespace(client=7)
    assert [*own._ask([instruction], send, 600.0, stateless=True)] == [
        (instruction, module.DIED, None)
    ]
    assert 2 <= len(visits) <= 3


@pytest.mark.slow
def test_a_client_that_kills_its_workers_is_dropped(
    alone: History, fleet: Any, trap: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trap.write_text("always dies")
    methods = [small("scaffold") for _ in range(2)]
    with pytest.raises(RuntimeError, match="none of 1 rounds counted"):
        run(methods[0], [[2]])
    assert "dropped client 2: its worker process died, even when run alone" in caplog.text
    trap.unlink()
    fleet.restore([])
    assert_same(run(methods[1]), alone)


def test_a_client_that_raises_is_dropped_with_its_reason(
    fleet: Any, trap: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trap.write_text("raises")
    history = run(small("scaffold"))
    assert history.metrics["dropped"].tolist()[1:] == [1, 0, 0, 0]
    assert ": ValueError: the trap" in caplog.text


def test_a_worker_past_the_time_of_a_round_is_ended(
    fleet: Any, trap: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first round has ten seconds, in which one client sleeps for ten minutes."""
    wait_for_workers(fleet)
    trap.write_text("sleeps")
    train, timeouts = fleet.train, iter([10.0])
    monkeypatch.setattr(fleet, "train", lambda requests, _: train(requests, next(timeouts, 300.0)))
    drops = run(small("scaffold")).metrics["dropped"].tolist()[1:]
    assert drops[0] >= 1
    assert drops[1:] == [0, 0, 0]
    assert LATE in caplog.text


def test_a_state_that_is_lost_makes_a_first_visit(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private.internal_api import free

    large, visits = ray.put(torch.zeros(10**6)), []
    free([large])  # as if its machine were gone

    def on_client(client: int) -> None:
        visits.append(client)
        if len(visits) == len(COHORTS[0]):
            fleet.store.save(1, Memory(Version(0, large)))

    monkeypatch.setattr(fleet, "_on_client", on_client)
    history = run(small("scaffold"))
    assert history.metrics["dropped"].tolist()[1:] == [0, 1, 0, 0]
    assert "dropped client 1: lost its state of round 1" in caplog.text
    fleet.store.save(2, Memory(Version(3, large)))
    assert 2 not in fleet.client_states([3] * 5)  # a checkpoint goes without it
    assert "no state of client 2" in caplog.text


def test_a_client_whose_state_is_lost_evaluates_the_output_model(
    own_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.internal_api import free

    tests = PerClient([source_of(part, PAIRS)[0] for part in clients()])
    with workers(task(tests)) as fleet:
        monkeypatch.setattr(fleet_choice, "choose", lambda *_, **__: nullcontext(lambda _: fleet))
        evaluate, calls = fleet.evaluate, []

        def lossy(requests: Any, timeout: float) -> Any:
            calls.append(requests)
            if len(calls) == len(whole):  # the last one
                fleet.store.remove(1)
                large = ray.put(torch.zeros(10**6))
                free([large])  # as if its machine were gone
                fleet.store.save(2, Memory(Version(requests[2].instruction.accepted, large)))
            return evaluate(requests, timeout)

        evaluated = partial(run, small("scaffold", evaluation="clients"), test=[*clients()])
        whole = evaluated().metrics["client-loss"]
        fleet.restore([])
        monkeypatch.setattr(fleet, "evaluate", lossy)
        metrics = evaluated().metrics
    assert len(calls) == len(whole) == len(COHORTS) + 1
    assert metrics["client-loss"].tolist() == whole.tolist()
    assert metrics["evaluation-replies"].iloc[-1] == len(SIZES)


def test_a_network_that_fails(fleet: Any) -> None:
    """The faults of `simulate` stand before the workers as before one process."""

    def faults(t: int, i: int) -> str | None:
        return {(1, 3): "lost-reply", (2, 0): "crash", (3, 1): "duplicate"}.get((t, i))

    expected = run_here(small("scaffold"), faults=faults)
    assert expected.metrics["dropped"].tolist()[1:] == [0, 1, 1, 0]
    assert_same(run(small("scaffold"), faults=faults), expected)


def test_many_clients_in_one_call(own_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes its share of a cohort in one call; the last bits may differ."""
    expected = run_here(small("scaffold"))
    with workers(task(), workers=1, vectorize=True) as own:
        monkeypatch.setattr(fleet_choice, "choose", lambda *_, **__: nullcontext(lambda _: own))
        history = run(small("scaffold"))
    torch.testing.assert_close(history.weights, expected.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("algo", "buffers"), [("scaffold", "mean"), ("ditto", "local")])
def test_a_run_goes_on_with_workers(
    algo: str, buffers: str, own_ray: None, settings: dict[str, Any]
) -> None:
    """Two rounds in one process, the rest in a worker, which loads the task itself."""
    roles = settings | ROLES | {"algo": algo, "buffers": buffers}
    whole = run_config(RunConfig.make(roles | {"name": f"{algo}-whole"}))
    parts = roles | {"name": f"{algo}-parts", "threads": 0}
    run_config(RunConfig.make(parts | {"num-server-rounds": 2}))
    again = run_config(RunConfig.make(parts | {"resume": True, "workers": 1}))
    assert written(again.path) == written(whole.path)


def test_states_beyond_the_memory_for_them_go_to_disk(fleet: Any) -> None:
    """Of 30 clients 4 MB each, in a store of 100 MB."""
    fleet.restore((i, (0, Kept(torch.full((10**6,), float(i))))) for i in range(30))
    states = fleet.client_states([0] * 30)
    assert len(states) == 30
    assert all(float(state.c[0]) == i for i, (_, state) in states.items())


def test_no_room_for_a_state_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaccord.storage.on_ray import RayStore

    def full(_: Any) -> None:
        raise ray.exceptions.OutOfDiskError

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(OSError, match=r"^Ray has no room .*; free some .* RAY_TMPDIR$"):
        RayStore().restore([(0, (0, Kept(torch.zeros(1))))])


def test_the_server_evaluates_on_the_cores_of_its_workers(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet.evaluators == max(1, min(2, cores() // torch.get_num_threads()))
    test = tuple(torch.cat(part)[:7] for part in zip(*clients(), strict=True))
    method = partial(small, "fedavg")
    expected = run_here(method(), test=test)
    threads = []

    def spy(*args: Any) -> dict[str, float]:
        threads.append(args[-2])
        return evaluate(*args)

    monkeypatch.setattr(fleet, "evaluators", 3)
    monkeypatch.setattr("fedaccord.task.task.evaluate", spy)
    assert_same(run(method(), test=test), expected)
    assert "test-loss" in expected.metrics
    assert set(threads) == {3}


def test_what_cannot_begin_is_refused_in_a_line(
    own_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedaccord.engine import cluster

    wanted = {  # arguments of `ray_for`, in a run that has joined a cluster
        (
            4,
            "auto",
            2,
            0.0,
        ): r"at most 2, the CPUs .*, got 8 for 4 workers of 2; lower workers or t",
        (2, "auto", 1, 0.5): r"at most 0, the GPUs .*, got 1 for 2 workers of 0.5; .* gpus-per-",
    }
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        patch.setattr(ray, "shutdown", lambda: None)
        patch.setattr(cluster, "begin", lambda *_: None)
        for arguments, line in wanted.items():
            with pytest.raises(ValueError, match=line), cluster.ray_for(*arguments):
                pass
    with pytest.raises(ValueError, match=r"a worker did not start: .*no data here"):  # noqa: SIM117
        with workers(task(), workers=1, load=no_data):
            pass

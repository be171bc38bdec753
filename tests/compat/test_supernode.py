"""What `fedaccord.compat.supernode` takes for granted of Flower, as in `test_flower.py`."""

import inspect
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array
from flwr.supercore.exit import ExitCode

from fedaccord.cli.device import THIRD_PARTY
from fedaccord.compat import supernode


def test_what_a_supernode_starts_by_name_and_how_long_it_waits() -> None:
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supernode import start_client_internal

    executor, loop = map(inspect.getsource, (subprocess_executor, start_client_internal))
    assert "subprocess.Popen(args)" in executor
    assert 'command = ["flower-superexec"]' in loop
    assert [*supernode.node_commands()] == [
        "flower-superexec",
        TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP],
    ]
    assert supernode.TASK_POLL_VARIABLE == run_superexec._TASK_POLL_INTERVAL_ENV
    waits = re.findall(r"\btime\.\w+.*", loop)
    assert waits == ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"]
    idle = loop.partition("if run_id is None:")[2].partition("continue")[0]
    assert "time.sleep(3)" in idle
    assert supernode.Pauses.__init__.__defaults__ == (start_client_internal.time,)


def test_a_message_waits_for_the_context_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ClientApp sends its reply first; its task is finished before its Context is stored."""
    from flwr.supercore.constant import TaskType
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode import main, start_client_internal
    from flwr.supernode.nodestate import NodeStateFactory
    from flwr.supernode.runtime import run_clientapp
    from flwr.supernode.servicer.runtime import runtime_handlers

    last = inspect.getsource(run_clientapp.run_clientapp).partition("finally:")[2]
    assert "push_message(" in last
    assert "flwr_exit(" in last.partition("push_message(")[2]
    assert main._RUNTIME_HANDLERS is runtime_handlers
    loop = inspect.getsource(start_client_internal)
    assert loop.count("_push_messages(\n                state=state,") == 1

    events = list[str]()

    def store(request: Any, state: Any, task: Any) -> None:
        assert state.finish_task(task.task_id, "completed", "")
        time.sleep(0.3)
        events.append("context")

    monkeypatch.setattr(start_client_internal, "_push_messages", lambda **_: events.append("reply"))
    monkeypatch.setattr(runtime_handlers, "push_task_output", store)
    supernode.await_contexts()
    state: Any = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    # a run that ended while its message was received: Flower forgets the message's task
    state.create_task(task_type=TaskType.CLIENT_APP, run_id=2, fab_hash="")
    number = state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="")
    assert state.claim_task(number)
    assert state.activate_task(number)
    words: Any = (None, state, SimpleNamespace(task_id=number))
    threading.Timer(0.3, runtime_handlers.push_task_output, words).start()
    arguments: dict[str, Any] = dict.fromkeys(("object_store", "send", "push_object"))
    start = time.monotonic()
    start_client_internal._push_messages(state=state, **arguments)
    assert events == ["reply", "context"]
    assert time.monotonic() - start < 10


def test_a_warm_process_has_imported_what_a_connection_needs() -> None:
    assert "import httpcore" in inspect.getsource(httpx.HTTPTransport.__init__)
    assert "httpcore" in THIRD_PARTY


def test_a_part_that_is_still_being_sent_is_asked_for_again_soon() -> None:
    """Flower's own wait is back afterwards."""
    from flwr.supercore.inflatable import inflatable_utils as parts
    from flwr.superlink.grid import http_grid
    from flwr.supernode import start_client_internal
    from flwr.supernode.runtime import run_clientapp

    for room in (http_grid, start_client_internal):
        assert room.pull_objects is parts.pull_objects
        assert inspect.getsource(room).count("pull_objects(") == 1
        assert "backoff" not in inspect.getsource(room)
    whole = run_clientapp.pull_and_inflate_object_from_tree
    assert whole is parts.pull_and_inflate_object_from_tree
    assert "backoff" not in inspect.getsource(run_clientapp)
    assert "delay = initial_backoff" in inspect.getsource(parts.pull_objects)

    def pauses() -> set[Any]:
        return {f.__kwdefaults__["initial_backoff"] for f in (parts.pull_objects, whole)}

    with supernode.part_pauses():
        assert pauses() == {0.05}
    assert pauses() == {1}


@pytest.mark.parametrize("short", [True, False])
def test_flowers_own_waits_stay_if_they_are_asked_for(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supernode import cli, start_client_internal

    values: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(
        cli, "flower_supernode", lambda: values.extend((start_client_internal.time, *sys.argv))
    )
    monkeypatch.setattr(supernode, "await_contexts", lambda: None)
    monkeypatch.setattr(supernode, "stay_connected", lambda: None)
    ends: list[int] = []  # Flower's command returns if the connection is lost
    monkeypatch.setattr("flwr.supercore.exit.flwr_exit", lambda code, why: ends.append(code))
    supernode.run_supernode(["--insecure"], short_pauses=short)
    assert ends == [ExitCode.SUPERNODE_CONNECTION_ERROR]
    assert isinstance(values[0], supernode.Pauses) == short
    assert values[0] is time or short
    assert values[1:] == ["flower-supernode", "--insecure"]


@pytest.mark.parametrize("own", [None, "200000"])
def test_a_device_sends_small_parts(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its environment sets their size, which Flower then read when it was imported."""
    from flwr.app.message import array

    name = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
    monkeypatch.setattr(array, name, int(own or 5 * 2**20))
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    supernode.send_small_parts()
    values = Array(np.random.default_rng(0).normal(size=5 * 10**5))  # 4 MB
    assert len(values.slice_array()) == (21 if own else 4)

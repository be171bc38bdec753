"""What a run may ask of a device, and that a simulation is none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedaccord.client import node_limits
from fedaccord.client_app import FUNCTION_KEYS, app, configured_task
from fedaccord.config import RunConfig
from fedaccord.core.options import options
from fedaccord.core.request import ModelSettings, TrainInstruction
from fedaccord.core.vectors import DTYPES
from fedaccord.strategies import FedAvg
from fedaccord.task.flat_model import flat_model
from fedaccord.wire.handshake import handshake
from tests.grid import InProcessGrid
from tests.own import save

ASKED = TrainInstruction(
    *(0, 1, FedAvg().client_half(), ((3,),), 0.1, 0.0, 0.0),
    **{"local_epochs": 2, "local_steps": 0, "batch_size": 10, "seed": 0, "precision": "float32"},
)


def context(run: dict[str, Any], **node: Any) -> Context:
    config = {"partition-id": 1, "num-partitions": 3, **node}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.client.node_limits.is_simulated", lambda: True)


# --- data -----------------------------------------------------------------------------------------

READS: list[dict[str, Any]] = [
    {"dataset": "npz", "data-dir": "/etc/passwd"},
    {"dataset": "npz"},
    {"dataset": "image-folder", "data-dir": "/root", "image-size": 8},
    {"dataset": "cifar10", "download": True},
    {"partition": "file", "partition-file": "/etc/passwd"},
]


@pytest.mark.parametrize("run", READS)
def test_a_device_reads_no_file_that_a_run_names(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened, and the line is the same whatever there is on the device."""
    monkeypatch.setattr("fedaccord.client_app.load_task", pytest.fail)
    with pytest.raises(ValueError, match=r".") as error:
        configured_task(context(run))
    line = str(error.value)
    assert line.startswith("expected a node-config that names this node's data, got none: start")
    assert 'dataset="npz" data-dir=' in line
    assert "allow-server-data=true" in line
    assert "\n" not in line
    assert not any(str(value) in line for value in run.values() if str(value).startswith("/"))


def test_a_run_names_no_partition_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file exists, or what is in it, does not show."""
    run = {"partition": "file", "partition-file": str(tmp_path / "x"), "model": "linear"}
    monkeypatch.setattr("fedaccord.data.partition_file.read", pytest.fail)
    for node in ({"dataset": "digits"}, {"dataset": "npz"}):
        with pytest.raises(ValueError, match="got partition=file: use another") as error:
            configured_task(context(run, **node))
        assert str(tmp_path) not in str(error.value)
    own = {"dataset": "npz", "data-dir": str(save(tmp_path / "14.npz", 14))}
    assert configured_task(context(run, **own)).num_examples(1) == 14


def test_a_run_names_no_gossip_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.plugins.gossip.mixing_matrix", pytest.fail)
    run = {"algo": "dfedavg", "gossip.topology": "file", "gossip.file": "/x", "model": "linear"}
    assert configured_task(context(run)).num_examples(1) > 0


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"max-local-steps": "many"}, "expected max-local-steps in this node's config"),
        ({"max-threads": 0}, "expected max-threads in this node's config"),
        ({"allowed-imports": True}, "expected allowed-imports in this node's config to be a str"),
        ({"state-days": -1}, "expected state-days in this node's config"),
        ({"state-dir": "states"}, "state-dir: expected an absolute path"),
        ({"state-dir": __file__}, "state-dir: expected a folder that can be written"),
        ({"state_dir": "/states"}, "state_dir: expected state-dir in this node's config: rename"),
        ({"max_threads": 1}, "max_threads: expected max-threads in this node's config"),
        ({"Device": "cpu"}, "Device: expected device in this node's config"),
        ({"allow-server-date": True}, "allow-server-date: expected allow-server-data in this"),
    ],
)
def test_a_wrong_node_config_shows_before_round_1(node: dict[str, Any], line: str) -> None:
    with InProcessGrid(ClientApp(), 1):
        message = Message(handshake(), 1, MessageType.TRAIN)
        with pytest.raises(ValueError, match=f"^partition-id=1: {line}"):
            app(message, context({"model": "linear"}, **node))


def test_keys_of_another_app_are_its_own() -> None:
    own = {"devices": 2, "path": "/x", "site": "north", "state": "/y", "max_threads": 7}
    assert configured_task(context({"model": "linear"}, **own, **{"max-threads": 7}))


def test_another_clients_states_are_noticed(tmp_path: Path) -> None:
    node = {"state-dir": str(tmp_path / "states")}
    with InProcessGrid(ClientApp(), 1):
        for _ in range(2):
            message = Message(handshake(), 1, MessageType.TRAIN)
            app(message, context({"model": "linear"}, **node))
        with pytest.raises(ValueError, match=r"^partition-id=2: state-dir: expected the folder of"):
            app(message, context({"model": "linear"}, **node, **{"partition-id": 2}))


@pytest.mark.parametrize("precision", ["float16", "", "float32 "])
def test_a_precision_that_the_device_does_not_know_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match=r"^precision: expected one of .*, got '"):
        flat_model(torch.nn.Linear(2, 1), ModelSettings(precision))
    (field,) = (f for f in options(FedAvg) if f.name == "precision")
    assert {*field.metadata["choices"]} <= {*DTYPES}


def test_the_server_hears_of_it_when_the_node_introduces_itself() -> None:
    with InProcessGrid(ClientApp(), 1):
        message = Message(handshake(), 1, MessageType.TRAIN)
        with pytest.raises(ValueError, match=r"^partition-id=1: expected a node-config that names"):
            app(message, context(READS[0]))


def test_data_that_the_node_names_is_read_and_nothing_else(tmp_path: Path) -> None:
    own = str(save(tmp_path / "14.npz", 14))
    run = {"dataset": "npz", "data-dir": str(save(tmp_path / "30.npz", 30)), "model": "linear"}
    assert configured_task(context(run, **{"data-dir": own})).num_examples(1) == 14
    for node in ({"dataset": "npz"}, {"dataset": "npz", "data-dir": ""}):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            configured_task(context(run, **node))
        assert run["data-dir"] not in str(error.value)


@pytest.mark.parametrize("partition", ["iid", "file"])
def test_a_node_takes_no_path_and_no_download_from_a_run(partition: str) -> None:
    run = {"data-dir": "/run", "partition-file": "/run.csv", "download": True, "lr": 0.1}
    node = {"dataset": "cifar10"}
    settings = node_limits.allowed(run | {"partition": partition}, node, node, whole=True)
    settings.pop("partition", None)
    assert settings == {"data-dir": "", "partition-file": "", "download": False, "lr": 0.1}


@pytest.mark.parametrize("allow", [False, "true", 1])
def test_only_the_nodes_own_yes_is_one(allow: Any) -> None:
    with pytest.raises(ValueError, match="allow-server-data=true"):
        node_limits.allowed(READS[0], {}, {"allow-server-data": allow}, whole=False)
    yes = {"allow-server-data": True}
    assert node_limits.allowed(READS[0], {}, yes, whole=False) == READS[0]


# --- imports --------------------------------------------------------------------------------------


def refused_import(run: dict[str, Any], **node: Any) -> str:
    with pytest.raises(ValueError, match="this node imports nothing") as error:
        configured_task(context(run, **node))
    return str(error.value)


def test_a_device_imports_nothing_because_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "harmful.py").write_text("raise SystemExit")
    (tmp_path / "fedaccord_too.py").write_text("raise SystemExit")
    for module in ("harmful", "fedaccord_too"):
        line = refused_import({"model": f"{module}:net"})
        assert line.startswith(f"model: this node imports nothing from {module} for a run: start")
        assert f'allowed-imports="{module}"' in line
        assert "\n" not in line
        assert module not in sys.modules


def test_the_node_names_what_runs_may_import() -> None:
    run = {"model": "tests.own:tiny"}
    refused_import(run, **{"allowed-imports": ""})
    refused_import(run, **{"allowed-imports": "tests.other, test, tests.own.more"})
    refused_import({"model": "fedaccord.task.models:mlp"}, **{"allowed-imports": "tests"})
    for packages in ("tests", "others,tests.own"):
        task = configured_task(context(run, **{"allowed-imports": packages}))
        assert [tuple(p.shape) for p in task.module().parameters()] == [(10, 64), (10,)]


def test_the_apps_own_package_is_allowed_unless_the_node_says_otherwise() -> None:
    run = {"model": "tests.own:tiny"}
    assert configured_task(context(run), own_package="tests").num_examples(0) > 0
    with pytest.raises(ValueError, match=r"imports nothing from tests\.own"):
        configured_task(context(run, **{"allowed-imports": "others"}), own_package="tests")


@pytest.mark.usefixtures("simulated")
def test_a_simulation_imports_what_its_user_names() -> None:
    node_limits.check_imports([("model", "tests.own:tiny")], "fedaccord", {})


def test_every_setting_that_names_a_function_is_checked() -> None:
    of_task = ["dataset", "tokenizer", "model", "loss", "metrics"]
    assert [*of_task, "optimizer", "diloco.inner", "fedpac.inner"] == FUNCTION_KEYS
    for key in FUNCTION_KEYS:
        run = {"dataset": "text", key: "harmful:function"}
        node = {"data-dir": "/data/site.csv"}
        assert refused_import(run, **node).startswith(f"{key}: this node imports nothing from harm")
    run = {"metrics": "accuracy, tests.own:brier , harmful:function"}
    line = refused_import(run, **{"allowed-imports": "tests"})
    assert line.startswith("metrics: this node imports nothing from harmful")


def test_a_nodes_own_data_set_is_its_own_choice() -> None:
    """A function too, which its config names."""
    node = {"dataset": "tests.own:from_folder", "data-path": "/a/b/c"}
    task = configured_task(context({"model": "linear", "dataset": "npz"}, **node))
    assert [task.num_examples(i) for i in range(3)] == [18] * 3
    node = {"data-dir": "/a/b", "allowed-imports": "tests"}
    run = {"model": "tests.own:tiny", "dataset": "tests.own:from_folder"}
    assert configured_task(context(run, **node)).num_examples(0) == 12
    del node["data-dir"]
    with pytest.raises(ValueError, match="expected a node-config that names this node's data"):
        configured_task(context(run, **node))


def test_a_nodes_data_set_is_not_looked_up_among_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every message of a device would do so."""
    monkeypatch.setattr("fedaccord.core.named.entry_points", None)
    assert configured_task(context({"model": "linear"}, dataset="digits"))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "file"])
def test_a_function_of_the_node_reads_the_clients_own_samples(partition: str) -> None:
    """No partition divides them, but by the clients that the function itself names."""
    run = {"model": "linear", "dataset": "npz", "partition": partition, "num-clients": 3}
    task = configured_task(context(run, dataset="tests.own:arrays"))
    assert [task.num_examples(i) for i in range(3)] == [40] * 3
    assert task.own_test
    task = configured_task(context(run | {"partition": "natural"}, dataset="tests.own:partitioned"))
    assert [task.num_examples(i) for i in range(3)] == [5, 10, 25]


def test_images_that_come_with_scikit_learn_are_nobodys() -> None:
    assert configured_task(context({"model": "linear"})).num_examples(1) > 0


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("run", READS)
def test_a_simulation_reads_what_its_user_names(run: dict[str, Any]) -> None:
    assert node_limits.allowed(run, {}, {}, whole=False) == run
    node_limits.check_steps(ASKED._replace(local_steps=10**9), 100, {})


def test_every_key_of_a_file_is_thought_of() -> None:
    """A new setting that names a path or a network is to be looked at here."""
    keys = {key for key in RunConfig.make({}).flat if key.endswith(("dir", "file"))}
    assert keys == {
        *("data-dir", "out-dir", "partition-file", "gossip.file", "state-dir"),
        "device-profile",  # read where clients are simulated
    }


# --- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 2 * 3), ({"local_steps": 7}, 7), ({"batch_size": 0}, 2), ({"local_epochs": 9}, 27)],
)
def test_a_node_bounds_the_steps_of_a_round(settings: dict[str, Any], steps: int) -> None:
    instruction = ASKED._replace(**settings)
    node_limits.check_steps(instruction, 25, {"max-local-steps": steps})
    line = rf"^max-local-steps: .* at most {steps - 1} steps a round, .* got {steps} of the run;"
    with pytest.raises(ValueError, match=line):
        node_limits.check_steps(instruction, 25, {"max-local-steps": steps - 1})


def test_without_a_bound_of_its_own_a_node_takes_a_million() -> None:
    node_limits.check_steps(ASKED._replace(local_steps=10**6), 25, {})
    with pytest.raises(ValueError, match="at most 1000000 steps"):
        node_limits.check_steps(ASKED._replace(local_steps=10**6 + 1), 25, {})


def test_a_node_bounds_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    run = {"model": "linear", "threads": 4}
    configured_task(context(run))
    configured_task(context(run, **{"max-threads": 4}))
    configured_task(context(run, **{"max-threads": 1, "threads": 1}))
    assert numbers[-1] == 1
    assert 4 in numbers
    with pytest.raises(
        ValueError, match=r"^max-threads: this node allows at most 2 threads, the run"
    ):
        configured_task(context(run, **{"max-threads": 2}))
    assert node_limits.limited_threads(0, 8, {"max-threads": 3}) == 3


@pytest.mark.parametrize("value", [0, -1, "4", 2.5, True])
def test_a_bound_that_is_none_is_one_line(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^expected max-threads in this node's config to be an in"
    ):
        node_limits.limited_threads(0, 1, {"max-threads": value})

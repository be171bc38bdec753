"""What `fedaccord.compat` takes for granted of Flower: each test fails when Flower changes it."""

import base64
import inspect
import itertools
import queue
import runpy
import threading
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click import ClickException
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import ClientAppException
from flwr.common.constant import SType
from flwr.common.serde import array_to_proto
from flwr.superlink.grid import InMemoryGrid
from ray.exceptions import ActorDiedError

from fedaccord.cli.deployments import certificates
from fedaccord.compat import crypto, flower
from fedaccord.federation.errors import last_line
from fedaccord.wire.handshake import handshake
from tests.grid import FIRST_NODE, InProcessGrid
from tests.server.net import Net

# --- arrays ---------------------------------------------------------------------------------------


def test_an_array_has_the_fields_that_ours_fills() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert [field.name for field in fields(Array)] == ["dtype", "shape", "stype", "data"]
    ours, theirs = flower.TensorArray(torch.from_numpy(values)), Array(values)
    assert vars(theirs).keys() - {"_is_dirty"} == {"dtype", "shape", "stype", "data"}
    for name in ("dtype", "shape", "stype", "data"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.stype == SType.NUMPY


@pytest.mark.parametrize("kind", [flower.TensorArray, flower.KeptArray])
def test_flower_sends_ours_as_one_of_its_own(kind: type[flower.TensorArray]) -> None:
    values = np.random.default_rng(0).normal(size=1000)
    ours, theirs = kind(torch.from_numpy(values)), Array(values)
    assert array_to_proto(ours) == array_to_proto(theirs)
    assert ours.deflate() == theirs.deflate()  # which names the type
    assert ours.object_id == theirs.object_id
    assert np.array_equal(ours.numpy(), values)
    record = ArrayRecord()
    record["w"] = ours
    assert record["w"] is ours


# --- the simulation -------------------------------------------------------------------------------


def test_the_grid_of_a_simulation_has_an_attribute_of_its_own() -> None:
    no_state: Any = SimpleNamespace(state=lambda: None)
    assert flower.is_simulation(InMemoryGrid(no_state))


def test_the_grid_of_a_deployment_has_none() -> None:
    from flwr.superlink.grid import HttpGrid

    assert "pull_interval" not in inspect.getsource(HttpGrid)
    assert not flower.is_simulation(Net())


@pytest.mark.flower
def test_a_worker_of_a_simulation_is_one_of_flowers_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is a ClientApp that uses Ray itself, nor an actor of its own."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import ClientAppActor
    from ray._private import ray_constants

    # else, under `uv run`, Ray copies the folder and builds an environment per worker: minutes
    monkeypatch.setattr(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False)

    @ray.remote
    class Own:
        def is_one(self) -> bool:
            return flower.in_simulation()

    def app(message: Any, context: Any) -> bool:
        return flower.in_simulation()

    assert not flower.in_simulation()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert not flower.in_simulation()
        own = Own.remote()
        assert not ray.get(own.is_one.remote())
        ray.kill(own)
        worker = ClientAppActor.remote()
        assert ray.get(worker.run.remote(lambda: app, None, "0", None)) == ("0", True, None)
    finally:
        ray.shutdown()


def test_how_many_clients_a_simulation_has_by_default() -> None:
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG

    assert DEFAULT_SIMULATION_CONFIG.num_supernodes == flower.DEFAULT_SUPERNODES


def simulated_reason(error: Exception) -> str:
    """What Flower's simulation replies for a client that raised."""
    from flwr.server.superlink.fleet.vce import vce_api

    def fail(*_: Any) -> Any:
        raise error

    node: Any = SimpleNamespace(retrieve_context=lambda run_id: None)
    backend: Any = SimpleNamespace(process_message=fail)
    metrics: Any = SimpleNamespace(add_clientapp_runtime=lambda seconds: None)
    requests: queue.Queue[Message] = queue.Queue()
    replies: queue.Queue[Message] = queue.Queue()
    over = threading.Event()
    with Net():
        requests.put(Message(handshake(), 7, MessageType.TRAIN))
        words = {
            "messageins_queue": requests,
            "messageres_queue": replies,
            "node_info_store": {7: node},
            "backend": backend,
            "f_stop": over,
            "metrics": metrics,
        }
        thread = threading.Thread(target=vce_api.worker, kwargs=words)
        thread.start()
        reply = replies.get(timeout=10)
        over.set()
        thread.join()
    return reply.error.reason or ""


def test_a_worker_that_died_is_known_by_the_class_of_its_error() -> None:
    assert flower.is_dead_worker(simulated_reason(ActorDiedError()))
    assert not flower.is_dead_worker(simulated_reason(ClientAppException("no data")))


@pytest.mark.parametrize("text", ["expected a number, got 'x'", "two\nlines"])
def test_the_words_around_a_clients_own(text: str) -> None:
    """The class of the error, in a simulation within a class of Flower's; in process neither."""
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.supernode.runtime import run_clientapp

    for module in (run_clientapp, vce_api):
        assert """reason = str(type(ex)) + ":<'" + str(ex) + "'>\"""" in inspect.getsource(module)
    line = text.splitlines()[-1]
    assert last_line(simulated_reason(ClientAppException(text))) == line
    assert last_line(simulated_reason(ValueError(text))) == line
    assert last_line(str(ClientAppException(text))) == line
    assert flower.raised_message(text) == text


def test_an_app_without_a_function_for_a_message_says_so() -> None:
    with InProcessGrid(ClientApp(), 1) as grid:
        message = Message(RecordDict(), FIRST_NODE, MessageType.EVALUATE)
        (reply,) = grid.send_and_receive([message])
    assert flower.has_no_function(reply.error.reason)
    assert not flower.has_no_function("no data")


# --- `flwr` commands ------------------------------------------------------------------------------


def test_the_words_of_a_server_that_is_away() -> None:
    from flwr.cli.utils import SUPERLINK_UNAVAILABLE_MESSAGE

    assert flower.is_superlink_away(SUPERLINK_UNAVAILABLE_MESSAGE)
    assert not flower.is_superlink_away("Run 7 not found")


def test_the_words_of_a_run_that_lost_its_server() -> None:
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate
    from flwr.superlink.runtime import run_serverapp

    reason = "No heartbeat received from the task"
    assert f'"{reason}"' in inspect.getsource(in_memory_corestate)
    assert f'"{reason}"' in inspect.getsource(sql_corestate)
    unknown = "Task failed with unknown error."
    assert f'"{unknown}"' in inspect.getsource(run_serverapp)
    assert flower.has_lost_superlink(reason)
    assert flower.has_lost_superlink(unknown)
    assert not flower.has_lost_superlink("ServerApp failed with exception: lr is too large")


def test_the_local_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.cli import constant, local_superlink

    def port() -> str:
        return str(runpy.run_path(str(constant.__file__))["LOCAL_SUPERLINK_HTTP_API_PORT"])

    monkeypatch.delenv(flower.LOCAL_PORT_VARIABLE, raising=False)
    assert port() == flower.LOCAL_PORT
    monkeypatch.setenv(flower.LOCAL_PORT_VARIABLE, "1234")
    assert port() == "1234"
    config = tomllib.loads(constant.DEFAULT_FLOWER_CONFIG_TOML)["superlink"]
    assert config["default"] == flower.LOCAL
    assert flower.LOCAL in config

    class Started(Exception):
        pass

    def start(command: list[str], **_: Any) -> Any:
        raise Started(command)

    monkeypatch.setattr(local_superlink.subprocess, "Popen", start)
    monkeypatch.setattr(
        local_superlink, "_get_local_superlink_paths", lambda: (Path("a.db"), Path("a.log"))
    )
    with pytest.raises(Started) as error:
        local_superlink._start_local_superlink()
    command: list[str] = error.value.args[0]
    assert command[0] == flower.LOCAL_PROGRAM
    at = command.index(flower.LOCAL_PORT_OPTION)
    assert command[at + 1] == constant.LOCAL_SUPERLINK_HTTP_API_PORT


def test_a_node_config_is_read_as_a_supernode_reads_it() -> None:
    from flwr.common import config

    supernode: Any = import_module("flwr.supernode.cli.flower_supernode")
    assert supernode.parse_config_args is config.parse_config_args
    pairs = flower.read_node_config("partition-id=1 path='/a b' yes=true\nrate=0.5")
    assert pairs == {"partition-id": 1, "path": "/a b", "yes": True, "rate": 0.5}
    with pytest.raises(ClickException):
        flower.read_node_config("path=/a")


# --- secure sums ---------------------------------------------------------------------------------


def test_shares_of_a_secret_and_keys_of_pairs() -> None:
    """Any two of three shares give the secret, and they are as long as earlier versions made them;
    a pair has one key, which encrypts as Fernet does."""
    secret = bytes(range(32))
    shares = crypto.create_shares(secret, 2, 3)
    assert [len(share) for share in shares] == [4 + 48] * 3
    assert [share[0] for share in shares] == [1, 2, 3]
    for pair in itertools.combinations(shares, 2):
        assert crypto.combine_shares([*pair]) == secret
    one, two = (ec.derive_private_key(number, ec.SECP256R1()) for number in (7, 11))
    key = crypto.generate_shared_key(one, two.public_key())
    assert key == crypto.generate_shared_key(two, one.public_key())
    expected = HKDF(algorithm=SHA256(), length=32, salt=None, info=None)
    agreement = one.exchange(ec.ECDH(), two.public_key())
    assert base64.urlsafe_b64decode(key) == expected.derive(agreement)
    assert Fernet(key).decrypt(crypto.encrypt(key, secret)) == secret
    assert crypto.decrypt(key, Fernet(key).encrypt(secret)) == secret


# --- a SuperLink's HTTP interface -----------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A device's private key."""
    path = tmp_path / "device.key"
    path.write_bytes(certificates.make_device_key()[0])
    return path


def activation(key: Path, time: str) -> flower.HttpRequest:
    signature = certificates.sign(key, time.encode())
    return flower.activation_request(certificates.public_key(key), time, signature)


def authenticate(request: flower.HttpRequest) -> None:
    """Raises HTTPException as the SuperLink does where it takes no such request."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.superlink.routers.fleet.node_auth import authenticate_node

    body = ActivateNodeRequest.FromString(request.body)
    state = SimpleNamespace(protobuf_request=body)
    flower_request: Any = SimpleNamespace(headers=request.headers, state=state)
    authenticate_node(flower_request)


def test_the_paths() -> None:
    from flwr.supercore.routers.health.router import router as health
    from flwr.superlink.routers.fleet.router import router as fleet

    path = flower.activation_request(b"", "", b"").path
    for router, url, method in ((health, flower.HEALTH, "GET"), (fleet, path, "POST")):
        routes: list[Any] = [*router.routes]
        assert any(route.path == url and method in route.methods for route in routes)


def test_a_superlink_takes_the_signature_of_a_device(key: Path) -> None:
    from fastapi import HTTPException

    time = flower.signed_time()
    authenticate(activation(key, time))
    with pytest.raises(HTTPException, match="401"):
        authenticate(activation(key, time)._replace(body=b""))
    with pytest.raises(HTTPException, match="401"):
        authenticate(flower.activation_request(certificates.public_key(key), time, b"other"))


def test_the_times_that_a_superlink_takes() -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert flower.CLOCK_AHEAD == SYSTEM_TIME_TOLERANCE
    assert flower.CLOCK_BEHIND == TIMESTAMP_TOLERANCE


@pytest.mark.parametrize(("node", "status"), [(7, flower.REGISTERED), (None, flower.UNKNOWN)])
def test_a_key_is_looked_for_and_nothing_changes(key: Path, node: int | None, status: int) -> None:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import FlowerError
    from flwr.supercore.error.catalog import API_ERROR_MAP
    from flwr.superlink.servicer.fleet.fleet_handlers import activate_node

    request = ActivateNodeRequest.FromString(activation(key, flower.signed_time()).body)
    keys: list[bytes] = []

    def find(public: bytes) -> int | None:
        keys.append(public)
        return node

    state: Any = SimpleNamespace(get_node_id_by_public_key=find)  # has nothing that changes it
    with pytest.raises(FlowerError) as error:
        activate_node(request, state)
    assert API_ERROR_MAP[error.value.code].http_status_code == status
    assert keys == [certificates.public_key(key)]

"""A SuperNode's connection to a SuperLink that fails for a while, or for good."""

import http.server
import inspect
import os
import signal
import threading
from itertools import count
from typing import Any, cast

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection as room

from fedaccord.compat import supernode


@pytest.fixture(autouse=True)
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's, which `stay_connected` replaces, are back afterwards."""
    for name in ("FleetHttpClient", "HeartbeatSender"):
        monkeypatch.setattr(room, name, getattr(room, name))


class Failing(http.server.BaseHTTPRequestHandler):
    """A SuperLink that fails to handle every second request."""

    numbers = count()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(500 if next(self.numbers) % 2 == 0 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


def test_a_supernode_asks_a_superlink_that_fails_again() -> None:
    """Its polls and its heartbeats; Flower ends both."""
    supernode.stay_connected()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with room.FleetHttpClient.from_server_address(address, True, None, []) as client:
            invoker = make_simple_http_retry_invoker()
            invoker.wait_function = lambda seconds: None
            assert invoker.invoke(client.PullMessages, PullMessagesRequest()) is not None
        server.shutdown()
    source = inspect.getsource(room)
    assert "in (502, 503, 504)" in source  # of a heartbeat
    assert "heartbeat_sender = HeartbeatSender(" in source
    assert source.count("FleetHttpClient.from_server_address(") == 1


@pytest.mark.parametrize(
    ("text", "is_cut"),
    [
        ("_ssl.c:989: The handshake operation timed out", True),
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol", True),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", False),
    ],
)
def test_a_handshake_that_was_cut_is_repeated(
    text: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was refused is not."""

    def fail(*words: Any, **more: Any) -> Any:
        raise httpx.ConnectError(text)

    monkeypatch.setattr(room.FleetHttpClient, "_unary_unary", fail)
    supernode.stay_connected()
    gives_up = make_simple_http_retry_invoker().should_giveup
    assert gives_up is not None
    with pytest.raises(httpx.ConnectError) as error:
        room.FleetHttpClient("http://127.0.0.1").PullMessages(cast(Any, None))
    assert gives_up(error.value) == (not is_cut)


def test_a_supernode_whose_heartbeats_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def beat() -> bool:
        raise RuntimeError("The SuperLink does not recognize this SuperNode.")

    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: signals.append(number))
    supernode.stay_connected()
    sender = room.HeartbeatSender(beat)
    sender.start()
    sender._thread.join()
    assert signals == [signal.SIGTERM]

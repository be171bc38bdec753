"""`fedaccord doctor --deployment`: the checks of a server and of a device."""

import errno
import http.client
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import click
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509 import load_der_x509_certificate

from fedaccord.cli.check import Check, fail, ok, size, warn
from fedaccord.cli.deployments import certificates, folders
from fedaccord.cli.deployments.folders import Facts, read_facts
from fedaccord.compat import flower
from fedaccord.config import node_keys
from fedaccord.core import node_config
from fedaccord.data.datasets import DATASETS
from fedaccord.runs.origin import versions

SECONDS = 10.0  # seconds to wait for the server
SOON = 30  # days before a certificate's end from which to warn
LITTLE, TOO_LITTLE = 1e9, 1e8  # bytes of free space
NAME = "its certificate is for another name: make one with `fedaccord deploy renew DIR --host`"
VERIFY = {  # OpenSSL's codes of certificate errors
    9: "its certificate is not valid yet by this machine's clock: set the clock",
    10: "its certificate has expired: run `fedaccord deploy renew DIR` where it was made",
    **{62: NAME, 64: NAME},
}
ANOTHER_CA = "its certificate is not signed by this folder's ca.crt: use the one of this server"


def check_deployment(folder: Path) -> Iterator[Check]:
    """The checks of a machine's folder and of its server; a device's state folder is made."""
    try:
        facts = read_facts(folder)
    except ValueError as error:
        yield fail("folder", error)
        return
    here = versions()
    for package in folders.COMPARED:
        # without the build suffix of PyTorch: 2.9.1+cpu
        have, wanted = (v[package].partition("+")[0] for v in (here, facts.versions))
        advice = f"expected {wanted}, as on the other machines, got {have or 'none'}"
        advice += "; install the same version everywhere, and after an upgrade of all machines run "
        advice += "`fedaccord deploy renew DIR` where the deployment was made"
        if have == wanted:
            yield ok(package, have)
        elif package == "torch" and have.split(".")[0] == wanted.split(".")[0]:
            yield warn(package, f"{advice}, or results differ in the last digits")
        else:
            yield fail(package, advice)
    free = shutil.disk_usage(folder).free
    mark = "fail" if free < TOO_LITTLE else "warn" if free < LITTLE else "ok"
    yield Check(mark, "space", f"{'' if mark == 'ok' else 'only '}{size(free)} free in {folder}")
    is_server = (folder / folders.SUPERLINK_UNIT).exists()
    yield from (_check_server if is_server else _check_device)(folder, facts)


def _check_server(folder: Path, facts: Facts) -> Iterator[Check]:
    yield _check_writable("folder", folder)
    yield _check_private(folder / folders.SERVER_KEY)
    try:
        authority = certificates.read_certificate(folder / folders.AUTHORITY)
        certificate = certificates.read_certificate(folder / folders.CERTIFICATE)
        key = certificates.read_key(folder / folders.SERVER_KEY)
        certificates.check_server(certificate, key, authority, facts.host)
    except (OSError, ValueError) as error:
        yield fail("certificate", f"{error}; `fedaccord deploy renew DIR` makes another")
        return
    for what, of in (("ca.crt", authority), ("certificate", certificate)):
        yield _check_days(what, certificates.days_left(of), f"for {facts.host}")
    yield _check_own_port(folder, facts)


def _check_own_port(folder: Path, facts: Facts) -> Check:
    try:
        with socket.create_server(("", facts.port)):
            return ok("port", f"{facts.port} is free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return fail("port", f"{facts.port}: {error.strerror}; use another one")
    try:
        _ask(facts._replace(host="localhost"), folder, "GET", flower.HEALTH)
    except (OSError, http.client.HTTPException):
        return fail("port", f"{facts.port} is used by another program; end it")
    return ok("port", f"the SuperLink answers on {facts.port}")


def _check_device(folder: Path, facts: Facts) -> Iterator[Check]:
    file, config = folder / folders.NODE_CONFIG, dict[str, Any]()
    try:
        config = flower.read_node_config(file.read_text(encoding="utf-8").strip())
        node_config.check_spelling(config, node_keys())
        _check_number(config)
    except OSError as error:
        yield fail("node-config", f"expected a line of key=value pairs, got {error}")
    except click.ClickException:
        yield fail("node-config", f'expected pairs such as key=1 key=true key="text"; edit {file}')
    except ValueError as error:
        yield fail("node-config", f"{error}; edit {file}")
    else:
        yield _check_own_data(config, file)
    yield _check_states(config, folder)
    try:
        days = certificates.days_left(certificates.read_certificate(folder / folders.AUTHORITY))
    except (OSError, ValueError) as error:
        yield fail("ca.crt", f"expected a certificate, got {error}")
        return
    yield _check_days("ca.crt", days, "of the authority")
    connection = _check_connection(folder, facts)
    yield from connection
    key = folder / folders.DEVICE_KEY
    if not key.exists():
        yield fail("key", f"none in {folder}: `fedaccord deploy key` makes one")
        return
    yield _check_private(key)
    if connection[-1].what == "clock":
        yield _check_registered(key, folder, facts)


def _check_number(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for a node that cannot be a client of any server."""
    if node_config.is_unnumbered(config):
        return
    for key in node_config.NUMBERS:
        if type(config.get(key)) is not int:
            raise ValueError(
                f"expected e.g. partition-id=0 num-partitions=3, without spaces around =, "
                f"got {key}={config.get(key)!r}"
            )


def _check_own_data(config: Mapping[str, Any], file: Path) -> Check:
    key = next((key for key in node_config.OWN_DATA if key in config), None)
    if key is not None:
        if Path(str(config[key])).exists():
            return ok("data", str(config[key]))
        return fail(
            "data", f"{key}: expected this device's data, found no {config[key]}; edit {file}"
        )
    dataset, server = config.get("dataset"), config.get(node_config.ALLOW) is True
    if server:
        return ok("data", f"{node_config.ALLOW}=true")
    if dataset is None:
        return warn("data", "no data-dir: this device can only take part in runs on digits")
    if dataset in DATASETS and DATASETS[dataset].origin == "user":
        return fail("data", f"dataset={dataset}: expected data-dir with it, got none; edit {file}")
    return ok("data", f"dataset={dataset}")


def _check_states(config: Mapping[str, Any], folder: Path) -> Check:
    own = config.get(node_config.STATE_DIR)
    states = folder / "state" if own is None else Path(str(own))
    if not states.is_absolute():
        return fail("state-dir", f"expected an absolute path, got {str(states)!r}")
    return _check_writable("state-dir", states)


def _check_connection(folder: Path, facts: Facts) -> list[Check]:
    """Checks of port, certificate and clock, up to the first failure; the clock is last if the
    connection works."""
    address = f"{facts.host}:{facts.port}"
    try:
        with socket.create_connection((facts.host, facts.port), SECONDS):
            port = ok("port", f"{address} is open")
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        advice = "start the SuperLink there, and open the port in its firewall"
        return [fail("port", f"{address}: {reason}; {advice}")]
    try:
        answer, certificate = _ask(facts, folder, "GET", flower.HEALTH)
    except ssl.SSLCertVerificationError as error:
        reason = VERIFY.get(error.verify_code, ANOTHER_CA)
        return [port, fail("certificate", f"{address}: {reason}")]
    except ssl.SSLError:
        advice = "the server does not speak TLS; start it with its start.sh, without --insecure"
        return [port, fail("certificate", f"{address}: {advice}")]
    except (OSError, http.client.HTTPException) as error:
        advice = f"expected the answer of a SuperLink, got none ({type(error).__name__})"
        return [port, fail("server", f"{address}: {advice}")]
    days = certificates.days_left(load_der_x509_certificate(certificate))
    clock = _check_clock(answer.getheader("date"))
    return [port, _check_days("certificate", days, f"of {facts.host}"), clock]


def _check_clock(date: str | None) -> Check:
    """date: that of the server's response, in whole seconds."""
    try:
        remote = parsedate_to_datetime(date or "")
        ahead = (datetime.now(UTC) - remote).total_seconds() - 0.5
    except (ValueError, TypeError):  # none, or one without a zone
        return warn("clock", "the server's response has no date")
    if -2 < ahead < 2:
        return ok("clock", "as the server's")
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if ahead >= flower.CLOCK_AHEAD or ahead <= -flower.CLOCK_BEHIND:
        return fail("clock", f"{words}; signed messages are refused: set both by NTP")
    return warn("clock", f"{words}; set both by NTP")


def _check_registered(key: Path, folder: Path, facts: Facts) -> Check:
    """Whether the server knows this device's key."""
    try:
        public, stamp = certificates.public_key(key), flower.signed_time()
        signature = certificates.sign(key, stamp.encode())
    except (ValueError, TypeError, OSError, UnsupportedAlgorithm) as error:
        return fail("key", f"{key}: expected a key, got {error}")
    path, body, headers = flower.activation_request(public, stamp, signature)
    try:
        answer, _ = _ask(facts, folder, "POST", path, body, headers)
    except (OSError, http.client.HTTPException) as error:
        return fail("key", f"the server did not answer ({type(error).__name__})")
    if answer.status == flower.REGISTERED:
        return ok("key", "registered")
    if answer.status == flower.UNKNOWN:
        advice = f"flwr supernode register {folders.PUBLIC_KEY} {folders.CONNECTION}"
        return fail("key", f"not registered at the server: run {advice} where runs are started")
    return fail("key", f"refused by the server ({answer.status} {answer.reason})")


def _ask(
    facts: Facts,
    folder: Path,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    """The server's response, and its certificate in DER."""
    context = ssl.create_default_context(cafile=str(folder / folders.AUTHORITY))
    connection = http.client.HTTPSConnection(
        facts.host, facts.port, timeout=SECONDS, context=context
    )
    with closing(connection):
        connection.connect()
        certificate = connection.sock.getpeercert(binary_form=True)
        connection.request(method, path, body, headers or {})
        return connection.getresponse(), certificate or b""


def _check_days(what: str, days: float, whose: str) -> Check:
    if days < 0:
        advice = "run `fedaccord deploy renew DIR` where the deployment was made"
        return fail(what, f"{whose}, has expired {-days:.0f} days ago; {advice}")
    return (warn if days < SOON else ok)(what, f"{whose}, valid for {days:.0f} days")


def _check_private(path: Path) -> Check:
    if not path.exists():
        return fail(path.name, f"none in {path.parent}")
    if path.stat().st_mode & 0o077:
        return fail(path.name, f"other users can read it: chmod 600 {path}")
    return ok(path.name, "no other user can read it")


def _check_writable(what: str, folder: Path) -> Check:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail(what, f"{folder} cannot be written ({error.strerror})")
    return ok(what, f"{folder} can be written")

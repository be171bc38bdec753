"""Certificates and keys, checked by OpenSSL as Python has it, and as Flower reads them."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedaccord.cli.deployments import certificates
from fedaccord.cli.deployments.certificates import as_pem, check_server, make_authority, make_server

HOSTS = ["192.0.2.10", "lab.example.org", "::1"]
Authority = tuple[x509.Certificate, certificates.Key]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("lab")


def test_a_certificate_is_checked_against_hosts_key_and_authority(authority: Authority) -> None:
    certificate, key = make_server(*authority, HOSTS, days=10)
    for host in HOSTS:
        check_server(certificate, key, authority[0], host)
    assert 9.9 < certificates.days_left(certificate) < 10
    assert 3649 < certificates.days_left(authority[0]) < 3650
    other = ec.generate_private_key(ec.SECP384R1())
    for k, of, host, line in (
        (key, authority[0], "x", r"is for 192\.0\.2\.10, lab\.example\.org, ::1, not for x"),
        (key, make_authority("lab")[0], HOSTS[0], r"not signed by ca\.crt"),
        (other, authority[0], HOSTS[0], "not that of the certificate"),
    ):
        with pytest.raises(ValueError, match=line):
            check_server(certificate, k, of, host)


def handshake(authority: x509.Certificate, server: Path, host: str) -> None:
    """A TLS handshake in memory, with Python's strictest checks."""
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = ssl.create_default_context(cadata=as_pem(authority).decode())
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server)
    client = client_context.wrap_bio(one, other, server_hostname=host)
    accepted = server_context.wrap_bio(other, one, server_side=True)
    for _ in range(3):
        for side in (client, accepted):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("host", "days", "own", "code"),
    [
        ("192.0.2.10", 10, True, None),
        ("lab.example.org", 10, True, None),
        ("192.0.2.11", 10, True, 64),
        ("other.example.org", 10, True, 62),
        ("192.0.2.10", -1, True, 10),  # expired
        ("192.0.2.10", 10, False, 20),  # of another authority
    ],
)
def test_a_client_accepts_only_the_right_certificate(
    authority: Authority, tmp_path: Path, host: str, days: float, own: bool, code: int | None
) -> None:
    certificate, key = make_server(*(authority if own else make_authority("x")), HOSTS, days)
    (tmp_path / "server").write_bytes(as_pem(certificate) + as_pem(key))
    if code is None:
        handshake(authority[0], tmp_path / "server", host)
        return
    with pytest.raises(ssl.SSLCertVerificationError) as error:
        handshake(authority[0], tmp_path / "server", host)
    assert error.value.verify_code == code


def test_flower_accepts_a_devices_key(tmp_path: Path) -> None:
    """Its `register` command reads the public key, its SuperNode the private one."""
    private, public = certificates.make_device_key()
    (tmp_path / "key").write_bytes(private)
    registered = serialization.load_ssh_public_key(public)
    assert isinstance(registered, ec.EllipticCurvePublicKey)
    assert registered.curve.name == "secp384r1"
    public_key = serialization.load_pem_public_key(certificates.public_key(tmp_path / "key"))
    assert public_key == registered
    signature = certificates.sign(tmp_path / "key", b"2026")
    registered.verify(signature, b"2026", ec.ECDSA(hashes.SHA256()))
    other, _ = certificates.make_device_key()
    assert other != private

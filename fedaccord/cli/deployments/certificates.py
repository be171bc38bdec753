"""Certificates and keys: a private authority, the server's certificate, a device's key."""

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SLACK = timedelta(days=1)  # certificates are valid from before their creation: clocks differ

Key = ec.EllipticCurvePrivateKey


def make_authority(name: str) -> tuple[x509.Certificate, Key]:
    """A certificate that signs other certificates, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject, usage = _name(f"{name} authority"), _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(subject, subject, key, AUTHORITY_DAYS, x509.BasicConstraints(True, 0), usage)
    return builder.sign(key, hashes.SHA384()), key


def make_server(
    authority: x509.Certificate, authority_key: Key, hosts: Sequence[str], days: float
) -> tuple[x509.Certificate, Key]:
    """A server's certificate for its names and addresses, the first its main one."""
    key = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    basic, usage = x509.BasicConstraints(False, None), _usage(digital_signature=True)
    builder = (
        _builder(_name(hosts[0]), authority.subject, key, days, basic, usage)
        .add_extension(x509.SubjectAlternativeName([*map(_host, hosts)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
    )
    return builder.sign(authority_key, hashes.SHA384()), key


def check_server(
    certificate: x509.Certificate, key: Key, authority: x509.Certificate, host: str
) -> None:
    """Raise ValueError, in one line, if a server's files do not match."""
    if key.public_key() != certificate.public_key():
        raise ValueError("the key is not that of the certificate")
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError("the certificate is not signed by ca.crt") from None
    names = hosts_of(certificate)
    if str(_host(host).value) not in names:
        raise ValueError(f"the certificate is for {', '.join(names)}, not for {host}")


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses of a server's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def days_left(certificate: x509.Certificate) -> float:
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def make_device_key() -> tuple[bytes, bytes]:
    """A device's (private, public) key as OpenSSH files, of a curve that Flower accepts."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    plain = serialization.NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, plain), public + b"\n"


def public_key(path: Path) -> bytes:
    """The public key behind a device's private one as Flower sends it, a PEM text.

    Raises ValueError if the file is not such a key.
    """
    key = serialization.load_ssh_private_key(path.read_bytes(), None).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign(path: Path, text: bytes) -> bytes:
    """A text's signature by a device's private key, as Flower checks it."""
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    if not isinstance(key, Key):
        raise ValueError("not an elliptic-curve key")
    return key.sign(text, ec.ECDSA(hashes.SHA256()))


def as_pem(what: x509.Certificate | Key) -> bytes:
    if isinstance(what, x509.Certificate):
        return what.public_bytes(Encoding.PEM)
    return what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, serialization.NoEncryption())


def read_certificate(path: Path) -> x509.Certificate:
    """Raises OSError, and ValueError, which names the file, if it is not one."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: expected a certificate, got a damaged file") from None


def read_key(path: Path) -> Key:
    """Raises as `read_certificate`."""
    with suppress(ValueError, TypeError):  # TypeError: it has a password
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        if isinstance(key, Key):
            return key
    raise ValueError(f"{path}: expected an elliptic-curve key, got something else")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Key,
    days: float,
    *critical: x509.ExtensionType,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension in critical:
        builder = builder.add_extension(extension, critical=True)
    return builder


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**of: bool) -> x509.KeyUsage:
    usages = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**dict.fromkeys(usages, False) | of)

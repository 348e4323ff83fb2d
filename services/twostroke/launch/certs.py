"""`twostroke certs`: a development CA, and a certificate for each kind of process."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twostroke.errors import ConfigError

SERVER_NAME = "twostroke"
"""Every certificate carries it, for servers that are reached by an address that nobody knows beforehand."""
HOLDERS = ("router", "worker", "client")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_CA_DAYS = 3650


def make(folder: Path, names: Sequence[str], days: int) -> list[Path]:
    """Writes ca.pem and, for each holder, HOLDER.pem and HOLDER-key.pem; returns what was written.

    A CA that is there is used again, so that certificates can be renewed without telling everybody.
    names: further host names and addresses of the servers. Raises ConfigError when the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        key_path, path = folder / "ca-key.pem", folder / "ca.pem"
        if path.exists() != key_path.exists():
            raise ConfigError(f"{folder} holds only one of ca.pem and ca-key.pem; remove it, or choose another folder")
        if not path.exists():
            ca_key, ca = _authority()
            _write_key(key_path, ca_key)
            path.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
            written.append(path)
        authority_key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key_path} is not a key that this command made; choose another folder")
        authority = x509.load_pem_x509_certificate(path.read_bytes())
        for holder in HOLDERS:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _certificate(holder, key, authority, authority_key, names, days)
            _write_key(folder / f"{holder}-key.pem", key)
            (folder / f"{holder}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
            written.append(folder / f"{holder}.pem")
        return written
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; choose another folder") from error


def _authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("twostroke development CA")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = (
        _builder(name, name, key, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, built.sign(key, hashes.SHA256())


def _certificate(
    holder: str,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    days: int,
) -> x509.Certificate:
    # A router is a client of its workers and workers are of each other, so only "client" is a client alone.
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if holder == "client" else [ExtendedKeyUsageOID.SERVER_AUTH])]
    alternatives = [_alternative(name) for name in (SERVER_NAME, holder, *_LOCAL, *names)]
    built = (
        _builder(_name(f"twostroke {holder}"), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return built.sign(authority_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clocks of two machines differ.
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)

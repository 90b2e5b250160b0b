"""Tokens and certificates of both ends of a service: their files, and the certificate that is made from a token.

By this certificate, a service with TLS recognizes its callers before they send a message. Both ends make the same key
and certificate from the token. The caller shows this certificate in the handshake, and the service trusts no
other. So a stranger cannot send a message that the service would have to receive.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shlex
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.x509.oid import NameOID

from kvdrift.schema.errors import InputError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LEAST_TOKEN = 16  # characters; shorter ones can be guessed
_CURVE = ec.SECP256R1()
_SALT = b"kvdrift: certificate of a token"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvdrift token")])
_FROM, _UNTIL = dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2120, 1, 1, tzinfo=dt.UTC)  # for ever


def read_token(path: Path) -> str:
    """Return the token in the file that ``--token-file`` names."""
    if os.name == "posix" and path.is_file() and (mode := stat.S_IMODE(path.stat().st_mode)) & _OTHERS:
        raise InputError(
            f"--token-file {path}: others can read it (mode {mode:03o}); chmod 600 {shlex.quote(str(path))}"
        )
    token = _read("--token-file", path).decode(errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError(f"--token-file {path}: should hold one line of printable characters without spaces")
    if len(token) < _LEAST_TOKEN:
        raise InputError(f"--token-file {path}: {len(token)} characters are too few; write at least {_LEAST_TOKEN}")
    return token


def read_pem(option: str, path: Path) -> bytes:
    """Return the content of a PEM file of certificates or keys that ``option`` names."""
    content = _read(option, path)
    if b"-----BEGIN " not in content:
        raise InputError(f"{option} {path}: is not PEM (no -----BEGIN line)")
    return content


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class TokenCertificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


@cache
def token_certificate(token: str) -> TokenCertificate:
    """Make a certificate and its key from a token; both are the same, byte for byte, on every machine."""
    secret = Scrypt(salt=_SALT, length=48, n=2**14, r=8, p=1).derive(token.encode())  # slow to try tokens with
    key = ec.derive_private_key(int.from_bytes(secret) % (_CURVE.group_order - 1) + 1, _CURVE)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return TokenCertificate(certificate.public_bytes(pem), private)

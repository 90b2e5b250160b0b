"""The certificate of a token, by which a service with TLS recognizes its callers before they send a message.

Both ends make the same key and certificate from the token. The service trusts no other certificate of a caller, and the
caller shows it in the handshake. So a stranger cannot send a message that the service would have to receive.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.x509.oid import NameOID

_CURVE = ec.SECP256R1()
_SALT = b"kvdrift: certificate of a token"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvdrift token")])
_FROM, _UNTIL = dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2120, 1, 1, tzinfo=dt.UTC)  # for ever


@dataclass(frozen=True)
class TokenCertificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


@cache
def token_certificate(token: str) -> TokenCertificate:
    """Return the certificate of a token, which is the same, byte for byte, on every machine."""
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

"""``kvdrift serve``: the generator as a service; and what ``kvdrift run`` needs to find one."""

from __future__ import annotations

import logging
import re
import signal
import time
from pathlib import Path

import pyarrow as pa
import typer

from generator.service.admission import log
from generator.service.client import TLS_SCHEME, ServiceAddress, is_loopback
from generator.service.identity import identity_of
from generator.service.server import GenerationService
from generator.transformer.loading import load_model
from schema.errors import InputError, OperationError

_LEAST_TOKEN = 16  # characters: below that, guessing is worth a try


def endpoints_of(
    locations: list[str], token_file: Path | None, root_certificates: Path | None, timeout: float
) -> list[ServiceAddress]:
    """The endpoints that the options of ``kvdrift run`` name; InputError for what cannot be."""
    given = {"--token-file": token_file, "--tls-root-certs": root_certificates}
    for name, value in given.items():
        if value is not None and not locations:
            raise InputError(f"{name}: says how to reach an endpoint; add --endpoint grpc://HOST:PORT")
    for location in locations:
        if locations.count(location) > 1:
            raise InputError(f"--endpoint {location}: stands there twice")
    token = None if token_file is None else _token(token_file)
    certificates = None if root_certificates is None else _pem("--tls-root-certs", root_certificates)
    return [ServiceAddress(location, token, certificates, timeout) for location in locations]


def serve_model(
    model_id: str,
    *,
    host: str,
    port: int,
    device: str,
    dtype: str,
    revision: str | None,
    device_map: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_request_bytes: int,
) -> None:
    """Load the model and serve it until interrupted or terminated; says in one line when it is ready and where.

    InputError for what ``load_model`` refuses, for files that are not what they should be, and for a host that others
    can reach without token and TLS; OperationError where the address is taken.
    """
    if (tls_cert is None) != (tls_key is None):
        raise InputError("--tls-cert and --tls-key: give both, or none")
    if not is_loopback(host) and (token_file is None or tls_cert is None):
        raise InputError(
            f"--host {host}: others can reach it; give --token-file, --tls-cert and --tls-key, or --host 127.0.0.1"
        )
    token = None if token_file is None else _token(token_file)
    certificate = None
    if tls_cert is not None and tls_key is not None:
        certificate = (_pem("--tls-cert", tls_cert), _pem("--tls-key", tls_key))
    model = load_model(model_id, device=device, dtype=dtype, revision=revision, device_map=device_map)
    scheme, name = "grpc" if certificate is None else TLS_SCHEME, f"[{host}]" if ":" in host else host
    try:
        service = GenerationService(
            model,
            identity_of(model, revision),
            f"{scheme}://{name}:{port}",
            token=token,
            certificate=certificate,
            max_request_bytes=max_request_bytes,
        )
    except (OSError, pa.ArrowException) as error:
        hint = "is the port taken?" if certificate is None else "is the port taken, or are certificate and key no pair?"
        raise OperationError(f"cannot listen on {scheme}://{name}:{port}: {hint}") from error
    _log_to_standard_error()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        typer.echo(f"kvdrift: serving {model_id} on {scheme}://{name}:{service.port}")
        service.run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait for callers
    finally:
        service.close()


def _log_to_standard_error() -> None:
    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)sZ kvdrift: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    log.addHandler(handler)
    log.propagate = False


def _token(path: Path) -> str:
    token = _read("--token-file", path).decode(errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError(f"--token-file {path}: should hold one line of printable characters without spaces")
    if len(token) < _LEAST_TOKEN:
        raise InputError(f"--token-file {path}: {len(token)} characters are no secret; take at least {_LEAST_TOKEN}")
    return token


def _pem(option: str, path: Path) -> bytes:
    content = _read(option, path)
    if b"-----BEGIN " not in content:
        raise InputError(f"{option} {path}: is not PEM (no -----BEGIN line)")
    return content


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None

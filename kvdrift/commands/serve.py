"""``kvdrift serve``: event generation as a network service."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import TokenOption
from kvdrift.schema.errors import InputError, OperationError

if TYPE_CHECKING:
    from kvdrift.generator.service.server import GenerationService


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as model.id in a study file.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; an address that other machines reach needs a token and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free port.")] = 8815,
    token_file: TokenOption = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file with the service's certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file with the certificate's private key.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device, as in [model]: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="The floating-point type, as in [model].")] = "float32",
    revision: Annotated[str | None, typer.Option(help="The revision of a Hugging Face id, as in [model].")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="The device map, as in [model]: auto uses all GPUs in place of one device.")
    ] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="An installed module with selectors, codecs and policies that studies may name; repeat the option "
            "for several.",
        ),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1024, help="Refuse longer requests.")] = 2**24,
) -> None:
    """Serve a model to studies run with --endpoint, until interrupted.

    Examples:
        kvdrift serve kvdrift/tiny
        kvdrift serve my/model --device cuda:0 --dtype bfloat16 --port 8816 --token-file token
    """
    if (tls_cert is None) != (tls_key is None):
        raise InputError("--tls-cert and --tls-key: give both or neither")
    from kvdrift.generator.service.client import is_loopback

    if not is_loopback(host) and (token_file is None or tls_cert is None):
        raise InputError(
            f"--host {host}: other machines reach it; give --token-file, --tls-cert and --tls-key, or --host 127.0.0.1"
        )
    from kvdrift.generator.service.credentials import read_pem, read_token

    token = None if token_file is None else read_token(token_file)
    certificate = None
    if tls_cert is not None and tls_key is not None:
        certificate = (read_pem("--tls-cert", tls_cert), read_pem("--tls-key", tls_key))
    from kvdrift.generator.service.client import TLS_SCHEME
    from kvdrift.generator.service.server import GenerationService, identity_of, load_modules
    from kvdrift.generator.transformer.fused.layers import slower
    from kvdrift.generator.transformer.loading import load_model

    allowed = load_modules(allow_module or ())
    loaded = load_model(
        model, device=device, dtype=dtype, revision=revision, device_map=device_map,
        say=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
    if notice := slower(loaded.network, loaded.device):
        typer.echo(notice, err=True)
    scheme, name = "grpc" if certificate is None else TLS_SCHEME, f"[{host}]" if ":" in host else host
    try:
        service = GenerationService(
            loaded,
            identity_of(loaded, revision),
            f"{scheme}://{name}:{port}",
            token=token,
            certificate=certificate,
            max_request_bytes=max_request_bytes,
            allowed=allowed,
        )
    except OSError as error:  # Arrow's input and output errors are OSErrors
        hint = "is the port taken?" if certificate is None else "is the port taken, or are certificate and key no pair?"
        raise OperationError(f"cannot listen on {scheme}://{name}:{port}: {hint}") from error
    _serve_until_interrupted(service, f"kvdrift: serving {model} on {scheme}://{name}:{service.port}")


def _serve_until_interrupted(service: GenerationService, ready: str) -> None:
    _log_to_standard_error()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        typer.echo(ready)
        service.run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second signal ends the process without waiting for callers
    finally:
        service.close()


def _log_to_standard_error() -> None:
    from kvdrift.generator.service.server import log

    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)sZ kvdrift: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    log.addHandler(handler)
    log.propagate = False

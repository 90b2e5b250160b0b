"""The meaning of a run's options and parameters: the store's location, and the generator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import Study

if TYPE_CHECKING:
    from kvdrift.generator.service.client import ServiceAddress


def default_location(studies: Sequence[Study]) -> str:
    """Return ``stores/NAME`` in the working folder."""
    return str(Path("stores") / studies[0].name_in_file)


def named_workers(
    studies: Sequence[Study], cluster: str | None, gpus: str | None, *, served: bool
) -> ClusterAddress | None:
    """Return the cluster that ``--cluster`` or ``--gpus`` names; None if neither does."""
    who = {"--gpus": gpus is not None, "--cluster": cluster is not None, "--endpoint": served}
    given = [option for option, there in who.items() if there]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: each chooses who generates; give one of them")
    if gpus is not None:
        return ClusterAddress.of_gpus(gpus, studies)
    return None if cluster is None else ClusterAddress.parse(cluster)


def named_service(
    locations: Sequence[str], token_file: Path | None, root_certificates: Path | None, timeout: float
) -> ServiceAddress | None:
    """Return the service that ``--endpoint`` names; None without ``--endpoint``."""
    given = {"--token-file": token_file, "--tls-root-certs": root_certificates}
    for name, value in given.items():
        if value is not None and not locations:
            raise InputError(f"{name}: says how to reach an endpoint; add --endpoint grpc://HOST:PORT")
    if len(locations) > 1:
        raise InputError(f"--endpoint {' --endpoint '.join(locations)}: give one; --cluster generates on many machines")
    if not locations:
        return None
    from kvdrift.generator.service.client import ServiceAddress  # noqa: PLC0415 - where services generate
    from kvdrift.generator.service.credentials import read_pem, read_token  # noqa: PLC0415 - as above

    token = None if token_file is None else read_token(token_file)
    certificates = None if root_certificates is None else read_pem("--tls-root-certs", root_certificates)
    return ServiceAddress(locations[0], token, certificates, timeout)

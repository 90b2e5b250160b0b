"""The addresses of services and clusters that generate, read from a run's options, and the default store of a file."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvdrift.schema.errors import InputError, installing
from kvdrift.schema.study import TRANSFORMER, Study

if TYPE_CHECKING:
    from kvdrift.generator.service.client import ServiceAddress


@dataclass(frozen=True)
class ClusterAddress:
    """The address of a Dask cluster: that of a scheduler, or the workers to start on this machine."""

    text: str  # The cluster's name in messages: the text of ``--cluster``, or the GPUs
    # For each worker to start on this machine, environment variables added to the command's; None if there is a
    # scheduler already
    workers: tuple[Mapping[str, str], ...] | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of ``--cluster``: ``tcp://HOST:PORT``, ``tls://HOST:PORT``, or ``local:N`` for N workers."""
        local = re.fullmatch(r"local:([1-9][0-9]{0,2})", text)
        if local is None and not re.fullmatch(r"(tcp|tls)://[^\s/]+:[0-9]{1,5}", text):
            raise InputError(
                f"--cluster '{text}': write tcp://HOST:PORT of a Dask scheduler, or local:N for N workers here"
            )
        _check_dask(f"--cluster {text}")
        return cls(text, None if local is None else ({},) * int(local[1]))

    @classmethod
    def of_gpus(cls, text: str, studies: Sequence[Study]) -> Self:
        """Read the text of ``--gpus``, a number or ``all``; return an address with a worker for each GPU to use.

        The workers will generate for the ``studies`` of one file.
        """
        check_gpus(text, studies)
        from kvdrift.generator.transformer.model_checks import visible_gpus  # noqa: PLC0415 - torch takes seconds

        gpus = visible_gpus()
        if not gpus:
            raise InputError(
                f"--gpus {text}: torch finds no GPU on this machine; nvidia-smi lists the GPUs that the driver finds"
            )
        if text != "all" and int(text) > len(gpus):
            raise InputError(f"--gpus {text}: torch finds only {len(gpus)} on this machine; write all")
        _check_dask(f"--gpus {text}")
        taken = gpus if text == "all" else gpus[: int(text)]
        name = f"of GPU{'s' if len(taken) > 1 else ''} {', '.join(taken)}"
        return cls(name, tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in taken))


def check_gpus(text: str, studies: Sequence[Study]) -> None:
    """Check the text of ``--gpus``, and that each study's model computes on one GPU; this machine may lack a GPU."""
    if re.fullmatch(r"all|[1-9][0-9]{0,2}", text) is None:
        raise InputError(
            f"--gpus '{text}': write all, or a number of GPUs; to choose GPUs 0 and 2, set CUDA_VISIBLE_DEVICES=0,2 "
            "and write --gpus all"
        )
    for model in (study.model for study in studies):
        prefix = f"--gpus {text}: model."
        if model.kind != TRANSFORMER:
            raise InputError(f"{prefix}kind = '{model.kind}' uses no GPU; run it without --gpus")
        if model.device_map is not None:
            raise InputError(
                f"{prefix}device_map = '{model.device_map}' spreads one model over all GPUs; run it without --gpus"
            )
        if model.device not in {"cuda", "cuda:0"}:  # a worker sees its own GPU as the first
            raise InputError(f"{prefix}device = '{model.device}': write cuda, which is each worker's own GPU")


def _check_dask(option: str) -> None:
    if importlib.util.find_spec("distributed") is None:
        raise InputError(f"{option}: needs Dask: {installing('distributed')}")


def named_workers(
    studies: Sequence[Study], cluster: str | None, gpus: str | None, *, served: bool
) -> ClusterAddress | None:
    """Return the cluster that ``--cluster`` or ``--gpus`` names; None if neither is given.

    ``served`` says whether ``--endpoint`` is given. At most one of the three options may be given.
    """
    who = {"--gpus": gpus is not None, "--cluster": cluster is not None, "--endpoint": served}
    generators = [option for option, there in who.items() if there]
    if len(generators) > 1:
        raise InputError(f"{' and '.join(generators)}: each chooses where units are generated; give one of them")
    if gpus is not None:
        return ClusterAddress.of_gpus(gpus, studies)
    return None if cluster is None else ClusterAddress.parse(cluster)


def named_service(
    locations: Sequence[str], token_file: Path | None, root_certificates: Path | None, timeout: float
) -> ServiceAddress | None:
    """Return the address of the service that ``--endpoint`` names; None without the option.

    ``locations`` are the values of the option; more than one is refused.
    """
    files = {"--token-file": token_file, "--tls-root-certs": root_certificates}
    for name, value in files.items():
        if value is not None and not locations:
            raise InputError(f"{name}: is for the service at an endpoint; add --endpoint grpc://HOST:PORT")
    if len(locations) > 1:
        raise InputError(
            f"--endpoint {' --endpoint '.join(locations)}: give one endpoint; --cluster generates on many machines"
        )
    if not locations:
        return None
    from kvdrift.generator.service.client import ServiceAddress  # noqa: PLC0415 - only if a service generates
    from kvdrift.generator.service.credentials import read_pem, read_token  # noqa: PLC0415 - as above

    token = None if token_file is None else read_token(token_file)
    certificates = None if root_certificates is None else read_pem("--tls-root-certs", root_certificates)
    return ServiceAddress(locations[0], token, certificates, timeout)


def default_location(studies: Sequence[Study]) -> str:
    """Return the default store of a file's studies: ``stores/NAME``, a path relative to the working folder.

    NAME is the studies' common name in the file.
    """
    return str(Path("stores") / studies[0].name_in_file)

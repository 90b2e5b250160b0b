"""kvdrift: when, and for how long, a smaller KV cache makes a language model diverge from itself.

``kvdrift.open(store).sql("select * from decomposition")`` gives a DuckDB relation over a store's views;
``kvdrift.run("study.toml")`` runs a study and returns the path of its report.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sql.catalog import Views

__version__ = "0.1.0"


def open(store: str | Path, *, checked: bool = False) -> Views:  # noqa: A001 - kvdrift.open reads like the built-in it resembles
    """Open the views of a store at its present versions; ``.sql(query)`` gives a DuckDB relation.

    All cores work on a query. Stored estimates are computed on one core, so that they have the same last bits in every
    run.

    Args:
        store: folder or URL of a store.
        checked: whether to make sure first that no file is damaged, which reads each file of a local store once.

    Raises:
        schema.errors.InputError: there is no store.
        schema.errors.DamagedStoreError: the store is damaged.

    """
    from log.store import Store
    from sql.catalog import open_views

    return open_views(Store.open(store), threads=os.cpu_count() or 1, checked_within=0 if checked else None)


def run(
    study: str | Path,
    store: str | Path | None = None,
    *,
    endpoints: str | Sequence[str] = (),
    token_file: str | Path | None = None,
    tls_root_certs: str | Path | None = None,
    endpoint_timeout: float = 60.0,
    cluster: str | None = None,
    gpus: str | None = None,
) -> Path:
    """Run a study file to its report, or go on where an earlier run stopped.

    Args:
        study: the study file.
        store: folder or URL of the store, ``stores/NAME`` in the working folder by default.
        endpoints: ``grpc://HOST:PORT`` of the ``kvdrift serve`` that generates, or of each of several; this
            process by default.
        token_file: a file with the token that the endpoints ask for.
        tls_root_certs: a PEM file of the authorities to trust; the system's by default.
        endpoint_timeout: seconds of silence after which an endpoint is given up.
        cluster: ``tcp://HOST:PORT`` of a Dask scheduler whose workers generate, or ``local:N``.
        gpus: ``all``, or how many GPUs of this machine generate, with a worker each.

    Returns:
        The path of the report; the last one's of a file with several models.

    Raises:
        schema.errors.KvdriftError: the errors of ``schema.errors``, each one line.

    """
    from flows.study_file.options import named_services, named_workers
    from flows.study_file.run import run_file
    from schema.progress import SILENT
    from schema.study import load_studies

    studies = load_studies(Path(study))
    token, certificates = (None if file is None else Path(file) for file in (token_file, tls_root_certs))
    addresses = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    services = named_services(addresses, token, certificates, endpoint_timeout)
    workers = named_workers(studies, cluster, gpus, served=bool(services))
    return run_file(studies, store, services, SILENT, cluster=workers).pages[-1]

"""kvdrift: when, and for how long, a smaller KV cache makes a language model diverge from itself.

``kvdrift.open(store).sql("from summary")`` gives a DuckDB relation over a store's views;
``kvdrift.run("study.toml")`` runs a study and returns the path of its page. ``kvdrift.write_report`` writes pages
again, and ``kvdrift.gate`` decides whether an action is at most a margin worse than a baseline. A custom selector,
codec or policy imports all that it needs from here: ``from kvdrift import ScoringSelector``.
"""

# ruff: noqa: F405 - type checkers read the interfaces' names from their module
from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (Path(__file__).parent / "schema").is_dir():  # a clone, whose folders stand beside this one
    __path__.append(str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from kvdrift.flows.estimate.gate import Verdict
    from kvdrift.interfaces import *  # noqa: F403
    from kvdrift.schema.errors import DamagedStoreError, InputError, KvdriftError, OperationError
    from kvdrift.sql.catalog import Views

__version__ = "0.1.0"

__all__ = [
    "GROUP_BYTES",
    "TOVA",
    "CacheRule",
    "Codec",
    "DamagedStoreError",
    "InputError",
    "KvdriftError",
    "OperationError",
    "Policy",
    "PromptLayer",
    "QueryChunk",
    "ScoringPolicy",
    "ScoringSelector",
    "Selector",
    "SnapKV",
    "Statistic",
    "StoredBytes",
    "at_least",
    "channels_back",
    "entries_back",
    "gate",
    "open",
    "packed_bytes",
    "run",
    "window_attention",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import an error or an interface at its first use: the interfaces need torch, which takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module 'kvdrift' has no attribute '{name}'")
    module = "kvdrift.schema.errors" if name.endswith("Error") else "kvdrift.interfaces"
    return getattr(importlib.import_module(module), name)


def open(store: str | Path, *, checked: bool = False) -> Views:  # noqa: A001 - kvdrift.open reads like the built-in it resembles
    """Open the views of a store at its present versions; ``.sql(query)`` gives a DuckDB relation.

    All cores work on a query, so the last bits of sums may vary between calls. Stored estimates do not vary, since
    they are computed on one core.

    Args:
        store: folder or URL of a store.
        checked: whether to check first that no file is damaged, which reads every file of a local store.

    Raises:
        kvdrift.schema.errors.InputError: there is no store.
        kvdrift.schema.errors.OperationError: a file of the store is missing; ``DamagedStoreError``, which derives from
            it, if a log is damaged or, with ``checked``, any file.
    """
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog import open_views

    return open_views(Store.open(store), threads=os.cpu_count() or 1, checked_within=0 if checked else None)


def run(
    study: str | Path,
    store: str | Path | None = None,
    *,
    limit: int | None = None,
    redo: Sequence[str] = (),
    replan: bool = False,
    plan_only: bool = False,
    dry_run: bool = False,
    progress: bool = True,
    endpoint: str | None = None,
    token_file: str | Path | None = None,
    tls_root_certs: str | Path | None = None,
    endpoint_timeout: float = 60.0,
    cluster: str | None = None,
    gpus: str | None = None,
) -> Path | None:
    """Run a study file to its report, or go on where an earlier run stopped, as ``kvdrift run`` does.

    A process has one run at a time. An event loop may be running, as in a notebook.

    Args:
        study: the study file.
        store: folder or URL of the store, ``stores/NAME`` in the working folder by default.
        limit: how many documents to generate at most before the run stops; all by default.
        redo: changed actions to generate again.
        replan: whether to make a new revision of the plan from the changed ``[plan]``.
        plan_only: whether to stop once the plan is frozen.
        dry_run: whether to print the work, time and memory that the run needs, and to write no store.
        progress: whether to show the progress: on standard error, in a notebook below the cell.
        endpoint: ``grpc://HOST:PORT`` of the ``kvdrift serve`` that generates; this process by default.
        token_file: a file with the token that the endpoint requires.
        tls_root_certs: a PEM file of the certificate authorities to trust; those of the system by default.
        endpoint_timeout: seconds of silence after which the endpoint counts as lost.
        cluster: ``tcp://HOST:PORT`` of a Dask scheduler whose workers generate, or ``local:N``.
        gpus: ``all``, or how many GPUs of this machine generate, with a worker each.

    Returns:
        The path of the report. If the file has several models, it is the last model's; if it has several temperatures,
        it is the page that compares them. None if the run stopped before its reports, because of ``limit``,
        ``plan_only`` or ``dry_run``.

    Raises:
        kvdrift.schema.errors.KvdriftError: an error of ``kvdrift.schema.errors``, whose message is one line.
        KeyboardInterrupt: Ctrl-C, or a notebook's interrupt. The next run goes on where this run stopped.
    """
    from kvdrift.commands.run import run_study
    from kvdrift.console import listener
    from kvdrift.interrupts import noting_interrupts

    with noting_interrupts():
        ran = run_study(
            Path(study), None if store is None else str(store), functools.partial(listener, shown=progress),
            limit=limit, redo=redo, replan=replan, plan_only=plan_only, dry_run=dry_run,
            endpoints=[] if endpoint is None else [endpoint],
            token_file=None if token_file is None else Path(token_file),
            tls_root_certs=None if tls_root_certs is None else Path(tls_root_certs),
            endpoint_timeout=endpoint_timeout, cluster=cluster, gpus=gpus, compacts=True,
        )  # fmt: skip
    return ran[1].pages[-1] if ran is not None and ran[1].pages else None


def write_report(store: str | Path, output: str | Path | None = None, study: str | None = None) -> list[Path]:
    """Write the page of each study of a store, as ``kvdrift report`` does.

    Args:
        store: folder or URL of a store.
        output: the folder of the page, or of the pages' folders if there are several. By default pages are in the
            store, or those of a store behind a URL in ``reports`` in the working folder.
        study: the study whose page is written; all by default.

    Returns:
        The paths of the pages.

    Raises:
        kvdrift.schema.errors.InputError: there is no such store or study, or the folder may not be written.
        kvdrift.schema.errors.OperationError: the disk is full or broken.
    """
    from kvdrift.commands.report import report_pages

    return report_pages(str(store), None if output is None else Path(output), study, latex=False)


def gate(
    store: str | Path,
    quantity: str,
    action: str,
    margin: float,
    *,
    baseline: str | None = None,
    level: float = 0.95,
    study: str | None = None,
    model: str | None = None,
    stratum: str | None = None,
) -> Verdict:
    """Decide whether an action is at most a margin worse than a baseline, as ``kvdrift gate`` does.

    Args:
        store: folder or URL of a store with a finished study.
        quantity: such as ``mismatch``; ``kvdrift list quantities`` has all.
        action: the action to test.
        margin: the largest difference that still counts as no worse; 0.02 is 2 percentage points.
        baseline: the action to compare with; by default the study's floor, an action that computes the whole cache
            again or in another way. Of two floors, the one with more mismatches is taken.
        level: the confidence level of the answer.
        study: the study, if the store has several.
        model: the model, if the study has several.
        stratum: the stratum whose documents count; all by default.

    Returns:
        The verdict; ``decision`` is "equivalent or better", "worse" or "unresolved", as in the gate's JSON.

    Raises:
        kvdrift.schema.errors.InputError: a name does not exist, or the study is not finished.
    """
    from kvdrift.flows.estimate.gate import LARGER_FLOOR, GateQuestion, gate_stored
    from kvdrift.log.store import Store
    from kvdrift.schema.study import POOLED

    question = GateQuestion(
        quantity, action, baseline or LARGER_FLOOR, margin, level, study, model, POOLED if stratum is None else stratum
    )
    return gate_stored(Store.open(store), question)

"""Find the SQL text of every view, and create all views over empty tables, which ``kvdrift.sql.catalog`` replaces.

The text of a view is in a file; that of a stored table's view is made here, and leaves out superseded rows. DuckDB
takes most of a second to resolve all views and set their columns' comments. So the views are created once, in a small
database that is kept in the user's cache folder (measured: it saves .7 s of each command that opens views). DuckDB
copies that database into each connection without resolving the views again.
"""

from __future__ import annotations

import functools
import graphlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from kvdrift.schema.errors import OperationError
from kvdrift.schema.tables import TABLES
from kvdrift.sql.contracts import comments, contract, contracts, stored_tables, view_files
from kvdrift.sql.quoting import file_pattern, literal, quoted

_READS: Final = re.compile(r"\b(?:main|internal)\.\w+")


def view_texts() -> Mapping[str, str]:
    """Return the SQL text of every view by its name, each view after the views that it reads."""
    return {name.partition(".")[2]: text for name, text in qualified_texts().items()}


@functools.cache
def qualified_texts() -> Mapping[str, str]:
    """Return the SQL text of every view by SCHEMA.NAME, each view after the views that it reads."""
    texts = {_qualified(table): stored_text(table) for table in stored_tables()}
    texts |= {_qualified(name): text for name, text in view_files(".sql").items()}
    reads = {name: sorted({*_READS.findall(text)} & texts.keys()) for name, text in texts.items()}
    return {name: texts[name] for name in graphlib.TopologicalSorter(reads).static_order()}


def _qualified(view: str) -> str:
    return f"{contract(view).schema}.{view}"


def stored_text(table: str) -> str:
    """Return the SQL text of a stored table's view: its declared columns, without the rows of superseded revisions.

    Table ``plans`` keeps all revisions. Rows made under a plan are shown only if the plan is the newest. A document is
    shown only in its newest revision, and rows scored or estimated from documents only if they used newest revisions.
    """
    declared = TABLES[table].columns
    columns = ",\n    ".join(f"own.{quoted(name)}" for name in declared)
    text = f"select\n    {columns}\nfrom stored.{quoted(table)} as own"
    for name, revision in (("action", "action_revision"), ("baseline", "baseline_revision")):
        if {"study", name, revision} <= set(declared):
            same = f"own.study = {name}s.study and own.{name} = {name}s.action"
            text += f"\nanti join internal.superseded as {name}s on {same} and own.{revision} = {name}s.action_revision"
    if "plan_sha256" in declared and "plan_revision" not in declared:
        same = " and ".join(f"own.{name} = plans.{name}" for name in ("study", "model", "plan_sha256"))
        text += f"\nanti join internal.superseded_plans as plans on {same}"
    if "document_revision" in declared:
        same = " and ".join(f"own.{name} = documents.{name}" for name in ("study", "model", "doc", "document_revision"))
        text += f"\nanti join internal.superseded_documents as documents on {same}"
    if "documents_revision" in declared:
        same = " and ".join(f"own.{name} = analyses.{name}" for name in ("study", "model", "documents_revision"))
        text += f"\nanti join internal.superseded_analyses as analyses on {same}"
    return text


_KEPT: Final = 16  # files of the newest versions in the cache folder


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create all views in an empty database, over empty tables ``stored.NAME``."""
    try:
        with tempfile.NamedTemporaryFile(prefix="kvdrift-", suffix=".duckdb") as file:
            file.write(_empty_database())
            file.flush()
            connection.execute(f"attach {literal(file.name)} as empty_views (read_only)")
            (catalog,) = connection.execute("select current_database()").fetchone() or ("memory",)
            connection.execute(f"copy from database empty_views to {quoted(catalog)}")
            connection.execute("detach empty_views")
    except OSError as error:
        reason = error.strerror or error
        raise OperationError(
            f"no temporary file can be written ({reason}); set TMPDIR to a folder with space"
        ) from error


@functools.cache
def _empty_database() -> bytes:
    """Return the content of a DuckDB file with all views, from the cache folder or made now."""
    texts = qualified_texts()
    meanings = {name: [promised.description, *promised.comments.items()] for name, promised in contracts().items()}
    tables = {name: str(table.schema.remove_metadata()) for name, table in TABLES.items()}
    ours = [(resources.files("kvdrift.sql") / name).read_text("utf-8") for name in ("empty_views.py", "published.csv")]
    made_from = json.dumps([duckdb.__version__, pa.__version__, [*texts.items()], meanings, tables, ours])
    return kept_build(made_from.encode(), functools.partial(_made_database, texts))


def kept_build(made_from: bytes, build: Callable[[], bytes]) -> bytes:
    """Return the result of ``build``, from the user's cache folder if an earlier call kept it there.

    The file's name has a digest of ``made_from``, which determines the result. The file begins with a SHA-256 of the
    result, so that a truncated file is noticed. If no file can be written, nothing is kept.
    """
    file = cache_folder() / f"views-{hashlib.sha256(made_from).hexdigest()[:32]}"
    try:
        stored = file.read_bytes()
    except OSError:
        stored = b""
    content = stored[32:]
    if content and hashlib.sha256(content).digest() == stored[:32]:
        return content
    content = build()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as aside:
            Path(aside, "content").write_bytes(hashlib.sha256(content).digest() + content)
            Path(aside, "content").replace(file)
        others = sorted(set(file.parent.glob("views-*")) - {file}, key=lambda other: other.stat().st_mtime)
        for old in others[: 1 - _KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        pass
    return content


def cache_folder() -> Path:
    """Return the cache folder, which may not exist; if no home folder is known, a path where no file can be made."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "kvdrift")
    except RuntimeError:  # no home folder is known
        return Path(os.devnull)


def _made_database(texts: Mapping[str, str]) -> bytes:
    """Create all views in a new database, and return the content of its file."""
    with tempfile.TemporaryDirectory(prefix="kvdrift-") as folder:
        path = Path(folder, "views.duckdb")
        with duckdb.connect(str(path), config={"threads": 1}) as connection:
            connection.execute("begin")
            _create_empty_tables(connection)
            for name, text in texts.items():
                connection.execute(f"create view {name} as {text}")
                connection.execute(comments(contract(name.partition(".")[2]), "view"))
            connection.execute("commit")
        return path.read_bytes()


def _create_empty_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables that views read: stored tables without rows, and the paper's numbers."""
    connection.execute("create schema internal")
    connection.execute("create schema stored")
    _create_published(connection)
    for name, table in TABLES.items():
        connection.from_arrow(table.schema.empty_table()).create(f"stored.{quoted(name)}")


def _create_published(connection: duckdb.DuckDBPyConnection) -> None:
    """Create table ``stored.published`` of the paper's numbers, so that a catalogue needs no file of this package."""
    kinds = dict.fromkeys(("value", "low", "high", "level"), "DOUBLE")
    columns = ", ".join(f"{name}: '{kinds.get(name, 'VARCHAR')}'" for name in contract("published").columns)
    with resources.as_file(resources.files("kvdrift.sql") / "published.csv") as file:
        rows = f"from read_csv({literal(file_pattern(str(file)))}, header = true, columns = {{{columns}}})"
        connection.execute(f"create table stored.published as {rows}")

"""A query that Ctrl-C ends: DuckDB itself looks at no signal while it computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from sql.catalog import Views


def rows_of(views: Views, query: str) -> pa.Table:
    """Return the rows of a query.

    Raises:
        InputError: DuckDB cannot parse, bind or compute the query.
        OperationError: A stored file cannot be read.
        KeyboardInterrupt: The user interrupted it; the views can be asked again.

    """
    with ThreadPoolExecutor(1, "query") as thread:
        answer = thread.submit(views.table, query)
        try:
            return answer.result()
        except KeyboardInterrupt:
            views.connection.interrupt()
            answer.exception()  # the connection is free again once the query has ended
            raise

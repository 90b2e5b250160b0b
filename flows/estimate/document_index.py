"""The arrangement of a view's rows as arrays over documents and actions, in sorted order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schema.study import CONTROL_ACTION


def measured(table: pa.Table) -> pa.Table:
    """Return the rows without those of the full-retention control."""
    return table.filter(pc.not_equal(table["action"], CONTROL_ACTION))


class DocumentIndex:
    """The documents and actions of a view's rows, in sorted order, and the index of each row's document and action."""

    def __init__(self, table: pa.Table) -> None:
        keys = {
            doc: (stratum, cluster)
            for doc, stratum, cluster in zip(
                *(table[name].to_pylist() for name in ("doc", "stratum", "cluster")), strict=True
            )
        }
        self.documents = np.array(sorted(keys), dtype=np.str_)
        self.strata = np.array([keys[doc][0] for doc in self.documents.tolist()], dtype=np.str_)
        self.clusters = np.array([keys[doc][1] for doc in self.documents.tolist()], dtype=np.str_)
        self.actions = tuple(sorted(set(table["action"].to_pylist())))

    def spread(
        self, table: pa.Table, names: Sequence[str] | Mapping[str, str], axis: str | None = None, length: int = 0,
        first: int = 1,
    ) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:  # fmt: skip
        """Arrange columns of a view by document and action, float64 [documents, actions]; NaN without a row.

        With an ``axis``, a column by which a document and action has ``length`` rows from ``first`` on, there is a
        third dimension.
        """
        shape: tuple[int, ...] = (len(self.documents), len(self.actions))
        where: list[Any] = [
            pc.index_in(table[name], value_set=pa.array(known, pa.string())).to_numpy()
            for name, known in (("doc", self.documents.tolist()), ("action", self.actions))
        ]
        if axis is not None:
            shape = (*shape, length)
            where.append(table[axis].to_numpy() - first)
        cells, columns = np.ravel_multi_index(where, shape), {}
        for name in names:
            column = np.full(math.prod(shape), np.nan)
            column[cells] = table[name].cast(pa.float64()).to_numpy()
            columns[name] = column.reshape(shape)
        return columns

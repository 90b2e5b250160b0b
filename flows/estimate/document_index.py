"""The arrangement of a view's rows as arrays over documents and actions, in sorted order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.study import CONTROL_ACTION
from kvdrift.stats.moments import Float


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
        self, table: pa.Table, names: Iterable[str], axis: str | None = None, length: int = 0
    ) -> dict[str, Float]:
        """Arrange columns of a view by document and action, float64 [documents, actions]; NaN without a row.

        With an ``axis``, a column by which a document and action has ``length`` rows from 0 on, there is a third
        dimension. If the columns are lists of one length, the third dimension is that of the lists.
        """
        shape: tuple[int, ...] = (len(self.documents), len(self.actions))
        where: list[Any] = [
            pc.index_in(table[name], value_set=pa.array(known, pa.string())).to_numpy()
            for name, known in (("doc", self.documents.tolist()), ("action", self.actions))
        ]
        if axis is not None:
            shape = (*shape, length)
            where.append(table[axis].to_numpy())
        cells, columns = np.ravel_multi_index(where, shape), {}
        for name in names:
            values = _values(table[name])
            column = np.full((math.prod(shape), *values.shape[1:]), np.nan)
            column[cells] = values
            columns[name] = column.reshape(*shape, *values.shape[1:])
        return columns


def _values(column: pa.ChunkedArray) -> Float:
    """Return a column as float64 [rows]; a column of lists, all of one length, as float64 [rows, length]."""
    if not pa.types.is_list(column.type):
        return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
    return np.asarray(column.combine_chunks().flatten().to_numpy(), dtype=np.float64).reshape(len(column), -1)
